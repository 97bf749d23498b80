"""Text folded for comparing, never for showing.

In: any text. Out: the same text without what a reader would not call a difference: case, spacing,
width of characters, punctuation. Does not know languages; scripts that write without spaces are
taken character by character.
"""

import hashlib
import re
import unicodedata
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

# Kana, CJK ideographs and Hangul stand for words by themselves; in other scripts a run does.
_UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_BEYOND_ASCII = re.compile(r"[^\x00-\x7f]+")
# Small letters and digits stay, capitals become small, everything else parts words.
_FOLD = bytes(
    ord(chr(code).lower()) if code < 128 and chr(code).isalnum() else ord(" ") for code in range(256)
)

# Full stops, commas, question marks and quotes where a word begins or ends.
_AROUND = re.compile(r"(?<!\S)[\"'“”‘’«»]+|[.,;:!?…\"'“”‘’«»。，！？]+(?!\S)")


def words(text: str) -> list[str]:
    """The words of `text`, compatibility-normalised and case-folded, without punctuation."""
    plain = text if text.isascii() else _BEYOND_ASCII.sub(_part_words, text)
    if plain.isascii():
        return plain.encode("ascii").translate(_FOLD).decode("ascii").split()
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def normalise(text: str) -> str:
    """`text` as its words with single spaces between them."""
    return " ".join(words(text))


def fold(text: str) -> str:
    """`text` without what no reader calls another text: case, spacing, and the signs around words.

    Unlike `normalise` it keeps every sign that may carry the meaning: `C` is not `C++`, `a < b` not
    `a > b`, `2.5` not `25`.
    """
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return " ".join(_AROUND.sub("", plain.casefold()).split())


def last_lines(text: str) -> list[str]:
    """The lines of `text` that hold something, from the last to the first."""
    return [line.strip() for line in reversed(text.splitlines()) if line.strip()]


def _part_words(match: re.Match[str]) -> str:
    run = match.group()
    return " " if len(run) <= 16 and _only_parts_words(run) else run


@lru_cache(maxsize=4096)
def _only_parts_words(run: str) -> bool:
    """Whether the run is nothing but punctuation and signs: quotes, dashes, bullets, most emoji.

    A mark that combines with the letter before it is not: the two have to be normalised together.
    """
    parts = unicodedata.normalize("NFKD", run)
    return not any(map(unicodedata.combining, parts)) and _WORD.search(parts.casefold()) is None


Array = np.ndarray[Any, Any]

# Odd constants of splitmix64: they spread neighbouring numbers over all bits.
_SPREAD = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_MOST_WORDS = 400_000
# So many values are worked on at once: some 50 MB with all that is made of them.
_VALUES_AT_ONCE = 500_000
# Rounding must not leave a pair just below a threshold that it reaches.
TOLERANCE = 1e-6


def content_key(*texts: str) -> str:
    """The same for texts that differ in case, spacing and punctuation only."""
    return hashlib.sha256("\x1f".join(normalise(text) for text in texts).encode()).hexdigest()


def number_text(text: str) -> int:
    """64 bits that stand for a text, letter by letter; never 0, which stands for no text."""
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
    """64 bits for each word."""
    return np.fromiter(map(_numbers.__getitem__, words), dtype=np.uint64, count=len(words))


def spread(numbers: Array) -> Array:
    """Other numbers, one for one, in which every bit depends on every bit."""
    mixed = numbers.astype(np.uint64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_SPREAD[1])
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SPREAD[2])
    spread_out: Array = mixed ^ (mixed >> np.uint64(31))
    return spread_out


def distinct(values: Array) -> Array:
    """Sorted, each once. By sorting: the hash table behind `np.unique` takes four times as long."""
    ordered = np.sort(values)
    fresh = np.ones(len(ordered), dtype=bool)
    fresh[1:] = ordered[1:] != ordered[:-1]
    once: Array = ordered[fresh]
    return once


