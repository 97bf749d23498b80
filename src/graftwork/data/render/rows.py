"""Renders the kept rows of one block to shards of tokens, for every model that they belong to.

Input: a feature file, the numbers of the kept rows, and each model's split and weight for them. Output: one
Parquet file per model and split, and a summary, written last. Tokens of conversations that an earlier run
rendered are taken from its shards. Rows longer than `max_tokens` are dropped, split by turn, or lose their
oldest turns; text is never cut. Runs in worker processes.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from graftwork.data.audit.row_checks import find_broken_call
from graftwork.data.corpus.store import JoinedFacts, join_facts, read_interactions, read_table
from graftwork.data.ingest.turns import drop_reasoning
from graftwork.data.settings import DataSettings
from graftwork.files.dataset import encode_messages, encode_optional, row_schema, write_table
from graftwork.files.disk import file_digest, require_digest, write_atomic
from graftwork.records.dataset import RenderedTokens, Split
from graftwork.records.errors import Corrupted, UserError
from graftwork.records.interaction import CallUsage, Interaction, Message
from graftwork.text.redact import publish_text

SUMMARY = "summary.json"


class RenderedShard(NamedTuple):
    """A shard, with the length and the number in the block of each of its rows."""

    model: str
    split: Split
    file: str
    sha256: str
    trained_tokens: int
    lengths: "np.ndarray[Any, np.dtype[np.int32]]"
    numbers: "np.ndarray[Any, np.dtype[np.int64]]"


class RenderedBlock(NamedTuple):
    """The shards of a block, the rows that are in none, and the rows that are there only in part."""

    shards: list[RenderedShard]
    refused: dict[int, str]
    shortened: dict[int, str]


def find_rendered(folder: Path) -> RenderedBlock | None:
    """Return what an earlier run rendered into this folder, if it is complete and intact."""
    try:
        summary = orjson.loads((folder / SUMMARY).read_bytes())
        for shard in summary["shards"]:
            require_digest(folder / shard["file"], shard["sha256"])
    except (FileNotFoundError, Corrupted, ValueError, KeyError, TypeError):
        return None
    shards = [
        RenderedShard(
            **{
                **shard,
                "lengths": np.array(shard["lengths"], dtype=np.int32),
                "numbers": np.array(shard["numbers"], dtype=np.int64),
            }
        )
        for shard in summary["shards"]
    ]
    refused, shortened = (
        {int(number): reason for number, reason in summary[name].items()} for name in ("refused", "shortened")
    )
    return RenderedBlock(shards, refused, shortened)


KnownRows = Mapping[tuple[str, str], RenderedTokens]
"""Rendered rows by their encoded messages and their reply."""


def read_known_rows(folders: Sequence[Path]) -> KnownRows:
    """Read the tokens of the conversations in shards by the same renderer."""
    rendered_rows: dict[tuple[str, str], RenderedTokens] = {}
    for folder in folders:
        rendered = find_rendered(folder)
        for shard in rendered.shards if rendered is not None else ():
            columns = ["messages", "reply", "tokens", "trained_from"]
            table = pq.read_table(folder / shard.file, columns=columns, use_threads=False).combine_chunks()
            tokens = table.column("tokens").combine_chunks()
            values, spans = tokens.values.to_numpy(), pairwise(tokens.offsets.to_pylist())
            columns_read = (table.column(name).to_pylist() for name in ("messages", "reply", "trained_from"))
            for (start, stop), text, reply, begins in zip(spans, *columns_read, strict=True):
                rendered_rows[text, reply] = RenderedTokens(values[start:stop], begins)
    return rendered_rows


Count = Callable[[Sequence[Message], str], int]
Weights = Sequence[float | None]
"""The weight of each assistant turn, the reply last; None is not stated."""


class AnswerPart(NamedTuple):
    """The messages before an answer, and the answer to learn."""

    messages: tuple[Message, ...]
    reply: str


def fit_row(
    messages: Sequence[Message],
    reply: str,
    *,
    count: Count,
    settings: DataSettings,
    weights: Weights | None = None,
) -> tuple[list[AnswerPart], str]:
    """Return the row if it fits, otherwise what `data.overlong` makes of it; and what was left out of it."""
    whole = AnswerPart(tuple(messages), reply)
    tokens, most = count(whole.messages, reply), settings.max_tokens
    if tokens <= most:
        return [whole], ""
    too_long = f"{tokens} tokens, more than max_tokens {most}"
    if settings.overlong == "drop":
        return [], too_long
    if settings.overlong == "truncate":
        end = _leave_out_oldest(whole, count=count, most=most)
        if end is None:
            return [], f"{too_long}, and its last question and reply alone do not fit"
        left_out = len(whole.messages) - len(end.messages)
        return [end], f"{too_long}: {left_out} of its turns left out, the oldest"
    answers = list_answers(*whole, weights=weights)
    fitting = (_leave_out_oldest(answer, count=count, most=most) for answer in answers)
    rows = [row for row in fitting if row is not None]
    if not rows:
        return [], f"{too_long}, and none of its turns fits with its question alone"
    unfitted = len(answers) - len(rows)
    lost = f"; {unfitted} too long with their question alone" if unfitted else ""
    return rows, f"{too_long}: split into {len(rows)} of its {len(answers)} answers{lost}"


def list_answers(
    messages: Sequence[Message], reply: str, *, weights: Weights | None = None, only_marked: bool = False
) -> list[AnswerPart]:
    """Return a row for each assistant turn after the first question, with all turns before it.

    Turns with the weight 0 are left out; with `only_marked`, so are those without a weight.
    """
    turns = (*messages, Message(role="assistant", content=reply))
    first_question = next((index for index, turn in enumerate(turns) if turn.role == "user"), len(turns))
    stated = iter(weights or ())
    weight_of = {index: next(stated, None) for index, turn in enumerate(turns) if turn.role == "assistant"}
    return [
        AnswerPart(turns[:index], turns[index].content)
        for index, weight in weight_of.items()
        if index > first_question
        and turns[index].content.strip()
        and (bool(weight) if only_marked else weight is None or weight > 0)
    ]


def _leave_out_oldest(row: AnswerPart, *, count: Count, most: int) -> AnswerPart | None:
    """Return the longest end of the conversation that fits, after the system turns; None if none does.

    An end is the whole conversation or begins with a user turn: no reply without its question, and no tool
    result without its call.
    """
    questions = [index for index, message in enumerate(row.messages) if message.role == "user"]
    if not questions:
        return None
    begins = sorted({0, *questions})

    def end(start: int) -> AnswerPart:
        remaining = (
            m for index, m in enumerate(row.messages) if index >= begins[start] or m.role == "system"
        )
        return AnswerPart(tuple(remaining), row.reply)

    def does_fit(start: int) -> bool:
        return count(*end(start)) <= most

    fits = len(begins) - 1
    if not does_fit(fits):
        return None
    # Searches backwards in growing strides, so that a long conversation is not counted for each of its turns.
    first, stride = 0, 1
    while first < fits:
        probe = max(fits - stride, first)
        if does_fit(probe):
            fits, stride = probe, 2 * stride
        else:
            first = probe + 1
            stride = max((fits - first + 1) // 2, 1)
    return end(fits)


# Tool definitions as the formats write them after the system prompt.
_TOOLS = re.compile(
    r"# Tools\n\n[^\n]*\n\n[^\n]*\n<tools>\n.*?\n</tools>\n\n[^\n]*\n<tool_call>.*?</tool_call>", re.DOTALL
)


@lru_cache(maxsize=256)
def _without_secrets(prompt: str) -> str:
    """Cached: many rows have the same prompt."""
    return publish_text(prompt)


def apply_system_prompt(
    messages: Sequence[Message], *, role: str | None, settings: DataSettings
) -> tuple[Message, ...]:
    """Apply the prompt of the row's role, else the one for all roles, else keep the logged one.

    An empty prompt removes the logged one, and so does `drop`.
    """
    prompt = settings.system_prompts.get(role) if role is not None else None
    if prompt is None:
        prompt = settings.system_prompt
    if prompt is None and settings.logged_system_prompt != "drop":
        return tuple(messages)
    prompt = prompt or ""
    # The prompt is trained on and sent to evaluated models, so it is redacted like the rows.
    parts = [_without_secrets(prompt) if settings.redact else prompt]
    if settings.logged_system_prompt == "keep_after":
        parts += [message.content for message in messages if message.role == "system"]
    else:
        # Tool definitions stay: without them the calls make no sense.
        parts += [
            block for turn in messages if turn.role == "system" for block in _TOOLS.findall(turn.content)
        ]
    text = "\n\n".join(part for part in parts if part)
    turns = tuple(message for message in messages if message.role != "system")
    return (Message(role="system", content=text), *turns) if text else turns


def needs_reasoning_dropped(rows: Sequence[Interaction], renderer: "Renderer") -> bool:
    """Whether the template refuses most of these rows, and fewer with `data.reasoning: drop`. Tries both."""
    # A renderer of another package need not know the switch.
    without = getattr(renderer, "without_reasoning", None)
    if without is None:
        return False
    refused = _count_refused(renderer, [(row.messages, row.reply) for row in rows])
    plain = [(row.messages, drop_reasoning(row.reply)) for row in rows]
    return 2 * refused > len(rows) and _count_refused(without(), plain) < refused


def _count_refused(renderer: "Renderer", conversations: Sequence[tuple[Sequence[Message], str]]) -> int:
    return sum(isinstance(row, UserError) for row in renderer.render_batch(conversations))


MOST_CHARACTERS_PER_TOKEN = 100
"""A row with more characters per allowed token is overlong without being tokenized."""
SUBSET_SPLITS: tuple[Split, ...] = ("train", "validation", "test", "rl")
"""The splits of a model subset are indexes into this list."""


class Renderer(Protocol):
    """The base model's chat template and tokenizer, with their fingerprints.

    It can be pickled, so that each worker process has its own.
    """

    @property
    def template_fingerprint(self) -> str: ...

    @property
    def tokenizer_fingerprint(self) -> str: ...

    @property
    def control_tokens(self) -> frozenset[str]:
        """Tokens that only the template may write: in a message they would forge a turn."""
        ...

    @property
    def writes_reasoning(self) -> bool:
        """Whether the template has its own tags for reasoning."""
        ...

    def render(self, messages: Sequence[Message], reply: str) -> RenderedTokens:
        """Render one row. Raises UserError if its loss mask cannot be proven."""
        ...

    def render_batch(
        self, conversations: Sequence[tuple[Sequence[Message], str]]
    ) -> Sequence[RenderedTokens | UserError]:
        """Render many rows at once; a refused row yields its UserError.

        Tokens may support the buffer protocol as 32-bit integers, which is faster than tuples.
        """
        ...

    def count_tokens(self, messages: Sequence[Message], reply: str) -> int: ...


class SubsetRows(NamedTuple):
    """One model's split and weight for each kept row of a block."""

    split: "np.ndarray[Any, np.dtype[np.uint8]]"
    weight: "np.ndarray[Any, np.dtype[np.float64]]"
    staged: bool


