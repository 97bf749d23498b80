"""Predicts escalation from the answers of a small and a large model to the same cases.

In: the reports of both, the cases that each check escalates, and what each answer cost. Out: an
`EscalationForecast`. Pure.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graftwork.evaluate.escalation_curve import mean_cost
from graftwork.evaluate.statistics.bounded import bounded_difference, bounded_mean
from graftwork.records.report import SubjectReport
from graftwork.records.routing import EscalationForecast, EscalationOption, MeasuredShare

Costs = Mapping[str, float | None]
"""Dollars of a model's answer to each case."""


class Answered(NamedTuple):
    """One model on the cases."""

    report: SubjectReport
    costs: Costs
    is_reference: bool = False
    """The log: its answers are what the others are graded against."""

    def quality(self, metric: str) -> Mapping[str, float | None]:
        found = self.report.metrics.get(metric)
        return {} if found is None else found.scores


class _Pair(NamedTuple):
    """Both models on the cases that both have a grade for."""

    cases: list[str]
    sessions: list[str]
    small: list[float]
    large: list[float]
    small_costs: list[float | None]
    large_costs: list[float | None]


def forecast(
    small: Answered,
    large: Answered,
    *,
    metric: str,
    failing: Mapping[str, set[str]],
    sessions: Mapping[str, str],
) -> EscalationForecast:
    """The pair under the checks, under each smaller set of them, and each model alone.

    `failing` has the cases that each check escalates.
    """
    checks = tuple(failing)
    pair = _pair_up(small, large, metric=metric, sessions=sessions)
    order = _by_gain(pair, failing)
    options = [_option(pair, order[:count], failing) for count in range(len(order) + 1)]
    mixed = _mix(pair, _union(failing, checks))
    gain = bounded_difference(pair.small, mixed, pair.sessions)
    loss = bounded_difference(mixed, pair.large, pair.sessions)
    right = math.fsum(mixed)
    alone = EscalationOption(
        checks=(),
        escalated=_share([1.0] * len(pair.cases), pair.sessions),
        quality=_share(pair.large, pair.sessions),
        cost_per_1000=_per_1000(pair.large_costs),
    )
    alone = _with_cost_interval(alone, pair.large_costs, pair.sessions)
    remarks = []
    if large.is_reference:
        remarks.append(
            f"{large.report.subject} counts as right everywhere: its answers are the references of {metric}"
        )
    if options[-1].cost_per_1000 is None:
        remarks.append(_explain_unknown_cost(pair, small=small.report.subject, large=large))
    return EscalationForecast(
        small=small.report.subject,
        large=large.report.subject,
        metric=metric,
        cases=len(pair.cases),
        chosen=options[-1].model_copy(update={"checks": tuple(checks)}),
        options=tuple(options),
        large_alone=alone,
        gain_over_small=(right - math.fsum(pair.small)) / max(len(pair.cases), 1),
        gain_low=gain.low,
        gain_high=gain.high,
        loss_to_large=(math.fsum(pair.large) - right) / max(len(pair.cases), 1),
        loss_low=loss.low,
        loss_high=loss.high,
        remarks=tuple(remarks),
    )


def _explain_unknown_cost(pair: _Pair, *, small: str, large: Answered) -> str:
    lacking = []
    if None in pair.small_costs:
        lacking.append(f"what {small} costs (set evaluate.costs.usd_per_hour)")
    if None in pair.large_costs and large.is_reference:
        lacking.append("what the log cost: it states neither costs nor tokens of a model with a price")
    elif None in pair.large_costs:
        lacking.append(f"the price of {large.report.subject} (add it to an api_prices.csv of your own)")
    return f"the cost of the pair is unknown; missing: {', and '.join(lacking)}"


def _pair_up(small: Answered, large: Answered, *, metric: str, sessions: Mapping[str, str]) -> _Pair:
    ours, theirs = small.quality(metric), large.quality(metric)
    if large.is_reference and not theirs:
        theirs = dict.fromkeys(ours, 1.0)
    cases = [case for case, grade in ours.items() if grade is not None and theirs.get(case) is not None]
    return _Pair(
        cases,
        [sessions.get(case, case) for case in cases],
        [ours[case] or 0.0 for case in cases],
        [theirs[case] or 0.0 for case in cases],
        [small.costs.get(case) for case in cases],
        [large.costs.get(case) for case in cases],
    )


def _by_gain(pair: _Pair, failing: Mapping[str, set[str]]) -> list[str]:
    """The checks, each time the one that adds most quality, then the one that escalates least."""
    chosen: list[str] = []
    left = list(failing)
    while left:
        best = max(
            left,
            key=lambda check: (
                math.fsum(_mix(pair, _union(failing, [*chosen, check]))),
                -len(_union(failing, [*chosen, check])),
            ),
        )
        chosen.append(best)
        left.remove(best)
    return chosen


def _union(failing: Mapping[str, set[str]], checks: Sequence[str]) -> set[str]:
    return set().union(*(failing[check] for check in checks))


def _mix(pair: _Pair, escalated: set[str]) -> list[float]:
    return [
        theirs if case in escalated else ours
        for case, ours, theirs in zip(pair.cases, pair.small, pair.large, strict=True)
    ]


def _option(pair: _Pair, checks: Sequence[str], failing: Mapping[str, set[str]]) -> EscalationOption:
    escalated = _union(failing, checks)
    asked = [float(case in escalated) for case in pair.cases]
    costs = [
        None if ours is None or (both and theirs is None) else ours + (theirs or 0.0) * both
        for both, ours, theirs in zip(asked, pair.small_costs, pair.large_costs, strict=True)
    ]
    option = EscalationOption(
        checks=tuple(checks),
        escalated=_share(asked, pair.sessions),
        quality=_share(_mix(pair, escalated), pair.sessions),
        cost_per_1000=_per_1000(costs),
    )
    return _with_cost_interval(option, costs, pair.sessions)


def _with_cost_interval(
    option: EscalationOption, costs: Sequence[float | None], sessions: Sequence[str]
) -> EscalationOption:
    _, low, high = mean_cost(costs, sessions)
    return option.model_copy(update={"cost_low": low, "cost_high": high})


def _share(values: Sequence[float], sessions: Sequence[str]) -> MeasuredShare:
    low, high = bounded_mean(values, sessions)
    value = math.fsum(values) / len(values) if values else 0.0
    return MeasuredShare(value=value, low=low, high=high, n=len(values))


def _per_1000(costs: Sequence[float | None]) -> float | None:
    known = [cost for cost in costs if cost is not None]
    return 1000 * math.fsum(known) / len(known) if known and len(known) == len(costs) else None
