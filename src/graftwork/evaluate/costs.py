"""What the answers of a subject cost: tokens per task, dollars per success, the slowest requests.

In: cases, answers, what a token or a second costs. Out: metrics with intervals, clustered by session. What
the log does not state is left out, never taken for 0. Pure; does not know where prices come from.
"""

import math
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graftwork.evaluate.comparison import cluster_cases
from graftwork.evaluate.statistics.intervals import Interval, clopper_pearson, quantile_interval
from graftwork.evaluate.statistics.means import RESAMPLES, bootstrap_mean, score_mean, widened_tail
from graftwork.grading.metrics import COST_PER_SUCCESS, DOLLARS, LATENCY_P95, TOKENS_PER_TASK
from graftwork.records.interaction import TokenPrice
from graftwork.records.report import Answer, Case, Generation, Metric

PERCENTILE = 0.95


class AnswerPrice(NamedTuple):
    """What an answer costs: tokens of a paid endpoint, or seconds of a machine that one pays for."""

    tokens: TokenPrice | None = None
    usd_per_hour: float | None = None


class CostedCase(NamedTuple):
    """One case: its cost in dollars, whether it was a success, and its cluster."""

    cost: float
    success: float
    cluster: str


def measure_tokens(
    tokens: Mapping[str, float | None], *, confidence: float, sessions: Mapping[str, str]
) -> Metric | None:
    """The mean over the cases whose tokens are known."""
    known = {case: count for case, count in tokens.items() if count is not None}
    if not known:
        return None
    values = list(known.values())
    clusters = cluster_cases(list(known), sessions=sessions)
    (low, high), method = score_mean(values, clusters=clusters, confidence=confidence)
    mean = math.fsum(values) / len(values)
    return Metric(
        name=TOKENS_PER_TASK,
        kind="number",
        value=mean,
        low=min(low, mean),
        high=max(high, mean),
        n=len(values),
        unit="tokens",
        confidence=confidence,
        scores=dict(tokens),
        clusters=len(set(clusters or ())),
        method=method if clusters is None else f"{method}, by session",
    )


def measure_slowest(seconds: Sequence[float], *, confidence: float) -> Metric | None:
    """The 95th percentile. Where so few requests give no upper bound, the interval ends at the slowest."""
    if not seconds:
        return None
    value = sorted(seconds)[math.ceil(PERCENTILE * len(seconds)) - 1]
    low, high = quantile_interval(seconds, quantile=PERCENTILE, confidence=confidence)
    bounded = math.isfinite(high) and math.isfinite(low)
    return Metric(
        name=LATENCY_P95,
        kind="number",
        value=value,
        low=min(low if math.isfinite(low) else min(seconds), value),
        high=max(high if math.isfinite(high) else max(seconds), value),
        n=len(seconds),
        unit="s",
        confidence=confidence,
        method="exact (order statistics)" if bounded else f"range of {len(seconds)}: too few to bound it",
    )


def measure_cost(
    costs: Mapping[str, float | None],
    *,
    successes: Mapping[str, float | None],
    confidence: float,
    sessions: Mapping[str, str],
) -> Metric | None:
    """All dollars over all successes, over the cases of which both are known; a ratio, by resampling."""
    known = [case for case, cost in costs.items() if cost is not None and successes.get(case) is not None]
    if not known:
        return None
    clusters = cluster_cases(known, sessions=sessions) or known
    rows = [
        CostedCase(costs[case] or 0.0, successes[case] or 0.0, cluster)
        for case, cluster in zip(known, clusters, strict=True)
    ]
    right = math.fsum(row.success for row in rows)
    if right < 1 or len(set(clusters)) < 2:
        # Without a success there is no cost of one, and a single session bounds nothing.
        return None
    value = math.fsum(row.cost for row in rows) / right
    low, high = _bound_ratio(rows, confidence=confidence)
    return Metric(
        name=COST_PER_SUCCESS,
        kind="number",
        value=value,
        low=min(low, value),
        high=max(high, value),
        n=len(rows),
        unit=DOLLARS,
        confidence=confidence,
        clusters=len(set(clusters)) if len(set(clusters)) < len(known) else 0,
        method="bootstrap of the ratio" + (", by session" if len(set(clusters)) < len(known) else ""),
    )


def _bound_ratio(rows: Sequence[CostedCase], *, confidence: float) -> Interval:
    """Clusters drawn as wholes. A draw without a success costs without end."""
    groups: dict[str, tuple[float, float]] = {}
    for row in rows:
        cost, right = groups.get(row.cluster, (0.0, 0.0))
        groups[row.cluster] = (cost + row.cost, right + row.success)
    parts = list(groups.values())
    draw = random.Random(0)
    found = []
    for _ in range(RESAMPLES):
        some = draw.choices(parts, k=len(parts))
        right = math.fsum(part[1] for part in some)
        found.append(math.fsum(part[0] for part in some) / right if right else math.inf)
    found.sort()
    tail = widened_tail((1 - confidence) / 2, n=len(parts))
    last = len(found) - 1
    low, high = found[math.floor(tail * last)], found[math.ceil((1 - tail) * last)]
    if math.isfinite(high):
        return Interval(low, high)
    # So few successes that a draw may hold none: the most that a case costs over the fewest successes.
    fewest = clopper_pearson(
        round(math.fsum(row.success for row in rows)), n=len(rows), confidence=confidence
    )
    most = bootstrap_mean([cost for cost, _ in parts], confidence=confidence).high * len(parts) / len(rows)
    return Interval(low, most / fewest.low)


def tokens_of_log(cases: Sequence[Case]) -> dict[str, float | None]:
    return {case.id: None if case.usage is None else case.usage.tokens for case in cases}


def costs_of_log(cases: Sequence[Case]) -> dict[str, float | None]:
    """The logged cost of each case; None where neither the log nor a price table knows it."""
    return {case.id: None if case.usage is None else case.usage.cost for case in cases}


def tokens_of_answers(by_case: Mapping[str, Sequence[Answer]]) -> dict[str, float | None]:
    """The mean over the repeats of a case. An endpoint that counts no tokens has none."""
    return {
        case: math.fsum(answer.prompt_tokens + answer.tokens for answer in answers) / len(answers)
        if any(answer.prompt_tokens + answer.tokens for answer in answers)
        else None
        for case, answers in by_case.items()
    }


def costs_of_answers(
    by_case: Mapping[str, Sequence[Answer]], *, generation: Generation, price: AnswerPrice | None
) -> dict[str, float | None]:
    """By tokens at an endpoint with a price, else by the seconds of the machine at full load."""
    if price is None:
        return {}
    if price.tokens is not None:
        found = price.tokens
        return {
            case: math.fsum(found.cost_of(a.prompt_tokens, a.tokens) for a in answers) / len(answers)
            for case, answers in by_case.items()
        }
    if price.usd_per_hour is None or not generation.answers:
        return {}
    # A batch is paid for as a whole: each of its answers has the same share of its seconds.
    return {
        case: price.usd_per_hour / 3600 * math.fsum(answer.seconds for answer in answers) / len(answers)
        for case, answers in by_case.items()
    }
