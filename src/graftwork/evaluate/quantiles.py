"""Medians and percentiles with exact bounds, whatever the distribution.

In: measured values. Out: an interval of which both bounds are measured values, or infinite where the values
are too few to bound anything; and how many would be enough. Pure.
"""

import math
from collections.abc import Sequence

from graftwork.evaluate.statistics import Interval
from graftwork.evaluate.statistics.beta import at_most


def quantile_interval(values: Sequence[float], *, quantile: float, confidence: float) -> Interval:
    """The order statistics between which the quantile lies at this confidence.

    The k-th smallest lies over the quantile unless k or more of the n lie under it. With few values no one
    is high (or low) enough, and the bound is infinite.
    """
    ordered, n, tail = sorted(values), len(values), (1 - confidence) / 2
    above = next((k for k in range(1, n + 1) if at_most(k - 1, n=n, rate=quantile) >= 1 - tail), None)
    under = next((k for k in range(n, 0, -1) if at_most(k - 1, n=n, rate=quantile) <= tail), None)
    low = ordered[under - 1] if under is not None else -math.inf
    high = ordered[above - 1] if above is not None else math.inf
    return Interval(low, high)


def fewest_for_quantile(quantile: float, *, confidence: float) -> int:
    """The fewest values whose largest lies over the quantile at this confidence: 6 for a median at 95 %."""
    return math.ceil(math.log((1 - confidence) / 2) / math.log(quantile) - 1e-9)
