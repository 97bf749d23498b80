"""One figure against one limit: what the candidate must reach by itself.

In: a rule and what was measured. Out: a RuleResult. Pure. A rule that the point estimate keeps but its
bound does not is "unknown", not "fail": more cases would settle it.
"""

import math

from graftwork.evaluate.gate.evidence import cases_for_limit
from graftwork.evaluate.gate.figures import figure_of
from graftwork.evaluate.gate.wording import called, held_figure, say_limit, say_ungraded, write_rule
from graftwork.evaluate.gate_settings import TIMED, Rule
from graftwork.evaluate.wording import show
from graftwork.records.report import Metric, SubjectReport
from graftwork.records.verdict import RuleOutcome, RuleResult


def judge_limit(rule: Rule, *, subject: SubjectReport) -> RuleResult:
    """A limit or an invariant held against the candidate's figure."""
    return judge_rule(rule, metric=figure_of(subject, rule))


def judge_rule(rule: Rule, *, metric: Metric | None) -> RuleResult:
    """One rule against one figure."""
    kind = "invariant" if rule.severity == "invariant" else "limit"
    if metric is None or metric.n == 0:
        return RuleResult(
            metric=rule.metric,
            rule=write_rule(rule),
            outcome="unknown",
            value=None,
            low=None,
            high=None,
            limit=rule.limit,
            sentence=f"{called(rule)} was not measured on any case, so nothing can be promised.",
            kind=kind,
            n=0,
        )
    outcome: RuleOutcome = "fail"
    if rule.clears(_held_at_worst(rule, metric)) and not _rests_on_one(rule, metric):
        outcome = "pass"
    elif rule.clears(metric.value):
        outcome = "unknown"
    too_wide = outcome == "unknown" and not rule.clears(held_figure(rule, metric))
    needed = cases_for_limit(rule, metric) if too_wide else None
    return RuleResult(
        metric=rule.metric,
        rule=write_rule(rule),
        outcome=outcome,
        value=metric.value,
        low=_finite(metric.low),
        high=_finite(metric.high),
        limit=rule.limit,
        sentence=say_limit(rule, metric, outcome, needed) + say_ungraded(metric.failed),
        cases_to_decide=needed,
        kind=kind,
        n=metric.n,
        test=metric.method,
    )


def explain_broken(rule: Rule, *, subject: SubjectReport) -> str | None:
    """Why an invariant ends the attempt: its whole interval lies on the wrong side. None if it does not."""
    metric = figure_of(subject, rule)
    if rule.severity != "invariant" or metric is None or metric.n == 0:
        return None
    best = metric.value if rule.held_bound == "value" else metric.high if rule.wants_more else metric.low
    if rule.clears(best):
        return None
    return (
        f"the invariant {write_rule(rule)} is broken: {show(rule.metric, metric.value)} "
        f"({show(rule.metric, metric.low)} to {show(rule.metric, metric.high)})"
    )


def _held_at_worst(rule: Rule, metric: Metric) -> float:
    """The bound if every case that the grader failed on was wrong: that may be the answer's fault."""
    held = held_figure(rule, metric)
    if not metric.failed:
        return held
    wrong = 0.0 if rule.wants_more else 1.0
    return (held * metric.n + wrong * metric.failed) / (metric.n + metric.failed)


def _rests_on_one(rule: Rule, metric: Metric) -> bool:
    """One timed request tells nothing of the next; whoever asks for the value alone gets it."""
    return rule.metric in TIMED and metric.n < 2 and rule.held_bound != "value"


def _finite(bound: float) -> float | None:
    """JSON has no infinity: a bound that is not there is not written."""
    return bound if math.isfinite(bound) else None
