"""The verdict: the rules of the project applied to a report. Pure.

Input: a report, the rules, how training went, whether anything is served yet. Output: a verdict with one
sentence per rule, for one adapter or for several judged together; what ends an attempt (a broken invariant, a
proven loss); and the checkpoint that the next training session starts from. Nothing is deployed that is not
proven.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from graftwork.evaluate.comparison import confidence_at, look_of
from graftwork.evaluate.gate.advice import Training, advise
from graftwork.evaluate.gate.figures import (
    SUBJECTS,
    at_confidence,
    count_cases_needed,
    finite,
    never_vacuous,
    say_counts,
    say_like_these,
    say_reason,
    say_worn,
    show_difference,
    show_size,
)
from graftwork.evaluate.gate.rules import (
    Pair,
    Surroundings,
    confidence_of,
    explain_broken,
    find_subject,
    judge_gains,
    judge_guardrail,
    judge_limit,
    judge_margin,
    lower_is_better,
    not_compared,
    p_of_primary,
    pair_up,
)
from graftwork.evaluate.gate.settings import FIGURES, Abort, Against, GateSettings
from graftwork.evaluate.statistics.significance import holm
from graftwork.grading.metrics import name_of, show_p
from graftwork.records.report import Decision, NextStart, Report, RuleResult, Verdict
from graftwork.text.wording import plural


class Stop(NamedTuple):
    """Why the attempt ends. `rule` is None if the broken rule is already in the verdict."""

    reason: str
    rule: RuleResult | None = None


def find_stops(
    report: Report, settings: GateSettings, *, judged: Sequence[RuleResult], around: Surroundings
) -> list[Stop]:
    """A broken invariant first; then what was declared under `abort_when`, or else any proven loss."""
    invariants = [
        rule for rule in settings.rules if rule.severity == "invariant" and rule.metric not in around.doubts
    ]
    watched = {} if settings.abort_when is not None else _watch(report, settings, around=around)
    # Each rule more is one more chance of a false alarm: together they may raise one as often as one alone.
    family = len(invariants) + len(watched)
    sure = at_confidence(report, 1 - (1 - confidence_of(report)) / max(family, 1))
    broken = (explain_broken(rule, report=sure) for rule in invariants)
    stops = [Stop(reason) for reason in broken if reason is not None]
    if settings.abort_when is not None:
        return stops + _worse_on_all(report, settings.abort_when, around=around)
    return stops + list(_proven_losses(watched, judged=judged, others=len(invariants)))


def _watch(
    report: Report, settings: GateSettings, *, around: Surroundings
) -> dict[tuple[str, Against], Pair]:
    """Quality metrics only: a slower or larger answer is limited by its own rule, not a loss of quality."""
    metrics: list[tuple[str, Against]] = [(rule.metric, rule.reference) for rule in settings.rules]
    if (primary := settings.primary_rule) is not None:
        metrics.append((primary.metric, primary.against))
    watched: dict[tuple[str, Against], Pair] = {}
    for name, against in dict.fromkeys(metrics):
        if name in around.doubts:
            continue
        subject = find_subject(report, against, around)
        pair = pair_up(report, name, with_subject=subject) if subject is not None else None
        if pair is not None and pair.kind != "number":
            watched[name, against] = pair
    return watched


def _proven_losses(
    watched: Mapping[tuple[str, Against], Pair], *, judged: Sequence[RuleResult], others: int
) -> Iterator[Stop]:
    """Losses after Holm's correction over all watched metrics and the `others` that may abort as well."""
    p_values = {f"{name} {against}": pair.comparison.p_value for (name, against), pair in watched.items()}
    adjusted = holm({**p_values, **{f"other {number}": 1.0 for number in range(others)}})
    for (name, against), pair in watched.items():
        if not pair.proven_loss or adjusted[f"{name} {against}"] >= 1 - pair.confidence:
            continue
        is_kept = any(
            rule.kind == "guardrail"
            and rule.metric == name
            and rule.outcome == "pass"
            and rule.against == pair.comparison.baseline
            for rule in judged
        )
        if is_kept:
            # A loss within the margin was allowed beforehand, however sure it is.
            continue
        comparison, opponent = pair.comparison, SUBJECTS[against]
        possessive = f"{opponent}'s" if against != "log" else f"that of {opponent}"
        lost = (
            f"{plural(comparison.losses, 'case')} lost, {comparison.wins} won ({show_p(comparison.p_value)})"
        )
        average = f"worse on average over {say_like_these(comparison)}"
        yield Stop(
            f"{name_of(name)} is worse than {possessive}: {lost}",
            _broken(
                name,
                pair,
                rule=f"{name_of(name)} not significantly worse than {opponent}",
                sentence=f"{name_of(name)}: {say_counts(comparison)} against {opponent}, {average}",
            ),
        )


