"""JSON lines: blocks cut at line ends, and single lines for the containers that need them.

In: a stream. Out: blocks, or lines with their numbers. A line beyond the limit is measured and
named, never held. Does not parse.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from graftwork.data.sources.block import Block, Entry, make_block
from graftwork.data.sources.fault import Flaw, too_long
from graftwork.data.sources.stream import Stream


def cut_lines(stream: Stream, *, file: str, size: int, longest: int) -> Iterator[Block]:
    """Blocks of whole lines: each ends at the last line end within `size`, or at the first beyond.

    So a block depends on nothing behind it. A line longer than `longest` is a block by itself, with
    a fault in place of data.
    """
    size = min(size, longest)
    line = 1
    held = b""
    chunks = iter(stream)
    for chunk in chunks:
        held += chunk
        while len(held) >= size:
            end = held.rfind(b"\n", 0, size) + 1 or held.find(b"\n", size) + 1
            if not end and len(held) <= longest:
                break
            if not end or end - 1 > longest:
                skipped = _skip_line(held, chunks)
                yield _name_long_line(file, line, skipped.size, longest=longest)
                held, line = skipped.rest, line + 1
                continue
            data, held = held[:end], held[end:]
            yield make_block(file, kind="lines", first_line=line, data=data)
            line += data.count(b"\n")
    if stream.damage:
        held = held[: held.rfind(b"\n") + 1]
        broken = Flaw(line + held.count(b"\n"), "parse_error", f"{stream.damage}; the rows before are read")
        yield make_block(file, kind="lines", first_line=line, data=held, flaws=[broken])
    elif held:
        yield make_block(file, kind="lines", first_line=line, data=held)


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
