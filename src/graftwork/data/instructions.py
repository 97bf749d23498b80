"""Lines that show themselves to be instructions as the rows come in.

In: the corpus. Out: for each of the last lines of each row, whether it stood in so many of the rows
before that it asks nothing. A ground that is learned now and then does not know what a new log, read
behind the others, says in every row; this sees it after the sixth row. Only rows before a row count,
and of the same turn only the first. Lines that end as a question are left to the ground: a popular
question must not pass for an instruction, or its rows would be parted.
"""

from collections.abc import Iterator

import numpy as np

from graftwork.data.bands import Columns, find_first
from graftwork.data.ground import ASKS, INSTRUCTION_COUNT, INSTRUCTION_SHARE
from graftwork.text.compare import Array

LINES_AT_ONCE = 4_000_000


def find_instructions(corpus: Columns, *, passed: Array, turns: Array) -> Array:
    """One mark a line, in the order of the column `lines`."""
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


def _read_part(corpus: Columns, part: int, parts: int) -> tuple[Array, Array, Array]:
    """Lines whose keys fall into one part of all keys, by number, with their rows; in their order."""
    found = list(_choose_part(corpus, part, parts))
    return (
        np.concatenate([numbers for numbers, _, _ in found] or [np.zeros(0, dtype=np.int64)]),
        np.concatenate([keys for _, keys, _ in found] or [np.zeros(0, dtype=np.uint64)]),
        np.concatenate([places for _, _, places in found] or [np.zeros(0, dtype=np.int64)]),
    )


def _choose_part(corpus: Columns, part: int, parts: int) -> Iterator[tuple[Array, Array, Array]]:
    number = 0
    for first, flat, offsets in corpus.ragged("lines"):
        mine = ((flat & ASKS) == 0) & ((flat >> np.uint64(1)) % np.uint64(parts) == part)
        rows = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets)) + first
        yield np.flatnonzero(mine) + number, flat[mine], rows[mine]
        number += len(flat)


def _repeat_enough(keys: Array, places: Array, *, counted: Array, before: Array) -> Array:
    """Which of these lines stood in enough of the rows since they were first seen."""
    order = np.argsort(keys, kind="stable")
    keys, places = keys[order], places[order]
    begins = np.concatenate(([True], keys[1:] != keys[:-1]))[: len(keys)]
    start = np.maximum.accumulate(np.where(begins, np.arange(len(keys)), 0))
    # A line that stands twice in a turn counts once.
    again = ~begins & np.concatenate(([False], places[1:] == places[:-1]))[: len(keys)]
    seen = np.concatenate(([0], np.cumsum(counted[places] & ~again)))
    times = seen[:-1] - seen[start]
    since = before[places] - before[places[start]]
    enough = np.zeros(len(keys), dtype=bool)
    enough[order] = (times >= INSTRUCTION_COUNT) & (times >= INSTRUCTION_SHARE * since)
    return enough
