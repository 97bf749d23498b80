"""How far a test set that was used to choose can still be trusted.

In: which look at the same questions this is, what the comparison shows. Out: a Wear with its sentence, and
the confidence that bounds must have at this look. Pure; does not know who looked.

Who measures k candidates and keeps the best one has asked k times whether chance is kind. So the error that a
gate may make is spent over the looks: all of it at the first, and a quarter more over all that follow. A
result at a later look has to be clearer. Where the cases are too few for that, fresh ones are asked for.
"""

from collections.abc import Mapping, Sequence
from statistics import NormalDist

from graftwork.evaluate.compare import cluster_cases, differences_of
from graftwork.evaluate.statistics.bounded import bounded_mean
from graftwork.evaluate.statistics.significance import USUAL_POWER, mcnemar
from graftwork.grading.metrics import plural
from graftwork.records.report import Comparison, Report, Wear

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
    """Which look at its questions a report is. Older ones counted the candidates on just the same cases."""
    return 1 if report.wear is None else max(1, report.wear.look or report.wear.candidates)


def wear_of(report: Report, *, candidates: int, look: int) -> Wear:
    """`candidates` counts this report's own; the gain is that of the metric named first."""
    first = next((c for c in report.comparisons if c.n and _is_graded(report, c)), None)
    confidence = report.candidate.metrics[first.metric].confidence if first else 0.95
    steps: Mapping[str, float] = {}
    subjects = {one.subject: one for one in (report.baseline, *report.others)}
    if first is not None and first.clusters and first.baseline in subjects:
        steps = differences_of(subjects[first.baseline], candidate=report.candidate, metric=first.metric)
    clusters = cluster_cases(list(steps), sessions=report.sessions)
    return tell_wear(
        report.looks,
        candidates=candidates,
        look=look,
        comparison=first,
        confidence=confidence,
        differences=list(steps.values()),
        clusters=clusters,
    )


def tell_wear(
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

    chance_gain = beyond(look)
    return Wear(
        looks=looks,
        candidates=max(1, min(candidates, looks)),
        look=look,
        confidence=confidence_at(confidence, look=look),
        chance_gain=chance_gain,
        fresh_gain=beyond(1),
        metric=comparison.metric if comparison is not None else "",
        worn=more_cases(look, confidence=confidence) >= WORN,
        sentence=_say(looks, look, chance_gain, confidence=confidence, comparison=comparison),
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


def _is_graded(report: Report, comparison: Comparison) -> bool:
    metric = report.candidate.metrics.get(comparison.metric)
    return metric is not None and metric.kind == "rate"


def _say(
    looks: int, look: int, gain: float | None, *, confidence: float, comparison: Comparison | None
) -> str:
    times = "once" if looks == 1 else f"{looks} times"
    begin = f"This test set was looked at {times}"
    if look <= 1:
        return f"{begin}{', always with the same candidate' if looks > 1 else ''}."
    n = comparison.n if comparison is not None else 0
    if n and gain is None:
        chance = f"no gain on {plural(n, 'case')} is beyond chance any more"
    elif gain is not None:
        chance = f"a gain under {_points(gain)} may be chance"
    else:
        chance = "the best candidate may be the luckiest"
    times_more = more_cases(look, confidence=confidence)
    cost = f"it takes {times_more:.1f} times as many cases as a fresh set"
    advice = " It is worn out: hold out new rows." if times_more >= WORN else ""
    return f"{begin}, and this is look {look} at its questions; {chance}, and {cost}.{advice}"


def _points(share: float) -> str:
    value = f"{100 * share:.1f}".removesuffix(".0")
    return f"{value} point{'' if value == '1' else 's'}"
