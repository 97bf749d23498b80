"""Two subjects on the same cases, by wins and losses.

In: wins and losses. Out: probabilities. Pure; does not know what a win is. The interval of the difference is
in `bounded`.
"""

import math


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


def likeliest_loss_rate(wins: float, losses: float, n: float, difference: float) -> float:
    """The chance of a loss that fits best, if wins are likelier than losses by just `difference`."""
    b = -wins - losses + (2 * n - wins + losses) * difference
    c = -losses * difference * (1 - difference)
    return (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
