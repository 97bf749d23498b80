"""The figure that a rule is applied to, the cases that have no grade, the cases needed to settle it, and how
the gate says all this.

Input: what was measured of a subject, a rule, the session of each case. Output: a Metric with bounds
(infinite where so few measurements give none); ungraded cases, which count against the candidate; counts of
cases for a power of 80 %; rules, differences, reasons and changed rules as sentences. Decides nothing.
"""

import math
from collections.abc import Mapping, Sequence, Set
from statistics import NormalDist, fmean, median, stdev
from typing import NamedTuple

from graftwork.evaluate.comparison import cluster_cases, share_of_look
from graftwork.evaluate.gate.settings import (
    FIGURES,
    REQUESTS,
    TIMED,
    Against,
    GateRule,
    GateSettings,
    Statistic,
)
from graftwork.evaluate.report import make_metric, make_perplexity
from graftwork.evaluate.statistics.intervals import Interval, fewest_for_quantile, quantile_interval
from graftwork.evaluate.statistics.means import Units, bounded_mean, make_units
from graftwork.evaluate.statistics.significance import USUAL_POWER, successes_to_clear, units_for_power
from graftwork.grading.metrics import (
    FIRST_TOKEN,
    JUDGE_PREFERENCE,
    LATENCY,
    LATENCY_P95,
    PERPLEXITY,
    TASK_SUCCESS,
    is_share,
    name_of,
    show,
    show_p,
    show_points,
)
from graftwork.records.report import (
    Comparison,
    Decision,
    Metric,
    Report,
    RuleOutcome,
    RuleResult,
    SubjectReport,
)
from graftwork.text.wording import plural

PERCENTILE = 0.95
MIDDLE = 0.5
FEWEST_FOR_MEAN = 16
SLOWEST = 2.0
"""No bound of a mean of seconds holds for every distribution: one request in a thousand may take an hour.
This one assumes that none takes this many times as long as the slowest of at least `FEWEST_FOR_MEAN`.
"""
NO_BOUNDS = Interval(-math.inf, math.inf)


def figure_of(
    subject: SubjectReport, rule: GateRule, *, sessions: Mapping[str, str] | None = None
) -> Metric | None:
    """Return the figure that the rule applies to; None if it was not measured."""
    metric = measured(subject, rule.metric)
    if metric is None:
        return None
    if rule.metric == PERPLEXITY:
        # Bounded by how far sessions differ, at the confidence that the metric has by now.
        losses = {case: math.log(value) if value else None for case, value in metric.scores.items()}
        recomputed = make_perplexity(losses, confidence=metric.confidence, sessions=sessions or {})
        metric = metric if recomputed is None else _keep_failures(recomputed, metric)
        return metric if (metric.clusters or metric.n) >= fewest_units(metric) else _unbounded(metric)
    if rule.metric not in TIMED:
        return metric
    values = times_of(subject, rule.metric)
    if not values:
        if rule.at not in (None, "median"):
            return None
        return metric if metric.n >= fewest_units(metric) else _unbounded(metric)
    confidence, method = metric.confidence, "exact (order statistics)"
    if rule.at == "p95":
        value, bounds = percentile(values, confidence=confidence)
    elif rule.at == "mean":
        value, bounds, method = fmean(values), NO_BOUNDS, "bounded mean, no request over twice the slowest"
        if len(values) >= fewest_units(metric, at=rule.at):
            bounds = bounded_mean(values, highest=SLOWEST * max(values), confidence=confidence)
    else:
        value, bounds = median(values), quantile_interval(values, quantile=MIDDLE, confidence=confidence)
    low, high = min(bounds.low, value), max(bounds.high, value)
    changed = {"value": value, "low": low, "high": high, "n": len(values), "method": method}
    return metric.model_copy(update=changed)


def at_confidence(report: Report, confidence: float) -> Report:
    """The report with every bound of the candidate at this confidence."""
    metrics = {}
    for name, metric in report.candidate.metrics.items():
        graded = metric.kind != "number" and any(value is not None for value in metric.scores.values())
        if metric.confidence == confidence:
            metrics[name] = metric
        elif graded:
            recomputed = make_metric(
                name,
                scores=metric.scores,
                confidence=confidence,
                sessions=report.sessions,
                scored=metric.kind == "score",
            )
            metrics[name] = _keep_failures(recomputed, metric)
        else:
            metrics[name] = metric.model_copy(update={"confidence": confidence})
    return report.model_copy(update={"candidate": report.candidate.model_copy(update={"metrics": metrics})})


