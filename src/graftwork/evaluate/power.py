"""What the cases can show, and what is left of that after repeated use of the same test set.

In: how many cases, what was lost so far, how often the questions were used to choose a candidate. Out: a
Power and a Wear with their sentences, and the confidence that bounds must have at this use. Pure.

Measuring k candidates and keeping the best gives chance k tries. So the error that a gate may make is
spread over the uses of a test set: all of it at the first, and a quarter more over all that follow. A later
result has to be clearer.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist

from graftwork.evaluate.comparison import cluster_cases, differences_of
from graftwork.evaluate.statistics.bounded import bounded_mean
from graftwork.evaluate.statistics.intervals import fewest_for_quantile
from graftwork.evaluate.statistics.significance import (
    USUAL_LOSS_RATE,
    USUAL_POWER,
    cases_for_difference,
    detectable_difference,
    mcnemar,
)
from graftwork.grading.metrics import name_of, show_p
from graftwork.records.report import Comparison, Power, Report, Wear
from graftwork.text.wording import plural

USUAL_GAIN = 0.05
"""The gain that most teams ask about: five points."""
MOST_LOSSES = 0.3
"""Beyond this share of losses the question is no longer how many cases are missing."""


def what_cases_show(
    cases: int,
    *,
    comparison: Comparison | None = None,
    effective: float | None = None,
    confidence: float = 0.95,
) -> Power:
    """`comparison` shows how often a case gets worse; `effective` what sessions leave of the cases."""
    worth = min(1.0, effective / cases) if effective is not None and cases else 1.0
    worse = (
        comparison is not None and _is_shown(comparison, confidence) and comparison.wins < comparison.losses
    )
    loss_rate = USUAL_LOSS_RATE
    if comparison is not None and comparison.n:
        # What was seen, as if one case more had got worse and one had not: none lost of 31 is not never.
        # Where the candidate is shown to be worse, the losses are the difference itself, and the wins go
        # against it.
        against = comparison.wins if worse else comparison.losses
        loss_rate = min(MOST_LOSSES, (against + 1) / (comparison.n + 2))
    independent = math.floor(cases * worth + 1e-9)
    detectable = detectable_difference(independent, loss_rate=loss_rate, confidence=confidence)
    needed = cases_for_difference(USUAL_GAIN, loss_rate=loss_rate, confidence=confidence)
    needed = math.ceil(needed / worth) if worth else needed
    # Up to two leading digits: 498 cases are about 500.
    step = int(10 ** max(0, len(str(needed)) - 2))
    rounded = math.ceil(needed / step) * step
    gain = _points(USUAL_GAIN)
    enough = f"to see {gain} you need about {rounded}"
    if cases >= needed:
        enough = f"a difference of {gain} needs {rounded}, and these are enough"
    return Power(
        cases=cases,
        detectable=detectable if math.isfinite(detectable) else None,
        asked=USUAL_GAIN,
        needed=needed,
        loss_rate=loss_rate,
        sentence=(
            f"{_say_seen(cases, independent, detectable, comparison=comparison, confidence=confidence)}; "
            f"{enough} (with 80 % power, if "
            f"{100 * loss_rate:.0f} % of the cases {'go the other way' if worse else 'get worse'})."
        ),
    )


def _is_shown(comparison: Comparison | None, confidence: float) -> bool:
    return comparison is not None and bool(comparison.n) and comparison.p_value <= 1 - confidence + 1e-12


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
        # What sessions leave of the cases is computed on this metric, and may be more on another.
        where = f" in {name_of(comparison.metric)}" if comparison is not None and independent != cases else ""
        return f"{having} cannot show any difference{where}, however large"
    return f"{having} show a difference only if {fewest} or more change, and nearly all the same way"


def _points(share: float) -> str:
    points = f"{100 * share:g}"
    return f"{points} point" if points == "1" else f"{points} points"


LATER_LOOKS = 0.25
"""The error that all looks after the first share, as a part of what the first one may spend."""
WORN = 2.0
"""From so many times the cases of a fresh set on, a set is called worn out."""


def share_of_look(look: int) -> float:
    """The part of the error that a look at the same cases may spend: all of it first, then less and less.

    The k-th look gets a quarter of 1 / (k (k - 1)), which adds up to a quarter. So the chance of a false
    result is at most 1.25 times that of a single look, however often a set is looked at.
    """
    return 1.0 if look <= 1 else LATER_LOOKS / (look * (look - 1))


def confidence_at(confidence: float, *, look: int) -> float:
    """The confidence that a bound must have at this look."""
    return 1 - (1 - confidence) * share_of_look(look)


def look_of(report: Report) -> int:
    """Which look at its questions a report is."""
    return 1 if report.wear is None else max(1, report.wear.look or report.wear.candidates)


def wear_of(report: Report, *, candidates: int, look: int) -> Wear:
    """`candidates` counts this report's own; the gain is that of the metric named first."""
    metrics = report.candidate.metrics
    rates = {name for name, metric in metrics.items() if metric.kind == "rate"}
    first = next((c for c in report.comparisons if c.n and c.metric in rates), None)
    confidence = metrics[first.metric].confidence if first else 0.95
    steps: Mapping[str, float] = {}
    subjects = {subject.subject: subject for subject in (report.baseline, *report.others)}
    if first is not None and first.clusters and first.baseline in subjects:
        steps = differences_of(subjects[first.baseline], candidate=report.candidate, metric=first.metric)
    clusters = cluster_cases(list(steps), sessions=report.sessions)
    return describe_wear(
        report.looks,
        candidates=candidates,
        look=look,
        comparison=first,
        confidence=confidence,
        differences=list(steps.values()),
        clusters=clusters,
    )


