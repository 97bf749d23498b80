"""The incomplete beta function, and what follows from it: binomial tails and Student's quantile.

In: plain numbers. Out: probabilities and quantiles. Pure; does not know what they are used for.
"""

import math
from functools import lru_cache

from graftwork.evaluate.statistics.search import bisect


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
