"""Builds the corpus: extracts the features of new blocks on all cores and puts all rows in row order.

The features of a block are everything that can be computed from a single row: an Arrow file with, for each
readable row, the row itself (redacted), whether it passed the checks, its notes and its fingerprints, the
same bytes on this machine and on another node. The file is named by the content of the block and the settings
it depends on, and never computed again. Scores of rows then weigh rows and pair replies.

Row order is the order in which rows were first seen, by the hash of their lines: known rows first, new ones
after them, whatever file they are in. A log that grows or is rotated, or a new file that sorts first, moves
no known row. An interrupted run loses only the blocks in progress.
"""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa

from graftwork.data.audit.findings import PROMPT_FINGERPRINT
from graftwork.data.audit.row_checks import (
    NEGATIVE_FEEDBACK,
    NOT_KEPT,
    RATED_BAD,
    RETRIED,
    REVIEWED,
    AuditContext,
    check_row,
    find_verdict,
    is_bad_score,
    is_dropped,
    is_rated_bad,
    redact_row,
    say_bad_score,
)
from graftwork.data.corpus.store import Corpus, JoinedFacts, Segment, encode_row, read_head, read_table
from graftwork.data.dedup.fingerprints import compute_fingerprints
from graftwork.data.ingest.blocks import LogBlock, ReadFault, SkippedPart
from graftwork.data.ingest.dataset_formats import NO_SCORE
from graftwork.data.ingest.fields import SCORES, day_of
from graftwork.data.ingest.files import cut_blocks, find_sources
from graftwork.data.ingest.read import read_block, settings_of_file
from graftwork.data.settings import NO_NUMBER, DataSettings, list_fields
from graftwork.files.disk import file_digest, make_folder, write_atomic
from graftwork.process.pieces import MapEngine, MapWork, RemoteWork, pack
from graftwork.records.base import fingerprint
from graftwork.records.dataset import InputFile
from graftwork.records.errors import UserError
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.shape import main_script
from graftwork.text.tool_calls import OPEN
from graftwork.version import __version__

FEATURES_FORM = 15
"""Incremented when the columns or the faults of a row change: older files are then computed again."""

LATER_SETTINGS = frozenset(
    {
        "logs",
        "system_prompt",
        "system_prompts",
        "logged_system_prompt",
        "near_duplicate",
        "keep_duplicate",
        "conflicts",
        "score_weights",
        "score_pairs",
        "stratify",
        "question_similarity",
        "paraphrases",
        "validation",
        "test",
        "pack_tokens",
        "train_on",
        "seed",
        "repair",
    }
)
"""Settings that do not affect row features."""

UNKNOWN = -1
"""An unknown number of tokens. Token counts are never negative, but an unknown cost is negative too."""

UNREADABLE_SCORE = -math.inf
"""The score of a row whose log has text in its place."""


class FeatureTask(NamedTuple):
    block: LogBlock
    out: Path
    context: AuditContext


def list_feature_inputs(context: AuditContext) -> list[Any]:
    """Return everything besides the block that row features depend on."""
    settings = context.settings.model_dump(mode="json", exclude=set(LATER_SETTINGS))
    base_facts = [context.base, context.control_tokens, context.base_reasons]
    return [settings, base_facts, __version__, FEATURES_FORM]


def name_features(block: LogBlock, *, inputs: list[Any], settings: DataSettings) -> str:
    """Return the name of the feature file of this block."""
    if settings.formats:
        file_settings = settings_of_file(settings, block.file)
        inputs = [
            *inputs,
            file_settings.format,
            file_settings.mapping and file_settings.mapping.model_dump(mode="json"),
        ]
    return f"{fingerprint([block.key, *inputs])[:40]}.arrow"


def digest_file(features: Path) -> Path:
    """The file with the hash of a feature file, written after it."""
    return features.with_suffix(".sha256")


def has_features(features: Path) -> bool:
    """Whether the features of this block exist and are intact."""
    try:
        return file_digest(features) == digest_file(features).read_text()
    except FileNotFoundError:
        return False


