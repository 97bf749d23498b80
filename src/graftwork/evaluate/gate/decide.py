"""Ship it or not: the rules of the project held against a report.

In: a report, the rules, and what else is known: how training went, whether anything is served yet. Out: a
verdict with one plain sentence for each rule. Pure. Nothing is deployed that is not proven.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graftwork.evaluate.gate.advice import advise
from graftwork.evaluate.gate.course import Training
from graftwork.evaluate.gate.evidence import count_cases_needed
from graftwork.evaluate.gate.figures import at_confidence
from graftwork.evaluate.gate.guardrails import judge_guardrail
from graftwork.evaluate.gate.judge import judge_limit
from graftwork.evaluate.gate.losses import find_stops
from graftwork.evaluate.gate.pairs import Surroundings, confidence_of
from graftwork.evaluate.gate.ungraded import never_vacuous
from graftwork.evaluate.gate.wins import judge_gains, p_of_primary
from graftwork.evaluate.gate.wording import say_reason, say_worn
from graftwork.evaluate.gate_settings import GateSettings, Rule
from graftwork.evaluate.statistics import holm
from graftwork.evaluate.wear import confidence_at, look_of
from graftwork.grading.metrics import name_of
from graftwork.records.report import Report
from graftwork.records.verdict import Decision, RuleResult, Verdict

NOTHING_ELSE = Surroundings()
STATISTICS = 2
"""Counted up when a test changes in a way that may change a verdict on the same report."""
USUAL_CONFIDENCE = 0.95


class Judged(NamedTuple):
    """One of several adapters that are judged in one go."""

    report: Report
    settings: GateSettings
    training: Training | None = None
    around: Surroundings = NOTHING_ELSE


def decide(
    report: Report,
    settings: GateSettings,
    *,
    training: Training | None = None,
    around: Surroundings = NOTHING_ELSE,
    adjusted_p: float | None = None,
) -> Verdict:
    """Deploy if every rule passes; abort on a broken invariant or a proven loss.

    `adjusted_p` is that of the primary metric where several adapters are judged together.
    """
    fresh = confidence_of(report)
    around = around._replace(look=around.look or look_of(report))
    held = at_confidence(report, confidence_at(fresh, look=around.look))
    rules = _judge_all(held, settings, around=around, adjusted_p=adjusted_p)
    worn: tuple[RuleResult, ...] = ()
    if around.look > 1:
        first = _judge_all(
            at_confidence(report, fresh), settings, around=around._replace(look=1), adjusted_p=adjusted_p
        )
        worn = _find_worn(rules, first)
        rules = [_ask_for_fresh(rule, look=around.look) if rule in worn else rule for rule in rules]
    stops = find_stops(held, settings, judged=rules, around=around)
    rules += [stop.rule for stop in stops if stop.rule is not None]
    decision = _decide(rules, aborted=bool(stops))
    needed = count_cases_needed(report, rules)
    reason = say_reason(decision, rules, [stop.reason for stop in stops], needed=needed)
    if decision == "not_enough_evidence" and worn:
        reason = say_worn([rule.metric for rule in worn], look=around.look, needed=needed)
    return Verdict(
        decision=decision,
        reason=reason,
        statistics=STATISTICS,
        rules=tuple(rules),
        advice=()
        if decision == "deploy"
        else advise(held, decision=decision, rules=rules, training=training),
        report_hash=report.fingerprint(),
        rules_hash=settings.rules_hash(),
        cases_needed=needed,
        notes=tuple(_note(report, settings, around)),
    )


def decide_all(judged: Mapping[str, Judged]) -> dict[str, Verdict]:
    """Several adapters in one go: the more are tried, the likelier one is better by chance (Holm)."""
    p_values = {
        name: p
        for name, one in judged.items()
        if (p := p_of_primary(one.report, one.settings, around=one.around)) is not None
    }
    adjusted = holm(p_values) if len(p_values) > 1 else {}
    # Adapters that are judged together are one look: Holm's correction is for their number.
    look = min((look_of(one.report) for one in judged.values()), default=1)
    return {
        name: decide(
            one.report,
            one.settings,
            training=one.training,
            around=one.around._replace(look=look, tried=len(judged)),
            adjusted_p=adjusted.get(name),
        )
        for name, one in judged.items()
    }


def _judge_all(
    report: Report, settings: GateSettings, *, around: Surroundings, adjusted_p: float | None
) -> list[RuleResult]:
    rules = [_judge(rule, report=report, around=around) for rule in settings.rules]
    rules += judge_gains(report, settings, around=around, adjusted_p=adjusted_p)
    return [never_vacuous(rule, report=report) for rule in rules]


def _find_worn(rules: Sequence[RuleResult], first: Sequence[RuleResult]) -> tuple[RuleResult, ...]:
    """The rules that would pass if nobody had looked at these cases before."""
    pairs = zip(rules, first, strict=True)
    return tuple(now for now, then in pairs if now.outcome == "unknown" and then.outcome == "pass")


def _ask_for_fresh(rule: RuleResult, *, look: int) -> RuleResult:
    said = (
        f"{rule.sentence} On fresh cases so much would do; this is look {look} at these, and the best of "
        "several may be the luckiest."
    )
    return rule.model_copy(update={"sentence": said})


def _judge(rule: Rule, *, report: Report, around: Surroundings) -> RuleResult:
    if rule.is_guardrail:
        return judge_guardrail(rule, report=report, around=around)
    return judge_limit(rule, report=report, look=around.look)


def _decide(rules: Sequence[RuleResult], *, aborted: bool) -> Decision:
    outcomes = {rule.outcome for rule in rules if rule.must}
    if aborted:
        return "abort"
    if outcomes == {"pass"}:
        return "deploy"
    return "iterate" if "fail" in outcomes else "not_enough_evidence"


def _note(report: Report, settings: GateSettings, around: Surroundings) -> list[str]:
    notes = []
    if "champion" in settings.subjects_needed() and around.no_champion and report.champion is None:
        unserved = "Nothing is served yet: what is said of the champion was held against the base."
        notes.append(around.instead or unserved)
    if "log" in settings.subjects_needed():
        notes += report.remarks
    for rule in settings.rules:
        if rule.at == "mean" and rule.bound != "value":
            notes.append(
                f"The mean of {name_of(rule.metric).lower()} is promised only if no request takes more than "
                "twice as long as the slowest of these: `at: p95` and the median hold without that."
            )
        if rule.bound == "value":
            notes.append(f"{rule.metric} counts by its value, as graft.yaml says: luck is not ruled out.")
    if (confidence := confidence_of(report)) < USUAL_CONFIDENCE:
        notes.append(
            f"Every bound holds at {100 * confidence:g} % only, as evaluate.confidence says; 95 % is usual."
        )
    if report.wear is not None and report.wear.worn:
        notes.append(report.wear.sentence)
    return notes
