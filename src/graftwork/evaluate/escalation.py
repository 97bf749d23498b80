"""Predicts escalation from the answers of a small and a large model to the same cases.

Input: the reports of both, the cases that each check escalates, the mean log-probability of the small model's
answers, and what each answer cost. Output: an `EscalationForecast`; an `EscalationCurve`, whose threshold is
chosen on validation cases and shown on test cases; live figures against a forecast; the file of the last
forecast in the project's state folder.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from graftwork.evaluate.statistics.means import bounded_difference, bounded_mean
from graftwork.files.disk import read_record, write_atomic
from graftwork.records.live import (
    EscalationCurve,
    EscalationForecast,
    EscalationLive,
    EscalationOption,
    EscalationPoint,
    LiveFigure,
    MeasuredShare,
)
from graftwork.records.report import SubjectReport

FORECAST_FILE = "escalation.json"
POINTS = 20
"""Thresholds of the curve: quantiles of the validation cases."""


class PairedCase(NamedTuple):
    """One case as both models answered it."""

    session: str
    logprob: float | None
    small: float
    large: float
    small_cost: float | None = None
    large_cost: float | None = None
    fails: bool = False
    """A check fails: the large model answers whatever the threshold."""
    id: str = ""

    def escalates(self, threshold: float) -> bool:
        return self.fails or (self.logprob is not None and self.logprob < threshold)


def make_curve(
    validation: Sequence[PairedCase], test: Sequence[PairedCase], *, max_rate: float
) -> EscalationCurve:
    """The threshold with the best validation quality among those that escalate at most `max_rate`."""
    # None of the cases, then quantiles, then all of them.
    logprobs = sorted(case.logprob for case in validation if case.logprob is not None)
    indices = {round(step * (len(logprobs) - 1) / POINTS) for step in range(POINTS + 1)}
    thresholds = sorted({logprobs[index] for index in indices}) if logprobs else [-math.inf]
    if logprobs and thresholds[-1] < 0:
        thresholds.append(0.0)
    # The chance that a correct answer has a higher log-probability than a wrong one.
    right = [case.logprob for case in test if case.logprob is not None and case.small >= 1]
    wrong = [case.logprob for case in test if case.logprob is not None and case.small < 1]
    wins = math.fsum((good > bad) + 0.5 * (good == bad) for good in right for bad in wrong)
    allowed = [t for t in thresholds if _rate(validation, t) <= max_rate] or thresholds[:1]
    best = max(allowed, key=lambda t: (_quality(validation, t), -_rate(validation, t)))
    return EscalationCurve(
        points=tuple(_point(test, threshold) for threshold in thresholds),
        chosen=_point(test, best),
        validation_cases=len(validation),
        validation_escalated=_rate(validation, best),
        validation_quality=_quality(validation, best),
        max_rate=max_rate,
        auc=wins / (len(right) * len(wrong)) if right and wrong else None,
    )


def _rate(cases: Sequence[PairedCase], threshold: float) -> float:
    return sum(case.escalates(threshold) for case in cases) / max(len(cases), 1)


def _quality(cases: Sequence[PairedCase], threshold: float) -> float:
    return math.fsum(_grade(case, threshold) for case in cases) / max(len(cases), 1)


def _grade(case: PairedCase, threshold: float) -> float:
    return case.large if case.escalates(threshold) else case.small


def _point(cases: Sequence[PairedCase], threshold: float) -> EscalationPoint:
    sessions = [case.session for case in cases]
    cost = mean_cost([pair_cost(case, escalated=case.escalates(threshold)) for case in cases], sessions)
    return EscalationPoint(
        threshold=threshold,
        escalated=share_of([float(case.escalates(threshold)) for case in cases], sessions),
        quality=share_of([_grade(case, threshold) for case in cases], sessions),
        cost_per_1000=cost[0],
        cost_low=cost[1],
        cost_high=cost[2],
    )


def pair_cost(case: PairedCase, *, escalated: bool) -> float | None:
    if case.small_cost is None or (escalated and case.large_cost is None):
        return None
    return case.small_cost + (case.large_cost or 0.0) * escalated


def share_of(values: Sequence[float], sessions: Sequence[str]) -> MeasuredShare:
    low, high = bounded_mean(values, sessions)
    mean = math.fsum(values) / len(values) if values else 0.0
    return MeasuredShare(value=mean, low=low, high=high, n=len(values))


def mean_cost(
    costs: Sequence[float | None], sessions: Sequence[str]
) -> tuple[float | None, float | None, float | None]:
    """Dollars for 1,000 requests with their interval; None if the cost of one is not known."""
    known_costs = [cost for cost in costs if cost is not None]
    if not known_costs or len(known_costs) != len(costs):
        return None, None, None
    most = max(known_costs)
    if most <= 0:
        return 0.0, 0.0, 0.0
    low, high = bounded_mean([cost / most for cost in known_costs], sessions)
    return 1000 * math.fsum(known_costs) / len(known_costs), 1000 * most * low, 1000 * most * high


class LiveRequest(NamedTuple):
    """One served request of the pair."""

    session: str
    escalated: bool
    quality: float | None = None
    cost: float | None = None


def compare_live(forecast: EscalationForecast, requests: Sequence[LiveRequest]) -> EscalationLive:
    """Rate, quality and cost of live requests against the forecast."""
    point: EscalationPoint | None = None if forecast.curve is None else forecast.curve.chosen
    option = forecast.chosen
    rate = option.escalated if point is None else point.escalated
    quality = option.quality if point is None else point.quality
    costs = (
        (option.cost_per_1000, option.cost_low, option.cost_high)
        if point is None
        else (point.cost_per_1000, point.cost_low, point.cost_high)
    )
    graded = [request for request in requests if request.quality is not None]
    priced = [request for request in requests if request.cost is not None]
    cost = mean_cost([request.cost for request in priced], [request.session for request in priced])
    remarks = [] if graded else ["no live answer has a grade: live quality is measured by feedback"]
    return EscalationLive(
        predicted_at=forecast.made_at,
        requests=len(requests),
        figures=(
            _against("escalated", rate, [(r.session, float(r.escalated)) for r in requests]),
            _against("quality", quality, [(r.session, r.quality or 0.0) for r in graded]),
            _figure("cost_per_1000", costs, cost, n=len(priced)),
        ),
        remarks=tuple(remarks),
    )


def _against(name: str, predicted: MeasuredShare, measured: Sequence[tuple[str, float]]) -> LiveFigure:
    share = (
        share_of([value for _, value in measured], [session for session, _ in measured]) if measured else None
    )
    live = (None, None, None) if share is None else (share.value, share.low, share.high)
    return _figure(name, (predicted.value, predicted.low, predicted.high), live, n=len(measured))


Measured = tuple[float | None, float | None, float | None]
"""A value and its interval."""


def _figure(name: str, predicted: Measured, live: Measured, *, n: int) -> LiveFigure:
    agrees = None
    if predicted[1] is not None and predicted[2] is not None and live[1] is not None and live[2] is not None:
        agrees = live[1] <= predicted[2] and predicted[1] <= live[2]
    return LiveFigure(
        name=name,
        predicted=predicted[0],
        predicted_low=predicted[1],
        predicted_high=predicted[2],
        live=live[0],
        live_low=live[1],
        live_high=live[2],
        n=n,
        agrees=agrees,
    )


Costs = Mapping[str, float | None]
"""Dollars of a model's answer to each case."""


