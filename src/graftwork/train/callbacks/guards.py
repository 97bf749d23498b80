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
    from graftwork.train.engine import StepResult, TrainingEngine

LEAST_KNOWN = 4
"""Fewer losses than this do not show what is usual."""
LEAST_RISE = 1.0
"""Near zero, many times the usual loss is still no spike."""
ROWS_NAMED = 12


class Diverged(AnswerIsNo):
    """The loss or the gradient went wrong, and stayed wrong."""


class DivergenceCallback(TrainingCallback):
    """Skips what is no number; stops a run whose loss exploded everywhere.

    A high loss alone is no fault: rows may be rare or hard, and clipping bounds what one batch can do. Where
    spikes follow each other, the rows of the recent step with the lowest loss are measured again. Only if
    their loss rose too, the model got worse, and not the rows harder.

    `compares_losses` is False where the loss of a step says nothing about another's. `peek` gives the rows of
    another step.
    """

    name = "watch"

    def __init__(
        self,
        settings: WatchSettings,
        *,
        compares_losses: bool = True,
        peek: Callable[[int], Sequence[Row]] = lambda _number: (),
        report: Callable[[str], None] = lambda _message: None,
    ) -> None:
        self._settings = settings
        self._compares = compares_losses
        self._peek = peek
        self._report = report
        self._engine: TrainingEngine | None = None
        self._usual: deque[tuple[int, float]] = deque(maxlen=settings.window)
        self._in_a_row = 0
        self._rows: Sequence[Row] = ()

    def on_train_begin(self, engine: "TrainingEngine", *, done: int, steps: int) -> None:
        self._engine = engine

    def accept_gradient(self, number: int, measured: "StepResult", rows: Sequence[Row]) -> bool:
        self._rows = rows
        if measured.is_finite:
            return True
        loss_fails = not math.isfinite(measured.loss)
        fault = f"the loss is {measured.loss}" if loss_fails else f"the gradient is {measured.gradient_norm}"
        self._in_a_row += 1
        if self._in_a_row > self._settings.tolerate:
            raise self._diverged(number, fault)
        again = "; it is trained on again after the next step" if self._peek(number) else ""
        self._report(
            f"step {number} is skipped: {fault}{again} (`train.watch.tolerate` allows "
            f"{self._settings.tolerate} in a row); its rows: {name_rows(rows)}"
        )
        return False

    def on_step_end(self, step: TrainStep, steps: int) -> None:
        if step.skipped:
            return
        fault = ""
        if step.gradient_norm > self._settings.gradient:
            fault = f"the gradient exploded to {step.gradient_norm:.3g}"
        elif self._compares and len(self._usual) >= LEAST_KNOWN:
            usual = median(loss for _, loss in self._usual)
            if step.loss > self._limit(usual):
                fault = f"the loss jumped to {step.loss:.3g} from about {usual:.3g}"
        if fault:
            self._in_a_row += 1
            if self._in_a_row <= self._settings.tolerate:
                return
            self._require_known_rows_stay(step.step, fault)
        self._usual.append((step.step, step.loss))
        self._in_a_row = 0

    def state(self) -> dict[str, Any]:
        return {"usual": list(self._usual), "in_a_row": self._in_a_row}

    def restore(self, state: dict[str, Any]) -> None:
        usual = ((int(step), float(loss)) for step, loss in state.get("usual", ()))
        self._usual = deque(usual, maxlen=self._settings.window)
        self._in_a_row = int(state.get("in_a_row", 0))

    def _limit(self, loss: float) -> float:
        return max(loss * self._settings.spike, loss + LEAST_RISE)

    def _require_known_rows_stay(self, number: int, fault: str) -> None:
        """Raise unless rows that the model knew a few steps ago have about the loss that they had then."""
        if not (self._compares and self._usual and self._engine):
            raise self._diverged(number, fault)
        known, before = min(reversed(self._usual), key=lambda entry: entry[1])
        rows = self._peek(known)
        if not rows:
            raise self._diverged(number, fault)
        now = self._engine.loss(rows)
        if not now <= self._limit(before):
            raise self._diverged(
                number, f"{fault}, and the rows of step {known} rose to {now:.3g} from {before:.3g}"
            )

    def _diverged(self, number: int, fault: str) -> Diverged:
        return Diverged(
            f"step {number}: {fault}",
            why="training further would destroy the adapter; the last good checkpoint is kept",
            fix="lower `train.learning_rate`, or look at these rows; if such losses are right for them, "
            f"raise `train.watch.spike` ({self._settings.spike:g}) or `train.watch.tolerate` "
            f"({self._settings.tolerate})",
            where=name_rows(self._rows),
        )


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
        known = [seconds for seconds in (self._save_seconds(), self._known_save) if seconds is not None]
        return step + SAVE_ALLOWANCE * max(known, default=UNKNOWN_SAVE_SECONDS) + self._margin

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
