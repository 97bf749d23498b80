"""Watches the loss and the gradient: refuses a step that has gone wrong, stops a run that stays so.

In: what each step measured, and its rows. Out: whether the step is taken. What is refused changes no
weight. Nothing here depends on a clock, and what it remembers goes into the checkpoint: a resumed run
comes to the same verdicts.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from graftwork.records.dataset import Row
from graftwork.records.errors import AnswerIsNo
from graftwork.train.attend.attendant import TrainingCallback
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
        self, settings: WatchSettings, *, on_word: Callable[[str], None] = lambda _word: None
    ) -> None:
        self._settings = settings
        self._on_word = on_word
        self._usual: deque[float] = deque(maxlen=settings.window)
        self._in_a_row = 0

    def judge(self, number: int, measured: "StepResult", rows: Sequence[Row]) -> bool:
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
        self._on_word(f"step {number} is passed over: {fault}; its rows: {name_rows(rows)}")
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
