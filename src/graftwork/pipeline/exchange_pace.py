"""Tells how far a transfer is: MiB done of MiB in all, how fast, and the time left.

In: a reporter. Out: a listener for `phase, bytes done, bytes in all`, as the registry calls it.
"""

import math
import time
from collections.abc import Callable

from graftwork.pipeline.reporter import Reporter
from graftwork.records.units import MIB

ENOUGH_SECONDS = 1.0
"""Before that the rate is chance."""
BETWEEN_SECONDS = 0.1
"""Between two words of the same phase: a fast disk has a thousand pieces a second."""


def tell_bytes(
    reporter: Reporter, *, clock: Callable[[], float] = time.monotonic
) -> Callable[[str, int, int], None]:
    """A phase begins anew when fewer bytes are done than before."""
    phase_now, began, last_told, last_done = "", 0.0, -math.inf, 0

    def tell(phase: str, done: int, total: int) -> None:
        nonlocal phase_now, began, last_told, last_done
        now = clock()
        if phase != phase_now or done < last_done:
            phase_now, began, last_told = phase, now, -math.inf
        last_done = done
        if now - last_told < BETWEEN_SECONDS and done < total:
            return
        last_told = now
        seconds = now - began
        rate = done / seconds if seconds > 0 else 0.0
        known = rate > 0 and seconds >= ENOUGH_SECONDS
        reporter.progress(
            phase,
            done / MIB,
            total / MIB,
            seconds_left=(total - done) / rate if known else None,
            detail={"MiB/s": round(rate / MIB, 1)} if known else {},
        )

    return tell
