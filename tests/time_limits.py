"""Checks of what happens at a time limit, on machines of any speed.

In: a check that takes the limit; limits in ascending order. Out: what the check returns. The check asserts
that one thing ends at the limit and that another is done before it. A limit that is too short for this
machine says nothing about the product: the next one is tried.
"""

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def check_with_limits(check: Callable[[float], Result], *limits: float) -> Result:
    for limit in limits[:-1]:
        try:
            return check(limit)
        except Exception:
            continue
    return check(limits[-1])
