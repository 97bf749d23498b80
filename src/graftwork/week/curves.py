"""Fit diminishing returns to the losses of a run.

In: hours of training and the loss at each. Out: hours until half of what the run could gain was gained, or
None where the losses do not show it.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import StatisticsError, fmean, linear_regression, median
from typing import NamedTuple

FEWEST_POINTS = 6
GRID = 60
BINS = 16


class FittedCurve(NamedTuple):
    half_hours: float
    explained: float
    """Share of the variance of the losses that the curve explains."""


def bin_losses(hours: Sequence[float], losses: Sequence[float]) -> list[tuple[float, float]]:
    """Means of consecutive steps: single losses are noise."""
    count = len(hours)
    edges = [round(number * count / BINS) for number in range(BINS + 1)]
    return [(fmean(hours[a:b]), fmean(losses[a:b])) for a, b in pairwise(edges) if b > a]


def fit_curve(points: Sequence[tuple[float, float]]) -> FittedCurve | None:
    """Least squares for `floor + drop * 2 ** (-hours / half)`; the drop must be a drop."""
    usable = [(h, loss) for h, loss in points if math.isfinite(h) and math.isfinite(loss)]
    if len(usable) < FEWEST_POINTS:
        return None
    span = max(h for h, _ in usable) - min(h for h, _ in usable)
    mean = fmean(loss for _, loss in usable)
    spread = sum((loss - mean) ** 2 for _, loss in usable)
    if span <= 0 or spread <= 0:
        return None
    losses = [loss for _, loss in usable]
    best: FittedCurve | None = None
    for number in range(GRID):
        half = span / 20 * 200 ** (number / (GRID - 1))
        fractions = [2 ** (-h / half) for h, _ in usable]
        try:
            slope, base = linear_regression(fractions, losses)
        except StatisticsError:
            continue
        if slope > 0:
            error = sum((y - base - slope * x) ** 2 for x, y in zip(fractions, losses, strict=True))
            if best is None or 1 - error / spread > best.explained:
                best = FittedCurve(half, 1 - error / spread)
    return best


def combine(curves: Sequence[FittedCurve], *, least: float = 0.5) -> float | None:
    """The median of runs whose curve explains at least half of what is seen."""
    good = [curve.half_hours for curve in curves if curve.explained >= least]
    return median(good) if good else None
