"""Looks at the model every so many steps: how good it is, whether it still gets better.

In: validation rows, and an examiner where more than the loss is asked for. Out: a line a look in
`looks.jsonl`, a score for whoever keeps the best checkpoint, an early end when patience runs out.
A step done again after a crash is not looked at again: what the first look found holds, so that a
resumed run decides as the first one did, whatever the clock says.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from graftwork.records.dataset import Row
from graftwork.records.errors import EnvironmentLacks, StoppedInOrder, UserMistake
from graftwork.records.run import TrainingEvaluation, TrainStep
from graftwork.train.attend.attendant import Attendant, FinishEarly
from graftwork.train.crew import Alone, Crew
from graftwork.train.engine import Engine
from graftwork.train.looks import Course, count_cases, find_look, log_look
from graftwork.train.ports import Examiner
from graftwork.train.settings import LOSS, ExamineSettings

ROWS_TOGETHER = 8


class Examine(Attendant):
    name = "examine"

    def __init__(
        self,
        settings: ExamineSettings,
        rows: Sequence[Row],
        *,
        folder: Path,
        examiner: Examiner | None = None,
        crew: Crew | None = None,
        on_word: Callable[[str], None] = lambda _word: None,
        pulse: Callable[[], None] = lambda: None,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings = settings
        self._examiner = examiner
        self._rows = choose_rows(rows, settings=settings, examiner=examiner)
        self._folder = folder
        self._crew = crew or Alone()
        self._on_word = on_word
        self._pulse = pulse
        self._stop_asked = stop_asked
        self._course = Course(
            smaller_is_better=settings.metric == LOSS
            or (examiner is not None and examiner.smaller_is_better(settings.metric))
        )
        self._engine: Engine | None = None
        self.latest: TrainingEvaluation | None = None
        """The look at the step that was just done, if there was one."""

    def begins(self, engine: Engine, *, done: int, steps: int) -> None:
        self._engine = engine

    def after_step(self, step: TrainStep, steps: int) -> None:
        self.latest = None
        every = self._settings.every
        if every is None or (step.step % every and step.step != steps):
            return
        found = find_look(self._folder, step) if self._crew.rank == 0 else None
        known = self._crew.tell(found is not None)
        look = self._course.judge(self._share(found if known else self._look(step.step)))
        if self._crew.rank == 0 and not known:
            log_look(self._folder, look, step)
        self.latest = look
        self._on_word(tell_look(look, of=len(self._rows), best_step=self._course.best_step))
        patience = self._settings.patience
        if patience is not None and self._course.since >= patience and step.step != steps:
            raise FinishEarly(
                f"stopped early after step {step.step} of {steps}: {look.metric} was best at step "
                f"{self._course.best_step}, and no better in the {self._course.since} look(s) since"
            )

    def score(self) -> float | None:
        if self.latest is None or not self.latest.compared:
            return None
        return self._course.fold(self.latest.value)

    def state(self) -> dict[str, Any]:
        return self._course.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._course.restore(state)

    def _look(self, step: int) -> TrainingEvaluation | None:
        """What the model is worth now, over the cases that all looks have in common."""
        begun = time.perf_counter()
        if self._settings.metric == LOSS:
            value, cases = self._measure_loss()
        elif self._crew.rank == 0:
            value, cases = self._ask(step)
        else:
            return None
        seconds = time.perf_counter() - begun
        return TrainingEvaluation(
            step=step, metric=self._settings.metric, value=value, cases=cases, seconds=seconds
        )

    def _share(self, look: TrainingEvaluation | None) -> TrainingEvaluation:
        """Several who train together decide alike: what the first of them found holds for all."""
        return TrainingEvaluation.model_validate(self._crew.tell(look.model_dump() if look else None))

    def _measure_loss(self) -> tuple[float, int]:
        loss = self._running().mean_loss(self._rows, batch_rows=ROWS_TOGETHER)
        return math.nan if loss is None else loss, len(self._rows)

    def _ask(self, step: int) -> tuple[float, int]:
        """The mean grade over the cases that count."""
        assert self._examiner is not None, "rows were chosen by one"

        def pulse() -> None:
            self._pulse()
            if self._stop_asked() and self._crew.size == 1:
                # Without a checkpoint of this step: a run that goes on from one would lack its look.
                raise StoppedInOrder(
                    f"stopped in good order during the look after step {step}",
                    fix="run the same command again: it goes on from the last checkpoint",
                )

        common = self._course.cases
        asked = self._rows[:common]
        grades = self._examiner.examine(
            self._running().model,
            asked,
            metric=self._settings.metric,
            seconds=self._settings.seconds,
            pulse=pulse,
        )
        counted = grades[: count_cases(len(grades), asked=len(asked), common=common)]
        return sum(counted) / len(counted), len(counted)

    def _running(self) -> Engine:
        assert self._engine is not None, "a look needs a run that has begun"
        return self._engine


def choose_rows(
    rows: Sequence[Row], *, settings: ExamineSettings, examiner: Examiner | None
) -> Sequence[Row]:
    """The first validation rows that the metric says anything about, or why there are none."""
    if settings.metric == LOSS:
        chosen: Sequence[Row] = rows[: settings.cases]
    elif examiner is None:
        raise EnvironmentLacks(
            f"nobody here can measure {settings.metric}",
            why="the training worker was started alone, without an examiner",
            fix="start the run with `graft train`, or set `train.examine.metric: loss`",
        )
    else:
        chosen = examiner.choose(rows, metric=settings.metric, most=settings.cases)
    if not chosen:
        raise UserMistake(
            f"there is nothing to look at: no validation row says anything about {settings.metric}"
            if rows
            else "there is nothing to look at: the validation split is empty",
            why="`train.examine.every` asks for looks during training",
            fix="give `data.validation` a share, choose another `train.examine.metric`, or take it away",
        )
    return chosen


def tell_look(look: TrainingEvaluation, *, of: int, best_step: int | None) -> str:
    """One line for whoever watches."""
    said = f"look after step {look.step}: {look.metric} {look.value:.4g} over {look.cases} case(s)"
    if look.cases < of:
        said += f" of {of}, as many as the time allowed"
    if look.better:
        return f"{said}; the best so far"
    if not look.compared:
        return f"{said}; not compared with the others"
    return f"{said}; step {best_step} stays the best"
