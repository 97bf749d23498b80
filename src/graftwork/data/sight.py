"""The order in which rows were first seen: the order in which they are grouped and dealt.

In: the rows that the logs have now, each by the hash of its line, and those of the last time. Out:
runs of rows, known ones where they stood, new ones behind them, whatever file they are in. So a log
that grows, is rotated or packed, or a new file whose name sorts first, moves no row that was dealt
before. A line that was changed is a new row. Pure; knows no texts.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from graftwork.data.corpus import Segment

Keys: TypeAlias = "np.ndarray[Any, np.dtype[np.uint64]]"
Places: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

RUNS_A_BLOCK, FEW_RUNS = 8, 2000
"""A log that was shuffled falls into so many runs that reading it in order would take forever: more
than this a block on average, and not few, and rows are seen in the order of the files again."""

_ODD = np.uint64(0x9E3779B97F4A7C15)


class BlockNow(NamedTuple):
    """A block as the log has it now, with the hash of the line of each of its rows."""

    file: str
    block: int
    first_line: int
    sifted: str
    keys: Keys


class Seen(NamedTuple):
    """Runs of rows in their order, and the hashes of their lines, to be remembered."""

    segments: list[Segment]
    keys: Keys


def arrange(blocks: Sequence[BlockNow], known: Keys) -> Seen:
    """The rows in their order of sight. `known` holds what the last time remembered."""
    none = np.zeros(0, dtype=np.uint64)
    keys = np.concatenate([none, *(block.keys for block in blocks)])
    sizes = np.array([len(block.keys) for block in blocks], dtype=np.int64)
    starts = np.cumsum(sizes) - sizes
    stood = find_places(keys, known)
    # Known rows by where they stood; new ones behind them, in the order of the files.
    order = np.lexsort((np.arange(len(keys)), np.where(stood < 0, len(known), stood)))
    runs = _find_runs(order, starts)
    if len(runs) > max(RUNS_A_BLOCK * len(blocks), FEW_RUNS):
        order = np.arange(len(keys))
        runs = _find_runs(order, starts)
    segments = [_to_segment(blocks, starts, int(low), int(high)) for low, high in runs]
    # A block without a readable row stands for what could not be read in it.
    segments += [_name(block, 0, 0) for block in blocks if not len(block.keys)]
    return Seen(segments, keys[order])


def find_places(keys: Keys, known: Keys) -> Places:
    """Where each key stands in `known`, or -1. Equal keys are matched one to one, first to first."""
    if not len(known):
        return np.full(len(keys), -1, dtype=np.int64)
    wanted, there = _tell_apart(keys), _tell_apart(known)
    order = np.argsort(there, kind="stable")
    at = np.minimum(np.searchsorted(there, wanted, sorter=order), len(there) - 1)
    places = order[at]
    found: Places = np.where(there[places] == wanted, places, -1)
    return found


def _tell_apart(keys: Keys) -> Keys:
    """The same keys, the second of two equal ones changed, the third in another way, and so on."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    first = np.concatenate(([True], ordered[1:] != ordered[:-1]))[: len(keys)]
    begins = np.maximum.accumulate(np.where(first, np.arange(len(keys)), 0))
    told = np.empty_like(keys)
    told[order] = ordered + (np.arange(len(keys)) - begins).astype(np.uint64) * _ODD
    return told


def _find_runs(order: Places, starts: Places) -> list[tuple[int, int]]:
    """Stretches of rows that stand behind each other in one block: the first, and the one behind the last."""
    if not len(order):
        return []
    broken = (np.diff(order) != 1) | np.isin(order[1:], starts)
    lows = np.concatenate(([0], np.flatnonzero(broken) + 1))
    highs = np.append(lows[1:], len(order))
    return list(zip(order[lows].tolist(), (order[highs - 1] + 1).tolist(), strict=True))


def _to_segment(blocks: Sequence[BlockNow], starts: Places, low: int, high: int) -> Segment:
    number = int(np.searchsorted(starts, low, side="right")) - 1
    while not len(blocks[number].keys):
        number -= 1
    return _name(blocks[number], low - int(starts[number]), high - int(starts[number]))


def _name(block: BlockNow, start: int, stop: int) -> Segment:
    return Segment(
        file=block.file,
        block=block.block,
        first_line=block.first_line,
        sifted=block.sifted,
        start=start,
        stop=stop,
    )
