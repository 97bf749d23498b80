"""Between two training sessions of one model: go on from this checkpoint, or from the one before.

In: the reports of the adapter before and after the session, the rules, the validation loss of each. Out: a
NextStart that says why. Pure; the same statistics as the gate's guardrails.

Not worse by more than the margins: this one. A proven loss: the one before. Too few cases to tell: this one,
since training was meant to help, unless the validation loss rose.
"""

from collections.abc import Mapping, Sequence

from graftwork.evaluate.gate.evidence import count_cases_needed
from graftwork.evaluate.gate.guardrails import judge_margin, not_compared
from graftwork.evaluate.gate.pairs import Pair, pair_up
from graftwork.evaluate.gate.wording import show_size
from graftwork.evaluate.gate_settings import FIGURES, GateSettings
from graftwork.evaluate.statistics import holm
from graftwork.grading.metrics import name_of, plural
from graftwork.records.report import Report
from graftwork.records.verdict import NextStart, RuleResult

BEFORE = "the checkpoint before"
DECIDES_GRADES = ("max_new_tokens", "fields", "sampling", "repeats", "checks", "judge")
"""Settings of an evaluation that must agree, or grades cannot be compared case by case."""
DECIDES_ANSWERS = {"engine": "the engine that answered", "base_as": "the precision of the base"}
"""What else must: with the same weights, two engines or precisions answer a little otherwise."""
ROSE = 1.01
"""The validation loss of the same rows does not rise by this much through rounding."""


def next_start(
    report_before: Report,
    report_after: Report,
    settings: GateSettings | None = None,
    *,
    loss_before: float | None = None,
    loss_after: float | None = None,
) -> NextStart:
    """Which checkpoint the next session starts from. The losses are those of the validation rows."""
    margins = _margins(settings or GateSettings(), report_after)
    if report_before.cases_hash != report_after.cases_hash:
        return _by_loss(
            "the two sessions were evaluated on different cases", (), loss_before, loss_after, needed=None
        )
    if changed := asked_otherwise(report_before, report_after):
        why = f"the two sessions were not asked in the same way ({changed} is another)"
        return _by_loss(why, (), loss_before, loss_after, needed=None)
    pairs = {
        name: pair
        for name in margins
        if (pair := pair_up(report_after, name, with_subject=report_before.candidate, one_sided=True))
    }
    rules = tuple(_judge(name, pairs.get(name), margin) for name, margin in margins.items())
    kept = {rule.metric for rule in rules if rule.outcome == "pass"}
    lost = [name for name in _proven_losses(pairs) if name not in kept]
    if lost:
        return NextStart(
            start="before",
            certain=True,
            reason=f"The session made it worse for sure: {_list(lost)}. The next one starts from {BEFORE}.",
            rules=rules,
        )
    if rules and all(rule.outcome == "pass" for rule in rules):
        return NextStart(
            start="this",
            certain=True,
            reason=f"Not worse than {BEFORE} by more than the margins: the next session goes on from this.",
            rules=rules,
        )
    needed = count_cases_needed(report_after, rules)
    unclear = _list([rule.metric for rule in rules if rule.outcome != "pass"]) or "no metric was compared"
    return _by_loss(f"too few cases to tell: {unclear}", rules, loss_before, loss_after, needed=needed)


def asked_otherwise(one: Report, other: Report) -> str:
    """What decides how answers come out or are graded, and differs; empty where nothing does."""
    for name in DECIDES_GRADES:
        if one.settings.get(name) != other.settings.get(name):
            return f"evaluate.{name}"
    made, made_too = (report.candidate.generation.settings for report in (one, other))
    return next((said for name, said in DECIDES_ANSWERS.items() if made.get(name) != made_too.get(name)), "")


def _margins(settings: GateSettings, report: Report) -> dict[str, float]:
    """The qualities that the rules name, each with its own margin where a guardrail gives one."""
    named: dict[str, float] = {}
    for rule in settings.rules:
        if rule.metric not in FIGURES:
            named[rule.metric] = rule.margin or named.get(rule.metric, settings.session_margin)
    if (primary := settings.primary_rule) is not None:
        named.setdefault(primary.metric, settings.session_margin)
    return {name: margin for name, margin in named.items() if name in report.candidate.metrics}


def _judge(name: str, pair: Pair | None, margin: float) -> RuleResult:
    text = f"{name_of(name)} worse than {BEFORE} by less than {show_size(name, margin)}"
    if pair is None:
        why = "it was not measured for both"
        return not_compared(name, rule=text, kind="guardrail", limit=-margin, why=why, against=BEFORE)
    return judge_margin(name, pair=pair, margin=margin, rule=text, named=BEFORE)


def _proven_losses(pairs: Mapping[str, Pair]) -> list[str]:
    """Several metrics are looked at, so each p is corrected for the others."""
    adjusted = holm({name: pair.seen.p_value for name, pair in pairs.items()})
    return [name for name, pair in pairs.items() if pair.gain < 0 and adjusted[name] < 1 - pair.confidence]


def _by_loss(
    why: str,
    rules: tuple[RuleResult, ...],
    before: float | None,
    after: float | None,
    *,
    needed: int | None,
) -> NextStart:
    settles = f" About {plural(needed, 'case')} would settle it." if needed else ""
    begin = f"{why[0].upper()}{why[1:]}"
    if before is not None and after is not None and after > before * ROSE:
        return NextStart(
            start="before",
            certain=False,
            reason=f"{begin}; but the validation loss rose from {before:.3f} to {after:.3f}, so the next "
            f"session starts from {BEFORE}.{settles}",
            rules=rules,
            cases_needed=needed,
        )
    seen = (
        f"and the validation loss did not rise ({before:.3f} → {after:.3f})"
        if before is not None and after is not None
        else "and nothing speaks against it"
    )
    return NextStart(
        start="this",
        certain=False,
        reason=f"{begin}; {seen}, so the next session goes on from this one.{settles}",
        rules=rules,
        cases_needed=needed,
    )


def _list(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(name_of(name) for name in names))