def _worse_on_all(report: Report, declared: Abort, *, around: Surroundings) -> list[Stop]:
    subject = find_subject(report, declared.against, around)
    if subject is None or any(name in around.doubts for name in declared.worse_on):
        return []
    pairs = {name: pair_up(report, name, with_subject=subject) for name in declared.worse_on}
    losing = {
        name: pair
        for name, pair in pairs.items()
        if pair is not None
        and (
            pair.gain <= 0
            if declared.by == "value"
            else pair.proven_loss or (pair.high < 0 and not pair.too_few)
        )
    }
    if len(losing) < len(declared.worse_on):
        return []
    lost = ", ".join(
        f"{name_of(name)} {show_difference(name, pair.comparison.difference)}"
        for name, pair in losing.items()
    )
    worse = "worse" if declared.by == "interval" else "no better"
    reason = f"{worse} than {SUBJECTS[declared.against]} on all of: {lost}"
    first = next(iter(losing))
    rule = f"not {worse} on all of {_list_names(list(losing))}"
    return [Stop(reason, _broken(first, losing[first], rule=rule, sentence=reason))]


def _broken(name: str, pair: Pair, *, rule: str, sentence: str) -> RuleResult:
    sign = -1 if lower_is_better(name) else 1
    return RuleResult(
        metric=name,
        rule=rule,
        outcome="fail",
        value=pair.comparison.difference,
        low=finite(min(sign * pair.low, sign * pair.high)),
        high=finite(max(sign * pair.low, sign * pair.high)),
        limit=0.0,
        sentence=f"{sentence[0].upper()}{sentence[1:]}.",
        kind="loss",
        against=pair.comparison.baseline,
        n=pair.comparison.n,
        p_value=pair.comparison.p_value,
        test=pair.comparison.test,
    )


NOTHING_ELSE = Surroundings()
STATISTICS = 2
"""Incremented when a test changes in a way that may change a verdict on the same report."""
USUAL_CONFIDENCE = 0.95


class GateCandidate(NamedTuple):
    """One of several adapters that are judged together."""

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
    tests = _tests_of_rules(settings, around)
    report_at_look = at_confidence(report, confidence_at(fresh, look=around.look))
    corrected = at_confidence(report, 1 - (1 - confidence_at(fresh, look=around.look)) / tests)
    rules = _judge_all(corrected, settings, around=around, adjusted_p=adjusted_p)
    worn: tuple[RuleResult, ...] = ()
    if around.look > 1:
        first = _judge_all(
            at_confidence(report, 1 - (1 - fresh) / tests),
            settings,
            around=around._replace(look=1),
            adjusted_p=adjusted_p,
        )
        # The rules that would pass if these cases had not been used before.
        pairs = zip(rules, first, strict=True)
        worn = tuple(now for now, then in pairs if now.outcome == "unknown" and then.outcome == "pass")
        fresh_needed = (
            f"On fresh cases this would be enough; this is evaluation {around.look} on these, and the best "
            "of several may be the luckiest."
        )
        rules = [
            rule.model_copy(update={"sentence": f"{rule.sentence} {fresh_needed}"}) if rule in worn else rule
            for rule in rules
        ]
    stops = find_stops(report_at_look, settings, judged=rules, around=around)
    rules += [stop.rule for stop in stops if stop.rule is not None]
    outcomes = {rule.outcome for rule in rules if rule.must}
    decision: Decision = "iterate" if "fail" in outcomes else "not_enough_evidence"
    if stops:
        decision = "abort"
    elif outcomes == {"pass"}:
        decision = "deploy"
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
        else advise(report_at_look, decision=decision, rules=rules, training=training),
        report_hash=report.fingerprint(),
        rules_hash=settings.rules_hash(),
        cases_needed=needed,
        notes=tuple(_note(report, settings, around)),
    )


