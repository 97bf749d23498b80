"""Intervals and tests of means: bounded grades, numbers by resampling, and cluster-robust Student's t.

Input: values, the cluster (session) of each, for bounded values the least and the largest that is possible.
Output: the chance of such values if the mean is no higher than a limit, an interval and the name of its
method. The same values and seed give the same interval. Pure.

Bounded values have Gaffke's test (Three test statistics for a nonparametric one-sided hypothesis on the mean
of a nonnegative variable, 2005): add one more unit with the worst possible value, give every unit a random
exponential weight, and take the chance that the weighted mean is no higher than the limit. It assumes only
that units are drawn alike and that their values are bounded. Where nothing but 0 and 1 occurs it is Clopper
and Pearson's exact bound; for wins, losses and ties it is McNemar's exact test. That it holds for every
bounded distribution is conjectured and was never contradicted; `make test-statistics` simulates it where it
is hard.

A cluster is one unit. The added unit is the answer to "what if a session fails as a whole, and none of those
seen did?". It is as large as the session that a case is found in on average.

Percentile intervals use the tails of Student's t (Hesterberg, The American Statistician, 2015); clustered
widths use the cluster-robust variance with G / (G - 1) and G - 1 degrees of freedom.
"""

import math
import random
from collections.abc import Hashable, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, NamedTuple

from graftwork.evaluate.statistics.intervals import Interval, Sided, student_quantile, tail_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array = npt.NDArray[np.float64]

NODES = 40
"""Points of the contour integral: good to six digits from two units on."""
REACH = 6.5
"""How far the contour is followed, in the stretched variable."""
BLOCK = 2_000_000
"""Numbers that are held at a time."""
NEGLIGIBLE = 1e-12
NEWTON_STEPS = 60
SEARCH_STEPS = 60

SADDLE_STEPS = 60
"""Newton's method takes a few; next to a pole the search halves its interval."""

RESAMPLES = 2000

MANY = 2000


class Units(NamedTuple):
    """The sum of each cluster and the number of its cases."""

    totals: list[float]
    sizes: list[int]

    @property
    def added_size(self) -> float:
        """The average size of the session that a case is in: Σ m² / Σ m."""
        return sum(size * size for size in self.sizes) / sum(self.sizes)


def make_units(values: Sequence[float], clusters: Sequence[Hashable] | None = None) -> Units:
    """One unit a cluster, in the order of the first members; without clusters one unit a value."""
    if clusters is None:
        return Units(list(values), [1] * len(values))
    members: dict[Hashable, list[float]] = {}
    for cluster, value in zip(clusters, values, strict=True):
        members.setdefault(cluster, []).append(value)
    return Units([math.fsum(group) for group in members.values()], [len(g) for g in members.values()])


def mean_above(units: Units, limit: float, *, lowest: float = -1.0) -> float:
    """One-sided p of "the mean is above `limit`", for values of at least `lowest`."""
    import numpy as np

    if not units.totals or limit < lowest:
        return 1.0
    return float(means_above(np.array([units.totals]), units.sizes, limit, lowest=lowest)[0])


def means_above(totals: "Array", sizes: Sequence[int], limit: float, *, lowest: float = -1.0) -> "Array":
    """`mean_above` for many sets of units of the same sizes, a row each: what simulations are made of."""
    import numpy as np

    count = np.asarray(sizes, dtype=float)
    weights, added = totals - limit * count, (lowest - limit) * float((count**2).sum() / count.sum())
    kinds, where = np.unique(weights, return_inverse=True)
    if 2 * len(kinds) > totals.shape[1]:
        return chance_not_positive(np.hstack([weights, np.full((len(weights), 1), added)]))
    # Few kinds of units: how many of each kind there are says it all.
    rows = np.arange(len(weights))[:, None] * len(kinds) + where.reshape(weights.shape)
    times = np.bincount(rows.ravel(), minlength=len(weights) * len(kinds)).reshape(len(weights), -1)
    repeated: Array = np.hstack([times, np.ones((len(weights), 1))]).astype(float)
    return chance_not_positive(np.broadcast_to(np.append(kinds, added), repeated.shape), repeated)


