"""How many cases would settle what is open.

In: figures and comparisons that leave a rule open. Out: counts for a power of 80 %, at the rates seen so far,
with sessions, corrections and earlier looks at the same cases in them. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import NamedTuple

from graftwork.evaluate.compare import cluster_cases
from graftwork.evaluate.gate.figures import fewest_units, times_for_percentile
from graftwork.evaluate.gate_settings import FIGURES, TIMED, Rule
from graftwork.evaluate.statistics import USUAL_POWER, Units, make_units, units_for_power
from graftwork.evaluate.wear import share_of_look
from graftwork.grading import PERPLEXITY
from graftwork.records.report import Metric, Report
from graftwork.records.verdict import RuleResult


class Needed(NamedTuple):
    """Fresh cases like these; `sessions` is 0 where every case stands alone.

    `certain`: it takes no luck if all goes on like this, for nothing varied. `with_these` is the size of a
    set that holds these cases too; 0 where that is not known.
    """

    cases: int
    sessions: int = 0
    with_these: int = 0
    certain: bool = False

    @property
    def fields(self) -> dict[str, int | None]:
        """As a RuleResult holds them."""
        return {
            "cases_to_decide": self.cases,
            "sessions_to_decide": self.sessions or None,
            "cases_with_these": self.with_these or None,
        }


def needed_for_limit(rule: Rule, metric: Metric, *, sessions: Mapping[str, str], look: int) -> Needed | None:
    """What lets the bound clear the limit if the figure stays as it is; None if nothing does."""
    if metric.kind in ("rate", "score"):
        sign = 1 if rule.wants_more else -1
        return needed_for_mean(
            _units_of(metric, sessions, sign=sign),
            limit=sign * rule.limit,
            lowest=0.0 if rule.wants_more else -1.0,
            tail=(1 - metric.confidence) / 2,
            look=look,
        )
    if rule.at == "p95":
        return Needed(max(times_for_percentile(metric.confidence), metric.n + 1))
    if rule.metric in (*TIMED, PERPLEXITY) and (fewest := _fewest_cases(metric, rule)) > metric.n:
        return Needed(fewest)
    sign = 1 if rule.wants_more else -1
    value, bound = sign * metric.value, sign * _bound(rule, metric)
    tail = (1 - metric.confidence) / 2
    return measurements_for(value, low=bound, beyond=sign * rule.limit, n=metric.n, tail=tail)


def needed_for_mean(
    units: Units | None, *, limit: float, lowest: float = -1.0, tail: float, look: int = 1
) -> Needed | None:
    """What shows that the mean of units like these lies above `limit`; `tail` is that of this look."""
    if units is None or not units.totals:
        return None
    n, count = sum(units.sizes), len(units.sizes)
    fresh_tail = tail / share_of_look(look)
    fresh = units_for_power(units, limit=limit, lowest=lowest, tail=fresh_tail)
    grown_tail = fresh_tail * share_of_look(look + 1)
    grown = units_for_power(units, limit=limit, lowest=lowest, tail=grown_tail, start=2 * (fresh or 0))
    if fresh is None or grown is None:
        return None
    if look == 1:
        # They were too few, whatever a simulation makes of a figure just short of the limit.
        fresh = max(fresh, count + 1)
    grown = max(grown, count + 1)
    return Needed(
        cases=math.ceil(fresh * n / count),
        sessions=fresh if n > count else 0,
        with_these=math.ceil(grown * n / count),
        certain=len(set(zip(units.totals, units.sizes, strict=True))) == 1,
    )


def measurements_for(gain: float, *, low: float, beyond: float, n: int, tail: float) -> Needed | None:
    """Measurements that lift the lower bound of a gain beyond what is asked, with a power of 80 %.

    An interval shrinks with the root of what was measured.
    """
    if n < 2 or gain <= beyond or not math.isfinite(low):
        return None
    reach = NormalDist().inv_cdf(1 - tail)
    widening = (reach + NormalDist().inv_cdf(USUAL_POWER)) / reach if reach > 0 else 1.0
    return Needed(max(n + 1, math.ceil(n * (widening * (gain - low) / (gain - beyond)) ** 2)))


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


def _units_of(metric: Metric, sessions: Mapping[str, str], *, sign: int) -> Units:
    graded = {case: sign * value for case, value in metric.scores.items() if value is not None}
    if not graded and metric.successes is not None:
        return make_units([float(sign)] * metric.successes + [0.0] * (metric.n - metric.successes))
    return make_units(list(graded.values()), cluster_cases(list(graded), sessions=sessions))


def _fewest_cases(metric: Metric, rule: Rule) -> int:
    """Where sessions are what counts, as many more cases as it takes to have enough of them."""
    fewest, units = fewest_units(metric, at=rule.at), metric.clusters or metric.n
    return math.ceil(fewest * metric.n / units) if units else fewest


def _bound(rule: Rule, metric: Metric) -> float:
    return {"lower": metric.low, "upper": metric.high, "value": metric.value}[rule.held_bound]
