"""Not worse by more than a margin that was set beforehand.

In: wins, losses, pairs, the margin. Out: whether it is proven. Pure; does not know who set the margin.
"""

from typing import NamedTuple

from graftwork.evaluate.statistics.bounded import make_units, mean_above, paired_difference


class NonInferiority(NamedTuple):
    """`bound` is the least difference that the pairs still allow; proven if it lies above `-margin`."""

    non_inferior: bool
    bound: float
    margin: float
    difference: float
    p_value: float


def non_inferior(
    wins: int, losses: int, n: int, *, margin: float, confidence: float = 0.95
) -> NonInferiority:
    """The one-sided test that the candidate loses less than `margin` (a share: 0.05 is 5 points).

    A win is a pair that only the candidate got right. Without pairs nothing is proven.
    """
    if not 0 < margin < 1:
        raise ValueError(f"a margin must lie between 0 and 1 (0.05 is 5 points), not {margin}")
    if n <= 0:
        return NonInferiority(non_inferior=False, bound=-1.0, margin=margin, difference=0.0, p_value=1.0)
    bound = paired_difference(wins, losses=losses, n=n, confidence=confidence, sided="lower").low
    units = make_units([1.0] * wins + [-1.0] * losses + [0.0] * (n - wins - losses))
    return NonInferiority(
        non_inferior=bound > -margin,
        bound=bound,
        margin=margin,
        difference=(wins - losses) / n,
        p_value=mean_above(units, -margin),
    )