def decide_all(judged: Mapping[str, GateCandidate]) -> dict[str, Verdict]:
    """Judge several adapters together: the more are tried, the likelier one is better by chance (Holm)."""
    p_values = {
        name: p
        for name, candidate in judged.items()
        if (p := p_of_primary(candidate.report, candidate.settings, around=candidate.around)) is not None
    }
    adjusted = holm(p_values) if len(p_values) > 1 else {}
    looks = count_own_looks({name: candidate.report for name, candidate in judged.items()})
    return {
        name: decide(
            candidate.report,
            candidate.settings,
            training=candidate.training,
            around=candidate.around._replace(look=looks[name], tried=len(judged)),
            adjusted_p=adjusted.get(name),
        )
        for name, candidate in judged.items()
    }


def count_own_looks(reports: Mapping[str, Report]) -> dict[str, int]:
    """Return which look at its questions each report is, not counting those of the adapters judged with it,
    which Holm's correction covers. An unchanged adapter does not use up a look of a retrained one.
    """
    looks = {name: look_of(report) for name, report in reports.items()}
    return {
        name: look
        - sum(
            looks[other_name] < look and reports[other_name].cases_hash == reports[name].cases_hash
            for other_name in reports
        )
        for name, look in looks.items()
    }


def _tests_of_rules(settings: GateSettings, around: Surroundings) -> int:
    """Return for how many adapters limits and guardrails are corrected; if a gain decides, its own test is
    corrected.
    """
    return around.tried if settings.primary_rule is None and settings.win_rule is None else 1


def _judge_all(
    report: Report, settings: GateSettings, *, around: Surroundings, adjusted_p: float | None
) -> list[RuleResult]:
    rules = [
        judge_guardrail(rule, report=report, around=around)
        if rule.is_guardrail
        else judge_limit(rule, report=report, look=around.look)
        for rule in settings.rules
    ]
    rules += judge_gains(report, settings, around=around, adjusted_p=adjusted_p)
    judged = []
    for rule in rules:
        outcome = never_vacuous(rule, report=report)
        if (why := around.doubts.get(rule.metric)) is not None:
            sentence = f"{name_of(rule.metric)} may not decide anything: the judge is not calibrated; {why}."
            changed = {"outcome": "unknown", "sentence": sentence, "cases_to_decide": None}
            outcome = outcome.model_copy(update=changed)
        judged.append(outcome)
    return judged


def _note(report: Report, settings: GateSettings, around: Surroundings) -> list[str]:
    notes = []
    if "champion" in settings.subjects_needed() and around.no_champion and report.champion is None:
        unserved = "Nothing is served yet: rules on the champion were checked against the base."
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
    confidence = confidence_of(report)
    if (tests := _tests_of_rules(settings, around)) > 1:
        notes.append(
            f"{tests} adapters are judged together and none has to be better, so every bound holds at "
            f"{100 * (1 - (1 - confidence) / tests):.4g} % (Bonferroni)."
        )
    if confidence < USUAL_CONFIDENCE:
        notes.append(
            f"Every bound holds at {100 * confidence:g} % only, as evaluate.confidence says; 95 % is usual."
        )
    if report.wear is not None and report.wear.worn:
        notes.append(report.wear.sentence)
    return notes


BEFORE = "the checkpoint before"
DECIDES_GRADES = ("max_new_tokens", "fields", "sampling", "repeats", "checks", "judge")
"""Settings of an evaluation that must agree, or grades cannot be compared case by case."""
DECIDES_ANSWERS = {"engine": "the engine that answered", "base_as": "the precision of the base"}
"""What else must agree: with the same weights, two engines or precisions answer slightly differently."""
ROSE = 1.01
"""Rounding alone does not raise the validation loss of the same rows by this factor."""


