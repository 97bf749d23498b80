"""Row features: everything that can be computed from one row alone, once, in worker processes.

In: a block of a log and the settings. Out: an Arrow file with, for each readable row, the row itself
(redacted), whether it passed the checks, its notes and its fingerprints: the same bytes on this machine and
on another node. The file is named by the content of the block and the settings it depends on, and never
computed again.
"""

import hashlib
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

from graftwork.data.audit.row_checks import (
    AuditContext,
    RedactedRow,
    check_row,
    find_verdict,
    is_dropped,
    redact_row,
)
from graftwork.data.audit.usage import UNKNOWN, day_of
from graftwork.data.corpus.store import encode_row
from graftwork.data.dedup.fingerprints import Fingerprints, compute_fingerprints
from graftwork.data.ingest.blocks import LogBlock, ReadFault, SkippedPart
from graftwork.data.ingest.fields import SCORES
from graftwork.data.ingest.read import ReadRow, read_block, settings_of_file
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

NOT_A_NUMBER = -math.inf
"""The score of a row whose log has text in its place."""


class FeatureTask(NamedTuple):
    block: LogBlock
    out: Path
    context: AuditContext


class RowFeatures(NamedTuple):
    read: ReadRow
    logged: Interaction
    kept: Interaction
    passed: bool
    fault: str | None
    reason: str | None
    notes: bytes | None
    redactions: bytes | None
    trace: int
    call: int


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
    encoded = _encode(_extract(task.block, task.context))
    write_atomic(task.out, encoded)
    write_atomic(digest_file(task.out), hashlib.sha256(encoded).hexdigest(), durable=False)
    return len(task.block.data)


class BlockFeatures(NamedTuple):
    table: "pa.Table"
    apart: "BlockRemarks"
    records: int


def _extract(block: LogBlock, context: AuditContext) -> BlockFeatures:
    """The features of a block, with lines counted from its first."""
    rows: list[RowFeatures] = []
    apart = BlockRemarks()
    for read in read_block(block, settings=context.settings):
        result = read.result
        place = read.line - block.first_line
        if isinstance(result, Interaction):
            rows.append(_extract_row(read, result, context=context))
        elif isinstance(result, ReadFault):
            apart.faults.append((place, read.input_hash, result.code, result.message))
        elif isinstance(result, SkippedPart):
            trace = 0 if result.trace is None else hash_name(result.trace)
            call = 0 if result.call is None else hash_name(result.call)
            apart.left_out.append((place, result.rule, result.count, trace, call))
        else:
            call = 0 if result.call is None else hash_name(result.call)
            apart.scores.append((hash_name(result.trace), call, result.value))
    # Including rows that are filtered out: the audit reports what they would have done.
    fingerprints = compute_fingerprints([row.kept for row in rows], settings=context.settings)
    # A line may contain several rows, and an array has all of its records on one line.
    lines = {(row.read.line - block.first_line, row.read.input_hash) for row in rows}
    records = len(lines) + sum((place, key) not in lines for place, key, *_ in apart.faults)
    return BlockFeatures(_to_table(rows, fingerprints, first_line=block.first_line), apart, records)


@dataclass
class BlockRemarks:
    """What a block holds besides rows: unreadable lines, what is left out by rule, scores of traces."""

    faults: list[tuple[int, str, str, str]] = field(default_factory=list)
    left_out: list[tuple[int, str, int, int, int]] = field(default_factory=list)
    scores: list[tuple[int, int, float]] = field(default_factory=list)


def hash_name(name: str) -> int:
    """A number for the id of a trace or a call; never 0."""
    return int.from_bytes(hashlib.sha256(name.encode(errors="replace")).digest()[:8], "big") | 1


def _extract_row(read: ReadRow, raw: Interaction, *, context: AuditContext) -> RowFeatures:
    settings = context.settings
    redacted = redact_row(raw)
    notes = check_row(raw, redacted, context=context)
    fault = find_verdict(notes)
    return RowFeatures(
        read=read,
        logged=raw,
        kept=redacted.row if settings.redact else raw,
        passed=not (fault and is_dropped(fault.code, settings)),
        fault=fault.code if fault else None,
        reason=fault.reason if fault else None,
        notes=orjson.dumps([tuple(note) for note in notes]) if notes else None,
        redactions=_count(redacted, settings),
        trace=0 if raw.trace is None else hash_name(raw.trace),
        call=0 if raw.trace is None else hash_name(raw.id),
    )


def _count(redacted: RedactedRow, settings: DataSettings) -> bytes | None:
    return orjson.dumps(redacted.counts) if redacted.counts and settings.redact else None