def extract_features(task: FeatureTask) -> int:
    """Write the feature file. Returns the size of the block, for progress."""
    table = _extract(task.block, task.context)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    encoded = sink.getvalue().to_pybytes()
    write_atomic(task.out, encoded)
    write_atomic(digest_file(task.out), hashlib.sha256(encoded).hexdigest(), durable=False)
    return len(task.block.data)


def _extract(block: LogBlock, context: AuditContext) -> "pa.Table":
    """The features of a block, with lines counted from its first; `store.read_head` reads what stands apart
    from the rows.
    """
    rows: list[tuple[Interaction, dict[str, Any]]] = []
    faults: list[tuple[int, str, str, str]] = []
    left_out: list[tuple[int, str, int, int, int]] = []
    scores: list[tuple[int, int, float]] = []
    for read in read_block(block, settings=context.settings):
        result = read.result
        line = read.line - block.first_line
        if isinstance(result, Interaction):
            rows.append(_extract_row(result, line, read.input_hash, context=context))
        elif isinstance(result, ReadFault):
            faults.append((line, read.input_hash, result.code, result.message))
        elif isinstance(result, SkippedPart):
            trace = 0 if result.trace is None else hash_name(result.trace)
            call = 0 if result.call is None else hash_name(result.call)
            left_out.append((line, result.rule, result.count, trace, call))
        else:
            call = 0 if result.call is None else hash_name(result.call)
            scores.append((hash_name(result.trace), call, result.value))
    # A line may contain several rows, and an array has all of its records on one line.
    lines = {(row["line"], row["input_hash"]) for _, row in rows}
    head = {
        "faults": orjson.dumps(faults),
        "left_out": orjson.dumps(left_out),
        "scores": orjson.dumps(scores),
        "records": str(len(lines) + sum((line, key) not in lines for line, key, *_ in faults)),
    }
    columns = {name: pa.array([row[name] for _, row in rows], kind) for name, kind in _COLUMNS.items()}
    # Including rows that are filtered out: the audit reports what they would have done.
    fixed, ragged = compute_fingerprints([row for row, _ in rows], settings=context.settings)
    columns |= {name: pa.array(values) for name, values in fixed.items()}
    for name, (values, offsets) in ragged.items():
        columns[name] = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))
    return pa.table(columns).replace_schema_metadata(head)


