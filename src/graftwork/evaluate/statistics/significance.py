"""Tests and their power: McNemar's exact test, sign flips, Holm's correction, cases needed.

Input: wins and losses, paired scores with their clusters, or p values. Output: probabilities and counts.
Pure. Sign flips are exact where feasible, else seeded and random; the power of McNemar's test is summed over
every outcome.
"""

import math
import random
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from statistics import NormalDist

from graftwork.evaluate.statistics.intervals import (
    MOST_CASES,
    at_most,
    bisect,
    clopper_pearson,
    exactly,
    first_count,
)
from graftwork.evaluate.statistics.means import Units, approximate_chance, chance_not_positive, sum_clusters


def mcnemar(wins: int, *, losses: int) -> float:
    """The exact two-sided p of as uneven a split of the discordant pairs, were both sides equal."""
    discordant = wins + losses
    fewer = min(wins, losses)
    splits = total = 1
    for losers in range(fewer):
        splits = splits * (discordant - losers) // (losers + 1)
        total += splits
    return min(1.0, 2 * total / (1 << discordant))


EXACT_FLIPS = 32
"""This many differences can be flipped in every way: two halves of 2^16 sums each."""
EXACT_STEPS = 2_000_000
"""Limit on the work of an exact count of sums on a grid."""
FINEST_GRID = 60
"""Averages of up to six repeats are multiples of 1/60."""
RANDOM_FLIPS = 10_000
MANY_FLIPS = 1000
"""From here on the sum of all flips is closer to normal than random flips are."""


def paired_permutation(
    a: Sequence[float],
    b: Sequence[float],
    *,
    clusters: Sequence[Hashable] | None = None,
    resamples: int = RANDOM_FLIPS,
) -> float:
    """The chance of as large a mean difference between `a` and `b` if they were equal."""
    sums = sum_clusters([new - old for old, new in zip(a, b, strict=True)], clusters)
    scale = max(map(abs, sums), default=0.0)
    steps = [abs(s) for s in sums if abs(s) > 1e-12 * scale]
    if not steps:
        return 1.0
    observed = abs(math.fsum(sums))
    grid = _on_grid(steps)
    if grid is not None:
        return _flip_on_grid(grid, round(observed * sum(grid) / math.fsum(steps)))
    reached = observed - 1e-9 * scale
    if len(steps) <= EXACT_FLIPS:
        return _flip_every_way(steps, reached)
    if len(steps) > MANY_FLIPS:
        return 2 * NormalDist().cdf(-observed / math.sqrt(math.fsum(step * step for step in steps)))
    return _flip_at_random(steps, reached, resamples=resamples)


def _on_grid(steps: Sequence[float]) -> list[int] | None:
    """The steps as whole numbers of a common fraction, if there is a coarse one and it is worth it."""
    for parts in range(1, FINEST_GRID + 1):
        if all(abs(step * parts - round(step * parts)) < 1e-9 for step in steps):
            whole = [round(step * parts) for step in steps]
            return whole if 2 * sum(whole) * len(whole) <= EXACT_STEPS else None
    return None


def _flip_on_grid(steps: Sequence[int], observed: int) -> float:
    """Counts the flips that lead to each sum, one step after another."""
    ways = {0: 1}
    for step in steps:
        after: dict[int, int] = {}
        for total, count in ways.items():
            after[total + step] = after.get(total + step, 0) + count
            after[total - step] = after.get(total - step, 0) + count
        ways = after
    far = sum(count for total, count in ways.items() if abs(total) >= observed)
    return far / (1 << len(steps))


def _flip_every_way(steps: Sequence[float], reached: float) -> float:
    """All sign flips of both halves; the sorted sums of one are merged with those of the other."""
    if reached <= 0:
        return 1.0
    left_sums, right_sums = _all_sums(steps[::2]), _all_sums(steps[1::2])
    far, start = 0, len(right_sums)
    for total in left_sums:
        # The larger the sum of the left half, the smaller a sum of the right half will do.
        while start and total + right_sums[start - 1] >= reached:
            start -= 1
        far += len(right_sums) - start
    # For every flip that reaches so far up, its mirror image reaches as far down.
    return min(1.0, 2 * far / (1 << len(steps)))


def _all_sums(steps: Sequence[float]) -> list[float]:
    sums = [0.0]
    for step in steps:
        sums = sorted([total - step for total in sums] + [total + step for total in sums])
    return sums


