"""What these cases can show, and how many would be needed to see more: the sentence of a report.

In: how many cases, what was lost so far. Out: a Power with its sentence. Pure; does not know which
difference matters to the team.
"""

import math

from graftwork.evaluate.statistics import cases_for_difference, detectable_difference
from graftwork.evaluate.statistics.power import USUAL_LOSS_RATE
from graftwork.records.report import Comparison, Power

WISHED_FOR = 0.05
"""The gain that most teams ask about: five points."""
MOST_LOSSES = 0.3
"""Beyond this share of losses the question is no longer how many cases are missing."""


def what_cases_show(
    cases: int,
    *,
    comparison: Comparison | None = None,
    effective: float | None = None,
    asked: float = WISHED_FOR,
    confidence: float = 0.95,
) -> Power:
    """`comparison` tells how often a case gets worse; `effective` what sessions leave of the cases."""
    worth = min(1.0, effective / cases) if effective is not None and cases else 1.0
    loss_rate = _loss_rate(comparison)
    independent = math.floor(cases * worth + 1e-9)
    detectable = detectable_difference(independent, loss_rate=loss_rate, confidence=confidence)
    needed = cases_for_difference(asked, loss_rate=loss_rate, confidence=confidence)
    needed = math.ceil(needed / worth) if worth else needed
    return Power(
        cases=cases,
        detectable=detectable if math.isfinite(detectable) else None,
        asked=asked,
        needed=needed,
        loss_rate=loss_rate,
        sentence=_say(cases, independent, detectable, asked=asked, needed=needed, loss_rate=loss_rate),
    )


def _loss_rate(comparison: Comparison | None) -> float:
    """What was seen, as if one case more had got worse and one had not: none lost of 31 is not never."""
    if comparison is None or not comparison.n:
        return USUAL_LOSS_RATE
    return min(MOST_LOSSES, (comparison.losses + 1) / (comparison.n + 2))


def _say(
    cases: int, independent: int, detectable: float, *, asked: float, needed: int, loss_rate: float
) -> str:
    noun = "case" if cases == 1 else "cases"
    having = f"{cases} {noun}"
    if independent != cases:
        having += f", worth {independent} independent {'one' if independent == 1 else 'ones'},"
    if not math.isfinite(detectable):
        begin = f"{having} cannot show any difference, however large"
    else:
        begin = (
            f"With {having} you can see a difference of {_points(math.ceil(100 * detectable - 1e-9) / 100)}"
        )
    if cases >= needed:
        end = f"a difference of {_points(asked)} needs {_round(needed)}, and these are enough"
    else:
        end = f"to see {_points(asked)} you need about {_round(needed)}"
    return f"{begin}; {end} (in four evaluations of five, if {100 * loss_rate:.0f} % of the cases get worse)."


def _points(share: float) -> str:
    points = f"{100 * share:g}"
    return f"{points} point" if points == "1" else f"{points} points"


def _round(count: int) -> int:
    """Up to two leading digits: 498 cases are about 500."""
    step = int(10 ** max(0, len(str(count)) - 2))
    return math.ceil(count / step) * step