def _keep_failures(again: Metric, before: Metric) -> Metric:
    return again.model_copy(
        update={
            "failed": before.failed,
            "why_failed": before.why_failed,
            "failed_cases": before.failed_cases,
            "vacuous": before.vacuous,
        }
    )


def fewest_units(metric: Metric, *, at: Statistic | None = None) -> int:
    """Return the fewest requests, or sessions, whose interval can reach the confidence of the metric."""
    fewest = fewest_for_quantile(MIDDLE, confidence=metric.confidence)
    return max(fewest, FEWEST_FOR_MEAN) if at == "mean" else fewest


def _unbounded(metric: Metric) -> Metric:
    return metric.model_copy(update=NO_BOUNDS._asdict())


def times_of(subject: SubjectReport, name: str) -> list[float]:
    """The measured times, request by request."""
    generation = subject.generation
    times = {LATENCY: generation.single_latency_seconds, FIRST_TOKEN: generation.first_token_seconds}.get(
        name, ()
    )
    if times:
        return list(times)
    metric = subject.metrics.get(name)
    return [value for value in metric.scores.values() if value is not None] if metric else []


def percentile(values: Sequence[float], *, confidence: float) -> tuple[float, Interval]:
    """The 95th percentile with its exact interval, whatever the distribution."""
    value = sorted(values)[math.ceil(PERCENTILE * len(values)) - 1]
    return value, quantile_interval(values, quantile=PERCENTILE, confidence=confidence)


def times_for_percentile(confidence: float) -> int:
    """Return the fewest requests whose slowest one is above the 95th percentile at this confidence."""
    return fewest_for_quantile(PERCENTILE, confidence=confidence)


def finite(bound: float) -> float | None:
    """JSON has no infinity: an infinite bound is left out."""
    return bound if math.isfinite(bound) else None


def measured(subject: SubjectReport, name: str) -> Metric | None:
    """The metric as the report has it; a range of too few requests does not bound their 95th percentile."""
    slowest = subject.metrics.get(name) if name == LATENCY_P95 else None
    if slowest is not None and slowest.n < times_for_percentile(slowest.confidence):
        return _unbounded(slowest)
    return subject.metrics.get(name)


def find_ungraded(report: Report, name: str) -> frozenset[str]:
    """Cases that should have a grade for the candidate and have none."""
    candidate = report.candidate.metrics.get(name)
    if candidate is None:
        return frozenset()
    graded_by_others: set[str] = set()
    for subject in (report.baseline, *report.others):
        if (metric := subject.metrics.get(name)) is not None:
            graded_by_others |= graded_cases(metric)
    return frozenset((candidate.scores.keys() - graded_cases(candidate)) & graded_by_others).union(
        candidate.failed_cases
    )


def find_ungraded_pairs(report: Report, name: str, *, other: SubjectReport) -> frozenset[str]:
    """Cases on which one of the two should have a grade and has none, or that the judge of the pairs left
    open.
    """
    metrics = [m for subject in (report.candidate, other) if (m := subject.metrics.get(name)) is not None]
    left_out = {case for metric in metrics for case in metric.failed_cases}
    if len(metrics) == 2:
        left_out |= graded_cases(metrics[0]) ^ graded_cases(metrics[1])
    if name == JUDGE_PREFERENCE:
        sides = (other.subject, report.candidate.subject)
        for tally in report.judged:
            left_out |= set(tally.unjudged) if (tally.baseline, tally.candidate) == sides else set()
    return frozenset(left_out)


def never_vacuous(rule: RuleResult, *, report: Report) -> RuleResult:
    """The rule as judged; unknown, with the reason, if no case is of the kind that it is about. "Refuses just
    where the reference does" holds for every model on a log without a refusal, so it proves nothing. A rule
    that fails anyway has failed.
    """
    metric = report.candidate.metrics.get(rule.metric)
    why = metric.vacuous if metric is not None else ""
    if not why or rule.outcome == "fail":
        return rule
    counts = (
        f"{metric.successes} of {metric.n}, but " if metric and metric.n and metric.kind == "rate" else ""
    )
    sentence = f"{name_of(rule.metric)}: {counts}{why}, so nothing is shown by it."
    changed = {"outcome": "unknown", "vacuous": why, "sentence": sentence, "cases_to_decide": None}
    return rule.model_copy(update=changed)


def all_wrong(metric: Metric, cases: Set[str], *, wrong: float, sessions: Mapping[str, str]) -> Metric:
    """Return the metric if every one of these cases had this grade."""
    return make_metric(
        metric.name,
        scores={**metric.scores, **dict.fromkeys(cases, wrong)},
        confidence=metric.confidence,
        sessions=sessions,
        scored=metric.kind == "score",
    )


