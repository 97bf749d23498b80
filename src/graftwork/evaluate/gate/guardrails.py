"""Not worse than another subject by more than a margin that was set beforehand.

In: a guardrail and the report. Out: a RuleResult. Pure. The bound is one-sided at the report's confidence;
what the point estimate keeps and the bound does not is "unknown".
"""

import math

from graftwork.evaluate.gate.evidence import Needed, measurements_for, needed_for_mean
from graftwork.evaluate.gate.figures import finite
from graftwork.evaluate.gate.pairs import (
    SIDE_BY_SIDE,
    Pair,
    Surroundings,
    explain_missing,
    find_subject,
    lower_is_better,
    pair_up,
)
from graftwork.evaluate.gate.wording import (
    SUBJECTS,
    say_counts,
    say_pairs_needed,
    say_ungraded,
    show_difference,
    show_size,
    write_rule,
)
from graftwork.evaluate.gate_settings import Rule
from graftwork.grading.metrics import name_of
from graftwork.records.report import Report
from graftwork.records.verdict import RuleKind, RuleOutcome, RuleResult


def judge_guardrail(rule: Rule, *, report: Report, around: Surroundings) -> RuleResult:
    """Non-inferiority: the least gain that the pairs still allow lies above minus the margin."""
    other = find_subject(report, rule.reference, around)
    pair = pair_up(report, rule.metric, with_subject=other, one_sided=True) if other is not None else None
    if pair is None:
        why = (
            explain_missing(rule.reference, around)
            if other is None
            else f"it was not measured on the same cases as {SUBJECTS[rule.reference]}"
        )
        return not_compared(
            rule.metric,
            rule=write_rule(rule),
            kind="guardrail",
            limit=-rule.limit,
            why=why,
            against=rule.reference,
        )
    return judge_margin(
        rule.metric,
        pair=pair,
        margin=rule.limit,
        rule=write_rule(rule),
        named=rule.reference,
        look=max(around.look, 1),
    )


def judge_margin(
    metric: str, *, pair: Pair, margin: float, rule: str, named: str, look: int = 1
) -> RuleResult:
    """A pair against a margin."""
    outcome: RuleOutcome = "unknown" if pair.gain > -margin else "fail"
    if pair.low > -margin and not pair.too_few:
        outcome = "pass"
    needed = _pairs_needed(pair, margin, look) if outcome == "unknown" else None
    sign = -1 if lower_is_better(metric) else 1
    size = show_size(metric, margin)
    low, high = (sign * bound for bound in (pair.low, pair.high))
    return RuleResult(
        metric=metric,
        rule=rule,
        outcome=outcome,
        value=sign * pair.gain,
        low=finite(min(low, high)),
        high=finite(max(low, high)),
        limit=-sign * margin,
        sentence=(
            f"{name_of(metric)}: {say_counts(pair.seen)} against {_called(named)} "
            f"({show_difference(metric, sign * pair.gain)}), {_say_end(metric, pair, outcome, size, needed)}."
            f"{say_ungraded(pair.ungraded)}"
        ),
        **(needed.fields if needed else {}),
        kind="guardrail",
        against=pair.seen.baseline,
        margin=margin,
        n=pair.seen.n,
        p_value=pair.seen.p_value if pair.seen.test != SIDE_BY_SIDE else None,
        test=pair.seen.test,
    )


def _pairs_needed(pair: Pair, margin: float, look: int) -> Needed | None:
    if pair.ungraded:
        # It is not the number of cases that leaves it open.
        return None
    if pair.too_few:
        return Needed(pair.pairs_for_a_bound)
    tail = 1 - pair.confidence
    if pair.kind != "number":
        return needed_for_mean(pair.units, limit=-margin, tail=tail, look=look) if margin < 1 else None
    return measurements_for(pair.gain, low=pair.low, beyond=-margin, n=pair.seen.n, tail=tail)


def _say_end(metric: str, pair: Pair, outcome: RuleOutcome, size: str, needed: Needed | None) -> str:
    if outcome == "fail":
        return f"a loss of more than the margin of {size}"
    if outcome == "unknown" and pair.too_few:
        return f"too few to bound the loss; {say_pairs_needed(metric, needed)}"
    if not math.isfinite(pair.low):
        return "which what was not graded may undo"
    worst = show_difference(metric, (-1 if lower_is_better(metric) else 1) * pair.low)
    if outcome == "pass":
        return f"at worst {worst}, which keeps the margin of {size}"
    return f"at worst {worst}, beyond the margin of {size}; {say_pairs_needed(metric, needed)}"


def not_compared(
    metric: str, *, rule: str, kind: RuleKind, limit: float, why: str, against: str
) -> RuleResult:
    """A comparison that could not be made proves nothing."""
    return RuleResult(
        metric=metric,
        rule=rule,
        outcome="unknown",
        value=None,
        low=None,
        high=None,
        limit=limit,
        sentence=f"{name_of(metric)} was not compared on any case, so nothing can be shown: {why}.",
        kind=kind,
        against=against,
        n=0,
    )


def _called(named: str) -> str:
    return next((words for against, words in SUBJECTS.items() if against == named), named)