def hash_name(name: str) -> int:
    """A number for the id of a trace or a call; never 0."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:8], "big") | 1


_COLUMNS = {
    "line": pa.int64(),
    "input_hash": pa.string(),
    "line_key": pa.uint64(),
    "passed": pa.bool_(),
    "fault": pa.string(),
    "reason": pa.string(),
    "notes": pa.binary(),
    "redactions": pa.binary(),
    "interaction": pa.binary(),
    "prompt_chars": pa.int32(),
    "reply_chars": pa.int32(),
    "script": pa.string(),
    "stage": pa.int32(),
    "trace": pa.uint64(),
    "call": pa.uint64(),
    "calls_tools": pa.bool_(),
    "day": pa.int32(),
    "score": pa.float64(),
    "cost": pa.float64(),
    **dict.fromkeys(("prompt_tokens", "cached_tokens", "reply_tokens"), pa.int64()),
    **dict.fromkeys(("group", "domain", "model", "status", "split"), pa.string()),
}
_COUNTS = ("prompt_tokens", "cached_tokens", "reply_tokens", "cost")
_NAMES = ("group", "domain", "model", "status", "split")


def _extract_row(
    raw: Interaction, line: int, input_hash: str, *, context: AuditContext
) -> tuple[Interaction, dict[str, Any]]:
    """The row as it is kept, and its value in each of the columns."""
    settings = context.settings
    redacted = redact_row(raw)
    row = redacted.row if settings.redact else raw
    notes = check_row(raw, redacted, context=context)
    fault = find_verdict(notes)
    replies = (row.reply, *(turn.content for turn in row.messages if turn.role == "assistant"))
    counts = {name: getattr(row, name) for name in _COUNTS}
    return row, {
        "line": line,
        "input_hash": input_hash,
        "line_key": int(input_hash[:16], 16),
        "passed": not (fault and is_dropped(fault.code, settings)),
        "fault": fault.code if fault else None,
        "reason": fault.reason if fault else None,
        "notes": orjson.dumps([tuple(note) for note in notes]) if notes else None,
        "redactions": orjson.dumps(redacted.counts) if redacted.counts and settings.redact else None,
        "interaction": encode_row(row),
        "prompt_chars": sum(len(message.content) for message in row.messages),
        "reply_chars": len(row.reply),
        "script": main_script(row.question),
        "stage": -1 if row.stage is None else row.stage,
        # Before redaction, which may rename them: scores are joined by them.
        "trace": 0 if raw.trace is None else hash_name(raw.trace),
        "call": 0 if raw.trace is None else hash_name(raw.id),
        "calls_tools": any(OPEN in text for text in replies),
        # Of the row as it was logged: redaction may take a time for a phone number.
        "day": day_of(raw),
        "score": _score_of(raw),
        **{name: UNKNOWN if count is None else count for name, count in counts.items()},
        **{name: getattr(row, name) for name in _NAMES},
    }


def _score_of(row: Interaction) -> float:
    """The score; NaN for none. Feedback on captured rows is on a scale of its own."""
    if row.capture is not None:
        return math.nan
    if row.reward is None:
        return UNREADABLE_SCORE if row.extra.keys() & SCORES else math.nan
    return row.reward


NOT_SENT = {"repair"}
"""Settings of another command, which may name endpoints."""


_BLOCK_FIELDS = ("file", "index", "key", "first_line", "offsets", "transcript")


def remote_features(context: AuditContext) -> RemoteWork[FeatureTask, int]:
    """Feature extraction in the form that is sent to a cluster."""

    def encode(task: FeatureTask) -> bytes:
        head = {
            **{name: getattr(task.block, name) for name in _BLOCK_FIELDS},
            "faults": [fault.model_dump(mode="json") for fault in task.block.faults],
            "out": str(task.out.absolute()),
        }
        return pack(head, task.block.data)

    return RemoteWork(
        entry="graftwork.data.corpus.build:extract_piece",
        shared=pack(
            {
                "settings": context.settings.model_dump(mode="json", exclude=NOT_SENT),
                "base": context.base,
                "control_tokens": context.control_tokens,
                "base_reasons": context.base_reasons,
            }
        ),
        encode=encode,
        collect=lambda task: len(task.block.data) if has_features(task.out) else None,
    )


def prepare_shared(head: Any, _blobs: list[bytes]) -> AuditContext:
    return AuditContext(
        settings=DataSettings.model_validate(head["settings"]),
        base=head["base"],
        control_tokens=tuple(head["control_tokens"]),
        base_reasons=head["base_reasons"],
    )


def extract_piece(context: AuditContext, head: Any, blobs: list[bytes]) -> None:
    """Work on one block, on a node."""
    out = Path(head["out"])
    block = LogBlock(
        **{name: head[name] for name in _BLOCK_FIELDS if name != "offsets"},
        data=blobs[0],
        offsets=None if head["offsets"] is None else tuple(head["offsets"]),
        faults=tuple(ReadFault.model_validate(fault) for fault in head["faults"]),
    )
    if not has_features(out):
        extract_features(FeatureTask(block=block, out=out, context=context))


Keys: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
Places: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

RUNS_PER_BLOCK, FEW_RUNS = 8, 2000
"""A shuffled log falls into too many runs to read efficiently. With more runs than this (on average per
block, and in total), rows are ordered by file again.
"""

_ODD = np.uint64(0x9E3779B97F4A7C15)


Progress = Callable[[str, int, int], None]


def order_rows(
    blocks: Sequence[Segment], line_keys: Sequence[Keys], known_keys: Keys
) -> tuple[list[Segment], Keys]:
    """Put the rows of these blocks in row order: runs of rows, and the hashes of all lines.

    `line_keys` are the hashes of each block's lines; `known_keys` is the order of the last time.
    """
    keys = np.concatenate([np.zeros(0, dtype=np.uint64), *line_keys])
    sizes = np.array([len(block_keys) for block_keys in line_keys], dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    stood = find_places(keys, known_keys)
    # Known rows keep their order; new ones follow in the order of the files.
    order = np.lexsort((np.arange(len(keys)), np.where(stood < 0, len(known_keys), stood)))
    runs = _find_runs(order, starts)
    if len(runs) > max(RUNS_PER_BLOCK * len(blocks), FEW_RUNS):
        order = np.arange(len(keys))
        runs = _find_runs(order, starts)
    segments = []
    for low, high in runs:
        number = int(np.searchsorted(starts, low, side="right")) - 1
        while not sizes[number]:
            number -= 1
        start = int(starts[number])
        segments.append(blocks[number]._replace(start=low - start, stop=high - start))
    # A block without a readable row carries the rows that could not be read.
    segments += [block for block, size in zip(blocks, sizes, strict=True) if not size]
    return segments, keys[order]


def find_places(keys: Keys, known_keys: Keys) -> Places:
    """Return the position of each key in `known_keys`, or -1. Equal keys are matched one to one, in order."""
    if not len(known_keys):
        return np.full(len(keys), -1, dtype=np.int64)
    numbered_keys, numbered_known = _number_repeats(keys), _number_repeats(known_keys)
    order = np.argsort(numbered_known, kind="stable")
    nearest = np.minimum(
        np.searchsorted(numbered_known, numbered_keys, sorter=order), len(numbered_known) - 1
    )
    positions = order[nearest]
    matches: Places = np.where(numbered_known[positions] == numbered_keys, positions, -1)
    return matches


def _number_repeats(keys: Keys) -> Keys:
    """Make repeated keys distinct: the second of two equal keys is changed, the third differently."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.concatenate(([True], ordered[1:] != ordered[:-1]))[: len(keys)]
    begins = np.maximum.accumulate(np.where(first, np.arange(len(keys)), 0))
    distinct = np.empty_like(keys)
    distinct[order] = ordered + (np.arange(len(keys)) - begins).astype(np.uint64) * _ODD
    return distinct