def mean_differs(units: Units) -> float:
    """Two-sided p of "the mean is not 0", for values from -1 to 1."""
    mirrored = Units([-total for total in units.totals], units.sizes)
    return min(1.0, 2 * min(mean_above(units, 0.0), mean_above(mirrored, 0.0)))


def bounded_mean(
    values: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    lowest: float = 0.0,
    highest: float = 1.0,
    confidence: float = 0.95,
    sided: Sided = "two",
) -> Interval:
    """The interval of the mean of values from `lowest` to `highest`. Without values it says nothing."""
    tail = tail_of(confidence, sided)
    if not values:
        return Interval(lowest, highest)
    units = make_units(values, clusters)
    low, high = lowest, highest
    if sided != "upper":
        low = _lower_bound(units, lowest=lowest, tail=tail)
    if sided != "lower":
        mirrored = Units([-total for total in units.totals], units.sizes)
        high = -_lower_bound(mirrored, lowest=-highest, tail=tail)
    return Interval(low, high)


def bounded_difference(
    scores_a: Sequence[float],
    scores_b: Sequence[float],
    clusters: Sequence[Hashable] | None = None,
    *,
    confidence: float = 0.95,
) -> Interval:
    """The interval of the mean of `b` less `a`, both graded from 0 to 1."""
    differences = [b - a for a, b in zip(scores_a, scores_b, strict=True)]
    return bounded_mean(differences, clusters, lowest=-1.0, confidence=confidence)


def paired_difference(wins: int, *, losses: int, n: int, sided: Sided = "two") -> Interval:
    """The interval of a difference of two paired rates: wins less losses, as a share of `n` pairs."""
    if min(wins, losses) < 0 or wins + losses > n:
        raise ValueError(f"{wins} wins and {losses} losses do not fit in {n} pairs")
    differences = [1.0] * wins + [-1.0] * losses + [0.0] * (n - wins - losses)
    return bounded_mean(differences, lowest=-1.0, sided=sided)


