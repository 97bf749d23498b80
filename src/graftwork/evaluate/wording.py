"""Figures in words: how a metric is called and how its values are written."""

from graftwork.grading import FIRST_TOKEN, LATENCY, MEMORY, PERPLEXITY, TOKENS_PER_SECOND

NAMES = {
    "json_valid": "JSON-valid rate",
    "schema_valid": "Schema-valid rate",
    "citation_coverage": "Citation coverage",
    "refusal_correct": "Refusal correctness",
    "citation_correct": "Citation correctness",
    "claims_cited": "Claims cited",
    "citations_exist": "Citations that exist",
    "citations_support": "Citations that support",
    "grounded": "Grounded answers",
    "groundedness": "Groundedness",
    "refused_where_due": "Refused where due",
    "answered_where_due": "Answered where due",
    "answer_match": "Answer match",
    "nearer_to_preferred": "Nearer to the preferred reply",
    "token_f1": "Shared words (F1)",
    "edit_similarity": "Edit similarity",
    "chrf": "Shared letters (chrF)",
    "reviewer_score": "Reviewers' score",
    "task_success": "Task success",
    "checks_passed": "Checks passed",
    "judge_score": "Judge's score",
    "judge_preference": "Judge's preference",
    "truncated": "Truncated answers",
    LATENCY: "Latency",
    FIRST_TOKEN: "First token",
    TOKENS_PER_SECOND: "Speed",
    MEMORY: "Peak memory",
    PERPLEXITY: "Perplexity of the recorded reply",
}
UNITS = {LATENCY: "s", FIRST_TOKEN: "s", MEMORY: "GiB", TOKENS_PER_SECOND: "tokens/s", PERPLEXITY: ""}


def name_of(metric: str) -> str:
    return NAMES.get(metric, metric)


def is_share(metric: str) -> bool:
    """Whether the metric is a grade from 0 to 1, as all are but those that measure cost."""
    return metric not in UNITS


def show(metric: str, value: float) -> str:
    """95.8 %, 1.25 s, 2 GiB."""
    if is_share(metric):
        return f"{100 * value:.1f} %".replace(".0 %", " %")
    return f"{value:.2f}".rstrip("0").rstrip(".") + f" {UNITS[metric]}".rstrip()


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def show_points(difference: float) -> str:
    return f"{100 * difference:+.1f} points"


def show_p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"
