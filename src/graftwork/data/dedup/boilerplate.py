"""Boilerplate: lines that many rows share, and how much each run of words weighs.

In: the corpus. Out: per window of rows, the lines that ask nothing and the weights of runs. Row i is judged
by what the rows before the largest power of two up to i show, so the result never changes when rows are
appended; large samples are thinned out evenly. The first rows have no sample. `mark_boilerplate` also
finds, row by row, what a new log says in every row.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from graftwork.data.dedup.lsh import CorpusColumns, find_first, read_rows
from graftwork.text.similarity import NO_WEIGHTS, Array, Ragged, RunWeights, distinct, weigh

FIRST_WINDOW = 8
SAMPLE_ROWS = 65_536

# A line is boilerplate when it occurs in this share of the distinct turns, and in this many. A line that ends
# as a question may be a popular question and needs a larger share.
BOILERPLATE_SHARE = 0.05
BOILERPLATE_COUNT = 6
QUESTION_SHARE = 0.3

IS_QUESTION = np.uint64(1)
"""The bit of a line's key that says whether the line ends as a question."""


class Window(NamedTuple):
    """The rows from `low` to before `high`, judged by the first `known` rows."""

    low: int
    high: int
    known: int


def open_windows(rows: int) -> Iterator[Window]:
    """Yield windows that cover all rows."""
    low, high = 0, FIRST_WINDOW
    while low < rows:
        yield Window(low, min(high, rows), low)
        low, high = high, 2 * high


def sample_before(window: Window, *, passed: Array, turns: Array, most: int = SAMPLE_ROWS) -> Array:
    """Return the rows that a window is judged by: each distinct turn once."""
    places = np.arange(0, window.known, max(1, window.known // most))
    places = places[passed[places]]
    _, once = np.unique(turns[places], return_index=True)
    chosen: Array = places[np.sort(once)]
    return chosen


def learn_boilerplate(corpus: CorpusColumns, places: Array) -> Array:
    """Return the sorted keys of lines that ask nothing, without the question bit."""
    lines = read_rows(corpus, "lines", places)
    if not len(lines.values):
        return np.zeros(0, dtype=np.uint64)
    asking = distinct(lines.values[(lines.values & IS_QUESTION) == IS_QUESTION] & ~IS_QUESTION)
    # A line that occurs twice in a turn counts once.
    order = np.argsort(lines.values & ~IS_QUESTION, kind="stable")
    keys, owners = (lines.values & ~IS_QUESTION)[order], lines.owners()[order]
    once = np.ones(len(keys), dtype=bool)
    once[1:] = (keys[1:] != keys[:-1]) | (owners[1:] != owners[:-1])
    found, counts = np.unique(keys[once], return_counts=True)
    share = np.where(np.isin(found, asking), QUESTION_SHARE, BOILERPLATE_SHARE)
    boilerplate: Array = found[(counts >= BOILERPLATE_COUNT) & (counts >= share * len(places))]
    return boilerplate


def learn_weights(sets: Ragged, keys: Array) -> RunWeights:
    """Learn the weights of the values of these sets, each distinct set (by its key) counted once."""
    if not len(keys):
        return NO_WEIGHTS
    _, once = np.unique(keys, return_index=True)
    return weigh(sets.take(np.sort(once)))


def remember_weights(
    corpus: CorpusColumns, name: str, window: Window, learn: Callable[[], RunWeights]
) -> RunWeights:
    """The weights that a window is judged by, which its first rows determine."""
    return RunWeights.from_arrays(*corpus.remember(name, window.known, lambda: learn().to_arrays()))


LINES_AT_ONCE = 4_000_000


def mark_boilerplate(corpus: CorpusColumns, *, passed: Array, turns: Array) -> Array:
    """Mark each line of the column `lines` that occurred in enough of the rows before its own.

    Only rows before a row count, and only the first with its turn. Lines that end as a question are left to
    `learn_boilerplate`: a popular question must not count as boilerplate, or its rows could end up in
    different splits.
    """
    sizes = [(first, len(flat)) for first, flat, _ in corpus.ragged("lines")]
    total = sum(size for _, size in sizes)
    marks = np.zeros(total, dtype=bool)
    counted = passed & (find_first(turns, among=passed) == np.arange(corpus.rows))
    before = np.concatenate(([0], np.cumsum(counted)))
    parts = -(-total // LINES_AT_ONCE)
    for part in range(parts):
        numbers, keys, places = _read_part(corpus, part, parts)
        marks[numbers[_repeat_enough(keys, places, counted=counted, before=before)]] = True
    return marks


def _read_part(corpus: CorpusColumns, part: int, parts: int) -> tuple[Array, Array, Array]:
    """Return the lines whose keys fall into one part of all keys: their numbers, keys and rows, in order."""
    found = list(_choose_part(corpus, part, parts))
    return (
        np.concatenate([numbers for numbers, _, _ in found] or [np.zeros(0, dtype=np.int64)]),
        np.concatenate([keys for _, keys, _ in found] or [np.zeros(0, dtype=np.uint64)]),
        np.concatenate([places for _, _, places in found] or [np.zeros(0, dtype=np.int64)]),
    )


def _choose_part(corpus: CorpusColumns, part: int, parts: int) -> Iterator[tuple[Array, Array, Array]]:
    number = 0
    for first, flat, offsets in corpus.ragged("lines"):
        mine = ((flat & IS_QUESTION) == 0) & ((flat >> np.uint64(1)) % np.uint64(parts) == part)
        rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)) + first
        yield np.flatnonzero(mine) + number, flat[mine], rows[mine]
        number += len(flat)


def _repeat_enough(keys: Array, places: Array, *, counted: Array, before: Array) -> Array:
    """Mark the lines that occurred in enough of the rows since they were first seen."""
    order = np.argsort(keys, kind="stable")
    keys, places = keys[order], places[order]
    begins = np.concatenate(([True], keys[1:] != keys[:-1]))[: len(keys)]
    start = np.maximum.accumulate(np.where(begins, np.arange(len(keys)), 0))
    # A line that occurs twice in a turn counts once.
    again = ~begins & np.concatenate(([False], places[1:] == places[:-1]))[: len(keys)]
    seen = np.concatenate(([0], np.cumsum(counted[places] & ~again)))
    times = seen[:-1] - seen[start]
    since = before[places] - before[places[start]]
    enough = np.zeros(len(keys), dtype=bool)
    enough[order] = (times >= BOILERPLATE_COUNT) & (times >= BOILERPLATE_SHARE * since)
    return enough
