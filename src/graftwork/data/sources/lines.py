"""JSON lines: blocks cut at line ends, and single lines for the containers that need them.

In: a stream. Out: blocks, or lines with their numbers. A line beyond the limit is measured and
named, never held. Does not parse.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from graftwork.data.sources.block import MOST_LINES, Block, Entry, make_block
from graftwork.data.sources.fault import Flaw, too_long
from graftwork.data.sources.stream import Stream

_FEW_LINES = 64


def cut_lines(stream: Stream, *, file: str, size: int, longest: int) -> Iterator[Block]:
    """Blocks of whole lines: each ends at the last line end within `size`, or at the first beyond.

    One of very short lines ends at the last line that it may have. So a block depends on nothing behind it.
    A line longer than `longest` is a block by itself, with a fault in place of data.
    """
    size = min(size, longest)
    line = 1
    held, start = b"", 0
    chunks = iter(stream)
    for chunk in chunks:
        held, start = held[start:] + chunk, 0
        while len(held) - start >= size:
            within = start + size
            end = held.rfind(b"\n", start, within) + 1 or held.find(b"\n", within) + 1
            if not end and len(held) - start <= longest:
                break
            if not end or end - start - 1 > longest:
                skipped = _skip_line(held[start:], chunks)
                yield _name_long_line(file, line, skipped.size, longest=longest)
                held, start, line = skipped.rest, 0, line + 1
                continue
            end = _end_of_lines(held, start, end)
            data, start = held[start:end], end
            yield make_block(file, kind="lines", first_line=line, data=data)
            line += data.count(b"\n")
    held = held[start:]
    while (end := _end_of_lines(held, 0, len(held))) < len(held):
        yield make_block(file, kind="lines", first_line=line, data=held[:end])
        held, line = held[end:], line + MOST_LINES
    if stream.damage:
        held = held[: held.rfind(b"\n") + 1]
        broken = Flaw(line + held.count(b"\n"), "parse_error", f"{stream.damage}; the rows before are read")
        yield make_block(file, kind="lines", first_line=line, data=held, flaws=[broken])
    elif held:
        yield make_block(file, kind="lines", first_line=line, data=held)


def _end_of_lines(data: bytes, start: int, end: int) -> int:
    """`end`, or before it the end of the last line that a block which begins at `start` may have."""
    place, left = start, MOST_LINES
    while left > _FEW_LINES and place < end:
        # So many bytes hold at most so many line ends: the last one is not passed over.
        step = min(place + left, end)
        left -= data.count(b"\n", place, step)
        place = step
    while left and place < end:
        place = data.find(b"\n", place, end) + 1 or end
        left -= 1
    return place


def split_lines(chunks: Iterable[bytes], *, line: int, longest: int) -> Iterator[Entry | Flaw]:
    """Lines one by one, each with its line end; what is beyond the limit as a flaw."""
    source = iter(chunks)
    held = b""
    for chunk in source:
        *whole, held = (held + chunk).split(b"\n")
        while whole or len(held) > longest:
            for data in whole:
                fits = len(data) <= longest
                yield Entry(line, data + b"\n") if fits else too_long(line, len(data), longest=longest)
                line += 1
            whole = []
            if len(held) > longest:
                skipped = _skip_line(held, source)
                yield too_long(line, skipped.size, longest=longest)
                *whole, held = skipped.rest.split(b"\n")
                line += 1
    if held:
        yield Entry(line, held)


class _Skipped(NamedTuple):
    size: int
    rest: bytes


def _skip_line(held: bytes, chunks: Iterator[bytes]) -> _Skipped:
    """Read on to the end of a line without holding it."""
    size = 0
    data: bytes | None = held
    while data is not None:
        end = data.find(b"\n")
        if end >= 0:
            return _Skipped(size + end, data[end + 1 :])
        size += len(data)
        data = next(chunks, None)
    return _Skipped(size, b"")


def _name_long_line(file: str, line: int, size: int, *, longest: int) -> Block:
    flaw = too_long(line, size, longest=longest)
    return make_block(file, kind="lines", first_line=line, data=b"", flaws=[flaw])
