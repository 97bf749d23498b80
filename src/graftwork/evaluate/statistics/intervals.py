"""The exact interval of a rate.

In: successes of n. Out: bounds. Pure; does not know what was counted. No normal approximation
stands in for the binomial here.
"""

import math
from typing import Literal, NamedTuple

from graftwork.evaluate.statistics.beta import incomplete_beta
from graftwork.evaluate.statistics.search import bisect

Sided = Literal["two", "lower", "upper"]


class Interval(NamedTuple):
    low: float
    high: float


def clopper_pearson(
    successes: float, *, n: float, confidence: float = 0.95, sided: Sided = "two"
) -> Interval:
    """The exact interval of a rate. `lower` bounds it from below only, `upper` from above only.

    Counts need not be whole: the sum of grades between 0 and 1 varies less than a count with the same
    mean, so the interval holds for it too, on the wide side.
    """
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie between 0 and n, not {successes} of {n}")
    tail = tail_of(confidence, sided)
    low = 0.0 if sided == "upper" else lower_bound(successes, n, tail)
    high = 1.0 if sided == "lower" else 1 - lower_bound(n - successes, n, tail)
    return Interval(low, high)


def tail_of(confidence: float, sided: Sided) -> float:
    """The chance that each open side of an interval leaves out."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not {confidence}")
    return (1 - confidence) / 2 if sided == "two" else 1 - confidence


def lower_bound(successes: float, n: float, tail: float) -> float:
    """The rate at which `successes` or more of `n` have just the chance `tail`."""
    if successes <= 0:
        return 0.0
    if successes >= n:
        return math.exp(math.log(tail) / n)
    return bisect(lambda p: incomplete_beta(p, a=successes, b=n - successes + 1) > tail, 0.0, 1.0)
