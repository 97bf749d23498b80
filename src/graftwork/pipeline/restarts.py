"""May a crashed worker be started again, and after how long? Pure.

In: how each attempt ended and how far it came. Out: seconds to wait, or None to give it up. Only
crashes without progress in between count: a run of a week may be killed every night.
"""

from dataclasses import dataclass

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0


@dataclass
class Restarts:
    most: int
    """How often in a row, without progress, a killed worker is started again."""
    total: int = 0
    in_a_row: int = 0
    furthest: float = 0.0

    def after_crash(self, code: int, *, done: float) -> float | None:
        """`code` is negative for a signal; `done` is how far the worker came."""
        if done > self.furthest:
            self.furthest, self.in_a_row = done, 0
        self.in_a_row += 1
        # Who was killed is started again; a fault of the program would only come again, so once.
        if self.in_a_row > (self.most if code < 0 else min(self.most, 1)):
            return None
        self.total += 1
        # Longer each time: a machine in trouble needs air.
        exponent = min(self.in_a_row - 1, 30)
        return min(FIRST_PAUSE_SECONDS * 2.0**exponent, LONGEST_PAUSE_SECONDS)