def graded_cases(metric: Metric) -> set[str]:
    return {case for case, value in metric.scores.items() if value is not None}


RANGE = NormalDist().inv_cdf(0.9)
"""Standard errors on either side of an interval of 80 %."""


class Needed(NamedTuple):
    """Fresh cases like these; `sessions` is 0 if every case is independent. `certain`: no chance is involved,
    since nothing varied. `with_these` is the size of a set that includes these cases; 0 if unknown. `least`
    and `most` are for the ends of an 80 % interval of the observed figure; `most` is None if that includes
    the limit: then it may be noise.
    """

    cases: int
    sessions: int = 0
    with_these: int = 0
    certain: bool = False
    least: int = 0
    most: int | None = 0

    @property
    def fields(self) -> dict[str, int | None]:
        """As a RuleResult holds them."""
        return {
            "cases_to_decide": self.cases,
            "sessions_to_decide": self.sessions or None,
            "cases_with_these": self.with_these or None,
        }


def needed_for_limit(
    rule: GateRule, metric: Metric, *, sessions: Mapping[str, str], look: int
) -> Needed | None:
    """Return the cases after which the bound clears the limit if the figure stays the same; None if none
    suffice.
    """
    sign = 1 if rule.wants_more else -1
    if metric.kind in ("rate", "score"):
        graded = {case: sign * value for case, value in metric.scores.items() if value is not None}
        if graded or metric.successes is None:
            units = make_units(list(graded.values()), cluster_cases(list(graded), sessions=sessions))
        else:
            units = make_units([float(sign)] * metric.successes + [0.0] * (metric.n - metric.successes))
        return needed_for_mean(
            units,
            limit=sign * rule.limit,
            lowest=0.0 if rule.wants_more else -1.0,
            tail=(1 - metric.confidence) / 2,
            look=look,
        )
    if rule.at == "p95" or rule.metric == LATENCY_P95:
        return Needed(max(times_for_percentile(metric.confidence), metric.n + 1))
    if rule.metric in (*TIMED, PERPLEXITY) and metric.n:
        # Where sessions are what counts, as many more cases as it takes to have enough of them.
        fewest = math.ceil(fewest_units(metric, at=rule.at) * metric.n / (metric.clusters or metric.n))
        if fewest > metric.n:
            return Needed(fewest)
    value, bound = sign * metric.value, sign * held_figure(rule, metric)
    tail = (1 - metric.confidence) / 2
    return measurements_for(value, low=bound, beyond=sign * rule.limit, n=metric.n, tail=tail)