class Ragged(NamedTuple):
    """Many runs of values, one behind the other; the values of item n end where those of n + 1 begin."""

    values: Array
    offsets: Array

    def take(self, items: Array) -> "Ragged":
        """Some of the items, in the order asked for."""
        lengths = self.offsets[items + 1] - self.offsets[items]
        offsets = np.concatenate(([0], np.cumsum(lengths)))
        at = np.repeat(self.offsets[items] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return Ragged(self.values[at], offsets)

    def owners(self) -> Array:
        """For each value, the item that it belongs to."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


def run_words(words: Ragged, *, size: int) -> Ragged:
    """The runs of `size` words of each item, as 64-bit numbers. A shorter item is one run by itself."""
    lengths = np.diff(words.offsets)
    ends = np.repeat(words.offsets[1:], lengths)
    here = np.arange(len(words.values))
    padded = np.concatenate((words.values, np.zeros(size, dtype=np.uint64)))
    total = np.zeros(len(here), dtype=np.uint64)
    for step in range(size):
        word = np.where(here + step < ends, padded[step : step + len(here)], np.uint64(0))
        total = (total + word) * np.uint64(_SPREAD[0])
    starts = np.repeat(words.offsets[:-1], lengths)
    chosen = here <= np.maximum(starts, ends - size)
    counts = np.where(lengths > 0, np.maximum(1, lengths - size + 1), 0)
    return Ragged(spread(total[chosen]), np.concatenate(([0], np.cumsum(counts))))


def as_sets(runs: Ragged, *, lowest: int | None = None) -> Ragged:
    """32-bit values, sorted, each once an item; of each item the `lowest` at most.

    The lowest values of two sets, up to the smaller of their highest ones, are a fair sample of
    both: the values are spread evenly and do not depend on the set.
    """
    items = len(runs.offsets) - 1
    values = runs.values.astype(np.uint64) & np.uint64(0xFFFFFFFF)
    joined = distinct(runs.owners().astype(np.uint64) << np.uint64(32) | values)
    offsets = np.searchsorted(joined, np.arange(items + 1, dtype=np.uint64) << np.uint64(32))
    sets = Ragged(joined.astype(np.uint32), offsets)
    if lowest is None:
        return sets
    lengths = np.minimum(np.diff(offsets), lowest)
    kept = np.concatenate(([0], np.cumsum(lengths)))
    at = np.repeat(offsets[:-1] - kept[:-1], lengths) + np.arange(kept[-1])
    return Ragged(sets.values[at], kept)


class RunWeights(NamedTuple):
    """What values weigh: the rarer among `total` sets, the more; one never seen as if seen once."""

    values: Array
    counts: Array
    total: int

    def of(self, values: Array) -> Array:
        """The weight of each value, in half the usual precision: there are many of them."""
        weighed = np.empty(len(values), dtype=np.float32)
        for start in range(0, len(values), _VALUES_AT_ONCE):
            part = values[start : start + _VALUES_AT_ONCE]
            seen = np.ones(len(part))
            if len(self.values):
                at = np.minimum(np.searchsorted(self.values, part), len(self.values) - 1)
                seen = np.where(self.values[at] == part, self.counts[at], 1.0)
            weighed[start : start + len(part)] = np.log1p(max(self.total, 1) / seen)
        return weighed


NO_WEIGHTS = RunWeights(np.zeros(0, dtype=np.uint32), np.zeros(0, dtype=np.int64), 0)
"""Every value weighs the same."""


def weigh(sets: Ragged) -> RunWeights:
    """Count the values of sets that are all different."""
    ordered = np.sort(sets.values)
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1]))[: len(ordered)])
    counts = np.diff(np.concatenate((starts, [len(ordered)])))
    return RunWeights(ordered[starts], counts, int((np.diff(sets.offsets) > 0).sum()))


class Measures(NamedTuple):
    """For each pair: common weight against the weight of both together, and against the smaller one."""

    likeness: Array
    containment: Array


def measure_pairs(
    sets: Ragged, one: Array, other: Array, *, weighed: Array, sampled: int | None = None
) -> Measures:
    """Measure pairs of items; `weighed` holds the weight of each value of the sets.

    Two empty sets say nothing about each other: 0. Containment looks at even values only: in sets of
    lines those are the single words. `sampled` says that a set of so many values is only the lowest
    ones of a larger set.
    """
    likeness, containment = np.zeros(len(one)), np.zeros(len(one))
    lengths = np.diff(sets.offsets)
    batches = np.cumsum(lengths[one] + lengths[other]) // _VALUES_AT_ONCE
    bounds = np.flatnonzero(np.diff(batches, prepend=-1, append=-1)) if len(one) else np.zeros(0, dtype=int)
    for start, stop in pairwise(bounds.tolist()):
        part = slice(start, stop)
        likeness[part], containment[part] = _measure(
            sets, one[part], other[part], weighed=weighed, sampled=sampled
        )
    return Measures(likeness, containment)


def _measure(sets: Ragged, one: Array, other: Array, *, weighed: Array, sampled: int | None) -> Measures:
    limits = None
    if sampled is not None:
        limits = np.minimum(_highest(sets, one, sampled), _highest(sets, other, sampled))
    first, second = _side(sets, one, weighed, limits), _side(sets, other, weighed, limits)
    at = np.minimum(np.searchsorted(second.keys, first.keys), max(len(second.keys) - 1, 0))
    common = second.keys[at] == first.keys if len(second.keys) else np.zeros(len(first.keys), dtype=bool)
    pairs = len(one)
    both = first.add_up(pairs, common)
    either = first.add_up(pairs) + second.add_up(pairs) - both
    words = first.is_word()
    smaller = np.minimum(first.add_up(pairs, words), second.add_up(pairs, second.is_word()))
    return Measures(_divide(both, either), _divide(first.add_up(pairs, common & words), smaller))


class _Side(NamedTuple):
    """The values of one side of many pairs, behind the number of their pair, and their weights."""

    keys: Array
    weights: Array

    def add_up(self, pairs: int, which: Array | None = None) -> Array:
        # In the order of the values, so that equal sets have equal sums to the last bit.
        weights = self.weights if which is None else np.where(which, self.weights, 0.0)
        return np.bincount((self.keys >> np.uint64(32)).astype(np.int64), weights, minlength=pairs)

    def is_word(self) -> Array:
        words: Array = (self.keys & np.uint64(1)) == 0
        return words


def _side(sets: Ragged, items: Array, weighed: Array, limits: Array | None) -> _Side:
    taken, weights = sets.take(items), Ragged(weighed, sets.offsets).take(items).values
    owners = taken.owners()
    keys = owners.astype(np.uint64) << np.uint64(32) | taken.values.astype(np.uint64)
    if limits is None:
        return _Side(keys, weights)
    within = taken.values <= limits[owners]
    return _Side(keys[within], weights[within])


def _highest(sets: Ragged, items: Array, sampled: int) -> Array:
    """Up to which value an item is fully known."""
    ends = sets.offsets[items + 1]
    cut = ends - sets.offsets[items] >= sampled
    return np.where(cut, sets.values[np.maximum(ends - 1, 0)] if len(sets.values) else 0, 2**32 - 1)


def _divide(part: Array, whole: Array) -> Array:
    return np.minimum(1.0, np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0))


class Clusters:
    """Union-find over positions. The name of a cluster is its smallest position."""

    def __init__(self, size: int) -> None:
        self._parent = array("q", range(size))

    def find(self, item: int) -> int:
        root = item
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[item] != root:
            self._parent[item], item = root, self._parent[item]
        return root

    def join(self, one: int, other: int) -> None:
        low, high = sorted((self.find(one), self.find(other)))
        self._parent[high] = low

    def names(self) -> Array:
        """For each position the name of its cluster."""
        names = np.array(self._parent, dtype=np.int64)
        while True:
            above = names[names]
            if np.array_equal(above, names):
                return names
            names = above
