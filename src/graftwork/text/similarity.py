"""Text similarity: hashes of words and runs of words, weighted Jaccard similarity.

Input: words (`text/words.py`), or sets of 32-bit hashes of runs of words. Output: the similarity of many
pairs of sets at once. The numbers are the same in every process and on every machine.
"""

import hashlib
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]

# Odd constants of splitmix64, which spread adjacent numbers over all bits.
_SPREAD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MOST_WORDS = 400_000
# Values that are processed at once: about 50 MB in total.
_VALUES_AT_ONCE = 500_000
# Rounding must not leave a pair just below a threshold that it reaches.
TOLERANCE = 1e-6


def number_text(text: str) -> int:
    """Hash a text to 64 bits; never 0, which means no text."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


class _WordNumbers(dict[str, int]):
    def __missing__(self, word: str) -> int:
        if len(self) >= _MOST_WORDS:
            self.clear()
        number = self[word] = number_text(word)
        return number


_numbers = _WordNumbers()


def number_words(words: Sequence[str]) -> Array:
    """Hash each word to 64 bits."""
    return np.fromiter(map(_numbers.__getitem__, words), dtype=np.uint64, count=len(words))


def spread(numbers: Array) -> Array:
    """Mix the bits of each number (a bijection)."""
    mixed = numbers.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_SPREAD[1])
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SPREAD[2])
    spread_out: Array = mixed ^ (mixed >> np.uint64(31))
    return spread_out


def distinct(values: Array) -> Array:
    """Return sorted distinct values. Sorting is four times as fast as `np.unique`."""
    ordered = np.sort(values)
    fresh = np.ones(len(ordered), dtype=bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    once: Array = ordered[fresh]
    return once


class Ragged(NamedTuple):
    """Runs of values of many items, concatenated, with the offset of each item."""

    values: Array
    offsets: Array

    def take(self, items: Array) -> "Ragged":
        """Return some of the items, in this order."""
        lengths = self.offsets[items + 1] - self.offsets[items]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        indices = np.repeat(self.offsets[items] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Ragged(self.values[indices], offsets)

    def owners(self) -> Array:
        """Return, for each value, the item that it belongs to."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


def run_words(texts: Ragged, *, size: int) -> Ragged:
    """Hash the runs of `size` words of each item. A shorter item is one run."""
    lengths = np.diff(texts.offsets)
    ends = np.repeat(texts.offsets[1:], lengths)
    positions = np.arange(len(texts.values))
    padded = np.concatenate((texts.values, np.zeros(size, dtype=np.uint64)))
    total = np.zeros(len(positions), dtype=np.uint64)
    for step in range(size):
        word = np.where(positions + step < ends, padded[step : step + len(positions)], np.uint64(0))
        total = (total + word) * np.uint64(_SPREAD[0])
    starts = np.repeat(texts.offsets[:-1], lengths)
    is_complete = positions <= np.maximum(starts, ends - size)
    counts = np.where(lengths > 0, np.maximum(1, lengths - size + 1), 0)
    return Ragged(spread(total[is_complete]), np.concatenate(([0], np.cumsum(counts))))


def as_sets(runs: Ragged, *, lowest: int | None = None) -> Ragged:
    """Return sorted distinct 32-bit values per item, at most the `lowest` ones.

    The lowest values of two sets, up to the smaller of their maxima, are a fair sample of both.
    """
    items = len(runs.offsets) - 1
    values = runs.values.astype(np.uint64) & np.uint64(0xFFFFFFFF)
    joined = distinct(runs.owners().astype(np.uint64) << np.uint64(32) | values)
    offsets = np.searchsorted(joined, np.arange(items + 1, dtype=np.uint64) << np.uint64(32))
    sets = Ragged(joined.astype(np.uint32), offsets)
    if lowest is None:
        return sets
    lengths = np.minimum(np.diff(offsets), lowest)
    bounds = np.concatenate(([0], np.cumsum(lengths)))
    indices = np.repeat(offsets[:-1] - bounds[:-1], lengths) + np.arange(bounds[-1])
    return Ragged(sets.values[indices], bounds)


class RunWeights(NamedTuple):
    """Weights of values: the rarer among `total` sets, the higher; unseen values count as seen once."""

    values: Array
    counts: Array
    total: int

    def of(self, values: Array) -> Array:
        """Return the weight of each value, in single precision."""
        weighed = np.empty(len(values), dtype=np.float32)
        for start in range(0, len(values), _VALUES_AT_ONCE):
            part = values[start : start + _VALUES_AT_ONCE]
            counts = np.ones(len(part))
            if len(self.values):
                nearest = np.minimum(np.searchsorted(self.values, part), len(self.values) - 1)
                counts = np.where(self.values[nearest] == part, self.counts[nearest], 1.0)
            weighed[start : start + len(part)] = np.log1p(max(self.total, 1) / counts)
        return weighed

    def to_arrays(self) -> tuple[Array, Array, Array]:
        """The same as arrays, as small as they can be stored."""
        return self.values, self.counts.astype(np.uint32), np.array(self.total)

    @classmethod
    def from_arrays(cls, values: Array, counts: Array, total: Array) -> "RunWeights":
        return cls(values, counts.astype(np.int64), int(total))


