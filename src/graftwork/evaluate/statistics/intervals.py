"""Exact intervals of rates and quantiles, and what they are computed with: bisection, the incomplete beta
function.

Input: successes of n, or measured values. Output: bounds, infinite where the values are too few. Pure; no
normal approximation replaces the binomial here.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

MOST_CASES = 10_000_000
"""A question that needs more cases than this is answered with "no number of cases decides"."""


def bisect(holds: Callable[[float], bool], low: float, high: float, *, steps: int = 80) -> float:
    """The point between `low` and `high` from which on `holds` is true; each step halves the error."""
    for _ in range(steps):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return (low + high) / 2


def first_count(holds: Callable[[int], bool], *, start: int = 1) -> int | None:
    """The smallest count from which on `holds` is true; None beyond `MOST_CASES`.

    `start` is a guess: the nearer, the fewer counts are tried.
    """
    low, high = 0, max(start, 1)
    while not holds(high):
        if high > MOST_CASES:
            return None
        low, high = high, high * 2
    while low == 0 and high > 1 and holds(high // 2):
        high //= 2
    low = max(low, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def incomplete_beta(x: float, *, a: float, b: float) -> float:
    """The regularized incomplete beta function: the chance of a or more successes in a + b - 1."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    # The continued fraction converges fast on one side of the mean; the other side mirrors it.
    if x < (a + 1) / (a + b + 2):
        return front * _beta_fraction(x, a, b) / a
    return 1 - front * _beta_fraction(1 - x, b, a) / b


def at_most(successes: int, *, n: int, rate: float) -> float:
    """The chance of `successes` or fewer of `n`."""
    if successes < 0:
        return 0.0
    if successes >= n:
        return 1.0
    return incomplete_beta(1 - rate, a=n - successes, b=successes + 1)


def exactly(successes: int, *, n: int, rate: float) -> float:
    """The chance of just `successes` of `n`."""
    if not 0 <= successes <= n:
        return 0.0
    if rate <= 0 or rate >= 1:
        return float(successes == (n if rate >= 1 else 0))
    ways = math.lgamma(n + 1) - math.lgamma(successes + 1) - math.lgamma(n - successes + 1)
    return math.exp(ways + successes * math.log(rate) + (n - successes) * math.log1p(-rate))


@lru_cache(maxsize=4096)
def student_quantile(tail: float, *, freedom: float) -> float:
    """The t that Student's distribution exceeds with the chance `tail` (at most one half)."""
    # P(T > t) is half the incomplete beta of f / (f + t²), which falls from 1 to 0 as t grows.
    share = bisect(lambda x: incomplete_beta(x, a=freedom / 2, b=0.5) > 2 * tail, 0.0, 1.0)
    return math.sqrt(freedom * (1 - share) / share) if share > 0 else math.inf


def log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Lentz's evaluation of the continued fraction of the incomplete beta function."""
    tiny = 1e-300
    c = 1.0
    d = 1 / _not_zero(1 - (a + b) * x / (a + 1), tiny)
    total = d
    for m in range(1, 100_000):
        for numerator in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _not_zero(1 + numerator * d, tiny)
            c = _not_zero(1 + numerator / c, tiny)
            total *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return total


def _not_zero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny


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
        raise ValueError(f"successes must be between 0 and n, not {successes} of {n}")
    tail = tail_of(confidence, sided)
    low = 0.0 if sided == "upper" else lower_bound(successes, n, tail)
    high = 1.0 if sided == "lower" else 1 - lower_bound(n - successes, n, tail)
    return Interval(low, high)


def tail_of(confidence: float, sided: Sided) -> float:
    """The chance that each open side of an interval leaves out."""
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must be between 0 and 1, not {confidence}")
    return (1 - confidence) / 2 if sided == "two" else 1 - confidence


def lower_bound(successes: float, n: float, tail: float) -> float:
    """The rate at which `successes` or more of `n` have just the chance `tail`."""
    if successes <= 0:
        return 0.0
    if successes >= n:
        return math.exp(math.log(tail) / n)
    return bisect(lambda p: incomplete_beta(p, a=successes, b=n - successes + 1) > tail, 0.0, 1.0)


def quantile_interval(values: Sequence[float], *, quantile: float, confidence: float) -> Interval:
    """The order statistics that enclose the quantile at this confidence.

    The k-th smallest is above the quantile unless k or more of the n are below it. With few values no one
    is high (or low) enough, and the bound is infinite.
    """
    ordered, n, tail = sorted(values), len(values), (1 - confidence) / 2
    above = next((k for k in range(1, n + 1) if at_most(k - 1, n=n, rate=quantile) >= 1 - tail), None)
    under = next((k for k in range(n, 0, -1) if at_most(k - 1, n=n, rate=quantile) <= tail), None)
    low = ordered[under - 1] if under is not None else -math.inf
    high = ordered[above - 1] if above is not None else math.inf
    return Interval(low, high)


def fewest_for_quantile(quantile: float, *, confidence: float) -> int:
    """The fewest values whose maximum is above the quantile at this confidence: 6 for a median at 95 %."""
    return math.ceil(math.log((1 - confidence) / 2) / math.log(quantile) - 1e-9)
