"""CSV and TSV: each row as a JSON object of its cells under the names that the header gives.

In: a stream. Out: entries and flaws with the line that each row begins on. An empty cell is null.
Does not know what a column means, but for those that hold text even where it looks like JSON.
"""

import csv
from collections.abc import Iterator
from typing import Any, NamedTuple

import orjson

from graftwork.data.sources.block import Entry
from graftwork.data.sources.fault import Flaw
from graftwork.data.sources.lines import split_lines
from graftwork.data.sources.stream import Stream

# A reply may be JSON and must stay the text that it is.
_TEXT_COLUMNS = frozenset(
    (
        *("prompt", "completion", "response", "question", "answer", "instruction", "input", "output"),
        *("system", "reply", "text", "content", "chosen", "rejected"),
    )
)
_KNOWN_COLUMNS = _TEXT_COLUMNS | {"messages", "conversations"}
_MARKS_OF_STRUCTURE = {"role", "from", "choices", "body", "status_code"}
_LONGEST_NAME = 200


def guess_delimiter(head: bytes) -> str | None:
    """What parts the columns, where the first line is a header with a column that we know."""
    first = head.partition(b"\n")[0].decode("utf-8", errors="replace").strip()
    for delimiter in ("\t", ",", ";"):
        names = {name.strip(' "') for name in first.split(delimiter)}
        if len(names) > 1 and names & _KNOWN_COLUMNS and not first.startswith(("{", "[")):
            return delimiter
    return None


def split_table(stream: Stream, *, delimiter: str, longest: int) -> Iterator[Entry | Flaw]:
    first_line = stream.head.partition(b"\n")[0]
    if delimiter == "," and b"," not in first_line and b";" in first_line:
        delimiter = ";"  # as spreadsheets write it where the comma is the decimal mark
    names: list[str] | None = None
    for record in _read_rows(stream, delimiter=delimiter, longest=longest):
        if isinstance(record, Flaw):
            yield record
        elif names is None:
            names = record.cells
            wrong = _explain_bad_header(names)
            if wrong:
                yield Flaw(record.line, "schema", wrong)
                return
        else:
            row = {name: open_cell(name, cell) for name, cell in zip(names, record.cells, strict=True)}
            yield Entry(record.line, orjson.dumps(row))


def open_cell(name: str, cell: str) -> Any:
    """What stands in a cell: nothing, JSON, or text."""
    if not cell:
        return None
    if cell[0] not in "{[" or cell.rstrip()[-1:] not in ("}", "]"):
        return cell
    try:
        value = orjson.loads(cell)
    except orjson.JSONDecodeError:
        return cell
    if name not in _TEXT_COLUMNS:
        return value
    parts = value if isinstance(value, list) else [value]
    is_structure = parts and all(isinstance(p, dict) and _MARKS_OF_STRUCTURE & p.keys() for p in parts)
    return value if is_structure else cell


def _explain_bad_header(names: list[str]) -> str | None:
    if any(not name.strip() for name in names):
        nameless = [bool(name.strip()) for name in names].index(False)
        return f"the header leaves column {nameless + 1} without a name"
    if any(len(name) > _LONGEST_NAME or "\n" in name or name[0] in "{[" for name in names):
        return "the first line is no header: it holds texts, not names of columns"
    repeated = next((place for place, name in enumerate(names) if name in names[:place]), None)
    return None if repeated is None else f"the header names column {repeated + 1} like one before it"


class _Row(NamedTuple):
    line: int
    cells: list[str]


class _LongLine(Exception):
    def __init__(self, flaw: Flaw) -> None:
        super().__init__(flaw.message)
        self.flaw = flaw


class _Feed:
    """Lines of text for the csv module, with the power to take a bad row back."""

    def __init__(self, records: Iterator[Entry | Flaw], *, patience: int) -> None:
        self.line = 0
        self.taken: list[str] = []
        self.is_utf8 = True
        self._records = records
        self._again: list[str] = []
        self._patience = patience

    def __iter__(self) -> "_Feed":
        return self

    def __next__(self) -> str:
        if self._again:
            text = self._again.pop()
        else:
            record = next(self._records)
            if isinstance(record, Flaw):
                self.line += 1
                raise _LongLine(record)
            text = record.data.decode("utf-8", errors="surrogateescape")
        self.is_utf8 = self.is_utf8 and (text.isascii() or _is_utf8(text))
        self.line += 1
        self.taken.append(text)
        return text

    def begin_row(self) -> None:
        self.taken.clear()
        self.is_utf8 = True

    def take_back(self) -> None:
        """Give the lines behind the first one of a bad row again: a stray quote swallows good rows."""
        self._patience -= sum(map(len, self.taken))
        if self._patience > 0:
            again = self.taken[1:]
            self.line -= len(again)
            self._again += reversed(again)


def _read_rows(stream: Stream, *, delimiter: str, longest: int) -> Iterator[_Row | Flaw]:
    csv.field_size_limit(longest)
    feed = _Feed(_whole_lines(stream, longest=longest), patience=4 * longest)
    reader = csv.reader(feed, delimiter=delimiter, strict=True)
    width = 0  # the header's, once it is read
    while True:
        feed.begin_row()
        line = feed.line + 1
        try:
            cells = next(reader, None)
        except csv.Error as error:
            if not (stream.damage and "end of data" in str(error)):
                yield Flaw(line, "parse_error", f"the row is not CSV: {error}")
            feed.take_back()
        except _LongLine as error:
            yield error.flaw
        else:
            if cells is None:
                break
            if not feed.is_utf8:
                yield Flaw(line, "encoding", "the row is not UTF-8")
            elif cells and len(cells) == (width or len(cells)):
                width = len(cells)
                yield _Row(line, cells)
            elif cells:
                text = f"the row has {len(cells)} cells, and the header names {width} columns"
                yield Flaw(line, "schema", text)
                feed.take_back()
            continue
        # The module keeps half a row after an error.
        reader = csv.reader(feed, delimiter=delimiter, strict=True)
    if stream.damage:
        yield Flaw(line, "parse_error", f"{stream.damage}; the rows before are read")


def _whole_lines(stream: Stream, *, longest: int) -> Iterator[Entry | Flaw]:
    """Lines; where the stream broke, without the one it broke in."""
    for record in split_lines(stream, line=1, longest=longest):
        if isinstance(record, Entry) and stream.damage and not record.data.endswith(b"\n"):
            return
        yield record


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
