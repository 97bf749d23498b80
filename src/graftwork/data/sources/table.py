"""CSV and TSV: each row as a JSON object of its cells under the names that the header gives.

In: a stream. Out: entries and flaws with the line that each row begins on. An empty cell is null.
Does not know what a column means, but for those that hold text even where it looks like JSON.
"""

import csv
from collections.abc import Iterator
from typing import NamedTuple

import orjson

from graftwork.data.sources.block import Entry
from graftwork.data.sources.cell import TEXT_COLUMNS, open_cell
from graftwork.data.sources.fault import Flaw, too_long
from graftwork.data.sources.lines import split_lines
from graftwork.data.sources.stream import Stream
from graftwork.text.json_size import MOST_VALUES

_KNOWN_COLUMNS = TEXT_COLUMNS | {"messages", "conversations"}
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


def _explain_bad_header(names: list[str]) -> str | None:
    if any(not name.strip() for name in names):
        nameless = [bool(name.strip()) for name in names].index(False)
        return f"the header leaves column {nameless + 1} without a name"
    if any(len(name) > _LONGEST_NAME or "\n" in name or name[0] in "{[" for name in names):
        return "the first line is no header: it holds texts, not names of columns"
    seen: set[str] = set()
    for place, name in enumerate(names):
        if name in seen:
            return f"the header names column {place + 1} like one before it"
        seen.add(name)
    return None


class _Row(NamedTuple):
    line: int
    cells: list[str]


class _BeyondLimit(Exception):
    """A line, or the lines of one row together, are more than is read."""

    def __init__(self, flaw: Flaw, *, is_held: bool) -> None:
        super().__init__(flaw.message)
        self.flaw = flaw
        self.is_held = is_held


class _Feed:
    """Lines of text for the csv module, with the power to take a bad row back.

    The lines of the row that is read are held as bytes in one piece: an open quote makes millions of lines
    one row, and as strings of their own they would take fifty times as much.
    """

    def __init__(self, records: Iterator[Entry | Flaw], *, delimiter: str, longest: int) -> None:
        self.line = 0
        self.is_utf8 = True
        self._records = records
        self._delimiter = delimiter
        self._longest = longest
        self._patience = 4 * longest
        self._held = bytearray()
        self._place = 0
        self._first_line = 0
        self._second_begins = 0
        self._cells = 0

    def __iter__(self) -> "_Feed":
        return self

    def __next__(self) -> str:
        if self._place == len(self._held):
            record = next(self._records)
            if isinstance(record, Flaw):
                self.line += 1
                raise _BeyondLimit(record, is_held=False)
            self._held += record.data
        end = self._held.find(b"\n", self._place) + 1 or len(self._held)
        text = self._held[self._place : end].decode("utf-8", errors="surrogateescape")
        self._place = end
        self.line += 1
        self._second_begins = self._second_begins or end
        self._cells += text.count(self._delimiter)
        self._require_bounded()
        self.is_utf8 = self.is_utf8 and (text.isascii() or _is_utf8(text))
        return text

    def begin_row(self) -> None:
        del self._held[: self._place]
        self._place = self._second_begins = self._cells = 0
        self._first_line = self.line + 1
        self.is_utf8 = True

    def take_back(self) -> None:
        """Give the lines behind the first one of a bad row again: a stray quote swallows good rows."""
        self._patience -= self._place
        if self._patience > 0 and self._second_begins:
            self._place = self._second_begins
            self.line = self._first_line

    def _require_bounded(self) -> None:
        if self._place > self._longest:
            flaw = too_long(self._first_line, self._place, longest=self._longest)
            raise _BeyondLimit(flaw, is_held=True)
        if self._cells >= MOST_VALUES:
            text = f"the row has {MOST_VALUES:,} cells or more"
            raise _BeyondLimit(Flaw(self._first_line, "parse_error", text), is_held=True)


def _read_rows(stream: Stream, *, delimiter: str, longest: int) -> Iterator[_Row | Flaw]:
    csv.field_size_limit(longest)
    feed = _Feed(_whole_lines(stream, longest=longest), delimiter=delimiter, longest=longest)
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
        except _BeyondLimit as error:
            yield error.flaw
            if error.is_held:
                feed.take_back()
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
