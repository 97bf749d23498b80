"""Means of grades, such as similarities or averages over repeats: neither counts nor free numbers.

In: one value a case, and the cluster (session) of each. Out: an interval and the name of the way it
was found. Pure.

Grades from 0 to 1 have bounds that hold however they are distributed, rare failures included. Numbers
without bounds have none such: those are resampled or, beyond thousands of values, get Student's t.
"""

from collections.abc import Hashable, Sequence
from typing import NamedTuple

from graftwork.evaluate.statistics.bootstrap import bootstrap_mean
from graftwork.evaluate.statistics.bounded import bounded_difference, bounded_mean
from graftwork.evaluate.statistics.clustered import mean_difference
from graftwork.evaluate.statistics.intervals import Interval, Sided

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
    if from_0_to_1(values):
        found = bounded_mean(values, clusters, confidence=confidence, sided=sided)
        return Estimate(found, "bounded mean")
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
    if from_0_to_1(a) and from_0_to_1(b):
        found = bounded_difference(a, b, clusters, confidence=confidence, sided=sided)
        return Estimate(found, "bounded mean")
    if len(a) > MANY:
        return Estimate(mean_difference(a, b, which, confidence=confidence, sided=sided), "Student's t")
    differences = [new - old for old, new in zip(a, b, strict=True)]
    found = bootstrap_mean(differences, clusters=which, confidence=confidence, sided=sided, seed=seed)
    return Estimate(found, "bootstrap")


def from_0_to_1(values: Sequence[float]) -> bool:
    """Whether the values have the bounds that `bounded` needs."""
    return all(0 <= value <= 1 for value in values)
