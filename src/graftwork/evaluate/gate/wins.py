"""The gain that deploys: the primary metric is better, or a saving that was declared beforehand is there.

In: the report, what was declared. Out: one RuleResult for each. Pure. One of the two is enough; the other
is then told, but not needed.
"""

from collections.abc import Sequence

from graftwork.evaluate.gate.evidence import Needed, measurements_for, needed_for_mean
from graftwork.evaluate.gate.figures import finite, measured
from graftwork.evaluate.gate.guardrails import not_compared
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
    say_like_these,
    say_pairs_needed,
    say_test,
    say_ungraded,
    show_difference,
    show_size,
)
from graftwork.evaluate.gate_settings import GateSettings, Primary, Win
from graftwork.grading.metrics import name_of, show_points
from graftwork.records.report import Report
from graftwork.records.verdict import RuleOutcome, RuleResult

MEASURED_ONCE = 0.05
"""A figure that was measured once each, such as memory, must fall by this share to be a saving."""


def judge_gains(
    report: Report, settings: GateSettings, *, around: Surroundings, adjusted_p: float | None = None
) -> list[RuleResult]:
    """The primary metric and the declared saving, as far as there are any."""
    gains = []
    if (primary := settings.primary_rule) is not None:
        gains.append(judge_primary(primary, report=report, around=around, adjusted_p=adjusted_p))
    if (win := settings.win_rule) is not None:
        gains.append(judge_win(win, report=report, around=around))
    return _one_is_enough(gains)


def p_of_primary(report: Report, settings: GateSettings, *, around: Surroundings) -> float | None:
    """What Holm's correction over several adapters starts from; None without a primary metric."""
    primary = settings.primary_rule
    other = find_subject(report, primary.against, around) if primary else None
    pair = pair_up(report, primary.metric, with_subject=other) if primary and other else None
    return pair.worst_p if pair is not None else None


def judge_primary(
    primary: Primary, *, report: Report, around: Surroundings, adjusted_p: float | None = None
) -> RuleResult:
    """The one metric on which the candidate must be better."""
    who = SUBJECTS[primary.against]
    text = f"{name_of(primary.metric)} better than {who}"
    found = _find(report, primary, around)
    if isinstance(found, str):
        return not_compared(
            primary.metric, rule=text, kind="primary", limit=0.0, why=found, against=primary.against
        )
    seen = found.seen
    p = found.worst_p if adjusted_p is None else max(adjusted_p, found.worst_p)
    better = found.gain > 0 and p < 1 - found.confidence and (not found.ungraded or found.low > 0)
    outcome: RuleOutcome = "pass" if better else "unknown" if found.gain > 0 else "fail"
    too_few = outcome == "unknown" and not found.ungraded
    tail = (1 - found.confidence) / 2 / around.tried
    needed = needed_for_mean(found.units, limit=0.0, tail=tail, look=max(around.look, 1)) if too_few else None
    settles = f"; {say_pairs_needed(primary.metric, needed)}" if needed else ""
    endings: dict[RuleOutcome, str] = {
        "pass": f"better on average over {say_like_these(seen)}",
        "unknown": f"which may be chance{settles}" if too_few else "which what was not graded may undo",
        "fail": f"so the adapter is no better than {who}",
    }
    return RuleResult(
        metric=primary.metric,
        rule=text,
        outcome=outcome,
        value=seen.difference,
        low=seen.low,
        high=seen.high,
        limit=0.0,
        sentence=(
            f"{name_of(primary.metric)}: {say_counts(seen)} against {who} "
            f"({show_points(seen.difference)}, {say_test(seen, adjusted=adjusted_p)}), {endings[outcome]}."
            f"{say_ungraded(found.ungraded)}"
        ),
        **(needed.fields if needed else {}),
        kind="primary",
        against=seen.baseline,
        n=seen.n,
        p_value=seen.p_value,
        adjusted_p=adjusted_p,
        test=seen.test,
    )


def judge_win(win: Win, *, report: Report, around: Surroundings) -> RuleResult:
    """The declared saving: its least likely size lies over what was asked for."""
    who = SUBJECTS[win.against]
    share = f" by at least {100 * win.by:g} %" if win.by else ""
    less = "less" if lower_is_better(win.metric) else "more"
    text = f"{name_of(win.metric)} {less} than {'that of ' if win.against != 'log' else ''}{who}{share}"
    found = _find(report, win, around)
    if isinstance(found, str):
        return not_compared(win.metric, rule=text, kind="win", limit=0.0, why=found, against=win.against)
    seen, asked = found.seen, _asked_saving(win, report=report, around=around, found=found)
    outcome: RuleOutcome = "unknown" if found.gain > asked else "fail"
    if found.low > asked and not found.too_few:
        outcome = "pass"
    needed: Needed | None = None
    if outcome == "unknown" and not found.ungraded:
        tail = (1 - found.confidence) / around.tried
        needed = measurements_for(found.gain, low=found.low, beyond=asked, n=seen.n, tail=tail)
        needed = Needed(found.pairs_for_a_bound) if found.too_few else needed
    sign = -1 if lower_is_better(win.metric) else 1
    size = show_size(win.metric, asked) if asked else "nothing"
    endings: dict[RuleOutcome, str] = {
        "pass": f"at the least {show_difference(win.metric, sign * found.low)}: the saving that was declared",
        "unknown": f"which may be {f'no more than {size}' if asked else 'no saving at all'}; "
        f"{say_pairs_needed(win.metric, needed)}",
        "fail": f"not the saving of more than {size} that was declared",
    }
    return RuleResult(
        metric=win.metric,
        rule=text,
        outcome=outcome,
        value=seen.difference,
        low=finite(min(sign * found.low, sign * found.high)),
        high=finite(max(sign * found.low, sign * found.high)),
        limit=sign * asked,
        sentence=(
            f"{name_of(win.metric)}: {show_difference(win.metric, seen.difference)} against {who} "
            f"({say_counts(seen)}), {endings[outcome]}.{say_ungraded(found.ungraded)}"
        ),
        **(needed.fields if needed else {}),
        kind="win",
        against=seen.baseline,
        n=seen.n,
        p_value=seen.p_value if seen.test != SIDE_BY_SIDE else None,
        test=seen.test,
    )


def _find(report: Report, wanted: Primary | Win, around: Surroundings) -> Pair | str:
    """The pair, or why there is none. A saving is bounded from below; a gain is tested both ways."""
    other = find_subject(report, wanted.against, around)
    if other is None:
        return explain_missing(wanted.against, around)
    saving = isinstance(wanted, Win)
    pair = pair_up(
        report, wanted.metric, with_subject=other, one_sided=saving, tried=around.tried if saving else 1
    )
    return pair or f"it was not measured on the same cases as {SUBJECTS[wanted.against]}"


def _asked_saving(win: Win, *, report: Report, around: Surroundings, found: Pair) -> float:
    """In the metric's unit. One measurement each has no interval, so a small difference is no saving."""
    other = find_subject(report, win.against, around)
    now = measured(other, win.metric) if other is not None else None
    least = MEASURED_ONCE if found.low == found.high else 0.0
    return max(win.by, least) * (now.value if now is not None else 0.0)


def _one_is_enough(gains: Sequence[RuleResult]) -> list[RuleResult]:
    """Of two ways to gain the better one counts; the other is told beside it."""
    if len(gains) < 2:
        return list(gains)
    rank = {"pass": 2, "unknown": 1, "fail": 0}
    best = max(gains, key=lambda gain: rank[gain.outcome])
    return [gain if gain is best else gain.model_copy(update={"must": False}) for gain in gains]
