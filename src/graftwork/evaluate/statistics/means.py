"""Intervals of means: bounded grades, numbers by resampling, and cluster-robust Student's t.

In: one value per case and its cluster (session). Out: an interval and the name of the method. The same
values and seed give the same interval. Pure. Percentile intervals use the tails of Student's t (Hesterberg,
The American Statistician, 2015); clustered widths use the cluster-robust variance with G / (G - 1) and G -
1 degrees of freedom.
"""

import math
import random
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

from graftwork.evaluate.statistics.bounded import bounded_difference, bounded_mean
from graftwork.evaluate.statistics.intervals import Interval, student_quantile, tail_of
from graftwork.evaluate.statistics.significance import sum_clusters

RESAMPLES = 2000


def bootstrap_mean(
    values: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
) -> Interval:
    """The interval of the mean. Clusters are drawn as wholes."""
    if not values:
        raise ValueError("a mean needs at least one value")
    groups: dict[Hashable, list[float]] = {}
    for cluster, value in zip(clusters or range(len(values)), values, strict=True):
        groups.setdefault(cluster, []).append(value)
    parts = [(math.fsum(group), len(group)) for group in groups.values()]
    draw = random.Random(0)
    sizes = {size for _, size in parts}
    if len(sizes) == 1:
        # Of equal size: the sums alone are drawn, which is twice as fast.
        whole = sizes.pop() * len(parts)
        sums = [total for total, _ in parts]
        means = [sum(draw.choices(sums, k=len(sums))) / whole for _ in range(resamples)]
    else:
        draws = (draw.choices(parts, k=len(parts)) for _ in range(resamples))
        means = [sum(total for total, _ in some) / sum(size for _, size in some) for some in draws]
    means.sort()
    tail, last = widened_tail(tail_of(confidence, "two"), n=len(parts)), len(means) - 1
    return Interval(means[math.floor(tail * last)], means[math.ceil((1 - tail) * last)])


def widened_tail(tail: float, *, n: int) -> float:
    """The tail at which a percentile interval of `n` values is as wide as Student's."""
    if n < 2:
        return 0.0
    return NormalDist().cdf(-math.sqrt(n / (n - 1)) * student_quantile(tail, freedom=n - 1))


def mean_difference(
    scores_a: Sequence[float],
    scores_b: Sequence[float],
    clusters: Sequence[Hashable],
    *,
    confidence: float = 0.95,
) -> Interval:
    """The difference of `b` less `a` for any numbers: cluster-robust Student, for hundreds of clusters."""
    differences = [b - a for a, b in zip(scores_a, scores_b, strict=True)]
    n, mean = len(differences), math.fsum(differences) / len(differences)
    sums = sum_clusters([difference - mean for difference in differences], clusters)
    count = len(sums)
    if count < 2:
        return Interval(-math.inf, math.inf)
    error = math.sqrt(count / (count - 1) * math.fsum(s * s for s in sums)) / n
    reach = student_quantile(tail_of(confidence, "two"), freedom=count - 1) * error
    return Interval(mean - reach, mean + reach)


MANY = 2000


class Estimate(NamedTuple):
    interval: Interval
    method: str


def score_mean(
    values: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
) -> Estimate:
    """The interval of a mean of grades."""
    which = list(range(len(values)) if clusters is None else clusters)
    if from_0_to_1(values):
        found = bounded_mean(values, clusters, confidence=confidence)
        return Estimate(found, "bounded mean")
    if len(values) > MANY:
        zeros = [0.0] * len(values)
        found = mean_difference(zeros, values, which, confidence=confidence)
        return Estimate(found, "Student's t")
    found = bootstrap_mean(values, clusters=which, confidence=confidence)
    return Estimate(found, "bootstrap")


def score_difference(
    a: Sequence[float],
    b: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
) -> Estimate:
    """The interval of the mean of `b` less `a`, pair by pair."""
    which = list(range(len(a)) if clusters is None else clusters)
    if from_0_to_1(a) and from_0_to_1(b):
        found = bounded_difference(a, b, clusters, confidence=confidence)
        return Estimate(found, "bounded mean")
    if len(a) > MANY:
        return Estimate(mean_difference(a, b, which, confidence=confidence), "Student's t")
    differences = [new - old for old, new in zip(a, b, strict=True)]
    found = bootstrap_mean(differences, clusters=which, confidence=confidence)
    return Estimate(found, "bootstrap")


def from_0_to_1(values: Sequence[float]) -> bool:
    """Whether the values have the bounds that `bounded` needs."""
    return all(0 <= value <= 1 for value in values)
