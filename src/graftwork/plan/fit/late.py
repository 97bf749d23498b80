"""The chance that a run which began well runs out of memory later, for a batch of long rows. Pure.

In: the lengths of the rows, how many a batch holds, the largest length that fits. Out: a chance. Where only a
sample of the rows is known, a row may be longer than all of them.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from statistics import NormalDist

QUANTILES = tuple((at + 0.5) / 16 for at in range(16))
RANGE_IN_DEVIATIONS = 2.0
"""A stated range is taken for two standard deviations either way."""
LONGEST_TAIL = 2.0
"""How much longer than the longest known row an unknown one may be (guessed)."""


def expected_longest(lengths: Sequence[int], rows: int) -> float:
    """Tokens that each row of a batch is padded to, on average: the longest of `rows` drawn ones."""
    ordered, count = sorted(lengths), len(lengths)
    total, below = 0.0, 0.0
    for at, length in enumerate(ordered, start=1):
        upto = (at / count) ** rows
        total += length * (upto - below)
        below = upto
    return total


def late_chance(
    lengths: Sequence[int],
    *,
    rows_in_run: int,
    rows_at_once: int,
    largest_that_fits: Sequence[float],
) -> float:
    """Chance that some batch passes what fits and the first does not.

    `largest_that_fits` are lengths for equally likely truths: nobody knows the peak to the last byte.
    """
    batches = max(rows_in_run // max(rows_at_once, 1), 1)
    chances = []
    for most in largest_that_fits:
        long = share_above(lengths, most, rows_in_run=rows_in_run)
        first = 1 - (1 - long) ** rows_at_once
        chances.append((1 - first) - (1 - first) ** batches)
    return max(sum(chances) / len(chances), 0.0) if chances else 0.0


def share_above(lengths: Sequence[int], most: float, *, rows_in_run: int) -> float:
    """Share of the rows that are longer than `most`."""
    if len(lengths) == 1:
        return float(lengths[0] > most)
    ordered = sorted(lengths)
    above = len(ordered) - bisect_right(ordered, most)
    if above or len(ordered) >= rows_in_run:
        return above / len(ordered)
    # None of the sample is: by the rule of succession one in so many may be, the less the further off.
    distance = most / max(ordered[-1], 1)
    return 0.0 if distance >= LONGEST_TAIL else (LONGEST_TAIL - distance) / (len(ordered) + 1)


def truths(value: float, *, spread: float) -> tuple[float, ...]:
    """Equally likely values around the stated one."""
    if spread <= 0:
        return (value,)
    normal = NormalDist(value, value * spread / RANGE_IN_DEVIATIONS)
    return tuple(max(normal.inv_cdf(at), 0.0) for at in QUANTILES)


def length_that_fits(*, room: float, floor: float, at_longest: float, longest: int) -> float:
    """Tokens of a row at which the peak meets the room, where memory grows in proportion to them."""
    a_token = (at_longest - floor) / max(longest, 1)
    return math.inf if a_token <= 0 else max((room - floor) / a_token, 0.0)
