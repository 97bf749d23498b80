"""A small search over settings by successive halving: which are tried, on how many rows, and who goes on.

In: the values to try and a budget. Out: the settings of each trial, and rungs: of each rung's trials, the
best by validation loss go on to the next, on more rows. Pure. Does not know how a trial is trained.
"""

import math
import random
from collections.abc import Callable, Sequence
from itertools import product
from typing import NamedTuple

from graftwork.records.base import Record

KEEP_ONE_OF = 3
"""Of so many trials of a rung, one goes on; it gets so many times the rows."""
FEWEST_TRIALS = 2


class SweepSettings(Record):
    """What a trial changes."""

    learning_rate: float
    rank: int
    batch_size: int

    def describe(self) -> str:
        return f"learning rate {self.learning_rate:g}, rank {self.rank}, batch {self.batch_size}"


class Rung(Record):
    """`trials` settings are trained on `rows` rows each."""

    trials: int
    rows: int


class SearchSpace(NamedTuple):
    learning_rates: tuple[float, ...]
    ranks: tuple[int, ...]
    batch_size: tuple[int, ...]


def default_space(now: SweepSettings) -> SearchSpace:
    """A third and three times the rate, half and twice the rank, half the batch."""
    return SearchSpace(
        # Two digits: more would pretend to a precision that a search has not.
        tuple(min(float(f"{now.learning_rate * factor:.2g}"), 1.0) for factor in (1 / 3, 1.0, 3.0)),
        tuple(dict.fromkeys((max(now.rank // 2, 1), now.rank, min(now.rank * 2, 512)))),
        tuple(dict.fromkeys((max(now.batch_size // 2, 1), now.batch_size))),
    )


def choose_trials(
    space: SearchSpace, now: SweepSettings, *, most: int, seed: int
) -> tuple[SweepSettings, ...]:
    """The present settings first, then as many others of the space, drawn by the seed."""
    every = [
        SweepSettings(learning_rate=rate, rank=rank, batch_size=rows) for rate, rank, rows in product(*space)
    ]
    others = [settings for settings in dict.fromkeys(every) if settings != now]
    random.Random(f"{seed}/sweep").shuffle(others)
    return (now, *others[: max(most - 1, 0)])


def count_rungs(trials: int) -> tuple[int, ...]:
    """How many trials each rung has: all of them, a third, a ninth … down to one."""
    counts = [trials]
    while counts[-1] > 1:
        counts.append(math.ceil(counts[-1] / KEEP_ONE_OF))
    return tuple(counts)


def plan_rungs(
    trials: int, *, rows: int, least: int, budget: float, cost: Callable[[int], float]
) -> tuple[Rung, ...]:
    """The rungs that the budget pays for; fewer trials where it is small, none where it is too small.

    `rows` is what a whole run trains on, `least` the fewest rows that say anything, `cost` the price of a
    trial by its rows, in the unit of the budget.
    """
    for count in range(trials, FEWEST_TRIALS - 1, -1):
        counts = count_rungs(count)
        first = _largest_first(counts, rows=rows, least=least, budget=budget, cost=cost)
        if first is not None:
            return _join_whole(_rungs(counts, first, rows), rows)
    return ()


def _rungs(counts: Sequence[int], first: int, rows: int) -> tuple[Rung, ...]:
    return tuple(
        Rung(trials=count, rows=min(first * KEEP_ONE_OF**at, rows)) for at, count in enumerate(counts)
    )


def _join_whole(rungs: tuple[Rung, ...], rows: int) -> tuple[Rung, ...]:
    """Once trials see every row, another rung would train the same again."""
    whole = next((at for at, rung in enumerate(rungs) if rung.rows == rows), len(rungs) - 1)
    return rungs[: whole + 1]


def _largest_first(
    counts: Sequence[int], *, rows: int, least: int, budget: float, cost: Callable[[int], float]
) -> int | None:
    """The most rows of the first rung that the budget allows, by bisection; None if not even `least`."""

    def price(first: int) -> float:
        return sum(rung.trials * cost(rung.rows) for rung in _join_whole(_rungs(counts, first, rows), rows))

    low, high = min(least, rows), rows
    if price(low) > budget:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if price(middle) <= budget else (low, middle - 1)
    return low


def advance(losses: Sequence[tuple[SweepSettings, float]], count: int) -> tuple[SweepSettings, ...]:
    """The `count` best by loss; of equal ones, those that were tried first."""
    return tuple(settings for settings, _ in sorted(losses, key=lambda pair: pair[1])[:count])
