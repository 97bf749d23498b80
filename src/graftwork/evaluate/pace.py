"""How long the rest of the answers takes, judged by those that are there and by the batch in the making.

In: batches as they begin and end, and each token of the open one. Out: seconds. Pure but for the clock.
Before the first batch is done, its longest row is taken to go on to the limit: that is the most it takes.
"""

import time
from collections.abc import Callable

BEAT_SECONDS = 1.0
"""Between two words about a batch that is being written."""


class Pace:
    """`left` counts the answers that are still to come, those of the open batch among them."""

    def __init__(self, *, left: int, longest: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._left, self._longest, self._clock = left, longest, clock
        self._done, self._spent = 0, 0.0
        self._rows, self._began, self._first, self._told = 0, 0.0, 0.0, 0.0
        self._tokens: dict[int, int] = {}

    def begin(self, rows: int) -> None:
        self._rows, self._began = rows, self._clock()
        self._told, self._tokens = self._began, {}

    def hear(self, row: int) -> bool:
        """One more token of this row; whether it is time to tell of it."""
        if not self._rows:
            return False
        now = self._clock()
        if not self._tokens:
            self._first = now
        self._tokens[row] = self._tokens.get(row, 0) + 1
        due = now - self._told >= BEAT_SECONDS
        self._told = now if due else self._told
        return due

    def end(self) -> None:
        self._spent += self._clock() - self._began
        self._done += self._rows
        self._left -= self._rows
        self._rows = 0

    @property
    def tokens(self) -> int:
        """Of the open batch, so far."""
        return sum(self._tokens.values())

    def tokens_per_second(self) -> float:
        """Of the open batch, its prompts' reading included."""
        elapsed = self._clock() - self._began
        return self.tokens / elapsed if elapsed > 0 else 0.0

    def seconds_left(self) -> float | None:
        """None as long as nothing is known."""
        elapsed = self._clock() - self._began if self._rows else 0.0
        # A torn batch is asked whole: it may have more rows than there are answers to come.
        behind = max(self._left - self._rows, 0)
        if self._done:
            each = self._spent / self._done
            return max(each * self._rows - elapsed, 0.0) + each * behind
        whole = self._whole_batch()
        if whole is None:
            return None
        return max(whole - elapsed, 0.0) + whole / self._rows * behind

    def _whole_batch(self) -> float | None:
        """Seconds of the open batch if its longest row goes on to the limit."""
        steps = max(self._tokens.values(), default=0) - 1
        if not self._rows or steps < 1:
            return None
        each = (self._clock() - self._first) / steps
        return self._first - self._began + each * (self._longest - 1)
