"""Two subjects on the same cases: exact tests, and the interval of the difference.

In: wins and losses, or two lists of scores in the same order. Out: probabilities and bounds. Pure;
does not know what a win is. The one interval that uses a normal quantile is Tango's score
interval, which holds its level at a few dozen pairs.
"""

import math
from statistics import NormalDist

from graftwork.evaluate.statistics.intervals import Interval, Sided, tail_of
from graftwork.evaluate.statistics.search import bisect


def mcnemar(wins: int, *, losses: int, mid_p: bool = False) -> float:
    """The exact two-sided p of as uneven a split of the discordant pairs, were both sides equal.

    `mid_p` counts the split that was seen by half, which is nearer to the level that was asked for and
    may exceed it by a little (Fagerland, Lydersen, Laake, 2013). The gate uses the exact one.
    """
    discordant = wins + losses
    fewer = min(wins, losses)
    splits = total = 1
    for losers in range(fewer):
        splits = splits * (discordant - losers) // (losers + 1)
        total += splits
    ways = 2 * total - (splits if mid_p else 0)
    return min(1.0, ways / (1 << discordant))


def paired_difference(
    wins: float, *, losses: float, n: float, confidence: float = 0.95, sided: Sided = "two"
) -> Interval:
    """Tango's score interval of a difference of two paired rates (Statistics in Medicine, 1998).

    It inverts the test that `n` pairs with `wins` and `losses` come of a true difference d; unlike
    Wald's it does not shrink to nothing when no pair is discordant. Counts need not be whole: parts of
    a win vary less than whole ones, so the interval holds for them too, on the wide side.
    """
    if min(wins, losses) < 0 or wins + losses > n + 1e-9:
        raise ValueError(f"{wins} wins and {losses} losses do not fit in {n} pairs")
    tail = tail_of(confidence, sided)
    if n == 0:
        return Interval(-1.0, 1.0)
    z = NormalDist().inv_cdf(1 - tail)
    seen = (wins - losses) / n
    low, high = -1.0, 1.0
    if sided != "upper" and losses < n:
        low = bisect(lambda d: tango_score(wins, losses, n, d) <= z, -1.0, seen)
    if sided != "lower" and wins < n:
        high = bisect(lambda d: tango_score(wins, losses, n, d) < -z, seen, 1.0)
    return Interval(low, high)


def tango_score(wins: float, losses: float, n: float, difference: float) -> float:
    """How many standard errors the seen difference lies above `difference`."""
    losing = likeliest_loss_rate(wins, losses, n, difference)
    variance = n * (2 * losing + difference * (1 - difference))
    above = wins - losses - n * difference
    if variance <= 0:
        return math.copysign(math.inf, above) if above else 0.0
    return above / math.sqrt(variance)


def likeliest_loss_rate(wins: float, losses: float, n: float, difference: float) -> float:
    """The chance of a loss that fits best, if wins are likelier than losses by just `difference`."""
    b = -wins - losses + (2 * n - wins + losses) * difference
    c = -losses * difference * (1 - difference)
    return (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
