"""How alike texts are: the same, nearly the same, or not.

In: texts. Out: keys of equal texts, and pairs and clusters of texts that are nearly equal. MinHash
(rensa) proposes pairs, the real Jaccard measure over word shingles decides. Shingles that many
texts share weigh less, so that instructions repeated in every row make no two rows alike. Does not
know what the texts are.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from graftwork.text.normalise import normalise, words

PERMUTATIONS = 128
MINHASH_SEED = 42
# Bands against rows of a band: 32 x 4 proposes from about 0.42 plain Jaccard on, 16 x 8 from 0.71.
LOOSE_BANDS = 32
TIGHT_BANDS = 16
TIGHT_FROM = 0.9
# Among this many sets, shingles that stand in more than this share of them propose no pairs,
# unless the others make up less than this part of a set's weight.
MANY = 200
COMMON_SHARE = 0.05
RARE_ENOUGH = 0.6


class Pair(NamedTuple):
    """Two texts by their positions, the first before the second, and how alike they are."""

    first: int
    second: int
    likeness: float


class Clusters:
    """Union-find over positions. The name of a cluster is its smallest position."""

    def __init__(self, size: int) -> None:
        self._parent = list(range(size))

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

    def members(self) -> dict[int, list[int]]:
        """Every cluster by its name, members in order."""
        found: dict[int, list[int]] = {}
        for item in range(len(self._parent)):
            found.setdefault(self.find(item), []).append(item)
        return found


def content_key(*texts: str) -> str:
    """The same for texts that differ in case, spacing and punctuation only."""
    return hashlib.sha256("\x1f".join(normalise(text) for text in texts).encode()).hexdigest()


def shingles(text: str, *, sizes: Sequence[int] = (3,)) -> frozenset[str]:
    """Runs of words. A text shorter than a run is one run by itself."""
    found = words(text)
    if not found:
        return frozenset()
    return frozenset(
        " ".join(found[start : start + size])
        for size in sizes
        for start in range(max(1, len(found) - size + 1))
    )


def weigh(sets: Sequence[frozenset[str]]) -> dict[str, float]:
    """The rarer a shingle among the distinct sets, the more it weighs; none weighs nothing."""
    distinct = {shingle_set for shingle_set in sets if shingle_set}
    seen = Counter(shingle for shingle_set in distinct for shingle in shingle_set)
    return {shingle: math.log1p(len(distinct) / count) for shingle, count in seen.items()}


def likeness(one: frozenset[str], other: frozenset[str], *, weights: dict[str, float]) -> float:
    """The weighted Jaccard measure. Two empty sets say nothing about each other: 0."""
    return _measure(_sum(one & other, weights), _sum(one, weights), _sum(other, weights)).likeness


def containment(one: frozenset[str], other: frozenset[str], *, weights: dict[str, float]) -> float:
    """How much of the smaller set stands in the other, by weight."""
    return _measure(_sum(one & other, weights), _sum(one, weights), _sum(other, weights)).containment


def alike_pairs(
    sets: Sequence[frozenset[str]], *, threshold: float, contained: float | None = None
) -> list[Pair]:
    """All pairs of positions whose likeness reaches `threshold`, in order.

    With `contained`, also pairs of which one stands in the other to that degree. Equal sets are
    all paired with their first bearer only, so that a thousand copies are a thousand pairs and not
    half a million.
    """
    first_of: dict[frozenset[str], int] = {}
    pairs = []
    for position, shingle_set in enumerate(sets):
        first = first_of.setdefault(shingle_set, position)
        if first != position and shingle_set:
            pairs.append(Pair(first, position, 1.0))
    distinct = {position: shingle_set for shingle_set, position in first_of.items() if shingle_set}
    weights = weigh(list(distinct.values()))
    totals = {position: _sum(shingle_set, weights) for position, shingle_set in distinct.items()}
    bands = TIGHT_BANDS if threshold >= TIGHT_FROM and contained is None else LOOSE_BANDS
    for one, other in sorted(_propose(distinct, totals, weights=weights, bands=bands)):
        common = _sum(distinct[one] & distinct[other], weights)
        measure = _measure(common, totals[one], totals[other])
        if measure.likeness >= threshold or (contained is not None and measure.containment >= contained):
            pairs.append(Pair(one, other, measure.likeness))
    return sorted(pairs)


def cluster(size: int, pairs: Iterable[Pair]) -> Clusters:
    clusters = Clusters(size)
    for pair in pairs:
        clusters.join(pair.first, pair.second)
    return clusters


class _Measure(NamedTuple):
    likeness: float
    containment: float


def _measure(common: float, one: float, other: float) -> _Measure:
    if not common:
        return _Measure(0.0, 0.0)
    # Rounding must not lift a measure over 1, nor leave equal sets below it.
    return _Measure(min(1.0, common / (one + other - common)), min(1.0, common / min(one, other)))


def _sum(shingle_set: frozenset[str], weights: dict[str, float]) -> float:
    # fsum is exact in any order: the iteration order of sets changes between processes.
    return math.fsum(weights[shingle] for shingle in shingle_set)


def _propose(
    sets: dict[int, frozenset[str]], totals: dict[int, float], *, weights: dict[str, float], bands: int
) -> set[tuple[int, int]]:
    """Pairs that may be alike: by their rare shingles, and by all where few of them are rare.

    Shingles that stand in a large share of many sets would make nearly all pairs candidates, and
    decide little: they weigh little.
    """
    if len(sets) < MANY:
        return _share_a_band(sets, bands=bands)
    common = math.log1p(1 / COMMON_SHARE)
    rare = {
        position: frozenset(shingle for shingle in shingle_set if weights[shingle] > common)
        for position, shingle_set in sets.items()
    }
    plain = {
        position: shingle_set
        for position, shingle_set in sets.items()
        if _sum(rare[position], weights) < RARE_ENOUGH * totals[position]
    }
    return _share_a_band({p: s for p, s in rare.items() if s}, bands=bands) | _share_a_band(
        plain, bands=bands
    )


def _share_a_band(sets: dict[int, frozenset[str]], *, bands: int) -> set[tuple[int, int]]:
    """Pairs of positions whose MinHashes share a band."""
    if len(sets) < 2:
        return set()
    import rensa

    positions = sorted(sets)
    hashes = rensa.RMinHash.from_token_sets(
        [sorted(sets[position]) for position in positions], PERMUTATIONS, MINHASH_SEED
    )
    # The first argument only serves `is_similar`, which is not asked here.
    index = rensa.RMinHashLSH(0.5, PERMUTATIONS, bands)
    index.insert_many(hashes)
    return {
        (positions[here], positions[there])
        for here, candidates in enumerate(index.query_all(hashes))
        for there in candidates
        if there > here
    }
