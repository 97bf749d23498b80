"""Cases that hang together: several turns of one session fail or succeed together.

In: numbers and the cluster of each. Out: intervals as wide as the sessions, not the turns, allow. Pure. With
one case a cluster every result here is that of the plain statistic. Bounded values are in `bounded`.

The width comes of the cluster-robust variance with its small-sample factor G / (G - 1) and Student's t
with G - 1 degrees of freedom, G being the number of clusters.
"""

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from graftwork.evaluate.statistics.beta import student_quantile
from graftwork.evaluate.statistics.intervals import Interval, Sided, tail_of
from graftwork.evaluate.statistics.permutation import sum_clusters

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
    """The design effect as seen, moved toward the worst one where the data can hardly tell.

    Whether failures come together shows only in the clusters that have some: one failure among 120
    successes looks independent whatever is true. So the worst case, that a cluster is worth a single
    case, counts as if `UNKNOWN_WEIGHT` clusters had shown it.
    """
    usual = Counter(values).most_common(1)[0][0]
    telling = len({cluster for cluster, value in zip(clusters, values, strict=True) if value != usual})
    return (telling * min(seen, worst) + UNKNOWN_WEIGHT * worst) / (telling + UNKNOWN_WEIGHT)
