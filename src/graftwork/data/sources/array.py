"""One JSON array, or objects over several lines: each on one line, without holding the file.

In: a stream that begins with an array or such an object. Out: entries and flaws with the line that
each begins on. Does not know JSON beyond strings and brackets: whether an element is sound is for
the parser to say. After a broken element it goes on at the next line that looks like the beginning
of one.
"""

import re
from collections.abc import Iterator
from itertools import chain

import orjson

from graftwork.data.sources.block import Entry
from graftwork.data.sources.fault import Flaw, too_long
from graftwork.data.sources.lines import split_lines
from graftwork.data.sources.stream import Stream
from graftwork.text.json_size import MOST_VALUES

_SEPARATORS = re.compile(rb"[ \t\r\n,]*+")
_STRING = rb'"[^"\\\n]*+(?:\\[^\n][^"\\\n]*+)*+"'
# All that is no bracket, strings whole; then the bracket, or a string that is not closed here.
_TO_BRACKET = re.compile(rb"(?:[^\"\[\]{}]++|" + _STRING + rb')*+(["\[\]{}]?)')
_SCALAR = re.compile(_STRING + rb"|[^,\]\n]++")
_CLOSER = {ord("{"): ord("}"), ord("["): ord("]")}
_ENDS_THERE = -1  # the stream ends inside the element
_BROKEN = -2
_DEEPEST = 1024
"""What the parser takes; whatever is nested deeper is no row."""


def looks_like_array(head: bytes) -> bool:
    """Whether the file is one array of objects; a line that is a list of something else is a line."""
    rest = head.lstrip()
    return rest.startswith(b"[") and rest[1:].lstrip()[:1] in (b"{", b"]", b"")


def looks_like_objects(head: bytes) -> bool:
    """Whether the file is an object spread over lines, or several: its first line only opens it."""
    return head.lstrip().partition(b"\n")[0].rstrip() == b"{" and b"\n" in head.lstrip()


def split_array(stream: Stream, *, longest: int, has_brackets: bool = True) -> Iterator[Entry | Flaw]:
    """The elements; where the stream is damaged, those before the damage and then its flaw."""
    held = _Held(iter(stream), longest=longest)
    held.drop(held.data.index(b"[") + 1 if has_brackets else 0)
    line = held.line
    for record in _split(held, stream, is_closed=has_brackets):
        line = record.line
        yield record
    if stream.damage:
        yield Flaw(max(line, held.line), "parse_error", f"{stream.damage}; the rows before are read")


def _split(held: "_Held", stream: Stream, *, is_closed: bool) -> Iterator[Entry | Flaw]:
    longest = held.longest
    wasted = 0
    indent: bytes | None = None  # of the first element that begins a line, and so of all
    while True:
        margin = held.skip_separators()
        if not held.left:
            if is_closed and not stream.damage:
                yield Flaw(held.line, "parse_error", _UNCLOSED)
            return
        if held.data[held.start] == ord("]"):
            held.drop(1)
            yield from _rest_by_line(held)
            return
        end = held.find_end()
        line = held.line
        if end == _ENDS_THERE and stream.damage:
            return
        if end > longest:
            held.drop(end)
            yield too_long(line, end, longest=longest)
            continue
        indent = margin if indent is None else indent
        if end >= 0 and held.is_one_element(end, indent or b""):
            # A line end inside an element is white space, and so is \r; in a string both are wrong.
            yield Entry(line, held.take(end).replace(b"\n", b"\r"))
            continue
        wasted += held.scanned
        yield held.take_broken()
        if wasted > 4 * longest:
            yield from _objects_by_line(held)
            return
        if not held.find_next_line(indent or b""):
            return


_UNCLOSED = "the array is not closed; the file may still be being written"