def chance_not_positive(weights: "Array", counts: "Array | None" = None) -> "Array":
    """For each row, the chance that Σ weight · exponential is not positive; `counts` repeats a weight.

    The distribution function is the inverse Laplace transform of the moment generating function. The line of
    integration runs through its saddle point, where the integrand is positive and falls off fast, so that
    small chances keep their digits.
    """
    import numpy as np

    rows, columns = weights.shape
    chances = np.empty(rows)
    step = max(1, BLOCK // (columns * NODES))
    for start in range(0, rows, step):
        part = slice(start, start + step)
        times = np.ones_like(weights[part]) if counts is None else counts[part].astype(float)
        chances[part] = _integrate(*_only_needed(weights[part], times))
    return chances


def approximate_chance(weights: "Array", counts: "Array") -> "Array":
    """`chance_not_positive` by Lugannani and Rice's formula: good to a hundredth, and many times as fast.

    For simulations that plan how many cases to ask for. Decisions are made by the exact chance.
    """
    import numpy as np

    weights = np.where(counts > 0, weights, 0.0)
    low, high = 1 / np.minimum(weights.min(1), -NEGLIGIBLE), 1 / np.maximum(weights.max(1), NEGLIGIBLE)
    point: Array = np.zeros(len(weights))
    for _ in range(SADDLE_STEPS):
        factors = 1 - weights * point[:, None]
        slope = (counts * weights / factors).sum(1)
        bend = (counts * (weights / factors) ** 2).sum(1)
        low, high = np.where(slope < 0, point, low), np.where(slope < 0, high, point)
        moved = point - slope / bend
        # A search that has arrived stays where it is, though that point is now one of the bounds.
        stays = (moved > low) & (moved < high) | (moved == point)
        moved = np.where(stays, moved, (low + high) / 2)
        arrived = np.abs(moved - point) <= 1e-9 * np.abs(moved)
        point = moved
        if arrived.all():
            break
    factors = 1 - weights * point[:, None]
    bend = (counts * (weights / factors) ** 2).sum(1)
    root = np.sign(point) * np.sqrt(np.maximum(2 * (counts * np.log(factors)).sum(1), 0.0))
    sure = np.abs(root) > 1e-3
    root = np.where(sure, root, 1.0)
    density = np.exp(-(root**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([NormalDist().cdf(value) for value in root.tolist()])
    chance = below + density * (1 / root - 1 / np.where(sure, point * np.sqrt(bend), 1.0))
    # Next to the mean the formula is 0 / 0. Its limit is a half and a term for the skewness.
    spread, skewness = (counts * weights**2).sum(1), (2 * counts * weights**3).sum(1)
    middle = 0.5 + skewness / (6 * math.sqrt(2 * math.pi) * np.maximum(spread, NEGLIGIBLE) ** 1.5)
    return np.where(sure, np.clip(chance, 0.0, 1.0), np.clip(middle, 0.0, 1.0))


def _only_needed(weights: "Array", times: "Array") -> "tuple[Array, Array]":
    """Equal weights of a single row counted together: grades repeat, and a sum over kinds is faster."""
    import numpy as np

    if len(weights) != 1:
        return weights, times
    kinds, where = np.unique(weights[0], return_inverse=True)
    repeated: Array = np.bincount(where.ravel(), weights=times[0]).astype(float)
    return kinds[None, :], repeated[None, :]


def _integrate(weights: "Array", times: "Array") -> "Array":
    import numpy as np

    # A weight that is negligible next to the largest counts as none.
    scale = np.abs(np.where(times > 0, weights, 0.0)).max(1)
    weights = np.where((times > 0) & (np.abs(weights) > NEGLIGIBLE * scale[:, None]), weights, 0.0)
    # Of the two tails the smaller one is computed, so that no digits are lost.
    mirrored = (weights * times).sum(1) < 0
    signed = np.where(mirrored[:, None], -weights, weights)
    always, never = signed.max(1) <= 0, signed.min(1) >= 0
    ordinary = ~(always | never)
    chances = np.where(always, 1.0, 0.0)
    if ordinary.any():
        unit = signed[ordinary] / scale[ordinary, None]
        chances[ordinary] = _tail(unit, times[ordinary])
    # A sum that is 0 for certain counts as not positive, from whichever side it is seen.
    nothing = scale == 0
    return np.where(nothing, 1.0, np.where(mirrored, 1 - chances, chances))


def _tail(weights: "Array", times: "Array") -> "Array":
    import numpy as np

    saddle = _find_saddle(weights, times)
    factors = 1 - weights * saddle[:, None]
    curvature = (times * (weights / factors) ** 2).sum(1) + 1 / saddle**2
    height = -(times * np.log(factors)).sum(1) - np.log(-saddle)
    width = 1 / np.sqrt(curvature)
    stretched = (np.arange(NODES) + 0.5) * (REACH / NODES)
    heights = width[:, None] * np.sinh(stretched)
    point = saddle[:, None] + 1j * heights
    logs = np.log(1 - weights[:, :, None] * point[:, None, :])
    integrand = np.exp(-(times[:, :, None] * logs).sum(1) - np.log(-point) - height[:, None]).real
    area = (integrand * width[:, None] * np.cosh(stretched)).sum(1) * (REACH / NODES) / np.pi
    chance: Array = np.clip(area * np.exp(height), 0.0, 1.0)
    return chance


def _find_saddle(weights: "Array", times: "Array") -> "Array":
    """Where the integrand on the negative axis is least: Newton's steps, halved where they lead outside."""
    import numpy as np

    lowest: Array = 1 / weights.min(1)
    low, high = lowest.copy(), np.zeros(len(weights))
    point: Array = lowest / 2
    for _ in range(NEWTON_STEPS):
        factors = 1 - weights * point[:, None]
        slope = (times * weights / factors).sum(1) - 1 / point
        bend = (times * (weights / factors) ** 2).sum(1) + 1 / point**2
        low, high = np.where(slope < 0, point, low), np.where(slope < 0, high, point)
        moved: Array = point - slope / bend
        # A search that has arrived stays where it is, though that point is now one of the bounds.
        moved = np.where((moved > low) & (moved < high) | (moved == point), moved, (low + high) / 2)
        # Next to a pole the steps are short however far the saddle is: the slope must have vanished too.
        near = np.abs(moved - point) <= 1e-4 * np.abs(point)
        if np.all(near & (np.abs(slope) <= 0.1 * np.sqrt(bend))):
            return moved
        point = moved
    return point


def _lower_bound(units: Units, *, lowest: float, tail: float) -> float:
    """The limit at which the p of "the mean is above it" is just `tail`."""
    mean = math.fsum(units.totals) / sum(units.sizes)
    if mean <= lowest:
        return lowest

    def off(limit: float) -> float:
        return math.log(max(mean_above(units, limit, lowest=lowest), 1e-300) / tail)

    low, high = lowest, mean
    off_low, off_high = -690.0, off(mean)
    if off_high <= 0:
        return mean
    # Regula falsi with Illinois' halving: p rises with the limit, smoothly.
    last_side = 0
    for _ in range(SEARCH_STEPS):
        middle = (
            (low + high) / 2 if off_low < -50 else (low * off_high - high * off_low) / (off_high - off_low)
        )
        value = off(middle)
        if abs(value) < 1e-9 or high - low < 1e-12:
            return middle
        if value < 0:
            low, off_low = middle, value
            off_high, last_side = (off_high / 2, -1) if last_side == -1 else (off_high, -1)
        else:
            high, off_high = middle, value
            off_low, last_side = (off_low / 2, 1) if last_side == 1 else (off_low, 1)
    return low


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
        means = [sum(total for total, _ in sample) / sum(size for _, size in sample) for sample in draws]
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
    cluster_ids = list(range(len(values)) if clusters is None else clusters)
    if from_0_to_1(values):
        interval = bounded_mean(values, clusters, confidence=confidence)
        return Estimate(interval, "bounded mean")
    if len(values) > MANY:
        zeros = [0.0] * len(values)
        interval = mean_difference(zeros, values, cluster_ids, confidence=confidence)
        return Estimate(interval, "Student's t")
    interval = bootstrap_mean(values, clusters=cluster_ids, confidence=confidence)
    return Estimate(interval, "bootstrap")


def score_difference(
    a: Sequence[float],
    b: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    confidence: float = 0.95,
) -> Estimate:
    """The interval of the mean of `b` less `a`, pair by pair."""
    cluster_ids = list(range(len(a)) if clusters is None else clusters)
    if from_0_to_1(a) and from_0_to_1(b):
        interval = bounded_difference(a, b, clusters, confidence=confidence)
        return Estimate(interval, "bounded mean")
    if len(a) > MANY:
        return Estimate(mean_difference(a, b, cluster_ids, confidence=confidence), "Student's t")
    differences = [new - old for old, new in zip(a, b, strict=True)]
    interval = bootstrap_mean(differences, clusters=cluster_ids, confidence=confidence)
    return Estimate(interval, "bootstrap")


def from_0_to_1(values: Sequence[float]) -> bool:
    """Whether the values have the bounds that `bounded_mean` needs."""
    return all(0 <= value <= 1 for value in values)


def sum_clusters(values: Sequence[float], clusters: Sequence[Hashable] | None) -> list[float]:
    """One sum a cluster, in the order of their first member."""
    if clusters is None:
        return list(values)
    members: dict[Hashable, list[float]] = {}
    for cluster, value in zip(clusters, values, strict=True):
        members.setdefault(cluster, []).append(value)
    return [math.fsum(group) for group in members.values()]
