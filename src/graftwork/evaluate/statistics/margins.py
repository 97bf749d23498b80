"""Not worse by more than a margin that was set beforehand.

In: wins, losses, pairs, the margin. Out: whether it is proven, and how many pairs would prove it.
Pure; does not know who set the margin or when.
"""

from statistics import NormalDist
from typing import NamedTuple

from graftwork.evaluate.statistics.paired import paired_difference, tango_score
from graftwork.evaluate.statistics.search import first_count


class NonInferiority(NamedTuple):
    """`bound` is the least difference that the pairs still allow; proven if it lies above `-margin`."""

    non_inferior: bool
    bound: float
    margin: float
    difference: float
    p_value: float


def non_inferior(
    wins: float, losses: float, n: float, *, margin: float, confidence: float = 0.95
) -> NonInferiority:
    """Tango's one-sided test that the candidate loses less than `margin` (a share: 0.05 is 5 points).

    A win is a pair that only the candidate got right. Without pairs nothing is proven.
    """
    _check_margin(margin)
    if n <= 0:
        return NonInferiority(non_inferior=False, bound=-1.0, margin=margin, difference=0.0, p_value=1.0)
    bound = paired_difference(wins, losses=losses, n=n, confidence=confidence, sided="lower").low
    return NonInferiority(
        non_inferior=bound > -margin,
        bound=bound,
        margin=margin,
        difference=(wins - losses) / n,
        p_value=1 - NormalDist().cdf(tango_score(wins, losses, n, -margin)),
    )


def pairs_for_margin(
    win_rate: float, *, loss_rate: float, margin: float, confidence: float = 0.95
) -> int | None:
    """How many pairs prove non-inferiority if the observed rates go on; None if none do."""
    _check_margin(margin)
    if win_rate - loss_rate <= -margin:
        return None
    z = NormalDist().inv_cdf(confidence)
    return first_count(lambda n: tango_score(win_rate * n, loss_rate * n, n, -margin) > z)


def _check_margin(margin: float) -> None:
    if not 0 < margin < 1:
        raise ValueError(f"a margin must lie between 0 and 1 (0.05 is 5 points), not {margin}")
