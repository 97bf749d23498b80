"""What is measured beside the grades: latency, first token, speed, memory, perplexity.

In: the answers of a subject, how they were generated, the session of each case. Out: a Metric each. Pure.
What a subject does not let be measured is left out, never taken for 0: an endpoint tells no memory.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from graftwork.evaluate.compare import cluster_cases
from graftwork.evaluate.statistics.intervals import fewest_for_quantile, quantile_interval
from graftwork.evaluate.statistics.means import bootstrap_mean
from graftwork.grading.metrics import FIRST_TOKEN, LATENCY, MEMORY, PERPLEXITY, TOKENS_PER_SECOND
from graftwork.records.report import Answer, Generation, Metric

LARGEST_LOSS = 700.0
"""e to more than this is no number any more."""


def measure(
    said: Mapping[str, Sequence[Answer]],
    *,
    generation: Generation,
    confidence: float = 0.95,
    sessions: Mapping[str, str] | None = None,
) -> dict[str, Metric]:
    """By name; `said` holds the answers to each case."""
    losses = {
        case: next((a.reference_loss for a in answers if a.reference_loss is not None), None)
        for case, answers in said.items()
    }
    found = [
        _make_seconds(LATENCY, generation.single_latency_seconds, confidence),
        _make_seconds(FIRST_TOKEN, generation.first_token_seconds, confidence),
        _make_figure(TOKENS_PER_SECOND, generation.tokens_per_second, "tokens/s", confidence),
        _make_figure(MEMORY, generation.peak_memory_gib, "GiB", confidence),
        make_perplexity(losses, confidence=confidence, sessions=sessions or {}),
    ]
    return {metric.name: metric for metric in found if metric is not None}


def _make_seconds(name: str, seconds: Sequence[float], confidence: float) -> Metric | None:
    if not seconds:
        return None
    low, high = quantile_interval(seconds, quantile=0.5, confidence=confidence)
    return Metric(
        name=name,
        kind="number",
        value=median(seconds),
        # Where no bound holds at this confidence, the range is shown, and how often it holds the median.
        low=low if math.isfinite(low) else min(seconds),
        high=high if math.isfinite(high) else max(seconds),
        n=len(seconds),
        unit="s",
        confidence=confidence,
        method=_name_method(len(seconds), confidence),
    )


def _name_method(count: int, confidence: float) -> str:
    """So few requests cannot bound their median at this confidence, and that is said."""
    if count >= fewest_for_quantile(0.5, confidence=confidence):
        return "exact (order statistics)"
    return f"range of {count}: holds the median in {1 - 2 * 0.5**count:.0%}"


def _make_figure(name: str, value: float, unit: str, confidence: float) -> Metric | None:
    """Measured once: the interval is the figure itself."""
    if not value > 0:
        return None
    return Metric(
        name=name, kind="number", value=value, low=value, high=value, n=1, unit=unit, confidence=confidence
    )


def make_perplexity(
    losses: Mapping[str, float | None], *, confidence: float, sessions: Mapping[str, str]
) -> Metric | None:
    """e to the mean of the cases' losses, bounded by how far their sessions differ.

    The repeats of a case weigh the same reply. A loss that is no number is counted as one that failed.
    """
    known = {case: loss for case, loss in losses.items() if loss is not None}
    sound = {case: loss for case, loss in known.items() if abs(loss) <= LARGEST_LOSS}
    if not sound:
        return None
    clusters = cluster_cases(list(sound), sessions=sessions)
    low, high = bootstrap_mean(list(sound.values()), clusters=clusters, confidence=confidence)
    mean = math.fsum(sound.values()) / len(sound)
    failed = len(known) - len(sound)
    return Metric(
        name=PERPLEXITY,
        kind="number",
        value=math.exp(mean),
        low=math.exp(min(low, mean)),
        high=math.exp(max(high, mean)),
        n=len(sound),
        confidence=confidence,
        scores={case: math.exp(sound[case]) if case in sound else None for case in losses},
        clusters=len(set(clusters or ())),
        method=f"bootstrap of the mean loss{', by session' if clusters else ''}",
        failed=failed,
        why_failed="the loss of the recorded reply is no number" if failed else "",
        failed_cases=tuple(case for case in known if case not in sound),
    )
