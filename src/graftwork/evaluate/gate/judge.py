"""One figure against one limit: what the candidate must reach by itself.

In: a rule and a report. Out: a RuleResult. Pure. A rule that the point estimate keeps but its bound does
not is "unknown", not "fail": more cases would settle it.
"""

import math
from collections.abc import Mapping

from graftwork.evaluate.gate.evidence import needed_for_limit
from graftwork.evaluate.gate.figures import figure_of, finite
from graftwork.evaluate.gate.ungraded import Ungraded, all_wrong, find_ungraded
from graftwork.evaluate.gate.wording import (
    held_figure,
    say_limit,
    say_ungraded,
    say_unmeasured,
    show_range,
    write_rule,
)
from graftwork.evaluate.gate_settings import FIGURES, Rule
from graftwork.grading.metrics import show
from graftwork.records.report import Metric, Report
from graftwork.records.verdict import RuleOutcome, RuleResult


def judge_limit(rule: Rule, *, report: Report, look: int = 1) -> RuleResult:
    """A limit or an invariant held against the candidate's figure."""
    metric = figure_of(report.candidate, rule, sessions=report.sessions)
    ungraded = find_ungraded(report, rule.metric)
    return judge_rule(rule, metric=metric, ungraded=ungraded, sessions=report.sessions, look=look)


def judge_rule(
    rule: Rule,
    *,
    metric: Metric | None,
    ungraded: Ungraded = Ungraded(),  # noqa: B008
    sessions: Mapping[str, str] | None = None,
    look: int = 1,
) -> RuleResult:
    """One rule against one figure; `ungraded` cases count against it."""
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
            sentence=say_unmeasured(rule, ungraded.total),
            kind=kind,
            n=0,
        )
    outcome: RuleOutcome = "fail"
    if rule.clears(_held_at_worst(rule, metric, ungraded, sessions or {})):
        outcome = "pass"
    elif rule.clears(metric.value):
        outcome = "unknown"
    too_wide = outcome == "unknown" and not rule.clears(held_figure(rule, metric))
    needed = needed_for_limit(rule, metric, sessions=sessions or {}, look=look) if too_wide else None
    return RuleResult(
        metric=rule.metric,
        rule=write_rule(rule),
        outcome=outcome,
        value=metric.value,
        low=finite(metric.low),
        high=finite(metric.high),
        limit=rule.limit,
        sentence=say_limit(rule, metric, outcome, needed) + say_ungraded(ungraded.total),
        **(needed.fields if needed else {}),
        kind=kind,
        n=metric.n,
        test=metric.method,
    )


def explain_broken(rule: Rule, *, report: Report) -> str | None:
    """Why an invariant ends the attempt: its whole interval lies on the wrong side. None if it does not."""
    metric = figure_of(report.candidate, rule, sessions=report.sessions)
    if rule.severity != "invariant" or metric is None or metric.n == 0:
        return None
    best = metric.value if rule.held_bound == "value" else metric.high if rule.wants_more else metric.low
    if rule.clears(best):
        return None
    return (
        f"the invariant {write_rule(rule)} is broken: {show(rule.metric, metric.value)} "
        f"({show_range(rule.metric, metric.low, metric.high)})"
    )


def _held_at_worst(rule: Rule, metric: Metric, ungraded: Ungraded, sessions: Mapping[str, str]) -> float:
    """The bound if every case that has no grade was wrong: that may be the answer's fault."""
    if not ungraded.total:
        return held_figure(rule, metric)
    if rule.metric in FIGURES:
        # Nobody knows how large a figure can be at worst: nothing is kept by it.
        return math.nan
    wrong = 0.0 if rule.wants_more else 1.0
    worst = all_wrong(metric, ungraded.cases, wrong=wrong, sessions=sessions) if ungraded.cases else metric
    held = held_figure(rule, worst)
    return (held * worst.n + wrong * ungraded.nameless) / (worst.n + ungraded.nameless)
