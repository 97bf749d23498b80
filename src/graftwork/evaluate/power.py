"""What these cases can show, and how many would be needed to see more: the sentence of a report.

In: how many cases, what was lost so far. Out: a Power with its sentence. Pure; does not know which
difference matters to the team.
"""

import math

from graftwork.evaluate.statistics.intervals import fewest_for_quantile
from graftwork.evaluate.statistics.significance import (
    USUAL_LOSS_RATE,
    cases_for_difference,
    detectable_difference,
)
from graftwork.grading.metrics import name_of, show_p
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
    worse = (
        comparison is not None and _is_shown(comparison, confidence) and comparison.wins < comparison.losses
    )
    loss_rate = _loss_rate(comparison, worse=worse)
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
        sentence=(
            f"{_say_seen(cases, independent, detectable, comparison=comparison, confidence=confidence)}; "
            f"{_say_needed(cases, asked=asked, needed=needed)} (in four evaluations of five, if "
            f"{100 * loss_rate:.0f} % of the cases {'go the other way' if worse else 'get worse'})."
        ),
    )


def _is_shown(comparison: Comparison | None, confidence: float) -> bool:
    return comparison is not None and bool(comparison.n) and comparison.p_value <= 1 - confidence + 1e-12


def _loss_rate(comparison: Comparison | None, *, worse: bool) -> float:
    """What was seen, as if one case more had got worse and one had not: none lost of 31 is not never.

    Where the candidate is shown to be `worse`, the losses are the difference itself; the wins go against it.
    """
    if comparison is None or not comparison.n:
        return USUAL_LOSS_RATE
    against = comparison.wins if worse else comparison.losses
    return min(MOST_LOSSES, (against + 1) / (comparison.n + 2))


def _say_seen(
    cases: int, independent: int, detectable: float, *, comparison: Comparison | None, confidence: float
) -> str:
    noun = "case" if cases == 1 else "cases"
    having = f"{cases} {noun}"
    if independent != cases:
        having += f", worth {independent} independent {'one' if independent == 1 else 'ones'},"
    if math.isfinite(detectable):
        seen = math.ceil(100 * detectable - 1e-9) / 100
        return f"With {having} you can see a difference of {_points(seen)}"
    if comparison is not None and _is_shown(comparison, confidence):
        name, p = name_of(comparison.metric), show_p(comparison.p_value)
        return f"{having} show the difference in {name} ({p}), and hardly a smaller one"
    fewest = fewest_for_quantile(0.5, confidence=confidence)
    if independent < fewest:
        # What sessions leave of the cases is reckoned on this metric, and may be more on another.
        where = f" in {name_of(comparison.metric)}" if comparison is not None and independent != cases else ""
        return f"{having} cannot show any difference{where}, however large"
    return f"{having} show a difference only if {fewest} or more change, and nearly all the same way"


def _say_needed(cases: int, *, asked: float, needed: int) -> str:
    if cases >= needed:
        return f"a difference of {_points(asked)} needs {_round(needed)}, and these are enough"
    return f"to see {_points(asked)} you need about {_round(needed)}"


def _points(share: float) -> str:
    points = f"{100 * share:g}"
    return f"{points} point" if points == "1" else f"{points} points"


def _round(count: int) -> int:
    """Up to two leading digits: 498 cases are about 500."""
    step = int(10 ** max(0, len(str(count)) - 2))
    return math.ceil(count / step) * step
