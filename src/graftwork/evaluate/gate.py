"""Ship it or not: the rules of the project held against a report.

In: a report and the rules. Out: a verdict with one plain sentence for each rule. Pure. A rule that the
point estimate keeps but its bound does not is "unknown", not "fail": more cases would settle it.
"""

from collections.abc import Sequence

from graftwork.evaluate.advice import advise, count_cases_needed
from graftwork.evaluate.gate_settings import GateSettings, Rule
from graftwork.evaluate.statistics import cases_to_decide, pairs_to_decide, successes_to_clear
from graftwork.evaluate.wording import name_of, show, show_p, show_points
from graftwork.records.report import Comparison, Metric, Report
from graftwork.records.verdict import Decision, RuleOutcome, RuleResult, Verdict


def decide(report: Report, settings: GateSettings) -> Verdict:
    """Deploy if every rule passes; abort on a broken invariant or a proven loss against the base."""
    rules = [judge_rule(rule, metric=report.candidate.metrics.get(rule.metric)) for rule in settings.rules]
    if settings.primary is not None:
        rules.append(_judge_primary_of(report, settings.primary))
    stops = _reasons_to_abort(report, settings)
    decision = _decide(rules, aborted=bool(stops))
    return Verdict(
        decision=decision,
        reason=_say_why(decision, rules, stops, needed=count_cases_needed(report, rules)),
        rules=tuple(rules),
        advice=() if decision == "deploy" else advise(report, decision=decision, rules=rules),
        report_hash=report.fingerprint(),
    )


def judge_rule(rule: Rule, *, metric: Metric | None) -> RuleResult:
    """One rule against the candidate's figure."""
    text = _write_rule(rule)
    if metric is None or metric.n == 0:
        return RuleResult(
            metric=rule.metric,
            rule=text,
            outcome="unknown",
            value=None,
            low=None,
            high=None,
            limit=rule.limit,
            sentence=f"{name_of(rule.metric)} was not measured on any case, so nothing can be promised.",
        )
    outcome: RuleOutcome
    if _clears(rule, _held(rule, metric)):
        outcome = "pass"
    elif _clears(rule, metric.value):
        outcome = "unknown"
    else:
        outcome = "fail"
    needed = _cases_needed(rule, metric) if outcome == "unknown" else None
    return RuleResult(
        metric=rule.metric,
        rule=text,
        outcome=outcome,
        value=metric.value,
        low=metric.low,
        high=metric.high,
        limit=rule.limit,
        sentence=_say_rule(rule, metric, outcome, needed),
        cases_to_decide=needed,
    )


def judge_primary(name: str, *, comparison: Comparison | None, confidence: float = 0.95) -> RuleResult:
    """The one metric on which the candidate must beat the base."""
    text = f"{name_of(name)} better than the base"
    if comparison is None or comparison.n == 0:
        return RuleResult(
            metric=name,
            rule=text,
            outcome="unknown",
            value=None,
            low=None,
            high=None,
            limit=0.0,
            sentence=f"{name_of(name)} was not compared on any case, so no gain can be shown.",
        )
    wins, losses, n = comparison.wins, comparison.losses, comparison.n
    better = wins > losses and comparison.p_value < 1 - confidence
    outcome: RuleOutcome = "pass" if better else "unknown" if wins > losses else "fail"
    needed = (
        pairs_to_decide(wins / n, loss_rate=losses / n, confidence=confidence)
        if outcome == "unknown"
        else None
    )
    endings: dict[RuleOutcome, str] = {
        "pass": "too uneven to be chance",
        "unknown": f"which may be chance; about {needed} pairs would settle it",
        "fail": "so the adapter is no better than the base",
    }
    return RuleResult(
        metric=name,
        rule=text,
        outcome=outcome,
        value=comparison.difference,
        low=comparison.low,
        high=comparison.high,
        limit=0.0,
        sentence=(
            f"{name_of(name)}: {wins} cases won and {losses} lost against the base "
            f"({show_points(comparison.difference)}, exact McNemar {show_p(comparison.p_value)}), "
            f"{endings[outcome]}."
        ),
        cases_to_decide=needed,
    )


def _judge_primary_of(report: Report, name: str) -> RuleResult:
    metric = report.candidate.metrics.get(name)
    confidence = metric.confidence if metric is not None else 0.95
    return judge_primary(name, comparison=_comparison(report, name), confidence=confidence)


def _decide(rules: Sequence[RuleResult], *, aborted: bool) -> Decision:
    outcomes = {rule.outcome for rule in rules}
    if aborted:
        return "abort"
    if outcomes <= {"pass"}:
        return "deploy"
    return "iterate" if "fail" in outcomes else "not_enough_evidence"