def needed_for_mean(
    units: Units | None, *, limit: float, lowest: float = -1.0, tail: float, look: int = 1
) -> Needed | None:
    """Return the cases that show that the mean of units like these is above `limit`; `tail` is that of this
    look.
    """
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
    # The number of cases falls with the square of the distance from the limit. The unit that was not observed
    # counts into the spread, as it does in the test.
    off = [total - limit * size for total, size in zip(units.totals, units.sizes, strict=True)]
    gain = fmean(off)
    reach = RANGE * stdev([*off, (lowest - limit) * units.added_size]) / math.sqrt(len(off))
    return Needed(
        least=math.ceil(fresh * n / count * (gain / (gain + reach)) ** 2),
        most=math.ceil(fresh * n / count * (gain / (gain - reach)) ** 2) if gain > reach else None,
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


def held_figure(rule: GateRule, metric: Metric) -> float:
    return {"lower": metric.low, "upper": metric.high, "value": metric.value}[rule.held_bound]


SUBJECTS: dict[Against, str] = {
    "base": "the base",
    "champion": "the champion",
    "log": "the log's answers",
    "prompt": "the prompted base",
    "logged_prompt": "the base with the logged prompt",
}
WAYS = {"over": "over", "under": "under", "at_least": "at least", "at_most": "at most"}


def way_of(rule: GateRule) -> str:
    return next(way for name, way in WAYS.items() if getattr(rule, name) is not None)


def called(rule: GateRule) -> str:
    """The metric with the statistic that the rule asks for."""
    special = {"mean": "mean", "p95": "95th percentile"}.get(rule.at or "")
    return f"{name_of(rule.metric)} ({special})" if special else name_of(rule.metric)


def write_rule(rule: GateRule) -> str:
    if rule.margin is not None:
        return (
            f"{name_of(rule.metric)} worse than {SUBJECTS[rule.reference]} by less than "
            f"{show_size(rule.metric, rule.margin)}"
        )
    return f"{called(rule)} {way_of(rule)} {show(rule.metric, rule.limit)}"


def show_size(metric: str, size: float) -> str:
    """A difference without its sign: 2 points, 0.5 s."""
    if not is_share(metric):
        return show(metric, size)
    points = f"{100 * size:.3g}"
    return f"{points} point" if points == "1" else f"{points} points"


def show_difference(metric: str, difference: float) -> str:
    if is_share(metric):
        return show_points(difference)
    return f"{'+' if difference >= 0 else '−'}{show(metric, abs(difference))}"


def say_limit(rule: GateRule, metric: Metric, outcome: RuleOutcome, needed: Needed | None) -> str:
    measured_text = show(rule.metric, metric.value)
    if metric.kind == "rate":
        measured_text = f"{metric.successes} of {metric.n} ({measured_text})"
    way, limit = way_of(rule), show(rule.metric, rule.limit)
    if outcome == "fail":
        return f"{called(rule)}: {measured_text}, which is not {way} {limit}."
    bound_value = held_figure(rule, metric)
    bound = (
        f"the {rule.held_bound} bound {show(rule.metric, bound_value)}" if bound_value != metric.value else ""
    )
    if outcome == "pass":
        return f"{called(rule)}: {measured_text}; {bound or 'that'} is {way} {limit}."
    remedy = _say_remedy(rule, metric, needed)
    ending = f"{bound} is not"
    if not math.isfinite(bound_value):
        unit = "request" if rule.metric in REQUESTS else "session" if metric.clusters else "case"
        units = metric.clusters or metric.n
        ending = f"{plural(units, unit)} {'is' if units == 1 else 'are'} too few for a bound"
    if rule.clears(bound_value):
        ending, remedy = "what could not be graded may be wrong", "more must be graded"
    return f"{called(rule)}: {measured_text} is {way} {limit}, but {ending}; {remedy}."


def say_unmeasured(rule: GateRule, ungraded: int) -> str:
    """Explain why there is no figure, as far as known."""
    sentence = f"{called(rule)} was not measured on any case, so nothing can be promised"
    if rule.metric == TASK_SUCCESS and not ungraded:
        sentence += ": no check is about these cases; write what a right answer is under evaluate.checks"
    return f"{sentence}.{say_ungraded(ungraded)}"


def show_range(metric: str, low: float, high: float) -> str:
    """An interval as text; it may be open at either end."""
    if math.isfinite(low) and math.isfinite(high):
        return f"{show(metric, low)} to {show(metric, high)}"
    if math.isfinite(low):
        return f"{show(metric, low)} and more"
    return f"up to {show(metric, high)}" if math.isfinite(high) else "too few to bound it"


def say_counts(comparison: Comparison) -> str:
    """Wins and losses where cases were paired one by one."""
    if comparison.wins + comparison.losses == 0 and comparison.test not in ("", "exact McNemar"):
        return f"{comparison.n} pairs" if comparison.n > 1 else "measured once each"
    if comparison.metric in TIMED:
        return f"{plural(comparison.wins, 'request')} faster and {comparison.losses} slower"
    return f"{plural(comparison.wins, 'case')} won and {comparison.losses} lost"


def say_like_these(comparison: Comparison) -> str:
    """Name what a mean was taken over, which is what it is evidence about."""
    return "sessions like these" if comparison.clusters else "cases like these"


def say_pairs_needed(metric: str, needed: Needed | None) -> str:
    """How many pairs would settle a comparison, and which setting gets them."""
    if not needed:
        return "more must be measured"
    if metric in REQUESTS:
        requests = plural(needed.cases, "timed request")
        return f"about {requests} of both would settle it (evaluate.latency_cases)"
    return say_cases_needed(needed)


def say_cases_needed(needed: Needed) -> str:
    """Fresh cases first; a set that includes these must be larger, because it is looked at again."""
    cases = plural(needed.cases, "fresh case")
    cases += f" in {plural(needed.sessions, 'session')}" if needed.sessions else ""
    cases += " like these"
    if needed.with_these > needed.cases:
        cases += f" (or {needed.with_these:,} with these among them)"
    if needed.certain:
        return f"{cases} would settle it at this rate"
    settle = f"about {cases} would settle it with 80 % power"
    if needed.most is None:
        return f"{settle}, but what was seen may be noise: {needed.least:,} or more, or no number of cases"
    if not needed.most:
        return settle
    return f"{settle} ({needed.least:,} to {needed.most:,}, for so much is known of the figure)"


def say_ungraded(cases: int) -> str:
    """Nothing is known about these cases, so no decision may depend on them."""
    counted = "counts" if cases == 1 else "count"
    return f" {cases} more could not be graded and {counted} against it." if cases else ""


def say_test(comparison: Comparison, *, adjusted: float | None = None) -> str:
    test = comparison.test or "exact McNemar"
    corrected = f", {show_p(adjusted)} after Holm's correction" if adjusted is not None else ""
    return f"{test} {show_p(comparison.p_value)}{corrected}"


def say_reason(
    decision: Decision, rules: Sequence[RuleResult], stops: Sequence[str], *, needed: int | None
) -> str:
    def named(outcome: RuleOutcome) -> str:
        open_ones = [rule for rule in rules if rule.outcome == outcome and rule.must and not rule.vacuous]
        return ", ".join(dict.fromkeys(name_of(rule.metric) for rule in open_ones))

    if decision == "abort":
        first = f"{stops[0][0].upper()}{stops[0][1:]}"
        return f"{first}{'' if len(stops) == 1 else f'; and {len(stops) - 1} more'}."
    if decision == "deploy":
        count = sum(rule.must for rule in rules)
        return f"All {count} rules hold." if count > 1 else "The rule holds."
    if decision == "iterate":
        return f"Not good enough yet: {named('fail')}."
    timed = max((r.cases_to_decide or 0 for r in rules if r.must and r.metric in REQUESTS), default=0)
    settle = [plural(needed, "case")] if needed else []
    settle += [plural(timed, "timed request")] if timed else []
    ending = f" About {' and '.join(settle)} would settle it." if settle else ""
    vacuous = [f"{name_of(rule.metric)} ({rule.vacuous})" for rule in rules if rule.vacuous and rule.must]
    empty = f"no case to judge by: {', '.join(dict.fromkeys(vacuous))}."
    if not named("unknown"):
        return f"Nothing is broken, but {empty}"
    also = f" And {empty}" if vacuous else ""
    return f"Nothing is broken, but too few cases to promise: {named('unknown')}.{ending}{also}"


def say_worn(metrics: Sequence[str], *, look: int, needed: int | None) -> str:
    """Why a verdict stays open on cases that were used before, and what would settle it."""
    names = ", ".join(dict.fromkeys(map(name_of, metrics)))
    fresh = f"about {plural(needed, 'fresh case')}" if needed else "fresh cases"
    return (
        f"Evaluation {look} on the same questions, so the result may be luck: {names}. Confirm it on "
        f"{fresh}, such as captures that were not trained on."
    )


def _say_remedy(rule: GateRule, metric: Metric, needed: Needed | None) -> str:
    """More cases at this rate or, with the existing cases, more of them right."""
    if needed is None:
        end = 1.0 if rule.wants_more else 0.0
        if is_share(rule.metric) and rule.limit == end:
            return (
                f"no number of cases proves {show(rule.metric, end)}: ask for less, or write `bound: value`"
            )
        return "more must be measured"
    if rule.metric in REQUESTS:
        return f"about {plural(needed.cases, 'timed request')} would settle it (evaluate.latency_cases)"
    remedy = say_cases_needed(needed)
    if not rule.wants_more or metric.kind != "rate" or metric.clusters:
        return remedy
    enough = successes_to_clear(metric.n, limit=rule.limit, confidence=metric.confidence)
    return f"{remedy}, or {enough} right of these {metric.n}" if enough else remedy


def describe_change(before: GateSettings, after: GateSettings) -> str:
    """Which rules are gone and which are new; empty if both ask for the same."""
    old, new = _list_rules(before), _list_rules(after)
    gone = [rule for rule in old if rule not in new]
    come = [rule for rule in new if rule not in old]
    parts = [f"no longer {rule}" for rule in gone] + [f"now {rule}" for rule in come]
    return "; ".join(parts)


def _list_rules(settings: GateSettings) -> list[str]:
    lines = []
    for rule in settings.rules:
        invariant = "invariant: " if rule.severity == "invariant" else ""
        counted = f" by its {rule.bound}" if rule.bound else ""
        lines.append(f"{invariant}{write_rule(rule)}{counted}")
    if (primary := settings.primary_rule) is not None:
        lines.append(f"{name_of(primary.metric)} better than {SUBJECTS[primary.against]}")
    if (win := settings.win_rule) is not None:
        lines.append(f"a saving of {100 * win.by:g} % of {name_of(win.metric)} of {SUBJECTS[win.against]}")
    if (stop := settings.abort_when) is not None:
        names = ", ".join(map(name_of, stop.worse_on))
        lines.append(f"abort when worse than {SUBJECTS[stop.against]} on {names} by {stop.by}")
    return lines
