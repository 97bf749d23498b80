"""Intervals of means: bounded grades, numbers by resampling, and cluster-robust Student's t.

In: one value per case and its cluster (session). Out: an interval and the name of the method. The same
values and seed give the same interval. Pure. Percentile intervals use the tails of Student's t (Hesterberg,
The American Statistician, 2015); clustered widths use the cluster-robust variance with G / (G - 1) and G -
1 degrees of freedom.
"""

import math
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import NamedTuple

from graftwork.evaluate.statistics.bounded import bounded_difference, bounded_mean
from graftwork.evaluate.statistics.intervals import Interval, Sided, student_quantile, tail_of
from graftwork.evaluate.statistics.significance import sum_clusters

RESAMPLES = 2000


def bootstrap_mean(
    values: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    sided: Sided = "two",
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """The interval of the mean. Clusters are drawn as wholes."""
    if not values:
        raise ValueError("a mean needs at least one value")
    groups: dict[Hashable, list[float]] = {}
    for cluster, value in zip(clusters or range(len(values)), values, strict=True):
        groups.setdefault(cluster, []).append(value)
    parts = [(math.fsum(group), len(group)) for group in groups.values()]
    tail = widened_tail(tail_of(confidence, sided), n=len(parts))
    return _cut(sorted(_resample(parts, random.Random(seed), resamples)), tail=tail, sided=sided)


def widened_tail(tail: float, *, n: int) -> float:
    """The tail at which a percentile interval of `n` values is as wide as Student's."""
    if n < 2:
        return 0.0
    return NormalDist().cdf(-math.sqrt(n / (n - 1)) * student_quantile(tail, freedom=n - 1))


def _resample(parts: Sequence[tuple[float, int]], draw: random.Random, resamples: int) -> list[float]:
    """Means of as many clusters as there are, drawn with replacement."""
    sizes = {size for _, size in parts}
    if len(sizes) == 1:
        # Of equal size: the sums alone are drawn, which is twice as fast.
        whole = sizes.pop() * len(parts)
        sums = [total for total, _ in parts]
        return [sum(draw.choices(sums, k=len(sums))) / whole for _ in range(resamples)]
    drawn = (draw.choices(parts, k=len(parts)) for _ in range(resamples))
    return [sum(total for total, _ in some) / sum(size for _, size in some) for some in drawn]


def _cut(ordered: Sequence[float], *, tail: float, sided: Sided) -> Interval:
    last = len(ordered) - 1
    low = -math.inf if sided == "upper" else ordered[math.floor(tail * last)]
    high = math.inf if sided == "lower" else ordered[math.ceil((1 - tail) * last)]
    return Interval(low, high)


UNKNOWN_WEIGHT = 1.0
"""How many clusters of evidence it takes to outweigh the doubt about how much cases hang together."""


class ClusteredMean(NamedTuple):
    """`effective_n`: so many independent cases would know the mean as well, at this confidence."""

    mean: float
    error: float
    clusters: int
    design_effect: float
    effective_n: float


def mean_difference(
    scores_a: Sequence[float],
    scores_b: Sequence[float],
    clusters: Sequence[Hashable],
    *,
    confidence: float = 0.95,
    sided: Sided = "two",
) -> Interval:
    """The difference of `b` less `a` for any numbers: cluster-robust Student, for hundreds of clusters."""
    differences = [b - a for a, b in zip(scores_a, scores_b, strict=True)]
    tail = tail_of(confidence, sided)
    seen = clustered_mean(differences, clusters, tail=tail)
    if seen.clusters < 2:
        return Interval(-math.inf, math.inf)
    reach = student_quantile(tail, freedom=seen.clusters - 1) * seen.error
    low = -math.inf if sided == "upper" else seen.mean - reach
    high = math.inf if sided == "lower" else seen.mean + reach
    return Interval(low, high)


def clustered_mean(
    values: Sequence[float], clusters: Sequence[Hashable], *, tail: float = 0.025
) -> ClusteredMean:
    """The mean, its cluster-robust standard error, and how many independent cases that is worth."""
    n = len(values)
    mean = math.fsum(values) / n
    residuals = [value - mean for value in values]
    sums = sum_clusters(residuals, clusters)
    count = len(sums)
    if count < 2:
        return ClusteredMean(mean, math.inf, count, float(n), 1.0)
    variance = count / (count - 1) * math.fsum(s * s for s in sums) / n**2
    independent = math.fsum(r * r for r in residuals) / (n - 1) / n
    seen = max(1.0, variance / independent) if independent > 1e-18 else 1.0
    worst = sum(size * size for size in Counter(clusters).values()) / n
    effect = _temper(seen, values, clusters, worst=worst)
    # Few clusters also know their own spread badly: Student's t for them against that for n cases.
    # But even if a cluster is worth a single case, so many cases there are.
    ratio = student_quantile(tail, freedom=n - 1) / student_quantile(tail, freedom=count - 1)
    effective = max(n / worst, n / effect * ratio**2)
    return ClusteredMean(mean, math.sqrt(variance), count, effect, effective)


def _temper(seen: float, values: Sequence[float], clusters: Sequence[Hashable], *, worst: float) -> float:
    """The design effect as seen, moved toward the worst one where the data hardly show it.

    Whether failures come together shows only in the clusters that have some: one failure among 120
    successes looks independent whatever is true. So the worst case, that a cluster is worth a single
    case, counts as if `UNKNOWN_WEIGHT` clusters had shown it.
    """
    usual = Counter(values).most_common(1)[0][0]
    differing = len({cluster for cluster, value in zip(clusters, values, strict=True) if value != usual})
    return (differing * min(seen, worst) + UNKNOWN_WEIGHT * worst) / (differing + UNKNOWN_WEIGHT)


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
