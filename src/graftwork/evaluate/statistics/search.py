"""Where a statement turns true: on the real line, and among counts.

In: a predicate that is false first and true from some point on. Out: that point.
"""

from collections.abc import Callable

MOST_CASES = 10_000_000
"""A question that needs more cases than this is answered with "no number of cases decides"."""


def bisect(holds: Callable[[float], bool], low: float, high: float, *, steps: int = 80) -> float:
    """The point between `low` and `high` from which on `holds` is true; each step halves the error."""
    for _ in range(steps):
        middle = (low + high) / 2
        if holds(middle):
            high = middle
        else:
            low = middle
    return (low + high) / 2


def first_count(holds: Callable[[int], bool], *, start: int = 1) -> int | None:
    """The smallest count from which on `holds` is true; None beyond `MOST_CASES`.

    `start` is a guess: the nearer, the fewer counts are tried.
    """
    low, high = 0, max(start, 1)
    while not holds(high):
        if high > MOST_CASES:
            return None
        low, high = high, high * 2
    while low == 0 and high > 1 and holds(high // 2):
        high //= 2
    low = max(low, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
