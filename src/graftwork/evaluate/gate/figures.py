"""The figure that a limit is held against: a metric as it was measured, or a mean or percentile of times.

In: what was measured of a subject, a rule, the session of each case. Out: a Metric with the bounds of its
interval, or None where nothing was measured. Pure; does not know whether the figure is good enough. A bound
that so few measurements cannot give at the report's confidence is infinite: nothing can be promised by it.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from graftwork.evaluate.gate_settings import TIMED, Rule, Statistic
from graftwork.evaluate.measure import make_perplexity
from graftwork.evaluate.score import make_metric
from graftwork.evaluate.statistics import Interval, bounded_mean
from graftwork.evaluate.statistics.intervals import fewest_for_quantile, quantile_interval
from graftwork.grading import FIRST_TOKEN, LATENCY, PERPLEXITY, TOKENS_PER_SECOND
from graftwork.records.report import Metric, Report, SubjectReport

PERCENTILE = 0.95
MIDDLE = 0.5
FEWEST_FOR_MEAN = 16
SLOWEST = 2.0
"""No bound of a mean of seconds holds for every distribution: one request in a thousand may take an hour.
This one assumes that none takes so many times as long as the slowest of at least `FEWEST_FOR_MEAN`."""
NO_BOUNDS = Interval(-math.inf, math.inf)


def figure_of(
    subject: SubjectReport, rule: Rule, *, sessions: Mapping[str, str] | None = None
) -> Metric | None:
    """What the rule looks at; None where it was not measured."""
    metric = measured(subject, rule.metric)
    if metric is not None and rule.metric == PERPLEXITY:
        return _by_session(metric, sessions or {})
    if metric is None or rule.metric not in TIMED:
        return metric
    values = times_of(subject, rule.metric)
    if values:
        return _of_times(metric, values, rule.at or "median")
    if rule.at not in (None, "median"):
        return None
    return metric if metric.n >= fewest_units(metric) else _unbounded(metric)


def at_confidence(report: Report, confidence: float) -> Report:
    """The report with every bound of the candidate at this confidence, by the statistics of today.

    What an older version wrote is judged as if it had been measured now: its grades are kept one by one.
    """
    metrics = {
        name: _renew(metric, confidence, report.sessions) for name, metric in report.candidate.metrics.items()
    }
    if metrics == report.candidate.metrics:
        return report
    return report.model_copy(update={"candidate": report.candidate.model_copy(update={"metrics": metrics})})


def _renew(metric: Metric, confidence: float, sessions: Mapping[str, str]) -> Metric:
    graded = metric.kind != "number" and any(value is not None for value in metric.scores.values())
    dated = graded and (metric.clusters or metric.kind == "score") and "bounded mean" not in metric.method
    if metric.confidence == confidence and not dated:
        return metric
    if not graded:
        return metric.model_copy(update={"confidence": confidence})
    again = make_metric(
        metric.name,
        scores=metric.scores,
        confidence=confidence,
        sessions=sessions,
        scored=metric.kind == "score",
    )
    kept = {"failed": metric.failed, "why_failed": metric.why_failed, "failed_cases": metric.failed_cases}
    return again.model_copy(update=kept)


def fewest_units(metric: Metric, *, at: Statistic | None = None) -> int:
    """Requests, or sessions, without which no interval reaches the confidence of the metric."""
    fewest = fewest_for_quantile(MIDDLE, confidence=metric.confidence)
    return max(fewest, FEWEST_FOR_MEAN) if at == "mean" else fewest


def _of_times(metric: Metric, values: Sequence[float], at: Statistic) -> Metric:
    confidence = metric.confidence
    if at == "p95":
        (value, found), method = percentile(values, confidence=confidence), "exact (order statistics)"
    elif at == "mean":
        found, value = NO_BOUNDS, fmean(values)
        if len(values) >= fewest_units(metric, at=at):
            found = bounded_mean(values, highest=SLOWEST * max(values), confidence=confidence)
        method = "bounded mean, no request over twice the slowest"
    else:
        found = quantile_interval(values, quantile=MIDDLE, confidence=confidence)
        value, method = median(values), "exact (order statistics)"
    low, high = min(found.low, value), max(found.high, value)
    told = {"value": value, "low": low, "high": high, "n": len(values), "method": method}
    return metric.model_copy(update=told)


def _by_session(metric: Metric, sessions: Mapping[str, str]) -> Metric:
    """Bounded by how far sessions differ, in reports too that were measured without a look at them."""
    losses = {case: math.log(value) if value else None for case, value in metric.scores.items()}
    again = make_perplexity(losses, confidence=metric.confidence, sessions=sessions)
    if again is not None:
        kept = {"failed": metric.failed, "why_failed": metric.why_failed, "failed_cases": metric.failed_cases}
        metric = again.model_copy(update=kept)
    return metric if (metric.clusters or metric.n) >= fewest_units(metric) else _unbounded(metric)


def _unbounded(metric: Metric) -> Metric:
    return metric.model_copy(update=NO_BOUNDS._asdict())


def times_of(subject: SubjectReport, name: str) -> list[float]:
    """The measured times, request by request."""
    made = subject.generation
    kept = {LATENCY: made.single_latency_seconds, FIRST_TOKEN: made.first_token_seconds}.get(name, ())
    if kept:
        return list(kept)
    metric = subject.metrics.get(name)
    return [value for value in metric.scores.values() if value is not None] if metric else []


def percentile(values: Sequence[float], *, confidence: float) -> tuple[float, Interval]:
    """The 95th percentile with its exact interval, whatever the distribution."""
    value = sorted(values)[math.ceil(PERCENTILE * len(values)) - 1]
    return value, quantile_interval(values, quantile=PERCENTILE, confidence=confidence)


def times_for_percentile(confidence: float) -> int:
    """The fewest requests whose slowest one lies over the 95th percentile for sure."""
    return fewest_for_quantile(PERCENTILE, confidence=confidence)


def finite(bound: float) -> float | None:
    """JSON has no infinity: a bound that is not there is not written."""
    return bound if math.isfinite(bound) else None


def measured(subject: SubjectReport, name: str) -> Metric | None:
    """The metric as the report has it. Reports older than the field tell their speed all the same."""
    speed = subject.generation.tokens_per_second
    if name in subject.metrics or name != TOKENS_PER_SECOND or not speed > 0:
        return subject.metrics.get(name)
    return Metric(name=name, kind="number", value=speed, low=speed, high=speed, n=1, unit="tokens/s")
