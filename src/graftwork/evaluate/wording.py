"""Figures in words: how a metric is called and how its values are written."""

from graftwork.evaluate.metrics import LATENCY, MEMORY, RATES

NAMES = {
    "json_valid": "JSON-valid rate",
    "citation_coverage": "Citation coverage",
    "refusal_correct": "Refusal correctness",
    "citation_correct": "Citation correctness",
    "answer_match": "Answer match",
    "truncated": "Truncated answers",
    "latency_seconds": "Latency",
    "peak_memory_gib": "Peak memory",
}
UNITS = {LATENCY: "s", MEMORY: "GiB"}


def name_of(metric: str) -> str:
    return NAMES.get(metric, metric)


def show(metric: str, value: float) -> str:
    """95.8 %, 1.25 s, 2 GiB."""
    if metric in RATES:
        return f"{100 * value:.1f} %".replace(".0 %", " %")
    return f"{value:.2f}".rstrip("0").rstrip(".") + f" {UNITS.get(metric, '')}".rstrip()


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def show_points(difference: float) -> str:
    return f"{100 * difference:+.1f} points"


def show_p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
