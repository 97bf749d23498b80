"""Small samples told straight: exact intervals, exact paired tests, and how many cases decide.

In: counts, rates, measured numbers. Out: intervals and probabilities. Pure; does not know what was
counted. No normal approximation stands in for a binomial here; the one interval that uses a normal
quantile is Tango's score interval, which holds its level at a few dozen pairs.
"""

import math
import random
from collections.abc import Callable, Sequence
from statistics import NormalDist, median
from typing import Literal, NamedTuple

Sided = Literal["two", "lower", "upper"]

MOST_CASES = 10_000_000
"""A question that needs more cases than this is answered with "no number of cases decides"."""


class Interval(NamedTuple):
    low: float
    high: float


def clopper_pearson(successes: int, *, n: int, confidence: float = 0.95, sided: Sided = "two") -> Interval:
    """The exact interval of a rate. `lower` bounds it from below only, `upper` from above only."""
    if not 0 <= successes <= n:
        raise ValueError(f"successes must lie between 0 and n, not {successes} of {n}")
    tail = _tail(confidence, sided)
    low = 0.0 if sided == "upper" else _lower_bound(successes, n, tail)
    high = 1.0 if sided == "lower" else 1 - _lower_bound(n - successes, n, tail)
    return Interval(low, high)


def mcnemar(wins: int, *, losses: int) -> float:
    """The exact two-sided p of as uneven a split of the discordant pairs, were both sides equal."""
    discordant = wins + losses
    ways = sum(math.comb(discordant, k) for k in range(min(wins, losses) + 1))
    return min(1.0, 2 * ways / (1 << discordant))


def paired_difference(
    wins: int, *, losses: int, n: int, confidence: float = 0.95, sided: Sided = "two"
) -> Interval:
    """Tango's score interval of a difference of two paired rates (Statistics in Medicine, 1998).

    It inverts the test that `n` pairs with `wins` and `losses` come of a true difference d; unlike
    Wald's it does not shrink to nothing when no pair is discordant.
    """
    if min(wins, losses) < 0 or wins + losses > n:
        raise ValueError(f"{wins} wins and {losses} losses do not fit in {n} pairs")
    if n == 0:
        return Interval(-1.0, 1.0)
    z = NormalDist().inv_cdf(1 - _tail(confidence, sided))
    seen = (wins - losses) / n
    low, high = -1.0, 1.0
    if sided != "upper" and losses < n:
        low = _bisect(lambda d: _tango_score(wins, losses, n, d) <= z, -1.0, seen)
    if sided != "lower" and wins < n:
        high = _bisect(lambda d: _tango_score(wins, losses, n, d) < -z, seen, 1.0)
    return Interval(low, high)


def bootstrap_median(
    values: Sequence[float], *, confidence: float = 0.95, seed: int = 0, resamples: int = 2000
) -> Interval:
    """The percentile interval of the median. The same values and seed give the same interval."""
    if not values:
        raise ValueError("a median needs at least one value")
    draw = random.Random(seed)
    medians = sorted(median(draw.choices(values, k=len(values))) for _ in range(resamples))
    tail = (1 - confidence) / 2
    last = resamples - 1
    return Interval(medians[math.floor(tail * last)], medians[math.ceil((1 - tail) * last)])


def cases_to_decide(
    rate: float, *, limit: float, confidence: float = 0.95, sided: Sided = "two"
) -> int | None:
    """How many cases let the lower bound clear `limit` if the observed rate goes on; None if none do."""
    if rate <= limit:
        return None
    tail = _tail(confidence, sided)
    return _first_count(lambda n: _lower_bound(rate * n, n, tail) > limit)


def successes_to_clear(n: int, *, limit: float, confidence: float = 0.95) -> int | None:
    """The fewest of `n` that put the lower bound over `limit`; None if even all of them do not."""
    if n < 1 or clopper_pearson(n, n=n, confidence=confidence).low <= limit:
        return None
    low, high = 0, n
    while high - low > 1:
        middle = (low + high) // 2
        clears = clopper_pearson(middle, n=n, confidence=confidence).low > limit
        low, high = (low, middle) if clears else (middle, high)
    return high


def pairs_to_decide(win_rate: float, *, loss_rate: float, confidence: float = 0.95) -> int | None:
    """How many pairs make McNemar's test decide if the observed rates go on; None if none do."""
    if win_rate <= loss_rate:
        return None
    alpha = 1 - confidence

    def decided(n: int) -> bool:
        # Real-valued counts keep this monotone; the binomial tail at 1/2 is an incomplete beta.
        wins, losses = win_rate * n, loss_rate * n
        return 2 * incomplete_beta(0.5, a=wins, b=losses + 1) < alpha

    return _first_count(decided)


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


def _tail(confidence: float, sided: Sided) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, not {confidence}")
    return (1 - confidence) / 2 if sided == "two" else 1 - confidence


def _lower_bound(successes: float, n: int, tail: float) -> float:
    """The rate at which `successes` or more of `n` have just the chance `tail`."""
    if successes <= 0:
        return 0.0
    if successes >= n:
        return math.exp(math.log(tail) / n)
    return _bisect(lambda p: incomplete_beta(p, a=successes, b=n - successes + 1) > tail, 0.0, 1.0)


def _tango_score(wins: int, losses: int, n: int, difference: float) -> float:
    """How many standard errors the seen difference lies above `difference`."""
    b = -wins - losses + (2 * n - wins + losses) * difference
    c = -losses * difference * (1 - difference)
    losing = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
    variance = n * (2 * losing + difference * (1 - difference))
    above = wins - losses - n * difference
    if variance <= 0:
        return math.copysign(math.inf, above) if above else 0.0
    return above / math.sqrt(variance)


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The point between `low` and `high` from which on `holds` is true."""
    for _ in range(80):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return (low + high) / 2


def _first_count(holds: Callable[[int], bool]) -> int | None:
    """The smallest count from which on `holds` is true; None beyond `MOST_CASES`."""
    high = 1
    while not holds(high):
        if high > MOST_CASES:
            return None
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


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
