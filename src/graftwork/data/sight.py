"""The order in which rows were first seen: the order in which they are grouped and dealt.

In: the blocks that the logs have now, and the order as it was the last time. Out: segments of rows,
old ones where they stood, new ones behind them, whatever file they are in. So a log that grows, or
a new file whose name sorts first, moves no row that was dealt before. Rows that changed are new.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from graftwork.data.corpus import Segment
from graftwork.records.base import Record


class Seen(Record):
    """A run of rows that was seen before, and the hash of their lines."""

    file: str
    block: int
    start: int
    stop: int
    sifted: str
    digest: str


class Order(Record):
    """What was seen, first to last."""

    seen: tuple[Seen, ...] = ()


class BlockNow(NamedTuple):
    """A block as the log has it now; `digest(start, stop)` hashes the lines of some of its rows."""

    file: str
    block: int
    first_line: int
    sifted: str
    rows: int
    digest: Callable[[int, int], str]


def arrange(blocks: Sequence[BlockNow], order: Order) -> tuple[list[Segment], Order]:
    """The rows in their order of sight, and the order to remember."""
    now = {(block.file, block.block): block for block in blocks}
    known: dict[tuple[str, int], int] = {}
    seen: list[Seen] = []
    for old in order.seen:
        block = now.get((old.file, old.block))
        if block is not None and _is_still_there(old, block, known.get((old.file, old.block), 0)):
            known[old.file, old.block] = old.stop
            seen.append(old.model_copy(update={"sifted": block.sifted}))
    for block in blocks:
        start = known.get((block.file, block.block), 0)
        # A block without a readable row stands for what could not be read in it.
        if start < block.rows or (block.file, block.block) not in known:
            digest = block.digest(start, block.rows)
            seen.append(
                Seen(
                    file=block.file,
                    block=block.block,
                    start=start,
                    stop=block.rows,
                    sifted=block.sifted,
                    digest=digest,
                )
            )
    segments = [
        Segment(
            file=run.file,
            block=run.block,
            first_line=now[run.file, run.block].first_line,
            sifted=run.sifted,
            start=run.start,
            stop=run.stop,
        )
        for run in seen
    ]
    return segments, Order(seen=tuple(seen))


def _is_still_there(old: Seen, block: BlockNow, expected_start: int) -> bool:
    """Whether the rows of an old run stand where they stood. Runs of one block follow each other."""
    if old.start != expected_start or old.stop > block.rows:
        return False
    return old.sifted == block.sifted or block.digest(old.start, old.stop) == old.digest
