"""The answer in words: the verdict, and how long is long. Pure."""

from graftwork.plan.serving.question import FormRow, ServeQuestion
from graftwork.records.base import Figure

SLOW_SECONDS = 60.0
"""Whoever waits a minute for an answer has gone to do something else."""
READING_SECONDS = 0.2
"""People read some five tokens a second; slower than that and they wait for every word."""


def say_verdict(question: ServeQuestion, row: FormRow) -> str:
    """One sentence: fits or not and by how much, in time or not."""
    held, there = row.holding.memory_gib, row.holding.available_gib.value
    room = f"{held.value:.1f} of {there:.1f} GiB" + (" of each card" if question.cards > 1 else "")
    if not row.fits:
        return _say_lack(row, room)
    answer, limit = row.latency.answer_seconds, question.limit_seconds
    taken = f"an answer takes {say_range(answer)}"
    how = f"in {row.form}, with {room}"
    if limit is None:
        slow = answer.value >= SLOW_SECONDS
        return f"fits, but {taken}: nobody waits for that; {how}" if slow else f"fits, and {taken} {how}"
    if row.meets_limit in ("no", "unlikely"):
        return f"too slow: {taken}, and the limit is {say_seconds(limit)}; {how}"
    met = "is likely to be met" if row.meets_limit == "likely" else "is met"
    return f"fits, and {taken}: the limit of {say_seconds(limit)} {met}; {how}"


def _say_lack(row: FormRow, room: str) -> str:
    if row.holding.fits == "likely":
        return f"may not fit: {row.form} take {room}, and up to {row.holding.memory_gib.high:.1f}"
    return f"does not fit: {row.form} take {room}, {-row.holding.spare_gib.value:.1f} GiB too much"


def say_range(figure: Figure) -> str:
    return f"{say_seconds(figure.value)} ({say_seconds(figure.low)} … {say_seconds(figure.high)})"


def say_seconds(seconds: float) -> str:
    """In milliseconds, seconds, minutes or hours."""
    if seconds < 0.2:
        return f"{1000 * seconds:.{0 if seconds >= 0.00995 else 1}f} ms"
    if seconds < 100:
        return f"{seconds:.{0 if seconds >= 9.95 else 1}f} s"
    if seconds < 5400:
        return f"{seconds / 60:.{0 if seconds >= 597 else 1}f} min"
    return f"{seconds / 3600:.1f} h"