NO_WEIGHTS = RunWeights(np.zeros(0, dtype=np.uint32), np.zeros(0, dtype=np.int64), 0)
"""Every value has the same weight."""


def weigh(sets: Ragged) -> RunWeights:
    """Count the values of distinct sets."""
    ordered = np.sort(sets.values)
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))[: len(ordered)])
    counts = np.diff(np.concatenate((starts, [len(ordered)])))
    return RunWeights(ordered[starts], counts, int((np.diff(sets.offsets) > 0).sum()))


def measure_pairs(
    sets: Ragged, first: Array, second: Array, *, weighed: Array, sampled: int | None = None
) -> tuple[Array, Array]:
    """Return the likeness and the containment of each pair of items.

    They are the shared weight relative to both together, and relative to the smaller one; `weighed` is the
    weight of each value of the sets.

    Two empty sets have similarity 0. Containment counts even values only: in sets of lines these are single
    words. With `sampled`, a set of that many values is only the lowest part of a larger set.
    """
    similarity, containment = np.zeros(len(first)), np.zeros(len(first))
    lengths = np.diff(sets.offsets)
    batches = np.cumsum(lengths[first] + lengths[second]) // _VALUES_AT_ONCE
    bounds = np.flatnonzero(np.diff(batches, prepend=-1, append=-1)) if len(first) else np.zeros(0, dtype=int)
    for start, stop in pairwise(bounds.tolist()):
        part, pairs = slice(start, stop), stop - start
        limits = None
        if sampled is not None:
            limits = np.minimum(*(_highest(sets, side[part], sampled) for side in (first, second)))
        keys, weights = _side(sets, first[part], weighed, limits)
        other_keys, other_weights = _side(sets, second[part], weighed, limits)
        nearest = np.minimum(np.searchsorted(other_keys, keys), max(len(other_keys) - 1, 0))
        common = other_keys[nearest] == keys if len(other_keys) else np.zeros(len(keys), dtype=bool)
        both = _add_up(keys, weights, pairs, common)
        either = _add_up(keys, weights, pairs) + _add_up(other_keys, other_weights, pairs) - both
        is_word, other_words = _are_words(keys), _are_words(other_keys)
        smaller = np.minimum(
            _add_up(keys, weights, pairs, is_word), _add_up(other_keys, other_weights, pairs, other_words)
        )
        similarity[part] = _divide(both, either)
        containment[part] = _divide(_add_up(keys, weights, pairs, common & is_word), smaller)
    return similarity, containment


def _side(sets: Ragged, items: Array, weighed: Array, limits: Array | None) -> tuple[Array, Array]:
    """The values of one side of many pairs, prefixed by the pair's number, and their weights."""
    chosen_sets, weights = sets.take(items), Ragged(weighed, sets.offsets).take(items).values
    owners = chosen_sets.owners()
    keys = owners.astype(np.uint64) << np.uint64(32) | chosen_sets.values.astype(np.uint64)
    if limits is None:
        return keys, weights
    within = chosen_sets.values <= limits[owners]
    return keys[within], weights[within]


def _add_up(keys: Array, weights: Array, pairs: int, which: Array | None = None) -> Array:
    # Summed in the order of the values, so that equal sets have equal sums to the last bit.
    added = weights if which is None else np.where(which, weights, 0.0)
    return np.bincount((keys >> np.uint64(32)).astype(np.int64), added, minlength=pairs)


def _are_words(keys: Array) -> Array:
    is_word: Array = (keys & np.uint64(1)) == 0
    return is_word


def _highest(sets: Ragged, items: Array, sampled: int) -> Array:
    """Return up to which value an item is complete."""
    ends = sets.offsets[items + 1]
    cut = ends - sets.offsets[items] >= sampled
    return np.where(cut, sets.values[np.maximum(ends - 1, 0)] if len(sets.values) else 0, 2**32 - 1)


def _divide(part: Array, whole: Array) -> Array:
    return np.minimum(1.0, np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0))


class Clusters:
    """Union-find over positions. A cluster is named by its smallest position."""

    def __init__(self, size: int) -> None:
        self._parent = array("q", range(size))

    def find(self, item: int) -> int:
        root = item
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[item] != root:
            self._parent[item], item = root, self._parent[item]
        return root

    def join(self, first: int, second: int) -> None:
        low, high = sorted((self.find(first), self.find(second)))
        self._parent[high] = low

    def names(self) -> Array:
        """Return the cluster name of each position."""
        names = np.array(self._parent, dtype=np.int64)
        while True:
            above = names[names]
            if np.array_equal(above, names):
                return names
            names = above
