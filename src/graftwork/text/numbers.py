"""Numbers as logs hold them, where tables may have text only."""

import math
import re
from typing import Any

_NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)


def take_figure(value: Any) -> float | None:
    """Return a number, also from text (tables only have text); None for anything else."""
    if value is None:
        return None
    if isinstance(value, str) and len(value) < 40 and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def take_score(value: Any) -> float | None:
    """Return a score: a number, or 1 for true and 0 for false."""
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().casefold(), value)
    return float(value) if isinstance(value, bool) else take_figure(value)
