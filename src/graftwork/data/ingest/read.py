"""Reads rows into interactions, each with the file and line it came from.

In: paths, or a block of JSON lines. Out: interactions and faults; a bad row is a fault that names its
origin and never stops the good ones. Does not judge the content.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import orjson
from pydantic import ValidationError

from graftwork.data.ingest.blocks import FaultCode, LogBlock, ReadFault, RowResult, SkippedPart, TraceScore
from graftwork.data.ingest.fields import BadRow, explain, name_type
from graftwork.data.ingest.files import cut_blocks, find_sources
from graftwork.data.ingest.formats import apply_reasoning, find_format, read_row, settings_of_file
from graftwork.data.ingest.transcript_rows import TranscriptReader
from graftwork.data.settings import DataSettings, FormatName
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.redact import redact
from graftwork.text.shape import MOST_VALUES, has_too_many_values

__all__ = [
    "FaultCode",
    "ReadFault",
    "ReadRow",
    "SkippedPart",
    "TraceScore",
    "find_files",
    "read",
    "read_block",
    "read_file",
]

_KEY = re.compile(rb'(?<!\\)"\s*:')
_LENIENT_MARKS = (b"NaN", b"Infinity", b"\\ud", b"\\uD")
_LONE_HALF = re.compile("[\ud800-\udfff]")
_DEFAULTS = DataSettings()


HASH_LENGTH = 32


class ReadRow(NamedTuple):
    """One result of a block: an interaction, a fault, or what of a line is neither. `input_hash` identifies
    the bytes of its row.
    """

    line: int
    input_hash: str
    result: RowResult


def find_files(paths: Iterable[str], *, root: Path = Path()) -> tuple[str, ...]:
    return find_sources(paths, root=root)


def read(
    paths: Iterable[str], *, root: Path = Path(), settings: DataSettings | None = None
) -> Iterator[Interaction | ReadFault]:
    """Yield every row of every file, in order."""
    for name in find_sources(paths, root=root):
        yield from read_file(name, root=root, settings=settings)


def read_file(
    name: str, *, root: Path = Path(), settings: DataSettings | None = None
) -> Iterator[Interaction | ReadFault]:
    """Yield every row of one file. An empty file, or one that cannot be opened, is an error."""
    for block in cut_blocks(name, root=root):
        for row in read_block(block, settings=settings or _DEFAULTS):
            if isinstance(row.result, Interaction | ReadFault):
                yield row.result


class Sample(NamedTuple):
    """Rows of a log, the format of each line, and what could not be read."""

    rows: tuple[Interaction, ...]
    formats: tuple[FormatName | None, ...]
    faults: tuple[ReadFault, ...]
    whole: bool
    """Whether these are all rows."""


def sample_rows(
    paths: Iterable[str], *, root: Path = Path(), settings: DataSettings = _DEFAULTS, most: int = 20_000
) -> Sample:
    """Read the first rows of a log, with their formats."""
    rows: list[Interaction] = []
    faults: list[ReadFault] = []
    formats: list[FormatName | None] = []
    for name in find_sources(paths, root=root):
        for block in cut_blocks(name, root=root):
            if block.transcript:
                formats.append(block.transcript)
            else:
                lines = block.data.split(b"\n")
                formats += [find_format(row) for line in lines if (row := _parse_object(line))]
            for found in read_block(block, settings=settings):
                if isinstance(found.result, ReadFault):
                    faults.append(found.result)
                elif isinstance(found.result, Interaction):
                    rows.append(found.result)
            if len(rows) >= most:
                return Sample(tuple(rows[:most]), tuple(formats), tuple(faults), whole=False)
    return Sample(tuple(rows), tuple(formats), tuple(faults), whole=True)


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        row = orjson.loads(line) if line.strip() else None
    except orjson.JSONDecodeError:
        return None
    return row if isinstance(row, dict) else None


def hash_line(line: bytes) -> str:
    """Identify a row of a log: the hash of its bytes without surrounding white space."""
    return hashlib.sha256(line.strip()).hexdigest()[:HASH_LENGTH]


def read_block(block: LogBlock, *, settings: DataSettings) -> Iterator[ReadRow]:
    """Yield the rows of one block and the faults of its container, in line order."""
    settings = settings_of_file(settings, block.file)
    faults = sorted(block.faults, key=lambda fault: fault.origin.line, reverse=True)
    lines = block.data.split(b"\n")
    # After the last line end there is nothing, or a row that is still being written.
    is_open = bool(lines[-1].strip())
    offsets = range(len(lines)) if block.offsets is None else block.offsets
    transcript = TranscriptReader(block.transcript) if block.transcript else None
    for offset, data in zip(offsets, lines, strict=False):
        raw = data.strip()
        if not raw or (transcript and transcript.continue_conversation(raw)):
            continue
        line = block.first_line + offset
        while faults and faults[-1].origin.line < line:
            yield _to_row(faults.pop())
        input_hash = hash_line(raw)
        origin = Origin(file=block.file, line=line)
        results = (
            _read_reply(raw, origin, transcript, settings) if transcript else _read_row(raw, origin, settings)
        )
        for result in results:
            is_last = is_open and data is lines[-1]
            yield ReadRow(line, input_hash, _may_be_unfinished(result) if is_last else result)
    while faults:
        yield _to_row(faults.pop())


def _to_row(fault: ReadFault) -> ReadRow:
    return ReadRow(fault.origin.line, "", fault)


def _read_row(raw: bytes, origin: Origin, settings: DataSettings) -> Sequence[RowResult]:
    if has_too_many_values(raw):
        return [_fault(origin, "parse_error", f"the row holds {MOST_VALUES:,} values or more")]
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        row = _parse_leniently(raw)
        if row is None:
            return [_explain_bad_json(raw, origin, error)]
    if not isinstance(row, dict):
        return [_fault(origin, "schema", f"the row must be an object, and is {name_type(row)}")]

    def read() -> Sequence[RowResult]:
        _refuse_repeated_keys(raw, row)
        return read_row(row, origin, settings=settings)

    return _catch_faults(read, origin)


def _read_reply(
    raw: bytes, origin: Origin, transcript: TranscriptReader, settings: DataSettings
) -> Sequence[RowResult]:
    results = _catch_faults(lambda: apply_reasoning(transcript.read(raw, origin), settings), origin)
    if settings.format in (None, transcript.kind):
        return results
    return [
        _fault(origin, "schema", f"the file is a transcript of the format {transcript.kind}") for _ in results
    ]


def _catch_faults(read: Callable[[], Sequence[RowResult]], origin: Origin) -> Sequence[RowResult]:
    """Turn what makes a row unreadable into a fault."""
    try:
        return read()
    except (BadRow, ValidationError) as error:
        # Keys come from the user and may contain secrets.
        return [_fault(origin, "schema", redact(explain(error)).text)]
    except RecursionError:
        return [_fault(origin, "parse_error", "the row is nested too deeply")]


def _parse_leniently(raw: bytes) -> Any:
    """Parse what the strict parser refuses: NaN, Infinity and lone surrogates.

    The numbers become null, the surrogates the replacement character. None if the row is invalid in another
    way.
    """
    if not any(mark in raw for mark in _LENIENT_MARKS):
        return None
    try:
        row = json.loads(raw.decode(), parse_constant=lambda _name: None)
        return orjson.loads(_LONE_HALF.sub("\ufffd", json.dumps(row, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return None


def _refuse_repeated_keys(raw: bytes, row: dict[str, Any]) -> None:
    """Refuse repeated keys, of which the parser silently keeps the last.

    Written again, a row that lost a key has fewer quotes, which is cheap to count. Only where the counts
    differ are keys counted, and only then is the row parsed again.
    """
    try:
        if orjson.dumps(row).count(b'"') == raw.count(b'"'):
            return
    except TypeError:
        pass  # nested too deeply to be written
    if len(_KEY.findall(raw)) != _count_keys(row):
        json.loads(raw, object_pairs_hook=_refuse_pairs)


def _count_keys(row: dict[str, Any]) -> int:
    count = len(row)
    inside: list[Any] = [row.values()]
    for values in inside:  # grows as it is walked
        for value in values:
            if type(value) is dict:
                count += len(value)
                inside.append(value.values())
            elif type(value) is list:
                inside.append(value)
    return count


def _refuse_pairs(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise BadRow(f"the key `{redact(key).text[:60]}` occurs twice in one object")
        seen.add(key)


def _explain_bad_json(raw: bytes, origin: Origin, error: orjson.JSONDecodeError) -> ReadFault:
    if not _is_utf8(raw):
        return _fault(origin, "encoding", "the row is not UTF-8")
    if b"\0" in raw:
        return _fault(origin, "encoding", "the row holds NUL bytes")
    return _fault(origin, "parse_error", f"the row is not JSON: {error.msg}")


def _may_be_unfinished(result: RowResult) -> RowResult:
    if not isinstance(result, ReadFault) or result.code == "schema":
        return result
    return _fault(result.origin, result.code, f"{result.message}; the file may still be being written")


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _fault(origin: Origin, code: FaultCode, message: str) -> ReadFault:
    return ReadFault(origin=origin, code=code, message=message)
