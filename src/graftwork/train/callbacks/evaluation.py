"""What the looks of a run add up to: which was the best, and how long ago that was.

In: looks one after the other, or the folder of a run. Out: each look judged against those before
it. Pure but for the reading; does not know how a look is taken.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from graftwork.files.disk import Journal
from graftwork.records.dataset import Row
from graftwork.records.errors import EnvironmentLacks, StoppedInOrder, UserMistake
from graftwork.records.run import Look, TrainStep
from graftwork.train.callbacks import EarlyStop, TrainingCallback
from graftwork.train.run_folder import EVALUATIONS
from graftwork.train.settings import LOSS, ExamineSettings

if TYPE_CHECKING:
    from graftwork.train.distributed.strategies import DistributedStrategy
    from graftwork.train.engine import TrainingEngine

RESERVE = 0.8


class EvaluationHistory:
    """The looks so far. Only looks over the same number of cases are compared; a tie is not better."""

    def __init__(self, *, smaller_is_better: bool) -> None:
        self._sign = 1.0 if smaller_is_better else -1.0
        self.cases: int | None = None
        self.best: float | None = None
        self.best_step: int | None = None
        self.since = 0

    def judge(self, look: Look) -> Look:
        """The look with its place among the others; the first one says over how many cases."""
        if self.cases is None:
            self.cases = look.cases
        compared = look.cases == self.cases and math.isfinite(look.value)
        better = compared and (self.best is None or self.fold(look.value) < self.fold(self.best))
        if better:
            self.best, self.best_step, self.since = look.value, look.step, 0
        elif compared:
            self.since += 1
        return look.model_copy(update={"compared": compared, "better": better})

    def fold(self, value: float) -> float:
        """Smaller is better, whatever the metric."""
        return self._sign * value

    def state(self) -> dict[str, Any]:
        return {"cases": self.cases, "best": self.best, "best_step": self.best_step, "since": self.since}

    def restore(self, state: dict[str, Any]) -> None:
        self.cases, self.best = state.get("cases"), state.get("best")
        self.best_step, self.since = state.get("best_step"), state.get("since", 0)


def count_comparable_cases(finished: int, *, asked: int, common: int | None) -> int:
    """Over how many of the finished cases a look counts.

    Once a measure is set, over no more than that. A first look that the time cut short sets four
    fifths of what it managed: a later one, at a busier moment, then still gets that far.
    """
    if common is not None:
        return min(finished, common)
    return finished if finished == asked else max(int(RESERVE * finished), 1)


def log_evaluation(folder: Path, look: Look, step: TrainStep) -> None:
    """On the disk before anything follows from it."""
    line = {"look": look.model_dump(), "loss": step.loss, "weights": step.weights}
    Journal(folder / EVALUATIONS).append(line, durable=True)


def find_evaluation(folder: Path, step: TrainStep) -> Look | None:
    """The look at this very step, if it was taken before a crash: same step, same loss, same weights."""
    for line in reversed(Journal(folder / EVALUATIONS).read()):
        same = line["look"]["step"] == step.step and line["loss"] == step.loss
        # Not every step has a digest of its weights; where both have, they must agree.
        if same and (line["weights"] == step.weights or not (line["weights"] and step.weights)):
            return Look.model_validate(line["look"])
    return None


def read_evaluations(folder: Path) -> tuple[Look, ...]:
    """The last word on each look, in order."""
    looks = [Look.model_validate(line["look"]) for line in Journal(folder / EVALUATIONS).read()]
    return tuple(sorted({look.step: look for look in looks}.values(), key=lambda look: look.step))


def find_best_step(looks: tuple[Look, ...]) -> int | None:
    """The step of the best look."""
    return next((look.step for look in reversed(looks) if look.better), None)


class TrainingEvaluator(Protocol):
    """Asks the model in training, and grades its answers. The model is left as it was."""

    def choose(self, rows: Sequence[Row], *, metric: str, most: int) -> list[Row]:
        """The first rows that the metric says anything about: the same every time."""

    def smaller_is_better(self, metric: str) -> bool: ...

    def examine(
        self, model: Any, rows: Sequence[Row], *, metric: str, seconds: float, progress: Callable[[], None]
    ) -> tuple[float, ...]:
        """Grades of the first rows, as many as could be asked in time, but of one at least.

        `progress` is called with every token; what it raises ends the look.
        """


ROWS_TOGETHER = 8


class EvaluationCallback(TrainingCallback):
    name = "examine"

    def __init__(
        self,
        settings: ExamineSettings,
        rows: Sequence[Row],
        *,
        folder: Path,
        evaluator: TrainingEvaluator | None = None,
        strategy: "DistributedStrategy | None" = None,
        report: Callable[[str], None] = lambda _message: None,
        progress: Callable[[], None] = lambda: None,
        stop_asked: Callable[[], bool] = lambda: False,
    ) -> None:
        from graftwork.train.distributed.strategies import SingleProcess

        self._settings = settings
        self._evaluator = evaluator
        self._rows = choose_evaluation_rows(rows, settings=settings, evaluator=evaluator)
        self._folder = folder
        self._strategy = strategy or SingleProcess()
        self._report = report
        self._progress = progress
        self._stop_asked = stop_asked
        self._course = EvaluationHistory(
            smaller_is_better=settings.metric == LOSS
            or (evaluator is not None and evaluator.smaller_is_better(settings.metric))
        )
        self._engine: TrainingEngine | None = None
        self.latest: Look | None = None
        """The look at the step that was just done, if there was one."""

    def on_train_begin(self, engine: "TrainingEngine", *, done: int, steps: int) -> None:
        self._engine = engine

    def on_step_end(self, step: TrainStep, steps: int) -> None:
        self.latest = None
        every = self._settings.every
        if every is None or (step.step % every and step.step != steps):
            return
        found = find_evaluation(self._folder, step) if self._strategy.rank == 0 else None
        known = self._strategy.broadcast(found is not None)
        look = self._course.judge(self._share(found if known else self._look(step.step)))
        if self._strategy.rank == 0 and not known:
            log_evaluation(self._folder, look, step)
        self.latest = look
        self._report(describe_evaluation(look, of=len(self._rows), best_step=self._course.best_step))
        patience = self._settings.patience
        if patience is not None and self._course.since >= patience and step.step != steps:
            raise EarlyStop(
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

    def _look(self, step: int) -> Look | None:
        """What the model is worth now, over the cases that all looks have in common."""
        begun = time.perf_counter()
        if self._settings.metric == LOSS:
            value, cases = self._measure_loss()
        elif self._strategy.rank == 0:
            value, cases = self._ask(step)
        else:
            return None
        seconds = time.perf_counter() - begun
        return Look(step=step, metric=self._settings.metric, value=value, cases=cases, seconds=seconds)

    def _share(self, look: Look | None) -> Look:
        """Several who train together decide alike: what the first of them found holds for all."""
        return Look.model_validate(self._strategy.broadcast(look.model_dump() if look else None))

    def _measure_loss(self) -> tuple[float, int]:
        loss = self._running().mean_loss(self._rows, batch_rows=ROWS_TOGETHER)
        return math.nan if loss is None else loss, len(self._rows)

    def _ask(self, step: int) -> tuple[float, int]:
        """The mean grade over the cases that count."""
        assert self._evaluator is not None, "rows were chosen by one"

        def progress() -> None:
            self._progress()
            if self._stop_asked() and self._strategy.size == 1:
                # Without a checkpoint of this step: a run that goes on from one would lack its look.
                raise StoppedInOrder(
                    f"stopped in good order during the look after step {step}",
                    fix="run the same command again: it goes on from the last checkpoint",
                )

        common = self._course.cases
        asked = self._rows[:common]
        grades = self._evaluator.examine(
            self._running().model,
            asked,
            metric=self._settings.metric,
            seconds=self._settings.seconds,
            progress=progress,
        )
        counted = grades[: count_comparable_cases(len(grades), asked=len(asked), common=common)]
        return sum(counted) / len(counted), len(counted)

    def _running(self) -> "TrainingEngine":
        assert self._engine is not None, "a look needs a run that has begun"
        return self._engine


def choose_evaluation_rows(
    rows: Sequence[Row], *, settings: ExamineSettings, evaluator: TrainingEvaluator | None
) -> Sequence[Row]:
    """The first validation rows that the metric says anything about, or why there are none."""
    if settings.metric == LOSS:
        chosen: Sequence[Row] = rows[: settings.cases]
    elif evaluator is None:
        raise EnvironmentLacks(
            f"nobody here can measure {settings.metric}",
            why="the training worker was started alone, without an evaluator",
            fix="start the run with `graft train`, or set `train.examine.metric: loss`",
        )
    else:
        chosen = evaluator.choose(rows, metric=settings.metric, most=settings.cases)
    if not chosen:
        raise UserMistake(
            f"there is nothing to look at: no validation row says anything about {settings.metric}"
            if rows
            else "there is nothing to look at: the validation split is empty",
            why="`train.examine.every` asks for looks during training",
            fix="give `data.validation` a share, choose another `train.examine.metric`, or take it away",
        )
    return chosen


def describe_evaluation(look: Look, *, of: int, best_step: int | None) -> str:
    """One line for whoever watches."""
    said = f"look after step {look.step}: {look.metric} {look.value:.4g} over {look.cases} case(s)"
    if look.cases < of:
        said += f" of {of}, as many as the time allowed"
    if look.better:
        return f"{said}; the best so far"
    if not look.compared:
        return f"{said}; not compared with the others"
    return f"{said}; step {best_step} stays the best"
