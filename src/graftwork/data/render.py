"""Kept rows of one block to shards of tokens, for every model that they go to.

In: a sifted block, which of its rows are kept, and the split that each has in each model. Out: one
Parquet file for each model and split, and a summary, written last. Named by all that went in: what
was rendered is never rendered again. Runs in worker processes; knows no other rows.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from graftwork.data.corpus import read_interactions, read_table
from graftwork.data.overlong import fit, take_each_answer
from graftwork.data.ports import Rendered, Renderer
from graftwork.data.prompts import give_system_prompt
from graftwork.data.settings import DataSettings
from graftwork.files.dataset import encode_captures, row_schema, write_table
from graftwork.files.disk import file_digest, require_digest, write_atomic
from graftwork.records.dataset import Split
from graftwork.records.errors import Damaged, UserMistake
from graftwork.records.interaction import Interaction, Message

SUMMARY = "summary.json"
PORTION_SPLITS: tuple[Split, ...] = ("train", "validation", "test", "rl")
"""A portion's numbers for the splits are places in this list."""


class Share(NamedTuple):
    """What one model gets of a block: a split and a weight for each kept row."""

    split: "np.ndarray[Any, np.dtype[np.uint8]]"
    weight: "np.ndarray[Any, np.dtype[np.float64]]"
    staged: bool


class RenderTask(NamedTuple):
    sifted: Path
    numbers: "np.ndarray[Any, np.dtype[np.int64]]"
    file: str
    first_line: int
    shares: Mapping[str, Share]
    out: Path


class ShardMade(NamedTuple):
    """A shard; the length of each of its rows and their numbers in the block, as arrays: they are many."""

    model: str
    split: Split
    file: str
    sha256: str
    trained_tokens: int
    lengths: "np.ndarray[Any, np.dtype[np.int32]]"
    numbers: "np.ndarray[Any, np.dtype[np.int64]]"


class RenderedBlock(NamedTuple):
    """The shards of a block, the rows that got no place in one, and those of which only a part did."""

    shards: list[ShardMade]
    refused: dict[int, str]
    shortened: dict[int, str]


class _Ready(NamedTuple):
    """A rendered row; `position` is its place among the kept rows of the block."""

    position: int
    row: Interaction
    part: int
    messages: tuple[Message, ...]
    reply: str
    rendered: Rendered


_tools: tuple[Renderer, DataSettings] | None = None


def begin(renderer: Renderer, settings: DataSettings) -> None:
    """What every process needs before its first block."""
    global _tools  # noqa: PLW0603  a worker process has one renderer for its whole life
    _tools = (renderer, settings)


def render_block(task: RenderTask) -> RenderedBlock:
    """Render, prove, write."""
    if _tools is None:
        raise RuntimeError("`begin` has not been called in this process")
    renderer, settings = _tools
    rows = list(
        read_interactions(task.sifted, task.numbers.tolist(), file=task.file, first_line=task.first_line)
    )
    ready, refused = _render(rows, renderer=renderer, settings=settings)
    placed = {one.position for one in ready}
    keys = _read_keys(task)
    shards = []
    for model, share in task.shares.items():
        for number, split in enumerate(PORTION_SPLITS):
            chosen = [one for one in ready if share.split[one.position] == number]
            if chosen:
                shards.append(_write_shard(task, chosen, keys, model=model, split=split))
    reasons = {place: (int(task.numbers[place]), reason) for place, reason in sorted(refused.items())}
    made = RenderedBlock(
        shards,
        refused=dict(named for place, named in reasons.items() if place not in placed),
        shortened=dict(named for place, named in reasons.items() if place in placed),
    )
    write_atomic(task.out / SUMMARY, orjson.dumps(made, default=_to_json, option=_OPTIONS), durable=False)
    return made


_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS


def _to_json(value: Any) -> Any:
    return value._asdict()


def find_rendered(folder: Path) -> RenderedBlock | None:
    """What an earlier run has rendered into this folder, if it is whole and still the same bytes."""
    try:
        said = orjson.loads((folder / SUMMARY).read_bytes())
        for shard in said["shards"]:
            require_digest(folder / shard["file"], shard["sha256"])
    except (FileNotFoundError, Damaged, ValueError, KeyError, TypeError):
        return None
    shards = [
        ShardMade(
            **{
                **shard,
                "lengths": np.array(shard["lengths"], dtype=np.int32),
                "numbers": np.array(shard["numbers"], dtype=np.int64),
            }
        )
        for shard in said["shards"]
    ]
    refused, shortened = (
        {int(number): reason for number, reason in said[name].items()} for name in ("refused", "shortened")
    )
    return RenderedBlock(shards, refused, shortened)


class _Asked(NamedTuple):
    """What is to be rendered of a kept row; `part` counts the answers of one row."""

    position: int
    part: int
    messages: tuple[Message, ...]
    reply: str