class RenderTask(NamedTuple):
    features: Path
    numbers: "np.ndarray[Any, np.dtype[np.int64]]"
    file: str
    first_line: int
    subsets: Mapping[str, SubsetRows]
    out: Path
    joined: Mapping[int, JoinedFacts] = {}
    """By the position among `numbers`: what is logged separately from the rows."""
    earlier: tuple[Path, ...] = ()
    """Folders with shards of the same block by the same renderer, whose tokens are taken."""


class _RenderedPart(NamedTuple):
    """A rendered row; `position` is its index among the kept rows of the block."""

    position: int
    row: Interaction
    part: int
    messages: tuple[Message, ...]
    reply: str
    rendered: RenderedTokens


_tools: tuple[Renderer, DataSettings] | None = None


def init_worker(renderer: Renderer, settings: DataSettings) -> None:
    """Set what every process needs before its first block."""
    global _tools  # noqa: PLW0603  a worker process has one renderer for its whole life
    _tools = (renderer, settings)


def render_block(task: RenderTask) -> RenderedBlock:
    """Render the rows, check their loss masks, write the shards."""
    if _tools is None:
        raise RuntimeError("`init_worker` has not been called in this process")
    renderer, settings = _tools
    rows = list(
        read_interactions(task.features, task.numbers.tolist(), file=task.file, first_line=task.first_line)
    )
    for position, joined in task.joined.items():
        rows[position] = join_facts(rows[position], joined)
    earlier = read_known_rows(task.earlier)
    ready, refused = _render(rows, renderer=renderer, settings=settings, earlier=earlier)
    placed = {entry.position for entry in ready}
    table = read_table(task.features, ["prompt", "reply", "input_hash"])
    keys: dict[str, list[Any]] = table.take(pa.array(task.numbers, pa.int64())).to_pydict()
    shards = []
    for model, subset in task.subsets.items():
        for number, split in enumerate(SUBSET_SPLITS):
            members = [entry for entry in ready if subset.split[entry.position] == number]
            if members:
                shards.append(_write_shard(task, members, keys, model=model, split=split))
    reasons = {index: (int(task.numbers[index]), reason) for index, reason in sorted(refused.items())}
    block = RenderedBlock(
        shards,
        refused=dict(refusal for index, refusal in reasons.items() if index not in placed),
        shortened=dict(refusal for index, refusal in reasons.items() if index in placed),
    )
    options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
    summary = orjson.dumps(block, default=lambda record: record._asdict(), option=options)
    write_atomic(task.out / SUMMARY, summary, durable=False)
    return block


