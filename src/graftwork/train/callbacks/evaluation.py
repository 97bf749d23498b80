"""Evaluations during training: every few steps, the validation loss or a metric of generated answers.

In: validation rows, and an evaluator where a metric needs answers. Out: a line for each evaluation in
`evaluations.jsonl`, a score by which the best checkpoint is kept, and an early stop when patience runs out. A
step that is repeated after a crash reuses its logged evaluation, so that a resumed run decides the same.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from graftwork.files.disk import Journal
from graftwork.records.dataset import Row
from graftwork.records.errors import EnvironmentLacks, StoppedInOrder, UserMistake
from graftwork.records.run import TrainingEvaluation, TrainStep
from graftwork.train.callbacks import EarlyStop, TrainingCallback
from graftwork.train.run_folder import EVALUATIONS
from graftwork.train.settings import LOSS, ExamineSettings

if TYPE_CHECKING:
    from graftwork.train.engine import TrainingEngine

RESERVE = 0.8
"""The share of the first evaluation's finished cases that later ones must finish too."""


class EvaluationHistory:
    """The evaluations so far. Only those over the same number of cases are compared; a tie is not better."""

    def __init__(self, *, smaller_is_better: bool) -> None:
        self._sign = 1.0 if smaller_is_better else -1.0
        self.cases: int | None = None
        self.best: float | None = None
        self.best_step: int | None = None
        self.since = 0

    def add(self, evaluation: TrainingEvaluation) -> TrainingEvaluation:
        """Compare an evaluation with those before it; the first one sets the number of cases."""
        if self.cases is None:
            self.cases = evaluation.cases
        compared = evaluation.cases == self.cases and math.isfinite(evaluation.value)
        better = compared and (
            self.best is None or self.comparable(evaluation.value) < self.comparable(self.best)
        )
        if better:
            self.best, self.best_step, self.since = evaluation.value, evaluation.step, 0
        elif compared:
            self.since += 1
        return evaluation.model_copy(update={"compared": compared, "better": better})

    def comparable(self, value: float) -> float:
        """The value with the sign that makes smaller better."""
        return self._sign * value

    def state(self) -> dict[str, Any]:
        return {"cases": self.cases, "best": self.best, "best_step": self.best_step, "since": self.since}

    def restore(self, state: dict[str, Any]) -> None:
        self.cases, self.best = state.get("cases"), state.get("best")
        self.best_step, self.since = state.get("best_step"), state.get("since", 0)


def count_comparable_cases(finished: int, *, asked: int, common: int | None) -> int:
    """How many of the finished cases an evaluation counts.

    At most as many as the first evaluation set. If time cut the first one short, it sets four fifths of what
    it finished, so that a later one on a busier machine still gets that far.
    """
    if common is not None:
        return min(finished, common)
    return finished if finished == asked else max(int(RESERVE * finished), 1)


def log_evaluation(folder: Path, evaluation: TrainingEvaluation, step: TrainStep) -> None:
    """Write the evaluation to disk before any decision depends on it."""
    line = {"evaluation": evaluation.model_dump(), "loss": step.loss, "weights": step.weights}
    Journal(folder / EVALUATIONS).append(line, durable=True)


def find_evaluation(folder: Path, step: TrainStep) -> TrainingEvaluation | None:
    """The evaluation of this step from before a crash: same step, same loss, same weights."""
    for line in reversed(Journal(folder / EVALUATIONS).read()):
        same = line["evaluation"]["step"] == step.step and line["loss"] == step.loss
        # Not every step has a digest of its weights; if both have one, they must agree.
        if same and (line["weights"] == step.weights or not (line["weights"] and step.weights)):
            return TrainingEvaluation.model_validate(line["evaluation"])
    return None


def read_evaluations(folder: Path) -> tuple[TrainingEvaluation, ...]:
    """The last evaluation of each step, in order."""
    evaluations = [
        TrainingEvaluation.model_validate(line["evaluation"]) for line in Journal(folder / EVALUATIONS).read()
    ]
    return tuple(
        sorted(
            {evaluation.step: evaluation for evaluation in evaluations}.values(), key=lambda item: item.step
        )
    )


def find_best_step(evaluations: tuple[TrainingEvaluation, ...]) -> int | None:
    """The step of the best evaluation."""
    return next((found.step for found in reversed(evaluations) if found.better), None)


