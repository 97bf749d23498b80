"""Intervals by resampling, for figures without an exact one: means of graded scores, and of seconds.

In: measured values, and which cluster (session) each belongs to. Out: intervals. The same values and
seed give the same interval. Pure.

A percentile interval of n values is as narrow as if their spread were known; the tails here are
those of Student's t instead (Hesterberg, The American Statistician, 2015, "expanded percentile").
"""

import math
import random
from collections.abc import Hashable, Sequence
from statistics import NormalDist, fmean

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


def studentised_mean(
    values: Sequence[float], *, confidence: float = 0.95, seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """The interval of the mean of skewed values such as seconds: a few long ones say that longer ones exist.

    The percentile interval misses the mean of such values two to five times as often as it promises. Here
    each resample is measured by its own spread (Efron and Tibshirani 1993, chapter 12).
    """
    n = len(values)
    if n < 2:
        return Interval(-math.inf, math.inf)
    mean, draw = fmean(values), random.Random(seed)
    off = [value - mean for value in values]
    spread = math.sqrt(math.fsum(one * one for one in off) / (n - 1))
    if spread == 0:
        return Interval(mean, mean)
    ratios = sorted(_studentise(draw.choices(off, k=n)) for _ in range(resamples))
    found = _cut(ratios, tail=tail_of(confidence, "two"), sided="two")
    a_mean = spread / math.sqrt(n)
    # Of few values a resample may be all one value, and the bound then has no end; or lie within the mean.
    return Interval(min(mean - found.high * a_mean, mean), max(mean - found.low * a_mean, mean))


def _studentise(off: Sequence[float]) -> float:
    """How far the mean of a resample is off, by the resample's own spread."""
    n, total = len(off), sum(off)
    squares = sum(one * one for one in off) - total * total / n
    if squares <= 0:
        return math.copysign(math.inf, total) if total else 0.0
    return total / math.sqrt(n) / math.sqrt(squares / (n - 1))


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