class Answered(NamedTuple):
    """One model on the cases."""

    report: SubjectReport
    costs: Costs
    is_reference: bool = False
    """The log: its answers are what the others are graded against."""

    def quality(self, metric: str) -> Mapping[str, float | None]:
        measured = self.report.metrics.get(metric)
        return {} if measured is None else measured.scores


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
    ours, theirs = small.quality(metric), large.quality(metric)
    if large.is_reference and not theirs:
        theirs = dict.fromkeys(ours, 1.0)
    cases = [
        PairedCase(
            sessions.get(case, case),
            logprob=None,
            small=grade,
            large=large_grade,
            small_cost=small.costs.get(case),
            large_cost=large.costs.get(case),
            id=case,
        )
        for case, grade in ours.items()
        if grade is not None and (large_grade := theirs.get(case)) is not None
    ]
    order = _by_gain(cases, failing)
    options = [
        _option(cases, order[:count], escalated=_union(failing, order[:count]))
        for count in range(len(order) + 1)
    ]
    clusters = [case.session for case in cases]
    smalls, larges = [case.small for case in cases], [case.large for case in cases]
    mixed = _mix(cases, _union(failing, order))
    gain = bounded_difference(smalls, mixed, clusters)
    loss = bounded_difference(mixed, larges, clusters)
    right = math.fsum(mixed)
    cost = mean_cost([case.large_cost for case in cases], clusters)
    large_only = EscalationOption(
        checks=(),
        escalated=share_of([1.0] * len(cases), clusters),
        quality=share_of(larges, clusters),
        cost_per_1000=cost[0],
        cost_low=cost[1],
        cost_high=cost[2],
    )
    remarks = []
    if large.is_reference:
        remarks.append(
            f"{large.report.subject} counts as right everywhere: its answers are the references of {metric}"
        )
    if options[-1].cost_per_1000 is None:
        remarks.append(_explain_unknown_cost(cases, small=small.report.subject, large=large))
    return EscalationForecast(
        small=small.report.subject,
        large=large.report.subject,
        metric=metric,
        cases=len(cases),
        chosen=options[-1].model_copy(update={"checks": tuple(failing)}),
        options=tuple(options),
        large_alone=large_only,
        gain_over_small=(right - math.fsum(smalls)) / max(len(cases), 1),
        gain_low=gain.low,
        gain_high=gain.high,
        loss_to_large=(math.fsum(larges) - right) / max(len(cases), 1),
        loss_low=loss.low,
        loss_high=loss.high,
        remarks=tuple(remarks),
    )


