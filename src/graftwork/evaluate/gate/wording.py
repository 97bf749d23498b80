"""What the gate says: rules, differences, reasons and changed rules as sentences. Pure; decides nothing."""

import math
from collections.abc import Sequence

from graftwork.evaluate.gate.figures import Needed, held_figure
from graftwork.evaluate.gate.settings import REQUESTS, TIMED, Against, GateRule, GateSettings
from graftwork.evaluate.statistics.significance import successes_to_clear
from graftwork.grading.metrics import TASK_SUCCESS, is_share, name_of, show, show_p, show_points
from graftwork.records.report import Comparison, Decision, Metric, RuleOutcome, RuleResult
from graftwork.text.wording import plural

SUBJECTS: dict[Against, str] = {
    "base": "the base",
    "champion": "the champion",
    "log": "the log's answers",
    "prompt": "the prompted base",
    "logged_prompt": "the base with the logged prompt",
}
WAYS = {"over": "over", "under": "under", "at_least": "at least", "at_most": "at most"}


def way_of(rule: GateRule) -> str:
    return next(words for name, words in WAYS.items() if getattr(rule, name) is not None)


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
    seen = show(rule.metric, metric.value)
    if metric.kind == "rate":
        seen = f"{metric.successes} of {metric.n} ({seen})"
    way, limit = way_of(rule), show(rule.metric, rule.limit)
    if outcome == "fail":
        return f"{called(rule)}: {seen}, which is not {way} {limit}."
    held = held_figure(rule, metric)
    bound = f"the {rule.held_bound} bound {show(rule.metric, held)}" if held != metric.value else ""
    if outcome == "pass":
        return f"{called(rule)}: {seen}; {bound or 'that'} is {way} {limit}."
    remedy = _say_remedy(rule, metric, needed)
    ending = f"{bound} is not" if math.isfinite(held) else _say_too_few(rule, metric)
    if rule.clears(held):
        ending, remedy = "what could not be graded may be wrong", "more must be graded"
    return f"{called(rule)}: {seen} is {way} {limit}, but {ending}; {remedy}."


def _say_too_few(rule: GateRule, metric: Metric) -> str:
    unit = "request" if rule.metric in REQUESTS else "session" if metric.clusters else "case"
    units = metric.clusters or metric.n
    return f"{plural(units, unit)} {'is' if units == 1 else 'are'} too few for a bound"


def say_unmeasured(rule: GateRule, ungraded: int) -> str:
    """Why there is no figure at all, as far as that is known."""
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


def say_counts(seen: Comparison) -> str:
    """Wins and losses where cases were paired one by one."""
    if seen.wins + seen.losses == 0 and seen.test not in ("", "exact McNemar"):
        return f"{seen.n} pairs" if seen.n > 1 else "measured once each"
    if seen.metric in TIMED:
        return f"{plural(seen.wins, 'request')} faster and {seen.losses} slower"
    return f"{plural(seen.wins, 'case')} won and {seen.losses} lost"


def say_like_these(seen: Comparison) -> str:
    """What a mean was taken over: that is what it says something about."""
    return "sessions like these" if seen.clusters else "cases like these"


def say_pairs_needed(metric: str, needed: Needed | None) -> str:
    """How many pairs would settle a comparison, and which setting gets them."""
    if not needed:
        return "more must be measured"
    if metric in REQUESTS:
        requests = plural(needed.cases, "timed request")
        return f"about {requests} of both would settle it (evaluate.latency_cases)"
    return say_cases_needed(needed)


def say_cases_needed(needed: Needed) -> str:
    """Fresh cases first; a set that these are part of has to be larger, for it is looked at again."""
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
    """Nothing is known of them, so nothing may rest on them."""
    counted = "counts" if cases == 1 else "count"
    return f" {cases} more could not be graded and {counted} against it." if cases else ""


def say_test(seen: Comparison, *, adjusted: float | None = None) -> str:
    test = seen.test or "exact McNemar"
    corrected = f", {show_p(adjusted)} after Holm's correction" if adjusted is not None else ""
    return f"{test} {show_p(seen.p_value)}{corrected}"


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
    shown = [f"{name_of(rule.metric)} ({rule.vacuous})" for rule in rules if rule.vacuous and rule.must]
    empty = f"no case to judge by: {', '.join(dict.fromkeys(shown))}."
    if not named("unknown"):
        return f"Nothing is broken, but {empty}"
    also = f" And {empty}" if shown else ""
    return f"Nothing is broken, but too few cases to promise: {named('unknown')}.{ending}{also}"


def say_worn(metrics: Sequence[str], *, look: int, needed: int | None) -> str:
    """Why a verdict stays open on cases that were looked at before, and what would settle it."""
    named = ", ".join(dict.fromkeys(map(name_of, metrics)))
    fresh = f"about {plural(needed, 'fresh case')}" if needed else "fresh cases"
    return (
        f"Evaluation {look} on the same questions, so the result may be luck: {named}. Confirm it on "
        f"{fresh}, such as captures that were not trained on."
    )


def _say_remedy(rule: GateRule, metric: Metric, needed: Needed | None) -> str:
    """More cases at this rate or, with the cases there are, more of them right."""
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
    """Which rules are gone and which are new; empty where both ask for the same."""
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
        named = ", ".join(map(name_of, stop.worse_on))
        lines.append(f"abort when worse than {SUBJECTS[stop.against]} on {named} by {stop.by}")
    return lines
