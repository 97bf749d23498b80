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
    distinct = set(sets)
    seen = Counter(shingle for shingle_set in distinct for shingle in shingle_set)
    return {shingle: math.log1p(len(distinct) / count) for shingle, count in seen.items()}


def likeness(one: frozenset[str], other: frozenset[str], *, weights: dict[str, float]) -> float:
    """The weighted Jaccard measure. Two empty sets say nothing about each other: 0."""
    shared = one & other
    if not shared:
        return 0.0
    # fsum is exact in any order: the iteration order of sets changes between processes.
    common = math.fsum(weights[shingle] for shingle in shared)
    apart = math.fsum(weights[shingle] for shingle in one ^ other)
    return common / (common + apart)


def containment(one: frozenset[str], other: frozenset[str], *, weights: dict[str, float]) -> float:
    """How much of the smaller set stands in the other, by weight."""
    total = min(math.fsum(weights[s] for s in one), math.fsum(weights[s] for s in other))
    return math.fsum(weights[s] for s in one & other) / total if total else 0.0


def alike_pairs(
    sets: Sequence[frozenset[str]], *, threshold: float, contained: float | None = None
) -> list[Pair]:
    """All pairs of positions whose likeness reaches `threshold`, in order.

    With `contained`, also pairs of which one stands in the other to that degree.

    Equal sets are all paired with their first bearer only, so that a thousand copies are a
    thousand pairs and not half a million.
    """
    weights = weigh(sets)
    first_of: dict[frozenset[str], int] = {}
    pairs = []
    for position, shingle_set in enumerate(sets):
        first = first_of.setdefault(shingle_set, position)
        if first != position and shingle_set:
            pairs.append(Pair(first, position, 1.0))
    distinct = sorted(position for shingle_set, position in first_of.items() if shingle_set)
    for one, other in _propose(distinct, sets, threshold=threshold, loose=contained is not None):
        measure = likeness(sets[one], sets[other], weights=weights)
        if measure >= threshold or (
            contained is not None and containment(sets[one], sets[other], weights=weights) >= contained
        ):
            pairs.append(Pair(one, other, measure))
    return sorted(pairs)


def cluster(size: int, pairs: Iterable[Pair]) -> Clusters:
    clusters = Clusters(size)
    for pair in pairs:
        clusters.join(pair.first, pair.second)
    return clusters


def _propose(
    positions: list[int], sets: Sequence[frozenset[str]], *, threshold: float, loose: bool
) -> Iterable[tuple[int, int]]:
    """Pairs that share a band of their MinHash."""
    if len(positions) < 2:
        return
    import rensa

    bands = TIGHT_BANDS if threshold >= TIGHT_FROM and not loose else LOOSE_BANDS
    hashes = rensa.RMinHash.from_token_sets(
        [sorted(sets[position]) for position in positions], PERMUTATIONS, MINHASH_SEED
    )
    index = rensa.RMinHashLSH(threshold, PERMUTATIONS, bands)
    index.insert_many(hashes)
    for here, candidates in enumerate(index.query_all(hashes)):
        for there in sorted(candidates):
            if there > here:
                yield positions[here], positions[there]
