"""Rows that share a value, found by sorting one column at a time.

In: a column of numbers, one or several a row. Out: pairs of rows, each packed into one 64-bit number
with the later row in its upper half, so that pairs sort by their later row. A row is paired only
with rows before it, and with few of them: what is found for a row does not change when more rows
follow. Does not know what the numbers stand for.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from tempfile import SpooledTemporaryFile
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

import numpy as np

from graftwork.records.interaction import Interaction, Origin
from graftwork.text.similarity import Array, Ragged, distinct

CANDIDATES_PER_ROW = 4
"""Each row against so many before it with the same value."""

MOST_LOOKED_UP = 25_000
"""The values of so many fresh rows are looked up; those of more are sorted along with all others."""

_HALF = np.uint64(32)
_LOW = np.uint64(2**32 - 1)
# So many entries are sorted at once, and so many bytes of a portion stay in memory before it is a file.
_PARTITION_ENTRIES = 500_000
_PARTITION_BYTES = 1 << 20


class LabelNumbers(Protocol):
    """A column of names as numbers; -1 where a row has none."""

    @property
    def numbers(self) -> Array: ...


class CorpusColumns(Protocol):
    """The rows of all logs in the order of sight, by single columns, and by their place."""

    @property
    def rows(self) -> int: ...

    def column(self, name: str) -> Array: ...

    def ragged(self, name: str) -> Iterator[tuple[int, Array, Array]]: ...

    def labels(self, name: str) -> LabelNumbers: ...

    def rows_at(self, places: Sequence[int]) -> Iterator[tuple[int, Interaction]]: ...

    def origin(self, place: int) -> Origin: ...


class Pairs(NamedTuple):
    later: Array
    earlier: Array


NO_PAIRS: Array = np.zeros(0, dtype=np.uint64)


def pack(later: Array, earlier: Array) -> Array:
    packed: Array = later.astype(np.uint64) << _HALF | earlier.astype(np.uint64)
    return packed


def unpack(pairs: Array) -> Pairs:
    return Pairs((pairs >> _HALF).astype(np.int64), (pairs & _LOW).astype(np.int64))


def merge_pairs(parts: Sequence[Array]) -> Array:
    """All pairs, sorted, each once."""
    return distinct(np.concatenate(parts)) if parts else NO_PAIRS


def find_first(keys: Array, *, among: Array) -> Array:
    """For each row the first row with the same key; rows not `among`, or with key 0, stand for themselves."""
    first = np.arange(len(keys), dtype=np.int64)
    places = np.flatnonzero(among & (keys != 0))
    order = places[np.argsort(keys[places], kind="stable")]
    starts = _run_starts(keys[order])
    first[order] = order[starts]
    return first


class ValueLookup:
    """Some numbers that are looked up among very many others."""

    _SLOTS = 1 << 20

    def __init__(self, numbers: Array) -> None:
        """The numbers are sorted, each once."""
        self._numbers = numbers
        self._slot = numbers.dtype.type(self._SLOTS - 1)
        self._taken = np.zeros(self._SLOTS, dtype=bool)
        self._taken[numbers & self._slot] = True

    def find(self, values: Array) -> tuple[Array, Array]:
        """Which of the values are among the numbers, and which number each of those is."""
        # Nearly all values are none of them: most are told by one look at some of their bits.
        maybe = np.flatnonzero(self._taken[values & self._slot])
        if not len(maybe):
            return maybe, maybe
        which = np.minimum(np.searchsorted(self._numbers, values[maybe]), len(self._numbers) - 1)
        same = self._numbers[which] == values[maybe]
        return maybe[same], which[same]


def pair_neighbours(
    values: Array, places: Array, *, before: int = CANDIDATES_PER_ROW, fresh: Array | None = None
) -> Array:
    """Each row with the few before it that have the same value. Places ascend; 0 is no value.

    Where some rows are marked as `fresh`, only pairs with one of them.
    """
    there = np.flatnonzero(values)
    if fresh is not None:
        there = there[ValueLookup(distinct(values[there][fresh[places[there]]])).find(values[there])[0]]
    values, places = values[there], places[there]
    order = np.argsort(values, kind="stable")
    values, places = values[order], places[order]
    found = []
    for step in range(1, before + 1):
        same = values[step:] == values[:-step]
        found.append(pack(places[step:][same], places[:-step][same]))
    return only_fresh(merge_pairs(found), fresh)


def is_worth_looking_up(fresh: Array | None) -> bool:
    """Whether some rows are marked as fresh, and so few that looking them up is worth it."""
    return fresh is not None and int(np.count_nonzero(fresh)) <= MOST_LOOKED_UP


def only_fresh(pairs: Array, fresh: Array | None) -> Array:
    """The pairs of which one row at least is fresh; all of them where nothing is said about that."""
    if fresh is None:
        return pairs
    later, earlier = unpack(pairs)
    return pairs[fresh[later] | fresh[earlier]]


class SortedEntries(NamedTuple):
    """Values, each with the row it stands in and a mark of 8 bits, sorted by value, then by row."""

    values: Array
    places: Array
    marks: Array

    def ranks(self) -> Array:
        """How many rows before it have the same value."""
        ranks: Array = np.arange(len(self.values)) - _run_starts(self.values)
        return ranks

    def pair(self, step: int) -> tuple[Array, Array]:
        """Which entries have the same value as the one `step` before: both positions."""
        later = np.flatnonzero(self.values[step:] == self.values[:-step]) + step
        return later, later - step


class ExternalSort:
    """Entries on disk, in portions by value that are sorted one at a time."""

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
        """Places ascend from one call to the next."""
        entries = np.zeros(len(values), dtype=self._ENTRY)
        entries["value"], entries["place"] = values, places
        if marks is not None:
            entries["mark"] = marks
        # The lowest bit may carry a meaning of its own.
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
    """The values of some rows, by ascending places."""
    parts = list(stream_rows(corpus, name, places))
    if not parts:
        return Ragged(np.zeros(0, dtype=np.uint32), np.zeros(len(places) + 1, dtype=np.int64))
    return join_ragged(parts)


def stream_rows(corpus: CorpusColumns, name: str, places: Array) -> Iterator[Ragged]:
    """The same, some rows at a time."""
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
    """For each of sorted values, the position of the first one equal to it."""
    fresh = np.ones(len(values), dtype=bool)
    fresh[1:] = values[1:] != values[:-1]
    starts: Array = np.maximum.accumulate(np.where(fresh, np.arange(len(values)), 0))
    return starts
