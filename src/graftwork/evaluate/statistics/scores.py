"""Means of grades, such as similarities or averages over repeats: neither counts nor free numbers.

In: one value a case, and the cluster (session) of each. Out: an interval and the name of the way it
was found. Pure.

Resampling needs something to resample: where hardly any value differs, it would promise too much (30
perfect grades and one of 0.9 do not make a mean of 0.99 for sure). There the bounds of a rate are
taken, which hold for all grades from 0 to 1. Beyond thousands of values Student's t says the same as
resampling, faster.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from graftwork.evaluate.statistics.bootstrap import bootstrap_mean
from graftwork.evaluate.statistics.clustered import clustered_difference, clustered_rate, mean_difference
from graftwork.evaluate.statistics.intervals import Interval, Sided

ENOUGH_THAT_DIFFER = 10
"""Clusters with a value other than the usual one, from which on resampling is trusted."""
MANY = 2000


class Estimate(NamedTuple):
    interval: Interval
    method: str


def score_mean(
    values: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    sided: Sided = "two",
    seed: int = 0,
) -> Estimate:
    """The interval of a mean of grades."""
    which = list(range(len(values)) if clusters is None else clusters)
    if _from_0_to_1(values) and _count_telling(values, which) < ENOUGH_THAT_DIFFER:
        return Estimate(clustered_rate(values, which, confidence=confidence, sided=sided), "bounds of a rate")
    if len(values) > MANY:
        zeros = [0.0] * len(values)
        found = mean_difference(zeros, values, which, confidence=confidence, sided=sided)
        return Estimate(found, "Student's t")
    found = bootstrap_mean(values, clusters=which, confidence=confidence, sided=sided, seed=seed)
    return Estimate(found, "bootstrap")


def score_difference(
    a: Sequence[float],
    b: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    sided: Sided = "two",
    seed: int = 0,
) -> Estimate:
    """The interval of the mean of `b` less `a`, pair by pair."""
    which = list(range(len(a)) if clusters is None else clusters)
    differences = [new - old for old, new in zip(a, b, strict=True)]
    if _from_0_to_1(a) and _from_0_to_1(b) and _count_telling(differences, which) < ENOUGH_THAT_DIFFER:
        found = clustered_difference(a, b, which, confidence=confidence, sided=sided)
        return Estimate(found, "Tango's score interval")
    if len(a) > MANY:
        return Estimate(mean_difference(a, b, which, confidence=confidence, sided=sided), "Student's t")
    found = bootstrap_mean(differences, clusters=which, confidence=confidence, sided=sided, seed=seed)
    return Estimate(found, "bootstrap")


def _from_0_to_1(values: Sequence[float]) -> bool:
    return all(0 <= value <= 1 for value in values)


def _count_telling(values: Sequence[float], clusters: Sequence[Hashable]) -> int:
    if not values:
        return 0
    usual = Counter(values).most_common(1)[0][0]
    return len({cluster for cluster, value in zip(clusters, values, strict=True) if value != usual})
