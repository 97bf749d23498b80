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
    held: list[Entry] = []
    flaws: list[Flaw] = []
    weight = 0
    for record in records:
        cost = len(record.data) + 1 if isinstance(record, Entry) else 1
        if weight and weight + cost > size:
            yield _gather(file, held, flaws)
            held, flaws, weight = [], [], 0
        weight += cost
        if isinstance(record, Entry):
            held.append(record)
        else:
            flaws.append(record)
    if weight:
        yield _gather(file, held, flaws)


def _gather(file: str, held: list[Entry], flaws: list[Flaw]) -> Block:
    first_line = min([*(entry.line for entry in held), *(flaw.line for flaw in flaws)])
    offsets = tuple(entry.line - first_line for entry in held)
    return make_block(
        file,
        kind="records",
        first_line=first_line,
        data=b"".join(entry.data + b"\n" for entry in held),
        offsets=None if offsets == tuple(range(len(held))) else offsets,
        flaws=flaws,
    )
