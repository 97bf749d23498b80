"""How long a phase will still take, by what it has done so far."""

import time
from collections.abc import Callable

from graftwork.coordinate.narrator import Narrator

ENOUGH_SECONDS = 2.0
"""Before that the rate is chance."""


def tell_pace(
    narrator: Narrator, *, clock: Callable[[], float] = time.monotonic
) -> Callable[[str, int, int], None]:
    """A listener for `phase, done, total` that adds the rate and the time left."""
    began: dict[str, tuple[float, int]] = {}

    def tell(phase: str, done: int, total: int) -> None:
        start, first = began.setdefault(phase, (clock(), done))
        seconds = clock() - start
        rate = (done - first) / seconds if seconds > 0 else 0.0
        left = (total - done) / rate if rate > 0 and seconds >= ENOUGH_SECONDS else None
        narrator.progress(phase, done, total, seconds_left=left, detail={})

    return tell