def _flip_at_random(steps: Sequence[float], reached: float, *, resamples: int) -> float:
    """What was seen counts as one of the flips, so that p is never 0 (Phipson and Smyth, 2010)."""
    # Eight steps at a time: a random byte picks one of their 256 sums.
    tables = [_all_sums(steps[i : i + 8]) for i in range(0, len(steps), 8)]
    tables = [table * (256 // len(table)) for table in tables]
    draw = random.Random(0)
    far = 0
    for _ in range(resamples):
        total = sum(table[byte] for table, byte in zip(tables, draw.randbytes(len(tables)), strict=True))
        far += abs(total) >= reached
    return (far + 1) / (resamples + 1)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p (Scandinavian Journal of Statistics, 1979), in the order of the names given.

    Those under alpha can all be called differences, with a chance of at most alpha that any one of
    them is none, however the tests hang together.
    """
    ranked = sorted(p_values, key=lambda name: p_values[name])
    adjusted: dict[str, float] = {}
    so_far = 0.0
    for rank, name in enumerate(ranked):
        so_far = max(so_far, min(1.0, (len(ranked) - rank) * p_values[name]))
        adjusted[name] = so_far
    return {name: adjusted[name] for name in p_values}


USUAL_LOSS_RATE = 0.05
"""One case in twenty gets worse even by a change for the better: what is assumed until losses are seen."""
USUAL_POWER = 0.8
"""What "n cases would settle it" means: in four evaluations of five."""
LUCK = 0.015
FEWEST_DRAWS, MOST_DRAWS, DRAWN_NUMBERS = 200, 400, 10_000
"""Test sets that are drawn to find the power: the fewer, the more kinds of units there are."""
FEW_ENOUGH_TO_SUM = 50_000
"""Beyond this many cases the normal approximation is within one in a hundred of the exact sum."""
NEGLIGIBLE_DEVIATIONS = 9.0
"""Counts of discordant pairs farther than this from their mean have no weight in a sum."""


def units_for_power(
    units: Units, *, limit: float, lowest: float, tail: float, start: int | None = None
) -> int | None:
    """How many units like these show that their mean is above `limit` in four test sets of five.

    A unit is a case, a pair, or a session with all of its cases. Test sets of every size are drawn from the
    units seen, and the test of `mean_above` is made on each. None if the mean seen is not above the limit.
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
        drawn = np.random.default_rng(0).multinomial(count, shares, draws).astype(float)
        added = (drawn @ sizes**2) / (drawn @ sizes)
        weights = np.broadcast_to(totals - limit * sizes, drawn.shape)
        weights = np.column_stack([weights, (lowest - limit) * added])
        # Where nothing varies, one case more or less shows.
        chance = chance_not_positive if draws == 1 else approximate_chance
        chances = chance(weights, np.column_stack([drawn, np.ones(draws)]))
        # The first size that passes is one with lucky draws: without this it would be a little too small.
        return float((chances < tail).mean()) >= (USUAL_POWER + LUCK if draws > 1 else 1.0)

    if start:
        return first_count(shows, start=start)
    # The search starts at the normal approximation, with the added unit that must be outweighed.
    gain, worst = math.fsum(off) / len(off), (limit - lowest) * units.added_size
    spread = math.sqrt(max(math.fsum(x * x for x in off) / len(off) - gain**2, 0.0))
    reach = NormalDist().inv_cdf(1 - tail) + NormalDist().inv_cdf(USUAL_POWER)
    guess = math.ceil((reach * spread / gain) ** 2 - math.log(tail) * worst / gain / 2)
    return first_count(shows, start=max(1, min(MOST_CASES, guess)))


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
        raise ValueError(f"wins of {win_rate} and losses of {loss_rate} are not shares of one whole")
    if discordant == 0 or n == 0:
        return 0.0
    tail, losing = (1 - confidence) / 2, loss_rate / discordant
    m = last = n
    if discordant < 1 - 1e-12:
        # Counts of discordant pairs far from their mean have no weight.
        spread = NEGLIGIBLE_DEVIATIONS * (math.sqrt(n * discordant * (1 - discordant)) + 1)
        m, last = max(0, math.floor(n * discordant - spread)), min(n, math.ceil(n * discordant + spread))
    first_kept = first_count(lambda k: at_most(k - 1, n=m, rate=0.5) > tail)
    assert first_kept is not None  # at_most reaches 1
    most = first_kept - 2  # the most losses among the discordant pairs that still reject; -1 if none do
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
        if under_null + (next_chance := exactly(most + 1, n=m, rate=0.5)) <= tail:
            most += 1
            under_null += next_chance
            beyond += exactly(most, n=m, rate=losing)


def detectable_difference(n: int, *, loss_rate: float = USUAL_LOSS_RATE, confidence: float = 0.95) -> float:
    """The smallest gain (wins less losses, as a share) that `n` pairs show with the usual power.

    `loss_rate` is the share of the cases that get worse anyway. Infinite where no gain would show.
    """
    _check_loss_rate(loss_rate)
    room = 1 - 2 * loss_rate

    def shows(gain: float) -> bool:
        power = mcnemar_power(n, win_rate=loss_rate + gain, loss_rate=loss_rate, confidence=confidence)
        return power >= USUAL_POWER

    if not shows(room):
        return math.inf
    return bisect(shows, 0.0, room, steps=30)


def cases_for_difference(
    difference: float, *, loss_rate: float = USUAL_LOSS_RATE, confidence: float = 0.95
) -> int:
    """How many pairs show a gain of `difference` (0.05 is 5 points) with the usual power."""
    _check_loss_rate(loss_rate)
    if not 0 < difference <= 1 - 2 * loss_rate + 1e-12:
        raise ValueError(
            f"a difference must be between 0 and {1 - 2 * loss_rate:g} (0.05 is 5 points), not {difference}"
        )
    win_rate = min(loss_rate + difference, 1 - loss_rate)
    # The search starts at the normal approximation, with a correction for whole counts.
    normal, discordant, gain = NormalDist(), win_rate + loss_rate, win_rate - loss_rate
    reach = normal.inv_cdf((1 + confidence) / 2) * math.sqrt(discordant)
    reach += normal.inv_cdf(USUAL_POWER) * math.sqrt(max(discordant - gain**2, 0.0))
    guess = max(1, math.ceil((reach / gain) ** 2 + 2 / gain))
    if guess > FEW_ENOUGH_TO_SUM:
        return guess

    def shows(n: int) -> bool:
        power = mcnemar_power(n, win_rate=win_rate, loss_rate=loss_rate, confidence=confidence)
        return power >= USUAL_POWER

    return first_count(shows, start=guess) or guess


def _check_loss_rate(loss_rate: float) -> None:
    if not 0 <= loss_rate < 0.5:
        raise ValueError(f"a loss rate must be between 0 and 0.5, not {loss_rate}")
