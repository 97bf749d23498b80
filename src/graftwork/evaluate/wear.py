"""How far a test set that was used to choose can still be trusted.

In: how many candidates were measured on the same cases, what the last comparison lost. Out: a Wear with
its sentence. Pure; does not know who looked.

Who measures k candidates and keeps the best one has asked k times whether chance is kind. By
Bonferroni's bound the promise of a 95 % interval is then worth 100 % less k times 5 %, and a gain must
have a p of at most 5 % / k to be beyond chance. This holds where candidates were made without knowing
the answers of the test; where each was tuned by what the last report showed, even less is left.
"""

from graftwork.evaluate.statistics import mcnemar
from graftwork.evaluate.wording import plural
from graftwork.records.report import Comparison, Report, Wear

WORN = 0.5
"""From this chance on that some candidate would pass by luck alone, the test set is called worn out."""


def wear_of(report: Report, *, candidates: int) -> Wear:
    """`candidates` counts this report's own; the gain is that of the metric named first."""
    first = next((c for c in report.comparisons if c.n and _is_graded(report, c)), None)
    confidence = report.candidate.metrics[first.metric].confidence if first else 0.95
    return tell_wear(report.looks, candidates=candidates, comparison=first, confidence=confidence)


def tell_wear(
    looks: int, *, candidates: int, comparison: Comparison | None = None, confidence: float = 0.95
) -> Wear:
    tried = max(1, min(candidates, looks))
    alpha = 1 - confidence
    n, losses = (comparison.n, comparison.losses) if comparison is not None else (0, 0)
    chance_gain = gain_beyond_chance(n, losses=losses, alpha=alpha / tried)
    worn = tried > 1 and tried * alpha >= WORN - 1e-9
    left = max(0.0, 1 - tried * alpha)
    return Wear(
        looks=looks,
        candidates=tried,
        confidence=left,
        chance_gain=chance_gain,
        fresh_gain=gain_beyond_chance(n, losses=losses, alpha=alpha),
        metric=comparison.metric if comparison is not None else "",
        worn=worn,
        sentence=_say(looks, tried, chance_gain, left=left, confidence=confidence, n=n, worn=worn),
    )


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
    looks: int, tried: int, gain: float | None, *, left: float, confidence: float, n: int, worn: bool
) -> str:
    times = "once" if looks == 1 else f"{looks} times"
    begin = f"This test set was looked at {times}"
    if looks > 1:
        begin += f", with {tried} different candidates" if tried > 1 else ", always with the same candidate"
    if tried == 1:
        return f"{begin}."
    if n and gain is None:
        chance = f"no gain on {plural(n, 'case')} is beyond chance any more"
    elif gain is not None:
        chance = f"a gain under {_points(gain)} may be chance"
    else:
        chance = "the best of them may be the luckiest"
    promise = f"together, the {100 * confidence:g} % of one interval are worth at least {100 * left:.0f} %"
    if left <= 0:
        promise = f"the {100 * confidence:g} % of one interval promise nothing together"
    advice = " It is worn out: hold out new rows." if worn else ""
    return f"{begin}; {chance}, and {promise}.{advice}"


def _points(share: float) -> str:
    value = f"{100 * share:.1f}".removesuffix(".0")
    return f"{value} point{'' if value == '1' else 's'}"