BY_TEMPLATE = "refused by the template"
NOT_MARKED = "nothing to train on: no reply is marked with `weight: 1`, and data.train_on is `marked`"


def _render(
    rows: Sequence[Interaction], *, renderer: Renderer, settings: DataSettings, earlier: KnownRows
) -> tuple[list[_RenderedPart], dict[int, str]]:
    # The conversations to render, each with the position of its row and the number of its answer.
    requests = []
    for position, row in enumerate(rows):
        messages = apply_system_prompt(row.messages, role=row.group, settings=settings)
        answers = list_trained(row.model_copy(update={"messages": messages}), settings)
        requests += [(position, part, answer) for part, answer in enumerate(answers)]
    most = settings.max_tokens * MOST_CHARACTERS_PER_TOKEN
    sizes = [_count_characters(*answer) for _, _, answer in requests]
    reused = [
        earlier.get((encode_messages(answer.messages), answer.reply)) if earlier and size <= most else None
        for (_, _, answer), size in zip(requests, sizes, strict=True)
    ]
    new = [
        answer
        for (_, _, answer), size, tokens in zip(requests, sizes, reused, strict=True)
        if size <= most and tokens is None
    ]
    results = iter(renderer.render_batch(new))
    ready: list[_RenderedPart] = []
    requested = {position for position, *_ in requests}
    refused = {position: NOT_MARKED for position in range(len(rows)) if position not in requested}
    for (position, part, answer), size, tokens in zip(requests, sizes, reused, strict=True):
        rendered = tokens or (next(results) if size <= most else None)
        row = rows[position]
        if isinstance(rendered, UserError):
            refused[position] = f"{BY_TEMPLATE}: {rendered.what}"
        elif rendered is not None and rendered.trained_from >= len(rendered.tokens):
            refused[position] = "nothing to train on: the template leaves no token of the reply"
        elif rendered is not None and len(rendered.tokens) <= settings.max_tokens:
            ready.append(_RenderedPart(position, row, part, *answer, rendered))
        else:
            only_last = settings.train_on != "last" or _is_one_call(row)
            shorter = _shorten(
                answer, renderer=renderer, settings=settings, only_last=only_last, weights=row.turn_weights
            )
            ready += [
                _RenderedPart(position, row, part + n, *rendered_part)
                for n, rendered_part in enumerate(shorter)
            ]
            if not shorter:
                length = f"{size:,} characters" if rendered is None else f"{len(rendered.tokens)} tokens"
                answer_label = f"answer {part + 1}, " if part else ""
                refused[position] = (
                    f"overlong: {answer_label}{length}, data.max_tokens is {settings.max_tokens}"
                )
    return ready, refused