def _render(
    rows: Sequence[Interaction], *, renderer: Renderer, settings: DataSettings
) -> tuple[list[_Ready], dict[int, str]]:
    asked = [one for place, row in enumerate(rows) for one in _ask(place, row, settings=settings)]
    ready: list[_Ready] = []
    refused: dict[int, str] = {}
    for one, rendered in zip(asked, renderer.render_batch([one[2:] for one in asked]), strict=True):
        row = rows[one.position]
        if isinstance(rendered, UserMistake):
            refused[one.position] = f"refused by the template: {rendered.what}"
        elif rendered.trained_from >= len(rendered.tokens):
            refused[one.position] = "nothing to train on: the template leaves no token of the reply"
        elif len(rendered.tokens) <= settings.max_tokens:
            ready.append(_Ready(one.position, row, one.part, one.messages, one.reply, rendered))
        else:
            may_shorten = settings.overlong != "drop"
            only_last = settings.train_on == "every" or row.capture is not None
            pieces = (
                _shorten(one, renderer=renderer, settings=settings, only_last=only_last)
                if may_shorten
                else []
            )
            ready += [_Ready(one.position, row, one.part + n, *piece) for n, piece in enumerate(pieces)]
            if not pieces:
                length = len(rendered.tokens)
                part = f"answer {one.part + 1}, " if one.part else ""
                refused[one.position] = (
                    f"overlong: {part}{length} tokens, data.max_tokens is {settings.max_tokens}"
                )
    return ready, refused


def _ask(position: int, row: Interaction, *, settings: DataSettings) -> Iterator[_Asked]:
    messages = give_system_prompt(row.messages, role=row.group, settings=settings)
    answers = [(messages, row.reply)]
    # The earlier replies of a captured conversation are captures of their own, with feedback of their own.
    if settings.train_on == "every" and row.capture is None:
        answers = [*take_each_answer(messages, row.reply)] or answers
    for part, (before, reply) in enumerate(answers):
        yield _Asked(position, part, before, reply)


def _shorten(
    one: _Asked, *, renderer: Renderer, settings: DataSettings, only_last: bool
) -> list[tuple[tuple[Message, ...], str, Rendered]]:
    def count(turns: Sequence[Message], said: str) -> int:
        return renderer.count_tokens(turns, said)

    shorter = fit(one.messages, one.reply, count=count, settings=settings).rows
    if only_last:
        # The answers before this one are rows of their own already.
        shorter = shorter[-1:]
    rendered = renderer.render_batch(shorter)
    return [
        (turns, said, one)
        for (turns, said), one in zip(shorter, rendered, strict=True)
        if not isinstance(one, UserMistake)
    ]


def _read_keys(task: RenderTask) -> dict[str, list[Any]]:
    table = read_table(task.sifted, ["prompt", "reply", "input_hash"])
    keys: dict[str, list[Any]] = table.take(pa.array(task.numbers, pa.int64())).to_pydict()
    return keys


def _write_shard(
    task: RenderTask, chosen: Sequence[_Ready], keys: Mapping[str, list[Any]], *, model: str, split: Split
) -> ShardMade:
    share = task.shares[model]
    lengths = np.array([len(one.rendered.tokens) for one in chosen], dtype=np.int32)
    trained = int(lengths.sum()) - sum(one.rendered.trained_from for one in chosen)
    path = task.out / f"{model}.{split}.parquet"
    write_table(path, _to_table(chosen, lengths, share, keys), durable=False)
    return ShardMade(
        model=model,
        split=split,
        file=path.name,
        sha256=file_digest(path),
        trained_tokens=trained,
        lengths=lengths,
        numbers=task.numbers[[one.position for one in chosen]],
    )


def _to_table(
    chosen: Sequence[_Ready], lengths: "np.ndarray[Any, Any]", share: Share, keys: Mapping[str, list[Any]]
) -> "pa.Table":
    tokens = np.concatenate([np.asarray(one.rendered.tokens, dtype=np.int32) for one in chosen])
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    columns: dict[str, Any] = {
        "id": [_name(one, keys) for one in chosen],
        "file": [one.row.origin.file for one in chosen],
        "line": [one.row.origin.line for one in chosen],
        "input_hash": [keys["input_hash"][one.position] for one in chosen],
        "messages": [
            orjson.dumps([{"role": turn.role, "content": turn.content} for turn in one.messages]).decode()
            for one in chosen
        ],
        "reply": [one.reply for one in chosen],
        "tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens)),
        "trained_from": [one.rendered.trained_from for one in chosen],
        "stage": [one.row.stage if share.staged else None for one in chosen],
        "weight": [float(share.weight[one.position]) for one in chosen],
        "rejected": [one.row.rejected if one.reply == one.row.reply else None for one in chosen],
    }
    for name in ("group", "domain", "session", "duration_ms", "reward"):
        columns[name] = [getattr(one.row, name) for one in chosen]
    captured = encode_captures([one.row.capture for one in chosen])
    columns |= captured
    schema = row_schema(captured=bool(captured))
    return pa.table({name: columns[name] for name in schema.names}, schema=schema)


def _name(one: _Ready, keys: Mapping[str, list[Any]]) -> str:
    """Logs repeat their own ids; the content is what makes a row the one it is."""
    mixed = (keys["prompt"][one.position] * 31 + keys["reply"][one.position]) % 2**64
    return f"{mixed:016x}" + (f".{one.part}" if one.part else "")
