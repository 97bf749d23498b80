"""The figure that a limit is held against: a metric as it was measured, or a mean or percentile of times.

In: what was measured of a subject, and a rule. Out: a Metric with the bounds of its interval, or None where
nothing was measured. Pure; does not know whether the figure is good enough.
"""

import math
from collections.abc import Sequence
from statistics import fmean

from graftwork.evaluate.gate_settings import Rule
from graftwork.evaluate.metrics import FIRST_TOKEN, LATENCY, TOKENS_PER_SECOND
from graftwork.evaluate.statistics import Interval, bootstrap_mean
from graftwork.evaluate.statistics.beta import at_most
from graftwork.records.report import Metric, SubjectReport

PERCENTILE = 0.95


def figure_of(subject: SubjectReport, rule: Rule) -> Metric | None:
    """What the rule looks at; None where it was not measured."""
    metric = measured(subject, rule.metric)
    if rule.at in (None, "median") or metric is None:
        return metric
    values = times_of(subject, rule.metric)
    if not values:
        return None
    value, (low, high) = (
        (fmean(values), bootstrap_mean(values, confidence=metric.confidence))
        if rule.at == "mean"
        else percentile(values, confidence=metric.confidence)
    )
    return metric.model_copy(
        update={
            "value": value,
            "low": min(low, value),
            "high": max(high, value),
            "n": len(values),
            "method": "bootstrap" if rule.at == "mean" else "order statistics",
        }
    )


def times_of(subject: SubjectReport, name: str) -> list[float]:
    """The measured times, request by request."""
    made = subject.generation
    kept = {LATENCY: made.single_latency_seconds, FIRST_TOKEN: made.first_token_seconds}.get(name, ())
    if kept:
        return list(kept)
    metric = subject.metrics.get(name)
    return [value for value in metric.scores.values() if value is not None] if metric else []


def percentile(values: Sequence[float], *, confidence: float) -> tuple[float, Interval]:
    """The 95th percentile with its exact interval, whatever the distribution.

    The bounds are measured values: the k-th smallest lies over the percentile unless k or more of the n
    lie under it. With few values no one is high enough, and the upper bound is infinite.
    """
    ordered, n, tail = sorted(values), len(values), (1 - confidence) / 2
    value = ordered[math.ceil(PERCENTILE * n) - 1]
    above = next((k for k in range(1, n + 1) if at_most(k - 1, n=n, rate=PERCENTILE) >= 1 - tail), None)
    under = next((k for k in range(n, 0, -1) if at_most(k - 1, n=n, rate=PERCENTILE) <= tail), None)
    low = ordered[under - 1] if under is not None else -math.inf
    high = ordered[above - 1] if above is not None else math.inf
    return value, Interval(low, high)


def times_for_percentile(confidence: float) -> int:
    """The fewest requests whose slowest one lies over the 95th percentile for sure."""
    return math.ceil(math.log((1 - confidence) / 2) / math.log(PERCENTILE))


def measured(subject: SubjectReport, name: str) -> Metric | None:
    """The metric as the report has it. Reports older than the field tell their speed all the same."""
    speed = subject.generation.tokens_per_second
    if name in subject.metrics or name != TOKENS_PER_SECOND or not speed > 0:
        return subject.metrics.get(name)
    return Metric(name=name, kind="number", value=speed, low=speed, high=speed, n=1, unit="tokens/s")
