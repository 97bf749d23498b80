"""A circuit breaker: outcomes of requests in, whether a replica may be asked out. The clock is injected.

Closed, all requests pass. Failures in a row open it: none pass for a pause. Then it is half open: one request
tries. If that succeeds, the circuit closes; if not, the pause doubles.
"""

import time
from collections.abc import Callable
from typing import Literal, NamedTuple

BreakerState = Literal["closed", "open", "half_open"]


class BreakerLimits(NamedTuple):
    failures: int = 5
    pause: float = 1.0
    longest_pause: float = 30.0


class CircuitBreaker:
    """Call `begin` when a request starts, and give what it returns to one of the others when it ends."""

    def __init__(self, limits: BreakerLimits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self._clock = clock
        self._failures = 0
        self._closed = True
        self._trying = False
        self._until = 0.0
        self._pause = limits.pause
        self._period = 0
        """Counts the changes of state. What was begun in an earlier period says nothing about this one."""

    @property
    def state(self) -> BreakerState:
        if self._closed:
            return "closed"
        return "half_open" if self._trying or self._clock() >= self._until else "open"

    def allows(self) -> bool:
        return self._closed or (not self._trying and self._clock() >= self._until)

    def begin(self) -> int:
        """A request starts; on an open circuit it is the trial."""
        if not self._closed:
            self._trying = True
            self._period += 1
        return self._period

    def succeed(self, period: int) -> None:
        if period != self._period:
            return
        self._failures = 0
        if not self._closed:
            self.reset()

    def fail(self, period: int) -> None:
        if period != self._period:
            return
        self._failures += 1
        if self._trying or self._failures >= self.limits.failures:
            self._open()

    def abandon(self, period: int) -> None:
        """The request ended without a verdict about the replica: its client left."""
        if period == self._period and self._trying:
            self._trying = False
            self._period += 1

    def reset(self) -> None:
        """Close it: the replica answered, or it is a new process."""
        self._closed, self._trying = True, False
        self._failures = 0
        self._pause = self.limits.pause
        self._period += 1

    def _open(self) -> None:
        self._closed = self._trying = False
        self._failures = 0
        self._until = self._clock() + self._pause
        self._pause = min(2 * self._pause, max(self.limits.longest_pause, self.limits.pause))
        self._period += 1
