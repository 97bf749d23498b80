"""How many cases would settle what is open.

In: figures and comparisons that leave a rule open. Out: counts, at the rates seen so far. Pure.
"""

import math
from collections.abc import Sequence

from graftwork.evaluate.gate.figures import fewest_units, times_for_percentile
from graftwork.evaluate.gate_settings import FIGURES, TIMED, Rule
from graftwork.evaluate.metrics import PERPLEXITY
from graftwork.evaluate.statistics import (
    cases_to_decide,
    clopper_pearson,
    paired_difference,
    pairs_for_margin,
    pairs_to_decide,
)
from graftwork.records.report import Comparison, Metric, Report
from graftwork.records.verdict import RuleResult


def cases_for_limit(rule: Rule, metric: Metric) -> int | None:
    """Cases that let the bound clear the limit if the figure stays as it is; None if none do."""
    if metric.kind == "rate":
        rate, limit = (metric.value, rule.limit) if rule.wants_more else (1 - metric.value, 1 - rule.limit)
        return _clustered(cases_to_decide(rate, limit=limit, confidence=metric.confidence), metric)
    if rule.at == "p95":
        return max(times_for_percentile(metric.confidence), metric.n + 1)
    if rule.metric in (*TIMED, PERPLEXITY) and (fewest := _fewest_cases(metric, rule)) > metric.n:
        return fewest
    sign = 1 if rule.wants_more else -1
    value, bound = sign * metric.value, sign * _bound(rule, metric)
    return measurements_for(value, low=bound, beyond=sign * rule.limit, n=metric.n)


def pairs_for_guardrail(seen: Comparison, *, margin: float, confidence: float) -> int | None:
    """Pairs that prove the margin if wins and losses go on like this; None if none do."""
    if not seen.n or seen.wins + seen.losses > seen.n or not 0 < margin < 1:
        return None
    needed = pairs_for_margin(
        seen.wins / seen.n, loss_rate=seen.losses / seen.n, margin=margin, confidence=confidence
    )
    return None if needed is None else max(seen.n + 1, math.ceil(needed * _widening(seen, confidence)))


def pairs_for_gain(seen: Comparison, *, confidence: float) -> int | None:
    """Pairs that prove the gain if wins and losses go on like this; None if none do."""
    if not seen.n or seen.wins <= seen.losses:
        return None
    needed = pairs_to_decide(seen.wins / seen.n, loss_rate=seen.losses / seen.n, confidence=confidence)
    return None if needed is None else max(seen.n + 1, math.ceil(needed * _widening(seen, confidence)))


def measurements_for(gain: float, *, low: float, beyond: float, n: int) -> int | None:
    """Measurements that lift the lower bound of a gain beyond what is asked, if the gain stays as it is.

    An interval shrinks with the root of what was measured.
    """
    if n < 2 or gain <= beyond or not math.isfinite(low):
        return None
    return max(n + 1, math.ceil(n * ((gain - low) / (gain - beyond)) ** 2))


def count_cases_needed(report: Report, rules: Sequence[RuleResult]) -> int | None:
    """How many cases would settle every open rule; a metric that applies to half needs twice as many."""
    factors = []
    for rule in rules:
        if rule.outcome != "unknown" or not rule.cases_to_decide or not rule.must:
            continue
        counted = rule.metric not in FIGURES or rule.metric == PERPLEXITY
        if not counted or rule.n is None or rule.n < 1:
            # Requests that are timed one by one are another count than the cases.
            continue
        factors.append(rule.cases_to_decide / rule.n)
    return math.ceil(max(factors) * report.cases) if factors else None


def _fewest_cases(metric: Metric, rule: Rule) -> int:
    """Where sessions are what counts, as many more cases as it takes to have enough of them."""
    fewest, units = fewest_units(metric, at=rule.at), metric.clusters or metric.n
    return math.ceil(fewest * metric.n / units) if units else fewest


def _bound(rule: Rule, metric: Metric) -> float:
    return {"lower": metric.low, "upper": metric.high, "value": metric.value}[rule.held_bound]


def _clustered(needed: int | None, metric: Metric) -> int | None:
    """More of them where cases of one session say much the same."""
    if needed is None or not metric.clusters or metric.successes is None:
        return needed
    alone = clopper_pearson(metric.successes, n=metric.n, confidence=metric.confidence)
    narrow, wide = alone.high - alone.low, metric.high - metric.low
    return max(metric.n + 1, math.ceil(needed * max(1.0, (wide / narrow) ** 2))) if narrow else needed


def _widening(seen: Comparison, confidence: float) -> float:
    if not seen.clusters or seen.wins + seen.losses > seen.n:
        return 1.0
    alone = paired_difference(seen.wins, losses=seen.losses, n=seen.n, confidence=confidence)
    narrow, wide = alone.high - alone.low, seen.high - seen.low
    return max(1.0, (wide / narrow) ** 2) if narrow else 1.0
