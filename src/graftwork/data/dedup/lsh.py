"""Candidate pairs: rows that share a value, found by sorting one column at a time.

In: columns of numbers (MinHash bands, keys, n-grams), one or several per row. Out: pairs of rows, each
packed into 64 bits with the later row in the upper half. A row is paired only with a few rows before it, so
its pairs do not change when rows are appended.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from tempfile import SpooledTemporaryFile
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from graftwork.records.interaction import Interaction, Origin
from graftwork.text.similarity import Array, Measures, Ragged, RunWeights, distinct, measure_pairs

CANDIDATES_PER_ROW = 4
"""Each row is paired with at most this many earlier rows that have the same value."""

MOST_LOOKED_UP = 25_000
"""Values of at most this many new rows are looked up; with more new rows, all values are sorted."""

_HALF = np.uint64(32)
_LOW = np.uint64(2**32 - 1)
# Entries that are sorted at once, and bytes of a partition that stay in memory before it becomes a file.
_PARTITION_ENTRIES = 500_000
_PARTITION_BYTES = 1 << 20


Arrays = tuple[Array, ...]


class LabelNumbers(Protocol):
    """A column of names as numbers; -1 for none."""

    @property
    def numbers(self) -> Array: ...


class CorpusColumns(Protocol):
    """All rows in row order, as columns and by their position."""

    @property
    def rows(self) -> int: ...

    @property
    def pairs(self) -> Mapping[int, int]:
        """By the row with the better reply to a prompt: the one with the worse, by their scores."""
        ...

    def column(self, name: str) -> Array: ...

    def ragged(self, name: str) -> Iterator[tuple[int, Array, Array]]: ...

    def labels(self, name: str) -> LabelNumbers: ...

    def rows_at(self, places: Sequence[int]) -> Iterator[tuple[int, Interaction]]: ...

    def origin(self, place: int) -> Origin: ...

    def remember(self, name: str, rows: int, make: Callable[[], Arrays], *, store: bool = True) -> Arrays: ...

    def grow(self, name: str, make: Callable[[int, Arrays | None], Arrays]) -> Arrays: ...


NO_PAIRS: Array = np.zeros(0, dtype=np.uint64)


def pack(later: Array, earlier: Array) -> Array:
    packed: Array = later.astype(np.uint64) << _HALF | earlier.astype(np.uint64)
    return packed


def unpack(pairs: Array) -> tuple[Array, Array]:
    """Return the later and the earlier rows."""
    return (pairs >> _HALF).astype(np.int64), (pairs & _LOW).astype(np.int64)


def rows_of(pairs: Array) -> Array:
    """Return the rows that occur in the pairs, each once, in order."""
    return distinct(np.concatenate(unpack(pairs)))


def measure_rows(
    pairs: Array, rows: Array, sets: Ragged, weights: RunWeights, *, sampled: int | None = None
) -> Measures:
    """Measure pairs of rows by their sets, which are given for these ascending rows."""
    later, earlier = (np.searchsorted(rows, side) for side in unpack(pairs))
    return measure_pairs(sets, later, earlier, weighed=weights.of(sets.values), sampled=sampled)


def merge_pairs(parts: Sequence[Array]) -> Array:
    """Return all pairs, sorted, without duplicates."""
    return distinct(np.concatenate(parts)) if parts else NO_PAIRS


def find_first(keys: Array, *, among: Array) -> Array:
    """Return, for each row, the first row with the same key. Rows not in `among`, or with key 0, map to
    themselves.
    """
    first = np.arange(len(keys), dtype=np.int64)
    places = np.flatnonzero(among & (keys != 0))
    order = places[np.argsort(keys[places], kind="stable")]
    starts = _run_starts(keys[order])
    first[order] = order[starts]
    return first


class ValueLookup:
    """A few sorted, distinct numbers that are looked up among many others."""

    _SLOTS = 1 << 20

    def __init__(self, numbers: Array) -> None:
        self._numbers = numbers
        self._slot = numbers.dtype.type(self._SLOTS - 1)
        self._taken = np.zeros(self._SLOTS, dtype=bool)
        self._taken[numbers & self._slot] = True

    def find(self, values: Array) -> tuple[Array, Array]:
        """Return which of the values are among the numbers, and which number each of them is."""
        # Most values are none of the numbers: a table of their lowest bits rules them out quickly.
        maybe = np.flatnonzero(self._taken[values & self._slot])
        if not len(maybe):
            return maybe, maybe
        which = np.minimum(np.searchsorted(self._numbers, values[maybe]), len(self._numbers) - 1)
        same = self._numbers[which] == values[maybe]
        return maybe[same], which[same]


def pair_neighbours(values: Array, places: Array, *, fresh: Array | None = None) -> Array:
    """Pair each row with the few rows before it that have the same value. Positions ascend; 0 is no value.

    With `fresh`, return only pairs that contain a row marked there.
    """
    there = np.flatnonzero(values)
    if fresh is not None:
        there = there[ValueLookup(distinct(values[there][fresh[places[there]]])).find(values[there])[0]]
    values, places = values[there], places[there]
    order = np.argsort(values, kind="stable")
    values, places = values[order], places[order]
    found = []
    for step in range(1, CANDIDATES_PER_ROW + 1):
        same = values[step:] == values[:-step]
        found.append(pack(places[step:][same], places[:-step][same]))
    return only_fresh(merge_pairs(found), fresh)


def is_worth_looking_up(fresh: Array | None) -> bool:
    """Whether there are so few fresh rows that looking up their values is faster than sorting all."""
    return fresh is not None and int(np.count_nonzero(fresh)) <= MOST_LOOKED_UP


def only_fresh(pairs: Array, fresh: Array | None) -> Array:
    """Keep the pairs that contain a fresh row; all pairs if `fresh` is None."""
    if fresh is None:
        return pairs
    later, earlier = unpack(pairs)
    return pairs[fresh[later] | fresh[earlier]]


class SortedEntries(NamedTuple):
    """Values with the row they occur in and 8 bits of marks, sorted by value, then by row."""

    values: Array
    places: Array
    marks: Array

    def ranks(self) -> Array:
        """Return how many rows before each entry have the same value."""
        ranks: Array = np.arange(len(self.values)) - _run_starts(self.values)
        return ranks

    def pair(self, step: int) -> tuple[Array, Array]:
        """Return the entries that have the same value as the entry `step` before them, and those entries."""
        later = np.flatnonzero(self.values[step:] == self.values[:-step]) + step
        return later, later - step


class ExternalSort:
    """Sorts more entries than fit in memory: partitioned on disk by value, one partition at a time."""

    _ENTRY = np.dtype([("value", "<u8"), ("place", "<u4"), ("mark", "u1")])

    def __init__(self, expected: int) -> None:
        self._files: list[Any] = [
            SpooledTemporaryFile(max_size=_PARTITION_BYTES)  # noqa: SIM115
            for _ in range(min(64, expected // _PARTITION_ENTRIES + 1))
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()

    def add(self, values: Array, places: Array, marks: Array | None = None) -> None:
        """Positions must ascend from one call to the next."""
        entries = np.zeros(len(values), dtype=self._ENTRY)
        entries["value"], entries["place"] = values, places
        if marks is not None:
            entries["mark"] = marks
        # The lowest bit may have a meaning of its own.
        partition = (values >> np.uint64(1)) % np.uint64(len(self._files))
        order = np.argsort(partition, kind="stable")
        bounds = np.searchsorted(partition[order], np.arange(len(self._files) + 1))
        for file, (start, stop) in zip(self._files, pairwise(bounds.tolist()), strict=True):
            file.write(entries[order[start:stop]].tobytes())

    def partitions(self) -> Iterator[SortedEntries]:
        for file in self._files:
            file.seek(0)
            entries = np.frombuffer(file.read(), dtype=self._ENTRY)
            order = np.argsort(entries["value"], kind="stable")
            values, places = entries["value"][order], entries["place"][order].astype(np.int64)
            fresh = np.ones(len(values), dtype=bool)
            fresh[1:] = (values[1:] != values[:-1]) | (places[1:] != places[:-1])
            yield SortedEntries(values[fresh], places[fresh], entries["mark"][order][fresh])


def read_rows(corpus: CorpusColumns, name: str, places: Array) -> Ragged:
    """Read the values of some rows, by ascending positions."""
    parts = list(stream_rows(corpus, name, places))
    if not parts:
        return Ragged(np.zeros(0, dtype=np.uint32), np.zeros(len(places) + 1, dtype=np.int64))
    return join_ragged(parts)


def stream_rows(corpus: CorpusColumns, name: str, places: Array) -> Iterator[Ragged]:
    """As `read_rows`, some rows at a time."""
    for first, flat, offsets in corpus.ragged(name):
        low, high = np.searchsorted(places, [first, first + len(offsets) - 1])
        if low < high:
            yield Ragged(flat, offsets).take(places[low:high] - first)
        if high == len(places):
            break


def join_ragged(parts: Sequence[Ragged]) -> Ragged:
    lengths = np.concatenate([np.diff(part.offsets) for part in parts])
    return Ragged(np.concatenate([part.values for part in parts]), np.concatenate(([0], np.cumsum(lengths))))


def _run_starts(values: Array) -> Array:
    """Return, for each of sorted values, the position of the first equal one."""
    fresh = np.ones(len(values), dtype=bool)
    fresh[1:] = values[1:] != values[:-1]
    starts: Array = np.maximum.accumulate(np.where(fresh, np.arange(len(values)), 0))
    return starts
