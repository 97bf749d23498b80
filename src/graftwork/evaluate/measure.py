"""What is measured beside the grades: latency, first token, speed, memory, perplexity.

In: the answers of a subject and how they were generated. Out: a Metric each. Pure. What a subject does
not let be measured is left out, never taken for 0: an endpoint tells no memory.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import median

from graftwork.evaluate.metrics import FIRST_TOKEN, LATENCY, MEMORY, PERPLEXITY, TOKENS_PER_SECOND
from graftwork.evaluate.statistics import bootstrap_mean, bootstrap_median
from graftwork.records.report import Answer, Generation, Metric


def measure(
    said: Mapping[str, Sequence[Answer]], *, generation: Generation, confidence: float = 0.95
) -> dict[str, Metric]:
    """By name; `said` holds the answers to each case."""
    found = [
        _make_seconds(LATENCY, generation.single_latency_seconds, confidence),
        _make_seconds(FIRST_TOKEN, generation.first_token_seconds, confidence),
        _make_figure(TOKENS_PER_SECOND, generation.tokens_per_second, "tokens/s", confidence),
        _make_figure(MEMORY, generation.peak_memory_gib, "GiB", confidence),
        _make_perplexity(said, confidence),
    ]
    return {metric.name: metric for metric in found if metric is not None}


def _make_seconds(name: str, seconds: Sequence[float], confidence: float) -> Metric | None:
    if not seconds:
        return None
    middle = median(seconds)
    low, high = bootstrap_median(seconds, confidence=confidence)
    return Metric(
        name=name,
        kind="number",
        value=middle,
        low=min(low, middle),
        high=max(high, middle),
        n=len(seconds),
        unit="s",
        confidence=confidence,
        method=_name_method(len(seconds), confidence),
    )


def _name_method(count: int, confidence: float) -> str:
    """So few requests cannot bound their median at this confidence, and that is said."""
    covers = 1 - 2 * 0.5**count
    if covers >= confidence:
        return "bootstrap of the median"
    return f"range of {count}: holds the median in {covers:.0%}"


def _make_figure(name: str, value: float, unit: str, confidence: float) -> Metric | None:
    """Measured once: the interval is the figure itself."""
    if not value > 0:
        return None
    return Metric(
        name=name, kind="number", value=value, low=value, high=value, n=1, unit=unit, confidence=confidence
    )


def _make_perplexity(said: Mapping[str, Sequence[Answer]], confidence: float) -> Metric | None:
    """e to the mean of the cases' losses; the repeats of a case weigh the same reply."""
    losses = {
        case: next((a.reference_loss for a in answers if a.reference_loss is not None), None)
        for case, answers in said.items()
    }
    known = [loss for loss in losses.values() if loss is not None]
    if not known:
        return None
    low, high = bootstrap_mean(known, confidence=confidence)
    mean = sum(known) / len(known)
    return Metric(
        name=PERPLEXITY,
        kind="number",
        value=math.exp(mean),
        low=math.exp(min(low, mean)),
        high=math.exp(max(high, mean)),
        n=len(known),
        confidence=confidence,
        scores={case: None if loss is None else math.exp(loss) for case, loss in losses.items()},
        method="bootstrap of the mean loss",
    )
