"""When a server is asked again: a bounded number of times, within a bounded time, after growing pauses.

In: failed attempts, and what the server said about when to come back. Out: the pause before the next attempt,
or None where there is none. A server can lengthen a pause up to a limit; it cannot shorten one, so that none
is asked more often than it can bear. Waits for nothing itself.
"""

import time
from collections.abc import Callable
from random import Random

FIRST_PAUSE = 0.5
LONGEST_PAUSE = 60.0
LONGEST_PATIENCE = 600.0
"""Seconds after the first attempt in which another one may begin."""
_BUSY = frozenset({408, 409, 425, 429})
_NEVER = frozenset({501, 505})


class Retries:
    """The attempts at one request. `seconds` bounds the time from the first attempt to the last."""

    def __init__(
        self,
        *,
        attempts: int,
        seconds: float = LONGEST_PATIENCE,
        first_pause: float = FIRST_PAUSE,
        longest_pause: float = LONGEST_PAUSE,
        chance: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._seconds = attempts, seconds
        self._first, self._longest = first_pause, longest_pause
        self._chance, self._clock = chance or Random(), clock
        self._began = clock()
        self.failed = 0

    def after_failure(self, *, asked: float | None = None) -> float | None:
        """The pause before the next attempt; None where this one was the last.

        Pauses double and are spread, so that many clients do not come back at once. `asked` is what the
        server asked for.
        """
        self.failed += 1
        spread = 0.5 + 0.5 * self._chance.random()
        # The exponent is bounded too: a float has no room for 2 ** 2000.
        own = self._first * 2.0 ** min(self.failed - 1, 30) * spread
        pause = min(max(own, asked or 0.0), self._longest)
        in_time = self._clock() - self._began + pause <= self._seconds
        return pause if self.failed < self._most and in_time else None


def may_pass(status: int) -> bool:
    """Whether the same request may be answered later: the server is busy or broken."""
    return status in _BUSY or (status >= 500 and status not in _NEVER)


def retry_after(header: str | None) -> float | None:
    """The seconds of a `Retry-After`; a date or anything else is left to our own pauses."""
    text = (header or "").strip()
    whole, _, part = text.partition(".")
    plain = whole.isdecimal() and text.isascii() and (not part or part.isdecimal()) and len(text) < 20
    return float(text) if plain else None
