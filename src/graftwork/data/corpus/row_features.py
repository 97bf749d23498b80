"""Row features: everything that can be computed from one row alone, once, in worker processes.

In: a block of a log and the settings. Out: an Arrow file with, for each readable row, the row itself
(redacted), whether it passed the checks, its notes and its fingerprints: the same bytes on this machine and
on another node. The file is named by the content of the block and the settings it depends on, and never
computed again.
"""

import hashlib
import math
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

from graftwork.data.audit.row_checks import (
    AuditContext,
    check_row,
    find_verdict,
    is_dropped,
    redact_row,
)
from graftwork.data.corpus.store import encode_row
from graftwork.data.dedup.fingerprints import compute_fingerprints
from graftwork.data.ingest.blocks import LogBlock, ReadFault, SkippedPart
from graftwork.data.ingest.fields import SCORES, day_of
from graftwork.data.ingest.read import read_block, settings_of_file
from graftwork.data.settings import DataSettings
from graftwork.files.disk import file_digest, write_atomic
from graftwork.process.cluster.pieces import RemoteWork, pack
from graftwork.records.base import fingerprint
from graftwork.records.interaction import Interaction
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
"""Of a number of tokens, which is never negative. An unknown cost is negative too."""

NOT_A_NUMBER = -math.inf
"""The score of a row whose log has text in its place."""


class FeatureTask(NamedTuple):
    block: LogBlock
    out: Path
    context: AuditContext


def list_feature_inputs(context: AuditContext) -> list[Any]:
    """Return everything besides the block that row features depend on."""
    settings = context.settings.model_dump(mode="json", exclude=set(LATER_SETTINGS))
    known = [context.base, context.control_tokens, context.base_reasons]
    return [settings, known, __version__, FEATURES_FORM]


def name_features(block: LogBlock, *, inputs: list[Any], settings: DataSettings) -> str:
    """Return the name of the feature file of this block."""
    if settings.formats:
        own = settings_of_file(settings, block.file)
        inputs = [*inputs, own.format, own.mapping and own.mapping.model_dump(mode="json")]
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
    written = (row.reply, *(turn.content for turn in row.messages if turn.role == "assistant"))
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
        "calls_tools": any(OPEN in text for text in written),
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
        return NOT_A_NUMBER if row.extra.keys() & SCORES else math.nan
    return row.reward


NOT_SENT = {"repair"}
"""Settings of another command, which may name endpoints."""


_BLOCK_FIELDS = ("file", "index", "key", "first_line", "offsets", "transcript")


def remote_features(context: AuditContext) -> RemoteWork[FeatureTask, int]:
    """The form for a cluster."""

    def encode(task: FeatureTask) -> bytes:
        head = {
            **{name: getattr(task.block, name) for name in _BLOCK_FIELDS},
            "faults": [fault.model_dump(mode="json") for fault in task.block.faults],
            "out": str(task.out.absolute()),
        }
        return pack(head, task.block.data)

    return RemoteWork(
        entry="graftwork.data.corpus.row_features:extract_piece",
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
