"""What the gate says: rules, differences and reasons in plain words.

In: rules, figures, outcomes. Out: sentences. Pure; decides nothing.
"""

import math
from collections.abc import Sequence

from graftwork.evaluate.gate_settings import TIMED, Against, Rule
from graftwork.evaluate.statistics import successes_to_clear
from graftwork.evaluate.wording import is_share, name_of, show, show_p, show_points
from graftwork.records.report import Comparison, Metric
from graftwork.records.verdict import Decision, RuleOutcome, RuleResult

SUBJECTS: dict[Against, str] = {"base": "the base", "champion": "the champion", "log": "the log's answers"}
WAYS = {"over": "over", "under": "under", "at_least": "at least", "at_most": "at most"}


def way_of(rule: Rule) -> str:
    return next(words for name, words in WAYS.items() if getattr(rule, name) is not None)


def called(rule: Rule) -> str:
    """The metric with the statistic that the rule asks for."""
    special = {"mean": "mean", "p95": "95th percentile"}.get(rule.at or "")
    return f"{name_of(rule.metric)} ({special})" if special else name_of(rule.metric)


def write_rule(rule: Rule) -> str:
    if rule.margin is not None:
        return (
            f"{name_of(rule.metric)} worse than {SUBJECTS[rule.reference]} by less than "
            f"{show_size(rule.metric, rule.margin)}"
        )
    return f"{called(rule)} {way_of(rule)} {show(rule.metric, rule.limit)}"


def show_size(metric: str, size: float) -> str:
    """A difference without its sign: 2 points, 0.5 s."""
    return f"{100 * size:.3g} points" if is_share(metric) else show(metric, size)


def show_difference(metric: str, difference: float) -> str:
    if is_share(metric):
        return show_points(difference)
    return f"{'+' if difference >= 0 else '−'}{show(metric, abs(difference))}"


def say_limit(rule: Rule, metric: Metric, outcome: RuleOutcome, needed: int | None) -> str:
    seen = show(rule.metric, metric.value)
    if metric.kind == "rate":
        seen = f"{metric.successes} of {metric.n} ({seen})"
    way, limit = way_of(rule), show(rule.metric, rule.limit)
    if outcome == "fail":
        return f"{called(rule)}: {seen}, which is not {way} {limit}."
    held = held_figure(rule, metric)
    bound = f"the {rule.held_bound} bound {show(rule.metric, held)}" if held != metric.value else ""
    if not math.isfinite(held):
        bound = f"{metric.n} requests are too few for a bound"
    if outcome == "pass":
        return f"{called(rule)}: {seen}; {bound or 'that'} is {way} {limit}."
    remedy = _say_remedy(rule, metric, needed)
    ending = bound if not math.isfinite(held) else f"{bound} is not"
    if rule.clears(held):
        ending = "what could not be graded may be wrong" if metric.failed else "one request bounds nothing"
    return f"{called(rule)}: {seen} is {way} {limit}, but {ending}; {remedy}."


def held_figure(rule: Rule, metric: Metric) -> float:
    return {"lower": metric.low, "upper": metric.high, "value": metric.value}[rule.held_bound]


def say_counts(seen: Comparison) -> str:
    """Wins and losses where cases were paired one by one."""
    if seen.wins + seen.losses == 0 and seen.test not in ("", "exact McNemar"):
        return f"{seen.n} pairs" if seen.n > 1 else "measured once each"
    return f"{seen.wins} cases won and {seen.losses} lost"


def say_ungraded(cases: int) -> str:
    """Nothing is known of them, so nothing may rest on them."""
    return f" {cases} more could not be graded and count against it." if cases else ""


def say_test(seen: Comparison, *, adjusted: float | None = None) -> str:
    test = seen.test or "exact McNemar"
    corrected = f", {show_p(adjusted)} after Holm's correction" if adjusted is not None else ""
    return f"{test} {show_p(seen.p_value)}{corrected}"


def say_reason(
    decision: Decision, rules: Sequence[RuleResult], stops: Sequence[str], *, needed: int | None
) -> str:
    def named(outcome: RuleOutcome) -> str:
        open_ones = [rule for rule in rules if rule.outcome == outcome and rule.must]
        return ", ".join(dict.fromkeys(name_of(rule.metric) for rule in open_ones))

    if decision == "abort":
        first = f"{stops[0][0].upper()}{stops[0][1:]}"
        return f"{first}{'' if len(stops) == 1 else f'; and {len(stops) - 1} more'}."
    if decision == "deploy":
        return f"All {sum(rule.must for rule in rules)} rules hold."
    if decision == "iterate":
        return f"Not good enough yet: {named('fail')}."
    timed = max((r.cases_to_decide or 0 for r in rules if r.must and r.metric in TIMED), default=0)
    settle = [f"{needed} cases"] if needed else []
    settle += [f"{timed} timed requests"] if timed else []
    ending = f" About {' and '.join(settle)} would settle it." if settle else ""
    return f"Nothing is broken, but too few cases to promise: {named('unknown')}.{ending}"


def _say_remedy(rule: Rule, metric: Metric, needed: int | None) -> str:
    """More cases at this rate or, with the cases there are, more of them right."""
    if needed is None:
        return "more must be measured"
    if rule.metric in TIMED:
        return f"about {needed} timed requests would settle it (evaluate.latency_cases)"
    remedy = f"about {needed} cases at this rate would settle it"
    if not rule.wants_more or metric.kind != "rate" or metric.clusters:
        return remedy
    enough = successes_to_clear(metric.n, limit=rule.limit, confidence=metric.confidence)
    return f"{remedy}, or {enough} right of these {metric.n}" if enough else remedy
