"""What ends an attempt: a broken invariant, or a loss that the cases prove.

In: the report and the rules, those already judged too. Out: reasons, with the rule that each breaks. Pure.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from graftwork.evaluate.gate.figures import finite
from graftwork.evaluate.gate.judge import explain_broken
from graftwork.evaluate.gate.pairs import Pair, Surroundings, find_subject, lower_is_better, pair_up
from graftwork.evaluate.gate.wording import SUBJECTS, say_counts, show_difference
from graftwork.evaluate.gate_settings import Abort, Against, GateSettings
from graftwork.evaluate.wording import name_of, plural, show_p
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
    broken = (explain_broken(rule, report=report) for rule in settings.rules if not rule.is_guardrail)
    stops = [Stop(reason) for reason in broken if reason is not None]
    if settings.abort_when is not None:
        return stops + _worse_on_all(report, settings.abort_when, around=around)
    return stops + list(_proven_losses(report, settings, judged=judged, around=around))


def _proven_losses(
    report: Report, settings: GateSettings, *, judged: Sequence[RuleResult], around: Surroundings
) -> Iterator[Stop]:
    """Qualities only: a slower or larger answer is what its own rule limits, not a loss of quality."""
    watched: list[tuple[str, Against]] = [(rule.metric, rule.reference) for rule in settings.rules]
    if (primary := settings.primary_rule) is not None:
        watched.append((primary.metric, primary.against))
    for name, against in dict.fromkeys(watched):
        other = find_subject(report, against, around)
        pair = pair_up(report, name, with_subject=other) if other is not None else None
        if pair is None or pair.kind == "number" or not pair.proven_loss:
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
    said = f"{name_of(name)}: {say_counts(seen)} against {who}, a loss that is too uneven to be chance"
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