class TrainingEvaluator(Protocol):
    """Generates answers with the model in training and grades them. Leaves the model unchanged."""

    def choose(self, rows: Sequence[Row], *, metric: str, most: int) -> list[Row]:
        """The first rows to which the metric applies, the same every time."""

    def smaller_is_better(self, metric: str) -> bool: ...

    def examine(
        self, model: Any, rows: Sequence[Row], *, metric: str, seconds: float, progress: Callable[[], None]
    ) -> tuple[float, ...]:
        """Grades of the first rows: as many as fit into `seconds`, at least one.

        `progress` is called for every token; an exception from it ends the evaluation.
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
        report: Callable[[str], None] = lambda _message: None,
        progress: Callable[[], None] = lambda: None,
        stop_requested: Callable[[], bool] = lambda: False,
    ) -> None:
        self._settings = settings
        self._evaluator = evaluator
        self._rows = choose_evaluation_rows(rows, settings=settings, evaluator=evaluator)
        self._folder = folder
        self._report = report
        self._progress = progress
        self._stop_requested = stop_requested
        self._history = EvaluationHistory(
            smaller_is_better=settings.metric == LOSS
            or (evaluator is not None and evaluator.smaller_is_better(settings.metric))
        )
        self._engine: TrainingEngine | None = None
        self.latest: TrainingEvaluation | None = None
        """The evaluation after the last step, if there was one."""

    def on_train_begin(self, engine: "TrainingEngine", *, done: int, steps: int) -> None:
        self._engine = engine

    def on_step_end(self, step: TrainStep, steps: int) -> None:
        self.latest = None
        every = self._settings.every
        if every is None or (step.step % every and step.step != steps):
            return
        strategy = self._running().strategy
        found = find_evaluation(self._folder, step) if strategy.rank == 0 else None
        known = strategy.broadcast(found is not None)
        mine = found if known else self._evaluate(step.step)
        # The first process's evaluation, for all processes, so that they make the same decisions.
        shared = strategy.broadcast(mine.model_dump() if mine else None)
        evaluation = self._history.add(TrainingEvaluation.model_validate(shared))
        if strategy.rank == 0 and not known:
            log_evaluation(self._folder, evaluation, step)
        self.latest = evaluation
        self._report(describe_evaluation(evaluation, of=len(self._rows), best_step=self._history.best_step))
        patience = self._settings.patience
        if patience is not None and self._history.since >= patience and step.step != steps:
            raise EarlyStop(
                f"stopped early after step {step.step} of {steps}: {evaluation.metric} was best at step "
                f"{self._history.best_step} and has not improved in {self._history.since} evaluation(s)"
            )

    def score(self) -> float | None:
        if self.latest is None or not self.latest.compared:
            return None
        return self._history.comparable(self.latest.value)

    def state(self) -> dict[str, Any]:
        return self._history.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._history.restore(state)

    def _evaluate(self, step: int) -> TrainingEvaluation | None:
        """Evaluate the model over the cases that all evaluations share."""
        begun = time.perf_counter()
        if self._settings.metric == LOSS:
            loss = self._running().mean_loss(self._rows, batch_size=ROWS_TOGETHER)
            value, cases = math.nan if loss is None else loss, len(self._rows)
        elif self._running().strategy.rank == 0:
            value, cases = self._grade_answers(step)
        else:
            return None
        seconds = time.perf_counter() - begun
        return TrainingEvaluation(
            step=step, metric=self._settings.metric, value=value, cases=cases, seconds=seconds
        )

    def _grade_answers(self, step: int) -> tuple[float, int]:
        """The mean grade over the counted cases."""
        assert self._evaluator is not None, "rows were chosen by one"

        def progress() -> None:
            self._progress()
            if self._stop_requested() and self._running().strategy.size == 1:
                # No checkpoint of this step: a run resumed from it would lack its evaluation.
                raise StoppedInOrder(
                    f"stopped in good order during the evaluation after step {step}",
                    fix="run the same command again: it resumes from the last checkpoint",
                )

        common = self._history.cases
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
        assert self._engine is not None, "an evaluation needs a run that has begun"
        return self._engine


def choose_evaluation_rows(
    rows: Sequence[Row], *, settings: ExamineSettings, evaluator: TrainingEvaluator | None
) -> Sequence[Row]:
    """The first validation rows to which the metric applies, or an error if there are none."""
    if settings.metric == LOSS:
        chosen: Sequence[Row] = rows[: settings.cases]
    elif evaluator is None:
        raise EnvironmentLacks(
            f"the metric {settings.metric} cannot be measured here",
            why="the training worker was started alone, without an evaluator",
            fix="start the run with `graft train`, or set `train.examine.metric: loss`",
        )
    else:
        chosen = evaluator.choose(rows, metric=settings.metric, most=settings.cases)
    if not chosen:
        raise UserMistake(
            f"nothing to evaluate: {settings.metric} applies to no validation row"
            if rows
            else "nothing to evaluate: the validation split is empty",
            why="`train.examine.every` asks for evaluations during training",
            fix="give `data.validation` a share, choose another `train.examine.metric`, or remove `every`",
        )
    return chosen


def describe_evaluation(evaluation: TrainingEvaluation, *, of: int, best_step: int | None) -> str:
    text = (
        f"evaluation after step {evaluation.step}: {evaluation.metric} {evaluation.value:.4g} "
        f"over {evaluation.cases} case(s)"
    )
    if evaluation.cases < of:
        text += f" of {of}, as many as the time allowed"
    if evaluation.better:
        return f"{text}; the best so far"
    if not evaluation.compared:
        return f"{text}; not compared with the others"
    return f"{text}; step {best_step} is still the best"
