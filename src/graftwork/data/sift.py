"""One block of a log to sifted rows: all that can be known of a row alone, worked out once.

In: a block and the settings. Out: an Arrow file with, for each readable row, the row itself
(redacted), whether it may be learned from, what is to be noted about it, and its prints. The file
is named by the content of the block and by the settings that matter here: what was sifted is never
sifted again. Runs in worker processes; knows no other rows.
"""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pyarrow as pa

from graftwork import __version__
from graftwork.data.corpus import pack
from graftwork.data.judge import is_dropped
from graftwork.data.prints import Prints, take_prints
from graftwork.data.read import ReadFault, ReadRow, read_block
from graftwork.data.redaction import RedactedRow, redact_row
from graftwork.data.rules.look import judgement, look
from graftwork.data.rules.note import Sight
from graftwork.data.settings import DataSettings
from graftwork.data.sources.blocks import Block
from graftwork.files.disk import file_digest, write_atomic
from graftwork.records.base import fingerprint
from graftwork.records.interaction import Interaction
from graftwork.text.script import main_script

FORM = 5
"""Counts up when the columns change: older files are then made anew."""

LATER = frozenset(
    {
        "logs",
        "system_prompt",
        "system_prompts",
        "logged_system_prompt",
        "near_duplicate",
        "keep_duplicate",
        "conflicts",
        "stratify",
        "question_similarity",
        "paraphrases",
        "validation",
        "test",
        "pack_tokens",
        "train_on",
        "seed",
    }
)
"""Settings that matter only after the sifting: changing one of them sifts nothing again."""


class SiftTask(NamedTuple):
    block: Block
    out: Path
    sight: Sight


class SiftedRow(NamedTuple):
    read: ReadRow
    kept: Interaction
    passed: bool
    fault: str | None
    reason: str | None
    notes: bytes | None
    redactions: bytes | None


def name_sifted(block: Block, *, sight: Sight) -> str:
    """The name of the file that this block sifts to."""
    settings = sight.settings.model_dump(mode="json", exclude=set(LATER))
    known = [sight.base, sight.control_tokens, sight.base_reasons]
    seen = fingerprint([block.key, settings, known, __version__, FORM])
    return f"{seen[:40]}.arrow"


def digest_file(sifted: Path) -> Path:
    """Where the hash of a sifted block stands, written behind it."""
    return sifted.with_suffix(".sha256")


def is_sifted(sifted: Path) -> bool:
    """Whether the block was sifted before, and its file is still what was written."""
    try:
        return file_digest(sifted) == digest_file(sifted).read_text()
    except FileNotFoundError:
        return False


def sift_block(task: SiftTask) -> int:
    """Write the sifted block; the number of its bytes comes back, for the progress."""
    settings = task.sight.settings
    rows: list[SiftedRow] = []
    faults: list[tuple[int, str, str, str]] = []
    for read in read_block(task.block, settings=settings):
        if isinstance(read.result, ReadFault):
            place = read.line - task.block.first_line
            faults.append((place, read.input_hash, read.result.code, read.result.message))
        else:
            rows.append(_sift(read, read.result, sight=task.sight))
    # Of rows that are filtered out too: the audit says what they would have done.
    prints = take_prints([row.kept for row in rows], settings=settings)
    table = _to_table(rows, prints, first_line=task.block.first_line)
    # A line may give several rows, and an array all of its records on one line.
    records = len({(row.read.line, row.read.input_hash) for row in rows}) + len(faults)
    encoded = _encode(table, faults, records=records)
    write_atomic(task.out, encoded)
    write_atomic(digest_file(task.out), hashlib.sha256(encoded).hexdigest(), durable=False)
    return len(task.block.data)


def _sift(read: ReadRow, raw: Interaction, *, sight: Sight) -> SiftedRow:
    settings = sight.settings
    redacted = redact_row(raw)
    notes = look(raw, redacted, sight=sight)
    fault = judgement(notes)
    return SiftedRow(
        read=read,
        kept=redacted.row if settings.redact else raw,
        passed=not (fault and is_dropped(fault.code, settings)),
        fault=fault.code if fault else None,
        reason=fault.reason if fault else None,
        notes=orjson.dumps([tuple(note) for note in notes]) if notes else None,
        redactions=_count(redacted, settings),
    )


def _count(redacted: RedactedRow, settings: DataSettings) -> bytes | None:
    return orjson.dumps(redacted.counts) if redacted.counts and settings.redact else None


def _to_table(rows: list[SiftedRow], prints: Prints, *, first_line: int) -> "pa.Table":
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
        "interaction": pa.array([pack(row) for row in kept], pa.binary()),
        "prompt_chars": pa.array([sum(len(m.content) for m in row.messages) for row in kept], pa.int32()),
        "reply_chars": pa.array([len(row.reply) for row in kept], pa.int32()),
        "script": pa.array([main_script(row.question) for row in kept], pa.string()),
        "stage": pa.array([-1 if row.stage is None else row.stage for row in kept], pa.int32()),
    }
    for name in ("group", "domain", "model", "status", "split"):
        columns[name] = pa.array([getattr(row, name) for row in kept], pa.string())
    columns |= {name: pa.array(values) for name, values in prints.fixed.items()}
    for name, (values, offsets) in prints.ragged.items():
        columns[name] = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(values))
    return pa.table(columns)


def _encode(table: "pa.Table", faults: list[tuple[int, str, str, str]], *, records: int) -> bytes:
    head = {"faults": orjson.dumps(faults), "rows": str(table.num_rows), "records": str(records)}
    schema = table.schema.with_metadata(head)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        writer.write_table(table.replace_schema_metadata(head))
    encoded: bytes = sink.getvalue().to_pybytes()
    return encoded