def _explain_unknown_cost(cases: Sequence[PairedCase], *, small: str, large: Answered) -> str:
    lacking = []
    if any(case.small_cost is None for case in cases):
        lacking.append(f"what {small} costs (set evaluate.costs.usd_per_hour)")
    if any(case.large_cost is None for case in cases):
        lacking.append(
            "what the log cost: it states neither costs nor tokens of a model with a price"
            if large.is_reference
            else f"the price of {large.report.subject} (add it to an api_prices.csv of your own)"
        )
    return f"the cost of the pair is unknown; missing: {', and '.join(lacking)}"


def _by_gain(cases: Sequence[PairedCase], failing: Mapping[str, set[str]]) -> list[str]:
    """Order the checks: each time the one that adds most quality, then the one that escalates least."""
    ranked: list[str] = []

    def gain(check: str) -> tuple[float, int]:
        escalated = _union(failing, [*ranked, check])
        return math.fsum(_mix(cases, escalated)), -len(escalated)

    while remaining := [check for check in failing if check not in ranked]:
        ranked.append(max(remaining, key=gain))
    return ranked


def _union(failing: Mapping[str, set[str]], checks: Sequence[str]) -> set[str]:
    return set().union(*(failing[check] for check in checks))


def _mix(cases: Sequence[PairedCase], escalated: set[str]) -> list[float]:
    return [case.large if case.id in escalated else case.small for case in cases]


def _option(cases: Sequence[PairedCase], checks: Sequence[str], *, escalated: set[str]) -> EscalationOption:
    sessions = [case.session for case in cases]
    cost = mean_cost([pair_cost(case, escalated=case.id in escalated) for case in cases], sessions)
    return EscalationOption(
        checks=tuple(checks),
        escalated=share_of([float(case.id in escalated) for case in cases], sessions),
        quality=share_of(_mix(cases, escalated), sessions),
        cost_per_1000=cost[0],
        cost_low=cost[1],
        cost_high=cost[2],
    )


def write_forecast(state: Path, forecast: EscalationForecast) -> Path:
    write_atomic(state / FORECAST_FILE, forecast.to_json())
    return state / FORECAST_FILE


def read_forecast(state: Path) -> EscalationForecast | None:
    """None if there is none, or one of another version."""
    return read_record(EscalationForecast, state / FORECAST_FILE)
