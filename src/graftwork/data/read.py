"""Log files to interactions, row by row, each with the file and line that it came from.

In: paths or globs. Out: an iterator over interactions and faults; a bad row is a fault that names
its place and never stops the good ones. JSONL is streamed; a file that holds one JSON array is
read whole. Does not judge what the rows say.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Literal

import orjson
from pydantic import ValidationError

from graftwork.data.formats import captured, chat, completion, execution
from graftwork.data.formats.fields import BadRow, name_type
from graftwork.files.whole import explain_os_error
from graftwork.records.base import Record
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.redact import redact

FaultCode = Literal["parse_error", "schema", "encoding"]
FORMATS: tuple[ModuleType, ...] = (captured, execution, chat, completion)
EXPECTED = "messages, prompt and completion, an execution with its output, or a capture"
BOM = b"\xef\xbb\xbf"
WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")


class ReadFault(Record):
    """A row that could not be read: where, and why. Never quotes the row."""

    origin: Origin
    code: FaultCode
    message: str


def find_files(paths: Iterable[str], *, root: Path = Path()) -> tuple[str, ...]:
    """The files that `paths` name, globs resolved and sorted, each named as the user would."""
    found: dict[str, None] = {}
    for path in paths:
        whole = root / path
        if any(mark in path for mark in "*?[") and not whole.exists():
            matches = sorted(str(match) for match in _glob(path, root=root))
            if not matches:
                raise UserMistake("no file matches this pattern", fix="check data.logs", where=path)
            found.update(dict.fromkeys(matches))
        else:
            found[path] = None
    if not found:
        raise UserMistake(
            "no log file is named",
            why="a dataset is made from logs",
            fix="name files or globs under data.logs in graft.yaml, or give a path",
        )
    return tuple(found)


def read(paths: Iterable[str], *, root: Path = Path()) -> Iterator[Interaction | ReadFault]:
    """Every row of every file, in order."""
    for name in find_files(paths, root=root):
        yield from read_file(name, root=root)


def read_file(name: str, *, root: Path = Path()) -> Iterator[Interaction | ReadFault]:
    """Every row of one file. A file that cannot be opened or holds nothing is the user's mistake."""
    path = root / name
    rows = 0
    try:
        with path.open("rb") as handle:
            head = handle.read(4096)
            if head.startswith(WIDE_BOMS):
                yield _fault(Origin(file=name, line=1), "encoding", "the file is UTF-16; convert it to UTF-8")
                return
            handle.seek(len(BOM) if head.startswith(BOM) else 0)
            rest = head.removeprefix(BOM).lstrip()
            is_array = rest.startswith(b"[") and rest[1:].lstrip()[:1] in (b"{", b"]", b"")
            lines = _split_array(handle.read()) if is_array else enumerate(handle, start=1)
            for line, raw in lines:
                if raw.strip():
                    rows += 1
                    yield _read_row(raw, Origin(file=name, line=line))
    except OSError as error:
        raise explain_os_error(error, path) from error
    if not rows:
        raise UserMistake(
            "the file is empty",
            why="there is nothing to learn from",
            fix="name a file with one JSON object a line",
            where=name,
        )


def _read_row(raw: bytes, origin: Origin) -> Interaction | ReadFault:
    try:
        row = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        return _explain_bad_json(raw, origin, error)
    if not isinstance(row, dict):
        return _fault(origin, "schema", f"the row must be an object, and is {name_type(row)}")
    shape = next((shape for shape in FORMATS if shape.fits(row)), None)
    if shape is None:
        keys = ", ".join(sorted(row)[:8]) or "none"
        return _fault(
            origin, "schema", f"no known shape (keys: {redact(keys).text[:120]}); expected {EXPECTED}"
        )
    try:
        interaction: Interaction = shape.to_interaction(row, origin)
    except (BadRow, ValidationError) as error:
        return _fault(origin, "schema", _name_key(error))
    return interaction


def _explain_bad_json(raw: bytes, origin: Origin, error: orjson.JSONDecodeError) -> ReadFault:
    if not _is_utf8(raw):
        return _fault(origin, "encoding", "the row is not UTF-8")
    if b"\0" in raw:
        return _fault(origin, "encoding", "the row holds NUL bytes")
    return _fault(origin, "parse_error", f"the row is not JSON: {error.msg}")


def _split_array(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The elements of one JSON array with the lines they begin on."""
    text = data.decode("utf-8", errors="surrogateescape")
    decoder = json.JSONDecoder()
    place = _skip(text, text.index("[") + 1, " \t\r\n")
    line = 1 + text.count("\n", 0, place)
    while place < len(text) and text[place] != "]":
        try:
            _, end = decoder.raw_decode(text, place)
        except (ValueError, RecursionError):
            yield from _salvage(text[place:], line)
            return
        yield line, text[place:end].encode("utf-8", errors="surrogateescape")
        behind = _skip(text, end, " \t\r\n,")
        line += text.count("\n", place, behind)
        place = behind
    # What looked like an array may have been the first line of a file of lines.
    for offset, rest in enumerate(text[place + 1 :].split("\n")):
        yield line + offset, rest.encode("utf-8", errors="surrogateescape")


def _salvage(text: str, line: int) -> Iterator[tuple[int, bytes]]:
    """The broken line, and behind it the lines that are an object by themselves."""
    for offset, rest in enumerate(text.split("\n")):
        bare = rest.strip().rstrip(",")
        if offset == 0 or (bare.startswith("{") and bare.endswith("}")):
            yield line + offset, (bare or "{").encode("utf-8", errors="surrogateescape")


def _skip(text: str, place: int, what: str) -> int:
    while place < len(text) and text[place] in what:
        place += 1
    return place


def _glob(pattern: str, *, root: Path) -> Iterator[Path]:
    path = Path(pattern)
    if path.is_absolute():
        anchor = Path(path.anchor)
        yield from (match for match in anchor.glob(str(path.relative_to(anchor))) if match.is_file())
    else:
        yield from (match.relative_to(root) for match in root.glob(pattern) if match.is_file())


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _name_key(error: BadRow | ValidationError) -> str:
    if isinstance(error, BadRow):
        return str(error)
    first = error.errors(include_input=False, include_url=False)[0]
    return f"`{'.'.join(str(part) for part in first['loc'])}`: {first['msg']}"


def _fault(origin: Origin, code: FaultCode, message: str) -> ReadFault:
    return ReadFault(origin=origin, code=code, message=message)