def _reasons_to_abort(report: Report, settings: GateSettings) -> list[str]:
    reasons = []
    for rule in settings.rules:
        metric = report.candidate.metrics.get(rule.metric)
        if rule.severity == "invariant" and metric is not None and _broken_for_sure(rule, metric):
            reasons.append(
                f"the invariant {_write_rule(rule)} is broken: {show(rule.metric, metric.value)} "
                f"({show(rule.metric, metric.low)} to {show(rule.metric, metric.high)})"
            )
    gated = dict.fromkeys([*(rule.metric for rule in settings.rules), settings.primary])
    for name in gated:
        seen = _comparison(report, name) if name else None
        if seen is not None and _proven_loss(report, seen):
            reasons.append(
                f"{name_of(seen.metric)} is worse than the base's: {seen.losses} cases lost, {seen.wins} won "
                f"({show_p(seen.p_value)})"
            )
    return reasons


def _proven_loss(report: Report, seen: Comparison) -> bool:
    """Rates only: a slower or larger answer is what its own rule limits, not a loss of quality."""
    metric = report.candidate.metrics[seen.metric]
    return metric.kind == "rate" and seen.losses > seen.wins and seen.p_value < 1 - metric.confidence


def _broken_for_sure(rule: Rule, metric: Metric) -> bool:
    """The whole interval lies on the wrong side of the limit."""
    if metric.n == 0:
        return False
    if rule.held_bound == "value":
        return not _clears(rule, metric.value)
    return not _clears(rule, metric.high if rule.over is not None else metric.low)


def _held(rule: Rule, metric: Metric) -> float:
    return {"lower": metric.low, "upper": metric.high, "value": metric.value}[rule.held_bound]


def _clears(rule: Rule, figure: float) -> bool:
    return figure > rule.limit if rule.over is not None else figure < rule.limit


def _cases_needed(rule: Rule, metric: Metric) -> int | None:
    if metric.kind != "rate":
        return None
    if rule.over is not None:
        return cases_to_decide(metric.value, limit=rule.limit, confidence=metric.confidence)
    return cases_to_decide(1 - metric.value, limit=1 - rule.limit, confidence=metric.confidence)


def _write_rule(rule: Rule) -> str:
    way = "over" if rule.over is not None else "under"
    return f"{name_of(rule.metric)} {way} {show(rule.metric, rule.limit)}"


def _say_rule(rule: Rule, metric: Metric, outcome: RuleOutcome, needed: int | None) -> str:
    seen = show(rule.metric, metric.value)
    if metric.kind == "rate":
        seen = f"{metric.successes} of {metric.n} ({seen})"
    way = "over" if rule.over is not None else "under"
    limit = show(rule.metric, rule.limit)
    if outcome == "fail":
        return f"{name_of(rule.metric)}: {seen}, which is not {way} {limit}."
    held = _held(rule, metric)
    bound = f"the {rule.held_bound} bound {show(rule.metric, held)}" if held != metric.value else ""
    if outcome == "pass":
        return f"{name_of(rule.metric)}: {seen}; {bound or 'that'} is {way} {limit}."
    remedy = _say_remedy(rule, metric, needed)
    return f"{name_of(rule.metric)}: {seen} is {way} {limit}, but {bound} is not; {remedy}."


def _say_remedy(rule: Rule, metric: Metric, needed: int | None) -> str:
    """More cases at this rate or, with the cases there are, more of them right."""
    if needed is None:
        return "more must be measured"
    remedy = f"about {needed} cases at this rate would settle it"
    if rule.over is None:
        return remedy
    enough = successes_to_clear(metric.n, limit=rule.limit, confidence=metric.confidence)
    return f"{remedy}, or {enough} right of these {metric.n}" if enough else remedy


def _say_why(
    decision: Decision, rules: Sequence[RuleResult], stops: Sequence[str], *, needed: int | None
) -> str:
    def named(outcome: RuleOutcome) -> str:
        return ", ".join(dict.fromkeys(name_of(r.metric) for r in rules if r.outcome == outcome))

    if decision == "abort":
        return (
            f"{stops[0][0].upper()}{stops[0][1:]}{'' if len(stops) == 1 else f'; and {len(stops) - 1} more'}."
        )
    if decision == "deploy":
        return f"All {len(rules)} rules hold."
    if decision == "iterate":
        return f"Not good enough yet: {named('fail')}."
    ending = f" About {needed} cases would settle it." if needed else ""
    return f"Nothing is broken, but too few cases to promise: {named('unknown')}.{ending}"


def _comparison(report: Report, name: str) -> Comparison | None:
    return next((c for c in report.comparisons if c.metric == name), None)
