"""How long a phase will still take, by what it has done so far."""

import time
from collections.abc import Callable
from typing import NamedTuple

from graftwork.pipeline.reporter import Reporter
from graftwork.records.units import MIB

ENOUGH_SECONDS = 2.0
"""Before that the rate is chance."""


class Unit(NamedTuple):
    name: str
    size: int


UNITS = {"read and sift": Unit("MiB", MIB)}
"""What a phase counts in, if not in rows."""


def tell_pace(
    reporter: Reporter, *, clock: Callable[[], float] = time.monotonic
) -> Callable[[str, int, int], None]:
    """A listener for `phase, done, total` that adds the rate and the time left."""
    began: dict[str, tuple[float, int]] = {}

    def tell(phase: str, done: int, total: int) -> None:
        start, first = began.setdefault(phase, (clock(), done))
        seconds = clock() - start
        rate = (done - first) / seconds if seconds > 0 else 0.0
        known = rate > 0 and seconds >= ENOUGH_SECONDS
        unit = UNITS.get(phase, Unit("rows", 1))
        reporter.progress(
            phase,
            done / unit.size,
            total / unit.size,
            seconds_left=(total - done) / rate if known else None,
            detail={f"{unit.name}/s": round(rate / unit.size, 1)} if known else {},
        )

    return tell
