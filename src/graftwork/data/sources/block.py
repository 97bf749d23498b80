"""The block: a few MiB of JSON lines with the place that they came from, named by its content.

In: records or lines of one container. Out: blocks that are cut by content alone, so that what is
appended to a file later changes only its last block. Does not know what a row means.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from graftwork.data.sources.fault import Flaw, ReadFault
from graftwork.records.interaction import Origin

BLOCK_SIZE = 4 << 20
MAX_LINE = 32 << 20
MOST_LINES = 1 << 16
"""Of one block. What is made of a row takes some hundred bytes, and the shortest rows have two."""
_LEAST_WEIGHT, _WEIGHT_OF_FLAW = 64, 512
"""Of a row and of a fault, for the same reason: `BLOCK_SIZE` holds `MOST_LINES` of the shortest rows."""
Kind = Literal["lines", "records"]


class Block(NamedTuple):
    """JSON lines of one file. The same `key` means the same rows, whatever the file is called.

    `first_line` counts from 1. `offsets` holds the line of each record relative to it where records
    do not follow line by line; None where they do, blank lines counted.
    """

    file: str
    index: int  # type: ignore[assignment]  # the number of the block, not the method of tuples
    key: str
    first_line: int
    data: bytes
    offsets: tuple[int, ...] | None
    faults: tuple[ReadFault, ...] = ()


class Entry(NamedTuple):
    """One record of a container that is not made of lines: its JSON on one line."""

    line: int
    data: bytes


def make_block(
    file: str,
    *,
    kind: Kind,
    first_line: int,
    data: bytes,
    offsets: tuple[int, ...] | None = None,
    flaws: Iterable[Flaw] = (),
) -> Block:
    """A block with its key. Its index is the business of who counts the blocks."""
    digest = hashlib.sha256(f"graftwork block 1 {kind} {offsets}".encode())
    faults = []
    for flaw in flaws:
        digest.update(f"\0{flaw.line - first_line} {flaw.code} {flaw.message}".encode())
        origin = Origin(file=file, line=flaw.line)
        faults.append(ReadFault(origin=origin, code=flaw.code, message=flaw.message))
    digest.update(b"\n")
    digest.update(data)
    return Block(file, 0, digest.hexdigest(), first_line, data, offsets, tuple(faults))


def gather_blocks(records: Iterable[Entry | Flaw], *, file: str, size: int) -> Iterator[Block]:
    """Records into blocks; a block ends before the record that would take it beyond `size`."""
    # In one piece: a short row as an object of its own takes up to four kilobytes, since the JSON library
    # gives every one a large buffer and shrinks it.
    data = bytearray()
    lines: list[int] = []
    flaws: list[Flaw] = []
    weight = 0
    for record in records:
        cost = max(_LEAST_WEIGHT, len(record.data) + 1) if isinstance(record, Entry) else _WEIGHT_OF_FLAW
        if weight and weight + cost > size:
            yield _gather(file, bytes(data), lines, flaws)
            data, lines, flaws, weight = bytearray(), [], [], 0
        weight += cost
        if isinstance(record, Entry):
            data += record.data
            data += b"\n"
            lines.append(record.line)
        else:
            flaws.append(record)
    if weight:
        yield _gather(file, bytes(data), lines, flaws)


def _gather(file: str, data: bytes, lines: list[int], flaws: list[Flaw]) -> Block:
    first_line = min([*lines, *(flaw.line for flaw in flaws)])
    offsets = tuple(line - first_line for line in lines)
    return make_block(
        file,
        kind="records",
        first_line=first_line,
        data=data,
        offsets=None if offsets == tuple(range(len(lines))) else offsets,
        flaws=flaws,
    )
