"""Callbacks that refuse a step or end the run: divergence, deadline, and a rehearsed crash.

In: what each step measured, its rows, and a clock. Out: whether the update is applied, or an error that stops
the run in good order. Divergence depends on no clock, and its memory is part of the checkpoint: a resumed run
comes to the same decisions.
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
"""Fewer losses than this do not show what is usual."""
LEAST_RISE = 1.0
"""Near zero, many times the usual loss is still no spike."""
ROWS_NAMED = 12


class Diverged(AnswerIsNo):
    """The loss or the gradient went wrong, and stayed wrong."""


class DivergenceCallback(TrainingCallback):
    """`compares_losses` is False where the loss of a step says nothing about another's."""

    name = "watch"

    def __init__(
        self,
        settings: WatchSettings,
        *,
        compares_losses: bool = True,
        report: Callable[[str], None] = lambda _message: None,
    ) -> None:
        self._settings = settings
        self._compares = compares_losses
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
                why="training further would destroy the adapter; the last good checkpoint is kept",
                fix="look at the rows of this batch, or lower `train.learning_rate`",
                where=name_rows(rows),
            )
        self._report(f"step {number} is skipped: {fault}; its rows: {name_rows(rows)}")
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
        if not self._compares or len(self._usual) < LEAST_KNOWN:
            return None
        usual = median(self._usual)
        if measured.loss > max(usual * self._settings.spike, usual + LEAST_RISE):
            return f"the loss jumped to {measured.loss:.3g} from about {usual:.3g}"
        return None


def name_rows(rows: Sequence[Row]) -> str:
    """The origins of up to a dozen rows as file:line, and how many more there are."""
    named = ", ".join(str(row.origin) for row in rows[:ROWS_NAMED])
    more = len(rows) - ROWS_NAMED
    return f"{named} and {more} more" if more > 0 else named


STEP_ALLOWANCE = 1.25
"""The next step may take this many times the longest of the last ones."""
SAVE_ALLOWANCE = 1.5
MARGIN_SECONDS = 10.0
UNKNOWN_SAVE_SECONDS = 10.0
"""Assumed until the first checkpoint has been measured, after the first step."""
REMEMBERED = 200
SETTLED = 3
"""After this many steps the first one, which warms up and compiles, no longer counts."""


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
        """Seconds for step `number`, a checkpoint after it, and a margin."""
        step = STEP_ALLOWANCE * max(self._steps, default=0.0) + self._evaluation_seconds(number)
        return step + SAVE_ALLOWANCE * self._save() + self._margin

    def on_step_begin(self, number: int, steps: int) -> None:
        now = self._clock()
        if self._begun is not None:
            self._steps.append(now - self._begun)
            self._seen += 1
            if self._seen == SETTLED:
                # Steps of an earlier process, if any, come before the first of this one.
                del self._steps[len(self._steps) - SETTLED]
        self._begun = now
        needed = self.seconds_needed(number)
        if now + needed > self._at:
            raise StoppedInOrder(
                f"stopped in good order after step {number - 1} of {steps}: the deadline is near",
                why=f"{max(self._at - now, 0):.0f} s are left; one more step with its checkpoint "
                f"and a margin takes up to {needed:.0f} s",
                fix="run the same command again: it resumes from here",
            )

    def wants_checkpoint(self, step: TrainStep) -> bool:
        """One checkpoint early, to measure how long it takes."""
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


STEPS_BEFORE_CRASH = 3
"""Behind a checkpoint, so that steps are repeated."""


class CrashRehearsal(TrainingCallback):
    name = "rehearsal"

    def __init__(self, folder: Path, *, checkpoint_every: int) -> None:
        self._marker = folder / REHEARSED
        self._every = checkpoint_every

    def on_step_begin(self, number: int, steps: int) -> None:
        if self._marker.exists():
            return
        behind = min(STEPS_BEFORE_CRASH, self._every - 1)
        halfway = max(steps // 2 // self._every, 1) * self._every + behind + 1
        if number == min(halfway, steps):
            write_atomic(self._marker, f"killed before step {number}\n")
            os.kill(os.getpid(), signal.SIGKILL)
