"""Leaves before the place is gone: the last checkpoint is planned and not hoped for.

In: when the place ends by the steady clock, that clock, and how long a checkpoint takes until it is safe.
Out: before every step the answer whether it still fits; if not, the run stops in good order. Step times are
measured from one step to the next, so that looks, logging and handing over a checkpoint are in them.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from graftwork.process import clock as steady_clock
from graftwork.records.errors import StoppedInOrder
from graftwork.records.run import TrainStep
from graftwork.train.attend.attendant import TrainingCallback

STEP_ALLOWANCE = 1.25
"""The next step may take so many times the longest of the last ones."""
SAVE_ALLOWANCE = 1.5
MARGIN_SECONDS = 10.0
UNKNOWN_SAVE_SECONDS = 10.0
"""Until the first checkpoint was measured; with a deadline that is after the first step."""
REMEMBERED = 200
SETTLED = 3
"""After so many steps the first one, which warms up and compiles, says nothing any more."""


class DeadlineCallback(TrainingCallback):
    name = "deadline"

    def __init__(
        self,
        at: float,
        *,
        save_seconds: Callable[[], float | None],
        look_seconds: Callable[[int], float] = lambda _number: 0.0,
        margin: float = MARGIN_SECONDS,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._at = at
        self._save_seconds = save_seconds
        self._look_seconds = look_seconds
        self._margin = margin
        self._clock = clock or steady_clock.steady
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._begun: float | None = None
        self._seen = 0
        self._known_save: float | None = None
        self._measuring = False

    def seconds_needed(self, number: int) -> float:
        """For step `number`, for a checkpoint behind it, and to spare."""
        step = STEP_ALLOWANCE * max(self._steps, default=0.0) + self._look_seconds(number)
        return step + SAVE_ALLOWANCE * self._save() + self._margin

    def before_step(self, number: int, steps: int) -> None:
        now = self._clock()
        if self._begun is not None:
            self._steps.append(now - self._begun)
            self._seen += 1
            if self._seen == SETTLED:
                # Those of an earlier process, if any, stand before the first of this one.
                del self._steps[len(self._steps) - SETTLED]
        self._begun = now
        needed = self.seconds_needed(number)
        if now + needed > self._at:
            raise StoppedInOrder(
                f"stopped in good order after step {number - 1} of {steps}: the place's time is up",
                why=f"{max(self._at - now, 0):.0f} s are left; one more step with its checkpoint "
                f"and a margin takes up to {needed:.0f} s",
                fix="run the same command again: it goes on from here",
            )

    def wants_checkpoint(self, step: TrainStep) -> bool:
        """One early on, to know how long it takes."""
        if self._measuring or self._known_save is not None:
            return False
        self._measuring = True
        return True

    def state(self) -> dict[str, Any]:
        return {"steps": list(self._steps), "save": self._save_seconds() or self._known_save}

    def restore(self, state: dict[str, Any]) -> None:
        self._steps = deque(state.get("steps", ()), maxlen=REMEMBERED)
        self._known_save = state.get("save")

    def _save(self) -> float:
        measured = self._save_seconds()
        known = [seconds for seconds in (measured, self._known_save) if seconds is not None]
        return max(known, default=UNKNOWN_SAVE_SECONDS)
