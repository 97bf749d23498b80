"""What many rows share, learned from the rows themselves: instructions, and how much words weigh.

In: the corpus. Out: for each window of rows the ground that they are judged on. The ground of row i
is learned from the rows before the largest power of two that is not beyond i, so it never changes
when rows are added; of many rows it takes every second, fourth … one, so that it stays small and
still sees the whole. The first rows have no ground: nothing is known yet.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from graftwork.data.bands import Columns, read_rows
from graftwork.text.compare import NO_WEIGHTS, Array, Ragged, Weights, distinct, weigh

FIRST_GROUND = 8
GROUND_ROWS = 65_536

# A line is an instruction when it stands in this share of the distinct turns, and in this many;
# a line that ends as a question may be a popular one and needs a larger share.
INSTRUCTION_SHARE = 0.05
INSTRUCTION_COUNT = 6
ASKING_SHARE = 0.3

ASKS = np.uint64(1)
"""The bit of a line's key that says whether the line ends as a question."""


class Window(NamedTuple):
    """The rows from `low` to before `high`, judged on what the first `known` rows taught."""

    low: int
    high: int
    known: int


def open_windows(rows: int) -> Iterator[Window]:
    """All rows, window by window."""
    low, high = 0, FIRST_GROUND
    while low < rows:
        yield Window(low, min(high, rows), low)
        low, high = high, 2 * high


def ground_places(window: Window, *, passed: Array, turns: Array, most: int = GROUND_ROWS) -> Array:
    """The rows that the ground of a window is learned from: each turn once."""
    places = np.arange(0, window.known, max(1, window.known // most))
    places = places[passed[places]]
    _, once = np.unique(turns[places], return_index=True)
    chosen: Array = places[np.sort(once)]
    return chosen


def learn_instructions(corpus: Columns, places: Array) -> Array:
    """The keys of lines that ask nothing, sorted, without the bit for asking."""
    lines = read_rows(corpus, "lines", places)
    if not len(lines.values):
        return np.zeros(0, dtype=np.uint64)
    asking = distinct(lines.values[(lines.values & ASKS) == ASKS] & ~ASKS)
    # A line that stands twice in a turn counts once.
    order = np.argsort(lines.values & ~ASKS, kind="stable")
    keys, owners = (lines.values & ~ASKS)[order], lines.owners()[order]
    once = np.ones(len(keys), dtype=bool)
    once[1:] = (keys[1:] != keys[:-1]) | (owners[1:] != owners[:-1])
    found, counts = np.unique(keys[once], return_counts=True)
    share = np.where(np.isin(found, asking), ASKING_SHARE, INSTRUCTION_SHARE)
    instructions: Array = found[(counts >= INSTRUCTION_COUNT) & (counts >= share * len(places))]
    return instructions


def learn_weights(sets: Ragged, keys: Array) -> Weights:
    """What the values of these sets weigh, each distinct set (by its key) counted once."""
    if not len(keys):
        return NO_WEIGHTS
    _, once = np.unique(keys, return_index=True)
    return weigh(sets.take(np.sort(once)))