def _count_characters(messages: Sequence[Message], reply: str) -> int:
    return sum(len(message.content) for message in messages) + len(reply)


def list_trained(row: Interaction, settings: DataSettings) -> list[AnswerPart]:
    """Return the answers that `data.train_on` asks for; those with broken calls only if these are kept."""
    whole = [AnswerPart(row.messages, row.reply)]
    if settings.train_on == "last" or (settings.train_on == "every" and _is_one_call(row)):
        return whole
    weights = row.turn_weights
    if settings.train_on == "every":
        answers = list_answers(row.messages, row.reply, weights=weights) or whole
    else:
        answers = list_answers(row.messages, row.reply, weights=weights, only_marked=True) if weights else []
    if not settings.drop_broken_calls:
        return answers
    return [answer for answer in answers if find_broken_call(*answer) is None]


def _is_one_call(row: Interaction) -> bool:
    """Whether earlier replies of the conversation are rows of their own: captures, and calls of traces."""
    return row.capture is not None or row.trace is not None


def _shorten(
    answer: AnswerPart,
    *,
    renderer: Renderer,
    settings: DataSettings,
    only_last: bool,
    weights: Weights | None,
) -> list[tuple[tuple[Message, ...], str, RenderedTokens]]:
    if settings.overlong == "drop":
        return []

    def count(messages: Sequence[Message], reply: str) -> int:
        size = _count_characters(messages, reply)
        is_long = size > settings.max_tokens * MOST_CHARACTERS_PER_TOKEN
        return size if is_long else renderer.count_tokens(messages, reply)

    # A part of a conversation has other turns than its row; only its last answer is taken.
    stated = None if only_last else weights
    shorter, _ = fit_row(*answer, count=count, settings=settings, weights=stated)
    if only_last:
        # The answers before this one are rows of their own already.
        shorter = shorter[-1:]
    rendered = renderer.render_batch(shorter)
    return [
        (messages, reply, row)
        for (messages, reply), row in zip(shorter, rendered, strict=True)
        if not isinstance(row, UserError)
    ]