def _to_table(rows: list[RowFeatures], fingerprints: Fingerprints, *, first_line: int) -> "pa.Table":
    kept = [row.kept for row in rows]
    columns: dict[str, Any] = {
        "line": pa.array([row.read.line - first_line for row in rows], pa.int64()),
        "input_hash": pa.array([row.read.input_hash for row in rows], pa.string()),
        "line_key": pa.array([int(row.read.input_hash[:16], 16) for row in rows], pa.uint64()),
        "passed": pa.array([row.passed for row in rows], pa.bool_()),
        "fault": pa.array([row.fault for row in rows], pa.string()),
        "reason": pa.array([row.reason for row in rows], pa.string()),
        "notes": pa.array([row.notes for row in rows], pa.binary()),
        "redactions": pa.array([row.redactions for row in rows], pa.binary()),
        "interaction": pa.array([encode_row(row) for row in kept], pa.binary()),
        "prompt_chars": pa.array([sum(len(m.content) for m in row.messages) for row in kept], pa.int32()),
        "reply_chars": pa.array([len(row.reply) for row in kept], pa.int32()),
        "script": pa.array([main_script(row.question) for row in kept], pa.string()),
        "stage": pa.array([-1 if row.stage is None else row.stage for row in kept], pa.int32()),
        # Before redaction, which may rename them: scores are joined by them.
        "trace": pa.array([row.trace for row in rows], pa.uint64()),
        "call": pa.array([row.call for row in rows], pa.uint64()),
        "calls_tools": pa.array([_calls_tools(row) for row in kept], pa.bool_()),
        # Of the row as it was logged: redaction may take a time for a phone number.
        "day": pa.array([day_of(row.logged) for row in rows], pa.int32()),
        "score": pa.array([_score_of(row.logged) for row in rows], pa.float64()),
        "cost": pa.array([UNKNOWN if row.cost is None else row.cost for row in kept], pa.float64()),
    }
    for name in ("prompt_tokens", "cached_tokens", "reply_tokens"):
        counts = [getattr(row, name) for row in kept]
        columns[name] = pa.array([UNKNOWN if count is None else count for count in counts], pa.int64())
    for name in ("group", "domain", "model", "status", "split"):
        columns[name] = pa.array([getattr(row, name) for row in kept], pa.string())
    columns |= {name: pa.array(values) for name, values in fingerprints.fixed.items()}
    for name, (values, offsets) in fingerprints.ragged.items():
        columns[name] = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))
    return pa.table(columns)


def _score_of(row: Interaction) -> float:
    """The score; NaN for none. Feedback on captured rows is on a scale of its own."""
    if row.capture is not None:
        return math.nan
    if row.reward is None:
        return NOT_A_NUMBER if row.extra.keys() & SCORES else math.nan
    return row.reward


def _calls_tools(row: Interaction) -> bool:
    earlier = (turn.content for turn in row.messages if turn.role == "assistant")
    return OPEN in row.reply or any(OPEN in content for content in earlier)


def _encode(features: BlockFeatures) -> bytes:
    table, apart, records = features
    head = {
        "faults": orjson.dumps(apart.faults),
        "left_out": orjson.dumps(apart.left_out),
        "scores": orjson.dumps(apart.scores),
        "rows": str(table.num_rows),
        "records": str(records),
    }
    schema = table.schema.with_metadata(head)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        writer.write_table(table.replace_schema_metadata(head))
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded


NOT_SENT = {"repair"}
"""Settings of another command, which may name endpoints."""


def remote_features(context: AuditContext) -> RemoteWork[FeatureTask, int]:
    """The form for a cluster."""
    head = {
        "settings": context.settings.model_dump(mode="json", exclude=NOT_SENT),
        "base": context.base,
        "control_tokens": context.control_tokens,
        "base_reasons": context.base_reasons,
    }
    return RemoteWork(
        entry="graftwork.data.corpus.row_features:extract_piece",
        shared=pack(head),
        encode=_pack_task,
        collect=_collect,
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
        file=head["file"],
        index=head["index"],
        key=head["key"],
        first_line=head["first_line"],
        data=blobs[0],
        offsets=None if head["offsets"] is None else tuple(head["offsets"]),
        faults=tuple(ReadFault.model_validate(fault) for fault in head["faults"]),
        transcript=head["transcript"],
    )
    if not has_features(out):
        extract_features(FeatureTask(block=block, out=out, context=context))


def _pack_task(task: FeatureTask) -> bytes:
    block = task.block
    head = {
        "file": block.file,
        "index": block.index,
        "key": block.key,
        "first_line": block.first_line,
        "offsets": block.offsets,
        "faults": [fault.model_dump(mode="json") for fault in block.faults],
        "transcript": block.transcript,
        "out": str(task.out.absolute()),
    }
    return pack(head, block.data)


def _collect(task: FeatureTask) -> int | None:
    return len(task.block.data) if has_features(task.out) else None
