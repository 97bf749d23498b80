"""What a number of cases can show, and how many would show more.

In: rates, differences, counts of cases. Out: chances and counts. Pure. The power of McNemar's test is
summed over every outcome, not approximated.
"""

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist

from graftwork.evaluate.statistics.beta import at_most, exactly
from graftwork.evaluate.statistics.bounded import Units, approximate_chance, chance_not_positive
from graftwork.evaluate.statistics.intervals import clopper_pearson
from graftwork.evaluate.statistics.search import MOST_CASES, bisect, first_count

USUAL_LOSS_RATE = 0.05
"""One case in twenty gets worse even by a change for the better: what is assumed until losses are seen."""
USUAL_POWER = 0.8
"""What "n cases would settle it" means: in four evaluations of five."""
LUCK = 0.015
FEWEST_DRAWS, MOST_DRAWS, DRAWN_NUMBERS = 200, 400, 10_000
"""Test sets that are drawn to find the power: the fewer, the more kinds of units there are."""
FEW_ENOUGH_TO_SUM = 50_000
"""Beyond so many cases the normal approximation is within one in a hundred of the exact sum."""
NEGLIGIBLE_DEVIATIONS = 9.0
"""Counts of discordant pairs farther than this from their mean have no weight in a sum."""


def units_for_power(
    units: Units, *, limit: float, lowest: float, tail: float, start: int | None = None, seed: int = 0
) -> int | None:
    """How many units like these show that their mean lies above `limit` in four test sets of five.

    A unit is a case, a pair, or a session with all of its cases. Test sets of every size are drawn from the
    units seen, and the test of `bounded` is made on each. None where the mean seen is not above the limit.
    `start` is a guess.
    """
    import numpy as np

    off = [total - limit * size for total, size in zip(units.totals, units.sizes, strict=True)]
    if not off or math.fsum(off) <= 1e-12 * len(off):
        return None
    if limit <= lowest:
        return 1
    kinds = Counter(zip(units.totals, units.sizes, strict=True))
    totals, sizes = (np.array(column, dtype=float) for column in zip(*kinds, strict=True))
    shares = np.array(list(kinds.values()), dtype=float) / len(off)
    draws = 1 if len(kinds) == 1 else max(FEWEST_DRAWS, min(MOST_DRAWS, DRAWN_NUMBERS // len(kinds)))

    def shows(count: int) -> bool:
        drawn = np.random.default_rng(seed).multinomial(count, shares, draws).astype(float)
        added = (drawn @ sizes**2) / (drawn @ sizes)
        weights = np.broadcast_to(totals - limit * sizes, drawn.shape)
        weights = np.column_stack([weights, (lowest - limit) * added])
        # Where nothing varies, one case more or less shows.
        chance = chance_not_positive if draws == 1 else approximate_chance
        chances = chance(weights, np.column_stack([drawn, np.ones(draws)]))
        # The first size that passes is one with lucky draws: without this it would be a little too small.
        return float((chances < tail).mean()) >= (USUAL_POWER + LUCK if draws > 1 else 1.0)

    guess = start or _guess_units(off, worst=(limit - lowest) * units.added_size, tail=tail)
    return first_count(shows, start=guess)


def _guess_units(off: Sequence[float], *, worst: float, tail: float) -> int:
    """Where to start the search: the normal approximation, and the added unit that must be outweighed."""
    count, gain = len(off), math.fsum(off) / len(off)
    spread = math.sqrt(max(math.fsum(x * x for x in off) / count - gain**2, 0.0))
    reach = NormalDist().inv_cdf(1 - tail) + NormalDist().inv_cdf(USUAL_POWER)
    return max(
        1, min(MOST_CASES, math.ceil((reach * spread / gain) ** 2 - math.log(tail) * worst / gain / 2))
    )


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


def mcnemar_power(n: int, *, win_rate: float, loss_rate: float, confidence: float = 0.95) -> float:
    """The chance that `n` pairs show the candidate to be better, by McNemar's exact two-sided test.

    Sums over the number of discordant pairs m, and for each m over the splits that the test rejects.
    Both tails are carried on from m to m + 1, so that a sum takes microseconds a term.
    """
    discordant = win_rate + loss_rate
    if min(win_rate, loss_rate) < 0 or discordant > 1 + 1e-12:
        raise ValueError(f"wins of {win_rate} and losses of {loss_rate} are no shares of one whole")
    if discordant == 0 or n == 0:
        return 0.0
    tail, losing = (1 - confidence) / 2, loss_rate / discordant
    m, last = _likely_counts(n, discordant)
    most = _most_losses(m, tail)
    under_null, beyond = at_most(most, n=m, rate=0.5), at_most(most, n=m, rate=losing)
    weight = exactly(m, n=n, rate=discordant)
    power = 0.0
    while True:
        power += weight * beyond
        if m == last:
            return min(1.0, max(0.0, power))
        # P(X <= k of m + 1) is P(X <= k of m) less the chance that the last pair makes it k + 1.
        under_null -= 0.5 * exactly(most, n=m, rate=0.5)
        beyond -= losing * exactly(most, n=m, rate=losing)
        weight *= discordant / (1 - discordant) * (n - m) / (m + 1)
        m += 1
        if under_null + (more := exactly(most + 1, n=m, rate=0.5)) <= tail:
            most += 1
            under_null += more
            beyond += exactly(most, n=m, rate=losing)


def detectable_difference(
    n: int, *, power: float = 0.8, loss_rate: float = USUAL_LOSS_RATE, confidence: float = 0.95
) -> float:
    """The smallest gain (wins less losses, as a share) that `n` pairs show with the chance `power`.

    `loss_rate` is the share of the cases that get worse all the same. Infinite where no gain would show.
    """
    _check_power(power, loss_rate)
    room = 1 - 2 * loss_rate

    def shows(gain: float) -> bool:
        return (
            mcnemar_power(n, win_rate=loss_rate + gain, loss_rate=loss_rate, confidence=confidence) >= power
        )

    if not shows(room):
        return math.inf
    return bisect(shows, 0.0, room, steps=30)


def cases_for_difference(
    difference: float, *, power: float = 0.8, loss_rate: float = USUAL_LOSS_RATE, confidence: float = 0.95
) -> int:
    """How many pairs show a gain of `difference` (0.05 is 5 points) with the chance `power`."""
    _check_power(power, loss_rate)
    if not 0 < difference <= 1 - 2 * loss_rate + 1e-12:
        raise ValueError(
            f"a difference must lie between 0 and {1 - 2 * loss_rate:g} (0.05 is 5 points), not {difference}"
        )
    win_rate = min(loss_rate + difference, 1 - loss_rate)
    guess = _guess_cases(win_rate, loss_rate, power=power, confidence=confidence)
    if guess > FEW_ENOUGH_TO_SUM:
        return guess
    found = first_count(
        lambda n: mcnemar_power(n, win_rate=win_rate, loss_rate=loss_rate, confidence=confidence) >= power,
        start=guess,
    )
    return found if found is not None else guess


def _guess_cases(win_rate: float, loss_rate: float, *, power: float, confidence: float) -> int:
    """Where to start the search: the normal approximation, with a correction for whole counts."""
    normal = NormalDist()
    discordant, difference = win_rate + loss_rate, win_rate - loss_rate
    reach = normal.inv_cdf((1 + confidence) / 2) * math.sqrt(discordant)
    reach += normal.inv_cdf(power) * math.sqrt(max(discordant - difference**2, 0.0))
    return max(1, math.ceil((reach / difference) ** 2 + 2 / difference))


def _likely_counts(n: int, rate: float) -> tuple[int, int]:
    if rate >= 1 - 1e-12:
        return n, n
    spread = NEGLIGIBLE_DEVIATIONS * math.sqrt(n * rate * (1 - rate)) + NEGLIGIBLE_DEVIATIONS
    return max(0, math.floor(n * rate - spread)), min(n, math.ceil(n * rate + spread))


def _most_losses(discordant: int, tail: float) -> int:
    """The most losses among the discordant pairs that still reject; -1 if none do."""
    fewest = first_count(lambda k: at_most(k - 1, n=discordant, rate=0.5) > tail)
    assert fewest is not None  # at_most reaches 1
    return fewest - 2


def _check_power(power: float, loss_rate: float) -> None:
    if not 0 < power < 1:
        raise ValueError(f"power must lie between 0 and 1, not {power}")
    if not 0 <= loss_rate < 0.5:
        raise ValueError(f"a loss rate must lie between 0 and 0.5, not {loss_rate}")