def _write_shard(
    task: RenderTask,
    members: Sequence[_RenderedPart],
    keys: Mapping[str, list[Any]],
    *,
    model: str,
    split: Split,
) -> RenderedShard:
    subset = task.subsets[model]
    lengths = np.array([len(entry.rendered.tokens) for entry in members], dtype=np.int32)
    trained = int(lengths.sum()) - sum(entry.rendered.trained_from for entry in members)
    path = task.out / f"{model}.{split}.parquet"
    write_table(path, _to_table(members, lengths, subset, keys), durable=False)
    return RenderedShard(
        model=model,
        split=split,
        file=path.name,
        sha256=file_digest(path),
        trained_tokens=trained,
        lengths=lengths,
        numbers=task.numbers[[entry.position for entry in members]],
    )


def _to_table(
    members: Sequence[_RenderedPart],
    lengths: "np.ndarray[Any, Any]",
    subset: SubsetRows,
    keys: Mapping[str, list[Any]],
) -> "pa.Table":
    tokens = np.concatenate([np.asarray(entry.rendered.tokens, dtype=np.int32) for entry in members])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    # Rows are named by their content: logs repeat their own ids.
    contents = [
        (keys["prompt"][entry.position] * 31 + keys["reply"][entry.position]) % 2**64 for entry in members
    ]
    columns: dict[str, Any] = {
        "id": [
            f"{content:016x}" + (f".{entry.part}" if entry.part else "")
            for content, entry in zip(contents, members, strict=True)
        ],
        "file": [entry.row.origin.file for entry in members],
        "line": [entry.row.origin.line for entry in members],
        "input_hash": [keys["input_hash"][entry.position] for entry in members],
        "messages": [encode_messages(entry.messages) for entry in members],
        "reply": [entry.reply for entry in members],
        "tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens)),
        "trained_from": [entry.rendered.trained_from for entry in members],
        "stage": [entry.row.stage if subset.staged else None for entry in members],
        "weight": [float(subset.weight[entry.position]) for entry in members],
        "rejected": [entry.row.rejected if entry.reply == entry.row.reply else None for entry in members],
    }
    for name in ("group", "domain", "session", "duration_ms", "reward"):
        columns[name] = [getattr(entry.row, name) for entry in members]
    optional = encode_optional(
        {
            "capture": [entry.row.capture for entry in members],
            "answered": [entry.row.answered for entry in members],
            "usage": [_usage_of(entry) for entry in members],
        }
    )
    columns |= optional
    schema = row_schema(optional=tuple(optional))
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _usage_of(part: _RenderedPart) -> CallUsage | None:
    """What the call used that gave the reply; earlier replies of a conversation were calls of their own.

    Captured calls were answered here, not by a model that is paid for by the token.
    """
    row = part.row
    stated = (row.cost, row.prompt_tokens, row.reply_tokens) != (None, None, None)
    if part.reply != row.reply or row.capture is not None or not stated:
        return None
    return CallUsage(
        model=row.model,
        prompt_tokens=row.prompt_tokens,
        cached_tokens=row.cached_tokens,
        reply_tokens=row.reply_tokens,
        cost=row.cost,
    )