def describe_wear(
    looks: int,
    *,
    candidates: int,
    look: int,
    comparison: Comparison | None = None,
    confidence: float = 0.95,
    differences: Sequence[float] = (),
    clusters: Sequence[str] | None = None,
) -> Wear:
    """`differences` and `clusters` are those of the comparison, where sessions hold several cases."""

    def beyond(at: int) -> float | None:
        needed = confidence_at(confidence, look=at)
        if clusters is not None:
            low = bounded_mean(differences, clusters, lowest=-1.0, confidence=needed).low
            return sum(differences) / len(differences) - low
        n, losses = (comparison.n, comparison.losses) if comparison is not None else (0, 0)
        return gain_beyond_chance(n, losses=losses, alpha=1 - needed)

    chance_gain, times_more = beyond(look), more_cases(look, confidence=confidence)
    sentence = f"This test set was looked at {'once' if looks == 1 else f'{looks} times'}"
    if look <= 1:
        sentence += ", always with the same candidate." if looks > 1 else "."
    else:
        chance = "the best candidate may be the luckiest"
        if chance_gain is not None:
            points = f"{100 * chance_gain:.1f}".removesuffix(".0")
            chance = f"a gain under {points} point{'' if points == '1' else 's'} may be chance"
        elif comparison is not None and comparison.n:
            chance = f"no gain on {plural(comparison.n, 'case')} is beyond chance any more"
        cost = f"it takes {times_more:.1f} times as many cases as a fresh set"
        advice = " It is worn out: hold out new rows." if times_more >= WORN else ""
        sentence += f", and this is evaluation {look} on its questions; {chance}, and {cost}.{advice}"
    return Wear(
        looks=looks,
        candidates=max(1, min(candidates, looks)),
        look=look,
        confidence=confidence_at(confidence, look=look),
        chance_gain=chance_gain,
        fresh_gain=beyond(1),
        metric=comparison.metric if comparison is not None else "",
        worn=times_more >= WORN,
        sentence=sentence,
    )


def more_cases(look: int, *, confidence: float = 0.95) -> float:
    """How many times the cases of a fresh set a look takes for the same power, about."""
    reach = NormalDist().inv_cdf(USUAL_POWER)
    fresh, now = (NormalDist().inv_cdf((1 + confidence_at(confidence, look=k)) / 2) for k in (1, look))
    return ((now + reach) / (fresh + reach)) ** 2


def gain_beyond_chance(n: int, *, losses: int, alpha: float) -> float | None:
    """The smallest gain on n pairs with so many losses whose exact McNemar p is at most alpha."""
    for wins in range(losses + 1, n - losses + 1):
        if mcnemar(wins, losses=losses) <= alpha:
            return (wins - losses) / n
    return None
