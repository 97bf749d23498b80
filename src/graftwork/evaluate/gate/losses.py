"""What ends an attempt: a broken invariant, or a loss that the cases prove.

In: the report and the rules, those already judged too. Out: reasons, with the rule that each breaks. Pure.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from graftwork.evaluate.gate.figures import at_confidence, finite
from graftwork.evaluate.gate.judge import explain_broken
from graftwork.evaluate.gate.pairs import (
    Pair,
    Surroundings,
    confidence_of,
    find_subject,
    lower_is_better,
    pair_up,
)
from graftwork.evaluate.gate.wording import SUBJECTS, say_counts, say_like_these, show_difference
from graftwork.evaluate.gate_settings import Abort, Against, GateSettings
from graftwork.evaluate.statistics import holm
from graftwork.grading.metrics import name_of, plural, show_p
from graftwork.records.report import Report
from graftwork.records.verdict import RuleResult


class Stop(NamedTuple):
    """Why the attempt ends. `rule` is None where the rule that is broken stands in the verdict already."""

    reason: str
    rule: RuleResult | None = None


def find_stops(
    report: Report, settings: GateSettings, *, judged: Sequence[RuleResult], around: Surroundings
) -> list[Stop]:
    """A broken invariant first; then what was declared under `abort_when`, or else any proven loss."""
    invariants = [rule for rule in settings.rules if rule.severity == "invariant"]
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
    """Qualities only: a slower or larger answer is what its own rule limits, not a loss of quality."""
    named: list[tuple[str, Against]] = [(rule.metric, rule.reference) for rule in settings.rules]
    if (primary := settings.primary_rule) is not None:
        named.append((primary.metric, primary.against))
    watched: dict[tuple[str, Against], Pair] = {}
    for name, against in dict.fromkeys(named):
        other = find_subject(report, against, around)
        pair = pair_up(report, name, with_subject=other) if other is not None else None
        if pair is not None and pair.kind != "number":
            watched[name, against] = pair
    return watched


def _proven_losses(
    watched: Mapping[tuple[str, Against], Pair], *, judged: Sequence[RuleResult], others: int
) -> Iterator[Stop]:
    """Losses after Holm's correction over all that is watched and the `others` that may abort as well."""
    p_values = {f"{name} {against}": pair.seen.p_value for (name, against), pair in watched.items()}
    adjusted = holm({**p_values, **{f"other {place}": 1.0 for place in range(others)}})
    for (name, against), pair in watched.items():
        if not pair.proven_loss or adjusted[f"{name} {against}"] >= 1 - pair.confidence:
            continue
        kept = any(
            rule.kind == "guardrail"
            and rule.metric == name
            and rule.outcome == "pass"
            and rule.against == pair.seen.baseline
            for rule in judged
        )
        if not kept:
            # A loss within the margin was allowed beforehand, however sure it is.
            yield _stop_for(name, pair, against)


def _worse_on_all(report: Report, declared: Abort, *, around: Surroundings) -> list[Stop]:
    other = find_subject(report, declared.against, around)
    if other is None:
        return []
    pairs = {name: pair_up(report, name, with_subject=other) for name in declared.worse_on}
    found = {name: pair for name, pair in pairs.items() if pair is not None and _lost(pair, declared)}
    if len(found) < len(declared.worse_on):
        return []
    said = ", ".join(
        f"{name_of(name)} {show_difference(name, pair.seen.difference)}" for name, pair in found.items()
    )
    worse = "worse" if declared.by == "interval" else "no better"
    reason = f"{worse} than {SUBJECTS[declared.against]} on all of: {said}"
    first = next(iter(found))
    return [
        Stop(reason, _broken(first, found[first], rule=f"not {worse} on all of {_list(found)}", said=reason))
    ]


def _lost(pair: Pair, declared: Abort) -> bool:
    if declared.by == "value":
        return pair.gain <= 0
    return pair.proven_loss or (pair.high < 0 and not pair.too_few)


def _stop_for(name: str, pair: Pair, against: Against) -> Stop:
    seen, who = pair.seen, SUBJECTS[against]
    lost = f"{plural(seen.losses, 'case')} lost, {seen.wins} won ({show_p(seen.p_value)})"
    possessive = f"{who}'s" if against != "log" else f"that of {who}"
    reason = f"{name_of(name)} is worse than {possessive}: {lost}"
    said = f"{name_of(name)}: {say_counts(seen)} against {who}, worse on average over {say_like_these(seen)}"
    return Stop(reason, _broken(name, pair, rule=f"{name_of(name)} not worse than {who} for sure", said=said))


def _broken(name: str, pair: Pair, *, rule: str, said: str) -> RuleResult:
    sign = -1 if lower_is_better(name) else 1
    return RuleResult(
        metric=name,
        rule=rule,
        outcome="fail",
        value=pair.seen.difference,
        low=finite(min(sign * pair.low, sign * pair.high)),
        high=finite(max(sign * pair.low, sign * pair.high)),
        limit=0.0,
        sentence=f"{said[0].upper()}{said[1:]}.",
        kind="loss",
        against=pair.seen.baseline,
        n=pair.seen.n,
        p_value=pair.seen.p_value,
        test=pair.seen.test,
    )


def _list(found: dict[str, Pair]) -> str:
    return ", ".join(name_of(name) for name in found)