class _Held:
    """The part of the stream that is held. `start` is the place in it, `line` the line of that place."""

    def __init__(self, chunks: Iterator[bytes], *, longest: int) -> None:
        self.chunks = chunks
        self.longest = longest
        self.data = next(chunks, b"")
        self.start = 0
        self.line = 1
        self.scanned = 0

    @property
    def left(self) -> int:
        return len(self.data) - self.start

    def grow(self) -> bool:
        """Hold one more chunk, and let go of what is done with."""
        chunk = next(self.chunks, b"")
        if not chunk:
            return False
        self.data = self.data[self.start :] + chunk
        self.start = 0
        return True

    def drop(self, count: int) -> None:
        end = self.start + count
        self.line += self.data.count(b"\n", self.start, end)
        self.start = end

    def take(self, count: int) -> bytes:
        taken = self.data[self.start : self.start + count]
        self.drop(count)
        return taken

    def skip_separators(self) -> bytes | None:
        """Go to the next element, or to the end. Gives the white space before it, if it begins its line."""
        seen = b""
        while True:
            match = _SEPARATORS.match(self.data, self.start)
            gap = match.group() if match else b""
            # Only what stands on the last line is of use, and the line end before it.
            seen = b"".join((seen + gap).rpartition(b"\n")[1:])
            self.drop(len(gap))
            if self.left or not self.grow():
                begins_line = seen.startswith(b"\n") and b"," not in seen
                return seen[1:] if begins_line else None

    def find_end(self) -> int:
        """The length of the element that begins here, or why it has none."""
        if self.data[self.start] not in _CLOSER:
            return self._find_scalar_end()
        closers = bytearray()
        place = brackets = 0
        while True:
            match = _TO_BRACKET.match(self.data, self.start + place)
            token = match.group(1) if match else b""
            place = self.scanned = (match.start(1) if match else 0) - self.start
            if not token or token == b'"':
                if token and self.data.find(b"\n", self.start + place) >= 0:
                    return _BROKEN
                if self.left > self.longest:
                    return _BROKEN
                if not self.grow():
                    return _ENDS_THERE
                continue
            place += 1
            brackets += 1
            fits = True
            if token[0] in _CLOSER:
                closers.append(_CLOSER[token[0]])
            else:
                fits = token[0] == closers.pop()
            if not fits or len(closers) > _DEEPEST or brackets > 2 * MOST_VALUES:
                return _BROKEN
            if not closers:
                return place

    def _find_scalar_end(self) -> int:
        match = _SCALAR.match(self.data, self.start)
        while match and match.end() == len(self.data) and self.left <= self.longest and self.grow():
            match = _SCALAR.match(self.data, self.start)
        return match.end() - self.start if match else _BROKEN

    def is_one_element(self, count: int, indent: bytes) -> bool:
        """Whether several broken elements did not merely add up to matching brackets."""
        if self.data.find(b"\n" + indent + b"{", self.start, self.start + count) < 0:
            return True
        try:
            orjson.loads(self.data[self.start : self.start + count])
        except orjson.JSONDecodeError:
            return False
        return True

    def take_broken(self) -> Entry | Flaw:
        """The line of a broken element, without its line end; too long a one is measured only."""
        line, size, kept = self.line, 0, b""
        while True:
            end = self.data.find(b"\n", self.start)
            part = self.take((end if end >= 0 else len(self.data)) - self.start)
            size += len(part)
            kept = kept + part if size <= self.longest else b""
            if end >= 0 or not self.grow():
                break
        if size > self.longest:
            return too_long(line, size, longest=self.longest)
        return Entry(line, kept.rstrip(b" \t\r,") or b"{")

    def find_next_line(self, indent: bytes) -> bool:
        """Go to the next line that begins as the elements of this file do."""
        begin = b"\n" + indent + b"{"
        while True:
            found = self.data.find(begin, self.start)
            if found >= 0:
                self.drop(found + 1 - self.start)
                return True
            self.drop(max(self.left - len(begin), 0))
            if not self.grow():
                return False


def _rest_by_line(held: _Held) -> Iterator[Entry | Flaw]:
    """What looked like an array may have been the first line of a file of lines."""
    rest = chain((held.data[held.start :],), held.chunks)
    for record in split_lines(rest, line=held.line, longest=held.longest):
        if isinstance(record, Flaw):
            yield record
        elif record.data.strip():
            yield Entry(record.line, record.data.strip().removesuffix(b","))


def _objects_by_line(held: _Held) -> Iterator[Entry | Flaw]:
    """In a file with too many broken places: the lines that are an object by themselves."""
    for record in _rest_by_line(held):
        if isinstance(record, Entry) and record.data.startswith(b"{") and record.data.endswith(b"}"):
            yield record