def next_start(
    report_before: Report,
    report_after: Report,
    settings: GateSettings | None = None,
    *,
    loss_before: float | None = None,
    loss_after: float | None = None,
) -> NextStart:
    """Which checkpoint the next session starts from. The losses are those of the validation rows."""
    settings = settings or GateSettings()
    if report_before.cases_hash != report_after.cases_hash:
        return _by_loss(
            "the two sessions were evaluated on different cases", (), loss_before, loss_after, needed=None
        )
    if changed := asked_otherwise(report_before, report_after):
        why = f"the two sessions were not asked in the same way ({changed} is another)"
        return _by_loss(why, (), loss_before, loss_after, needed=None)
    # The qualities that the rules name, each with its own margin where a guardrail gives one.
    margins: dict[str, float] = {}
    for rule in settings.rules:
        if rule.metric not in FIGURES:
            margins[rule.metric] = rule.margin or margins.get(rule.metric, settings.session_margin)
    if (primary := settings.primary_rule) is not None:
        margins.setdefault(primary.metric, settings.session_margin)
    pairs: dict[str, Pair] = {}
    rules: list[RuleResult] = []
    for name, margin in margins.items():
        if name not in report_after.candidate.metrics:
            continue
        text = f"{name_of(name)} worse than {BEFORE} by less than {show_size(name, margin)}"
        pair = pair_up(report_after, name, with_subject=report_before.candidate, one_sided=True)
        if pair is None:
            why = "it was not measured for both"
            judged = not_compared(name, rule=text, kind="guardrail", limit=-margin, why=why, against=BEFORE)
        else:
            pairs[name] = pair
            judged = judge_margin(name, pair=pair, margin=margin, rule=text, subject_name=BEFORE)
        rules.append(judged)
    holding = {rule.metric for rule in rules if rule.outcome == "pass"}
    # Several metrics are looked at, so each p is corrected for the others.
    adjusted = holm({name: pair.comparison.p_value for name, pair in pairs.items()})
    lost = [
        name
        for name, pair in pairs.items()
        if name not in holding and pair.gain < 0 and adjusted[name] < 1 - pair.confidence
    ]
    if lost:
        return NextStart(
            start="before",
            certain=True,
            reason=f"The session made it significantly worse: {_list_names(lost)}. "
            f"The next one starts from {BEFORE}.",
            rules=tuple(rules),
        )
    if rules and all(rule.outcome == "pass" for rule in rules):
        return NextStart(
            start="this",
            certain=True,
            reason=f"Not worse than {BEFORE} by more than the margins: the next session starts from it.",
            rules=tuple(rules),
        )
    needed = count_cases_needed(report_after, rules)
    unclear = (
        _list_names([rule.metric for rule in rules if rule.outcome != "pass"]) or "no metric was compared"
    )
    return _by_loss(f"too few cases to decide: {unclear}", rules, loss_before, loss_after, needed=needed)


def asked_otherwise(report_a: Report, report_b: Report) -> str:
    """Return the setting that decides how answers are made or graded and differs; empty if none does."""
    for name in DECIDES_GRADES:
        if report_a.settings.get(name) != report_b.settings.get(name):
            return f"evaluate.{name}"
    settings, other_settings = (report.candidate.generation.settings for report in (report_a, report_b))
    return next(
        (
            sentence
            for name, sentence in DECIDES_ANSWERS.items()
            if settings.get(name) != other_settings.get(name)
        ),
        "",
    )


def _by_loss(
    why: str,
    rules: Sequence[RuleResult],
    before: float | None,
    after: float | None,
    *,
    needed: int | None,
) -> NextStart:
    settles = f" About {plural(needed, 'case')} would settle it." if needed else ""
    opening = f"{why[0].upper()}{why[1:]}"
    if before is not None and after is not None and after > before * ROSE:
        return NextStart(
            start="before",
            certain=False,
            reason=f"{opening}; but the validation loss rose from {before:.3f} to {after:.3f}, so the next "
            f"session starts from {BEFORE}.{settles}",
            rules=tuple(rules),
            cases_needed=needed,
        )
    finding = (
        f"and the validation loss did not rise ({before:.3f} → {after:.3f})"
        if before is not None and after is not None
        else "and no rule failed"
    )
    return NextStart(
        start="this",
        certain=False,
        reason=f"{opening}; {finding}, so the next session starts from this one.{settles}",
        rules=tuple(rules),
        cases_needed=needed,
    )


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(name_of(name) for name in names))
