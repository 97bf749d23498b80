"""Intervals by resampling, for means of numbers without bounds.

In: measured values, and which cluster (session) each belongs to. Out: intervals. The same values and
seed give the same interval. Pure.

A percentile interval of n values is as narrow as if their spread were known; the tails here are
those of Student's t instead (Hesterberg, The American Statistician, 2015, "expanded percentile").
"""

import math
import random
from collections.abc import Hashable, Sequence
from statistics import NormalDist

from graftwork.evaluate.statistics.beta import student_quantile
from graftwork.evaluate.statistics.intervals import Interval, Sided, tail_of

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