def _find_runs(order: Places, starts: Places) -> list[tuple[int, int]]:
    """Return runs of consecutive rows of one block as (first, end)."""
    if not len(order):
        return []
    broken = (np.diff(order) != 1) | np.isin(order[1:], starts)
    lows = np.concatenate(([0], np.flatnonzero(broken) + 1))
    highs = np.append(lows[1:], len(order))
    return list(zip(order[lows].tolist(), (order[highs - 1] + 1).tolist(), strict=True))


ROW_ORDER_FILE = "order.bin"
"""The hash of every line, in row order: 8 bytes per row."""

BLOCK_BYTES = 4 << 20

log = logging.getLogger(__name__)


def build_corpus(
    context: AuditContext,
    *,
    folder: Path,
    root: Path = Path(),
    on_progress: Progress,
    engine: MapEngine | None = None,
) -> Corpus:
    """Extract the features of new blocks, and put all rows in row order."""
    names = find_sources(context.settings.logs, root=root)
    make_folder(folder)
    reading = _LogReader(names, root=root, folder=folder, context=context, report=on_progress)
    work = MapWork(extract_features, remote=lambda: remote_features(context))
    for size in (engine or MapEngine()).map(reading.new_tasks(), work):
        reading.done(size)
    records: Counter[str] = Counter()
    line_keys: list[Keys] = []
    for block in reading.blocks:
        # One by one: a head lists every unreadable line of its block.
        records[block.file] += read_head(folder / block.features)["records"]
        line_keys.append(read_table(folder / block.features, ["line_key"]).column("line_key").to_numpy())
    stored = folder / ROW_ORDER_FILE
    # Without the stored order, rows are ordered by file.
    data = stored.read_bytes() if stored.exists() else b""
    known_keys = np.frombuffer(data[: len(data) // 8 * 8], dtype=np.uint64)
    segments, keys = order_rows(reading.blocks, line_keys, known_keys)
    write_atomic(stored, keys.tobytes())
    _remove_stale(folder, keep={block.features for block in reading.blocks})
    inputs = [
        InputFile(file=file, sha256=sha256, rows=records[file]) for file, sha256 in reading.hashes.items()
    ]
    corpus = Corpus(
        folder, segments=segments, inputs=inputs, features_key=fingerprint(list_feature_inputs(context))
    )
    corpus.withdraw(_find_disputed_captures(corpus))
    corpus.withdraw(_find_replaced(corpus))
    corpus.withdraw(_find_retried_calls(corpus))
    corpus.joined.update(_join_scores(corpus))
    rated_bad = _find_rated_bad(corpus, context.settings)
    if context.settings.drop_rated_bad:
        corpus.withdraw(rated_bad)
    elif rated_bad:
        corpus.rate_low(np.array(sorted(rated_bad), dtype=np.int64))
    require_scores(corpus, context.settings)
    corpus.rate_low(find_low_rated(corpus, context.settings))
    corpus.pairs = find_scored_pairs(corpus, context.settings)
    if context.settings.keep is not None:
        _require_condition_fits(corpus, context.settings.keep)
    return corpus


def _require_condition_fits(corpus: Corpus, condition: str) -> None:
    """Refuse a `data.keep` that compares text with a number, or that leaves no row."""
    (reasons, texts), left_out = corpus.labels("reason"), corpus.has_label("fault", NOT_KEPT)
    if not left_out.any():
        return
    is_no_number = np.array([text.startswith(NO_NUMBER) for text in texts], dtype=bool)
    positions = np.flatnonzero(left_out & is_no_number[reasons])
    is_capture_or_repair = (corpus.column("capture") != 0) | (corpus.column("replaces") != 0)
    if not len(positions) and not (left_out | is_capture_or_repair).all():
        return
    positions = positions if len(positions) else np.flatnonzero(left_out)
    counts = Counter(reasons[positions].tolist())
    number, rows = counts.most_common(1)[0]
    first = corpus.origin(int(positions[np.flatnonzero(reasons[positions] == number)[0]]))
    listed = [row for _, row in corpus.rows_at(np.flatnonzero(left_out)[:50].tolist())]
    fields = ", ".join(sorted({name for row in listed for name in list_fields(row)})[:20])
    raise UserError(
        f"`{condition}` cannot be evaluated" if texts[number].startswith(NO_NUMBER) else "no row is kept",
        why=f"{texts[number].removeprefix(f'{NO_NUMBER}: ')} in {rows:,} rows, first in {first}",
        fix=f"use another field or condition; rows have {fields or 'no fields of their own'}",
        where="data.keep",
    )


def _find_retried_calls(corpus: Corpus) -> dict[int, str]:
    """Find calls that their agent made again: the same prompt in the same trace. The last answer counts."""
    traces = corpus.column("trace")
    positions = np.flatnonzero((traces != 0) & corpus.column("passed").astype(bool))
    if not len(positions):
        return {}
    mixed = (traces[positions] * _ODD) ^ corpus.column(PROMPT_FINGERPRINT)[positions].astype(np.uint64)
    order = np.argsort(mixed, kind="stable")
    is_followed = np.zeros(len(positions), dtype=bool)
    is_followed[order[:-1]] = mixed[order[1:]] == mixed[order[:-1]]
    reason = f"{RETRIED}: the agent made the same call again in the same trace"
    return dict.fromkeys(positions[is_followed].tolist(), reason)


def _join_scores(corpus: Corpus) -> dict[int, JoinedFacts]:
    """Give each call the mean of its own scores, else that of its trace."""
    by_call: dict[tuple[int, int], list[float]] = {}
    for trace, call, value in corpus.scores():
        by_call.setdefault((trace, call), []).append(value)
    if not by_call:
        return {}
    joined: dict[int, JoinedFacts] = {}
    calls = corpus.column("call").tolist()
    for position, trace in enumerate(corpus.column("trace").tolist()):
        call_scores = by_call.get((trace, calls[position])) if trace else None
        scores = call_scores or (by_call.get((trace, 0)) if trace else None)
        if scores:
            joined[position] = JoinedFacts(sum(scores) / len(scores), "call" if call_scores else "trace")
    return joined


def _find_rated_bad(corpus: Corpus, settings: DataSettings) -> dict[int, str]:
    """Find rows that a score apart from them rates bad; one that has a score of its own keeps that."""
    scored = sorted(
        position
        for position, joined in corpus.joined.items()
        if joined.reward is not None and is_bad_score(joined.reward, settings)
    )
    bad = (position for position, row in corpus.rows_at(scored) if is_rated_bad(row, settings))
    return dict.fromkeys(bad, f"{RATED_BAD}: a score of its trace is {say_bad_score(settings)}")


def _find_disputed_captures(corpus: Corpus) -> dict[int, str]:
    """Find captures that were exported before users rated them negative, and again afterwards."""
    captures = corpus.column("capture")
    if not captures.any():
        return {}
    bad = corpus.has_label("fault", NEGATIVE_FEEDBACK)
    disputed = np.isin(captures, captures[bad & (captures != 0)]) & corpus.column("passed").astype(bool)
    disputed &= corpus.column("unconfirmed") != 0
    reason = f"{NEGATIVE_FEEDBACK}: another row of the logs says that users called this reply bad"
    return dict.fromkeys(np.flatnonzero(disputed).tolist(), reason)


def _find_replaced(corpus: Corpus) -> dict[int, str]:
    """Find rows that another row replaces: a teacher or a reviewer answered the same prompt again.

    A line may have several rows: only the one with the same user turns is replaced. A replacement that was
    dropped replaces nothing, unless a reviewer rejected the row.
    """
    replaces = corpus.column("replaces")
    if not replaces.any():
        return {}
    rejected = corpus.has_label("fault", REVIEWED)
    valid = (replaces != 0) & (corpus.column("passed").astype(bool) | rejected)
    # Not the whole prompt: the system prompt may have been replaced since.
    turns = corpus.column("turn")
    pairs = set(zip(replaces[valid].tolist(), turns[valid].tolist(), strict=True))
    lines = corpus.column("line_key")
    positions = np.flatnonzero(np.isin(lines, replaces[valid]) & corpus.column("passed").astype(bool))
    replaced = [
        position for position in positions.tolist() if (int(lines[position]), int(turns[position])) in pairs
    ]
    return dict.fromkeys(replaced, "replaced: another row of the logs answers it again or rejects it")


class _LogReader:
    """Reads the files once: hashes them and yields the blocks without features."""

    def __init__(
        self, names: tuple[str, ...], *, root: Path, folder: Path, context: AuditContext, report: Progress
    ) -> None:
        self.blocks: list[Segment] = []
        """The blocks of the log, with no rows yet."""
        self.hashes: dict[str, str] = {}
        # A log that was just rotated has no rows yet; it is an error only if all are empty.
        sizes = {name: (root / name).stat().st_size for name in names if (root / name).is_file()}
        empty = {name for name, size in sizes.items() if not size}
        if empty and len(empty) < len(names):
            log.warning("empty, left out: %s", ", ".join(sorted(empty)))
            names = tuple(name for name in names if name not in empty)
        self._names = names
        self._root, self._folder, self._context = root, folder, context
        self._inputs = list_feature_inputs(context)
        self._report = report
        self._total = sum(sizes.values())
        self._done = 0

    def new_tasks(self) -> Iterator[FeatureTask]:
        for name in self._names:
            blocks_digest = hashlib.sha256()
            for block in cut_blocks(name, root=self._root, size=BLOCK_BYTES):
                blocks_digest.update(block.key.encode())
                features = name_features(block, inputs=self._inputs, settings=self._context.settings)
                self.blocks.append(Segment(block.file, block.index, block.first_line, features, 0, 0))
                if has_features(self._folder / features):
                    self.done(len(block.data))
                else:
                    yield FeatureTask(block, self._folder / features, self._context)
            # Standard input can be read only once: it is identified by the hash of its blocks.
            path = self._root / name
            sha256 = file_digest(path) if path.is_file() else blocks_digest.hexdigest()
            self.hashes[self.blocks[-1].file if self.blocks else name] = sha256
        if not self.blocks:
            raise UserError("the logs contain no rows", fix="specify other files under data.logs")

    def done(self, size: int) -> None:
        self._done += size
        self._report("read and sift", self._done, max(self._total, self._done))


def _remove_stale(folder: Path, *, keep: set[str]) -> None:
    for path in folder.glob("*.arrow"):
        if path.name not in keep:
            path.unlink(missing_ok=True)
            digest_file(path).unlink(missing_ok=True)
    # Left over from a killed run.
    for path in folder.glob(".*.part"):
        path.unlink(missing_ok=True)


Scores = npt.NDArray[np.float64]


def read_scores(corpus: Corpus) -> Scores:
    """The score of each row; NaN if it has none."""
    scores: Scores = corpus.column("score").astype(np.float64)
    joined = sorted(corpus.joined)
    for position, row in corpus.rows_at(joined):
        if row.capture is None and row.reward is not None:
            scores[position] = row.reward
    return scores


def require_scores(corpus: Corpus, settings: DataSettings) -> None:
    """Refuse `data.score_weights` and `data.score_pairs` without scores, or where one is not a number."""
    if not settings.score_weights and settings.score_pairs is None:
        return
    where = "data.score_weights" if settings.score_weights else "data.score_pairs"
    scores = read_scores(corpus)
    unreadable = np.flatnonzero(scores == UNREADABLE_SCORE)
    faults = (fault for _, fault in corpus.faults() if NO_SCORE in fault.message)
    first: tuple[Origin, str] | None = next(((fault.origin, fault.message) for fault in faults), None)
    if len(unreadable):
        first = corpus.origin(int(unreadable[0])), "its score is text"
    if first is not None:
        raise UserError(
            "a score is not a number",
            why=f"{first[0]}: {first[1]}",
            fix="correct the row, or use another field under data.mapping.reward",
            where=where,
        )
    if corpus.rows and np.isnan(scores).all():
        [(_, row)] = corpus.rows_at([0])
        field = settings.mapping.reward if settings.mapping else None
        missing = f"`{field}`" if field else "`reward`, `score` or `label`"
        raise UserError(
            "no row has a score",
            why=f"{row.origin} and all others lack {missing}",
            fix="specify the field with the score: `data.mapping: {reward: FIELD}`; rows have "
            + (", ".join(sorted(list_fields(row))[:20]) or "no other fields"),
            where=where,
        )


def find_low_rated(corpus: Corpus, settings: DataSettings) -> npt.NDArray[np.int64]:
    """Rows that cannot be references for tests: those in the lower half of the scale of `score_weights`."""
    if not settings.score_weights:
        return np.zeros(0, dtype=np.int64)
    middle = (min(settings.score_weights) + max(settings.score_weights)) / 2
    return np.flatnonzero(read_scores(corpus) < middle)


def weigh_rows(corpus: Corpus, settings: DataSettings) -> Scores | None:
    """The weight of each row by its score, 1 for rows without one; None if scores weigh nothing."""
    if not settings.score_weights:
        return None
    scores = read_scores(corpus)
    points = sorted(settings.score_weights.items())
    weights = np.interp(scores, [score for score, _ in points], [weight for _, weight in points])
    return np.where(np.isnan(scores), 1.0, weights)


def find_scored_pairs(corpus: Corpus, settings: DataSettings) -> dict[int, int]:
    """The row with the best reply to a prompt, and the one with the worst: if their scores differ enough.

    Replies that were dropped because they are rated bad take part as the worse ones.
    """
    if settings.score_pairs is None:
        return {}
    scores, passed = read_scores(corpus), corpus.column("passed").astype(bool)
    bad = corpus.has_label("fault", RATED_BAD)
    bad[[position for position, reason in corpus.withdrawn.items() if reason.startswith(RATED_BAD)]] = True
    positions = np.flatnonzero((passed | bad) & ~np.isnan(scores))
    prompt, reply = corpus.column("prompt"), corpus.column("reply")
    order = positions[np.lexsort((positions, scores[positions], passed[positions], prompt[positions]))]
    starts = np.flatnonzero(np.concatenate(([True], prompt[order][1:] != prompt[order][:-1]))[: len(order)])
    ends = np.append(starts, len(order))[1:]
    pairs: dict[int, int] = {}
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        replies = order[start:end]
        better, worse = int(replies[-1]), int(replies[np.argmin(scores[replies])])
        gap = scores[better] - scores[worse]
        if passed[better] and gap >= settings.score_pairs and reply[better] != reply[worse]:
            pairs[better] = worse
    return pairs
