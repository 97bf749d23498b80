"""Watches the loss and the gradient: refuses a step that has gone wrong, stops a run that stays so.

In: what each step measured, and its rows. Out: whether the step is taken. What is refused changes no
weight. Nothing here depends on a clock, and what it remembers goes into the checkpoint: a resumed run
comes to the same verdicts.
"""

import math
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from graftwork.files.disk import write_atomic
from graftwork.process import clock as steady_clock
from graftwork.records.dataset import Row
from graftwork.records.errors import AnswerIsNo, StoppedInOrder
from graftwork.records.run import TrainStep
from graftwork.train.callbacks import TrainingCallback
from graftwork.train.run_folder import REHEARSED
from graftwork.train.settings import WatchSettings

if TYPE_CHECKING:
    from graftwork.train.engine import StepResult

LEAST_KNOWN = 4
"""Of fewer losses nobody knows what is usual."""
LEAST_RISE = 1.0
"""Close to zero a loss easily becomes many times the usual one: that alone is no spike."""
ROWS_NAMED = 12


class Diverged(AnswerIsNo):
    """The loss or the gradient went wrong, and stayed wrong."""


class DivergenceCallback(TrainingCallback):
    name = "watch"

    def __init__(
        self, settings: WatchSettings, *, report: Callable[[str], None] = lambda _message: None
    ) -> None:
        self._settings = settings
        self._report = report
        self._usual: deque[float] = deque(maxlen=settings.window)
        self._in_a_row = 0

    def accept_gradient(self, number: int, measured: "StepResult", rows: Sequence[Row]) -> bool:
        fault = self._find_fault(measured)
        if fault is None:
            self._usual.append(measured.loss)
            self._in_a_row = 0
            return True
        self._in_a_row += 1
        if self._in_a_row > self._settings.tolerate:
            raise Diverged(
                f"step {number}: {fault}",
                why="training on would destroy the adapter; the last good checkpoint is kept",
                fix="look at the rows of this batch, or lower `train.learning_rate`",
                where=name_rows(rows),
            )
        self._report(f"step {number} is passed over: {fault}; its rows: {name_rows(rows)}")
        return False

    def state(self) -> dict[str, Any]:
        return {"usual": list(self._usual), "in_a_row": self._in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        self._usual = deque(state.get("usual", ()), maxlen=self._settings.window)
        self._in_a_row = int(state.get("in_a_row", 0))

    def _find_fault(self, measured: "StepResult") -> str | None:
        if not math.isfinite(measured.loss):
            return f"the loss is {measured.loss}"
        if not math.isfinite(measured.gradient_norm):
            return f"the gradient is {measured.gradient_norm}"
        if measured.gradient_norm > self._settings.gradient:
            return f"the gradient exploded to {measured.gradient_norm:.3g}"
        if len(self._usual) < LEAST_KNOWN:
            return None
        usual = median(self._usual)
        if measured.loss > max(usual * self._settings.spike, usual + LEAST_RISE):
            return f"the loss jumped to {measured.loss:.3g} from about {usual:.3g}"
        return None


def name_rows(rows: Sequence[Row]) -> str:
    """Where the rows came from, as file:line; a dozen of them and how many more."""
    named = ", ".join(str(row.origin) for row in rows[:ROWS_NAMED])
    more = len(rows) - ROWS_NAMED
    return f"{named} and {more} more" if more > 0 else named


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
        evaluation_seconds: Callable[[int], float] = lambda _number: 0.0,
        margin: float = MARGIN_SECONDS,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._at = at
        self._save_seconds = save_seconds
        self._evaluation_seconds = evaluation_seconds
        self._margin = margin
        self._clock = clock or steady_clock.steady
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._begun: float | None = None
        self._seen = 0
        self._known_save: float | None = None
        self._measuring = False

    def seconds_needed(self, number: int) -> float:
        """For step `number`, for a checkpoint behind it, and to spare."""
        step = STEP_ALLOWANCE * max(self._steps, default=0.0) + self._evaluation_seconds(number)
        return step + SAVE_ALLOWANCE * self._save() + self._margin

    def on_step_begin(self, number: int, steps: int) -> None:
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


class CrashRehearsal(TrainingCallback):
    name = "rehearsal"

    def __init__(self, folder: Path, *, checkpoint_every: int) -> None:
        self._marker = folder / REHEARSED
        self._every = checkpoint_every

    def on_step_begin(self, number: int, steps: int) -> None:
        if self._marker.exists():
            return
        # A few steps behind a checkpoint, so that there are steps to do again.
        halfway = max(steps // 2 // self._every, 1) * self._every + min(3, self._every - 1) + 1
        if number == min(halfway, steps):
            write_atomic(self._marker, f"killed before step {number}\n")
            os.kill(os.getpid(), signal.SIGKILL)
