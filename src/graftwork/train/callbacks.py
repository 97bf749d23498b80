"""Callbacks: what may watch a training loop, evaluate its model, refuse a gradient or end the run.

To add one: subclass TrainingCallback and add it in `worker.py`. What it must remember across a crash goes
into `state`, which every checkpoint carries under the callback's name. Divergence and early stopping depend
on no clock, and a repeated step reuses its logged evaluation: a resumed run comes to the same decisions.
"""

import math
import os
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from graftwork.files.disk import Journal, write_atomic
from graftwork.process import clock
from graftwork.process.heartbeat import Heart
from graftwork.records.dataset import Row
from graftwork.records.errors import EnvironmentFailure, GracefulStop, GraftError, NegativeResult, UserError
from graftwork.records.run import TrainingEvaluation, TrainStep
from graftwork.train.run_folder import EVALUATIONS, REHEARSED, SAVED
from graftwork.train.settings import LOSS, EvalSettings, WatchSettings

if TYPE_CHECKING:
    from graftwork.train.engine import StepResult, TrainingEngine


class EarlyStop(Exception):
    """Raise after a step to finish the run successfully before its last step."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TrainingCallback:
    """Does nothing; subclasses override what they need.

    Expected errors (GracefulStop, Diverged) may be raised from any method and end the run.
    """

    name = "attendant"

    def on_train_begin(self, engine: "TrainingEngine", *, done: int, steps: int) -> None:
        """The run starts, or resumes after step `done`."""

    def on_step_begin(self, number: int, steps: int) -> None: ...

    def accept_gradient(self, number: int, measured: "StepResult", rows: Sequence[Row]) -> bool:
        """Called between gradient and update; False skips the update of this step."""
        return True

    def on_step_end(self, step: TrainStep, steps: int) -> None: ...

    def score(self) -> float | None:
        """The score of the model at this step (smaller is better), if this callback has just evaluated it."""
        return None

    def wants_checkpoint(self, step: TrainStep) -> bool:
        """Whether to save a checkpoint after this step although none is due."""
        return False

    def on_save_begin(self, step: int) -> None: ...

    def on_save_end(self, folder: Path, step: int) -> None: ...

    def on_train_stopping(self) -> None:
        """Called before the loop waits for the last checkpoint and its mirror copy."""

    def on_train_end(self) -> None:
        """The run is over, successfully or not."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...


LEAST_KNOWN = 4
"""Fewer losses than this do not show what is normal."""
LEAST_RISE = 1.0
"""Near zero, many times the usual loss is still no spike."""
ROWS_NAMED = 12


class Diverged(NegativeResult):
    """The loss or the gradient went wrong, and stayed wrong."""


class DivergenceCallback(TrainingCallback):
    """Skips steps that are not a number; stops a run whose loss has diverged. A high loss alone is not a
    fault: rows may be rare or hard, and clipping limits the effect of one batch. If spikes follow each other,
    the rows of the recent step with the lowest loss are measured again. Only if their loss rose too has the
    model got worse; otherwise the rows were harder. `compares_losses` is False if the loss of a step says
    nothing about another's. `peek` returns the rows of another step.
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
        self._consecutive = 0
        self._rows: Sequence[Row] = ()

    def on_train_begin(self, engine: "TrainingEngine", *, done: int, steps: int) -> None:
        self._engine = engine

    def accept_gradient(self, number: int, measured: "StepResult", rows: Sequence[Row]) -> bool:
        self._rows = rows
        if measured.is_finite:
            return True
        loss_fails = not math.isfinite(measured.loss)
        fault = f"the loss is {measured.loss}" if loss_fails else f"the gradient is {measured.gradient_norm}"
        self._consecutive += 1
        if self._consecutive > self._settings.tolerate:
            raise self._diverged(number, fault)
        retry_note = "; it is trained on again after the next step" if self._peek(number) else ""
        self._report(
            f"step {number} is skipped: {fault}{retry_note} (`train.watch.tolerate` allows "
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
            self._consecutive += 1
            if self._consecutive <= self._settings.tolerate:
                return
            self._require_known_rows_stay(step.step, fault)
        self._usual.append((step.step, step.loss))
        self._consecutive = 0

    def state(self) -> dict[str, Any]:
        return {"usual": list(self._usual), "consecutive": self._consecutive}

    def restore(self, state: dict[str, Any]) -> None:
        usual = ((int(step), float(loss)) for step, loss in state.get("usual", ()))
        self._usual = deque(usual, maxlen=self._settings.window)
        self._consecutive = int(state.get("consecutive", 0))

    def _limit(self, loss: float) -> float:
        return max(loss * self._settings.spike, loss + LEAST_RISE)

    def _require_known_rows_stay(self, number: int, fault: str) -> None:
        """Raise unless rows that the model knew a few steps ago still have about the same loss."""
        if not (self._compares and self._usual and self._engine):
            raise self._diverged(number, fault)
        best_step, before = min(reversed(self._usual), key=lambda entry: entry[1])
        rows = self._peek(best_step)
        if not rows:
            raise self._diverged(number, fault)
        now = self._engine.loss(rows)
        if not now <= self._limit(before):
            raise self._diverged(
                number, f"{fault}, and the rows of step {best_step} rose to {now:.3g} from {before:.3g}"
            )

    def _diverged(self, number: int, fault: str) -> Diverged:
        return Diverged(
            f"step {number}: {fault}",
            why="training further would destroy the adapter; the last good checkpoint is kept",
            fix="lower `train.learning_rate`, or check these rows; if such losses are right for "
            f"them, raise `train.watch.spike` ({self._settings.spike:g}) or "
            f"`train.watch.tolerate` ({self._settings.tolerate})",
            where=name_rows(self._rows),
        )


def name_rows(rows: Sequence[Row]) -> str:
    """The origins of up to a dozen rows as file:line, and how many more there are."""
    origins = ", ".join(str(row.origin) for row in rows[:ROWS_NAMED])
    omitted = len(rows) - ROWS_NAMED
    return f"{origins} and {omitted} more" if omitted > 0 else origins


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
        now: Callable[[], float] | None = None,
    ) -> None:
        self._at = at
        self._save_seconds = save_seconds
        self._evaluation_seconds = evaluation_seconds
        self._margin = margin
        self._now = now or clock.steady
        self._steps: deque[float] = deque(maxlen=REMEMBERED)
        self._begun: float | None = None
        self._seen = 0
        self._known_save: float | None = None
        self._measuring = False

    def seconds_needed(self, number: int) -> float:
        """Seconds for step `number`, a checkpoint after it, and a margin."""
        step = STEP_ALLOWANCE * max(self._steps, default=0.0) + self._evaluation_seconds(number)
        save_times = [seconds for seconds in (self._save_seconds(), self._known_save) if seconds is not None]
        return step + SAVE_ALLOWANCE * max(save_times, default=UNKNOWN_SAVE_SECONDS) + self._margin

    def on_step_begin(self, number: int, steps: int) -> None:
        now = self._now()
        if self._begun is not None:
            self._steps.append(now - self._begun)
            self._seen += 1
            if self._seen == SETTLED:
                # Steps of an earlier process, if any, come before the first of this one.
                del self._steps[len(self._steps) - SETTLED]
        self._begun = now
        needed = self.seconds_needed(number)
        if now + needed > self._at:
            raise GracefulStop(
                f"stopped cleanly after step {number - 1} of {steps}: the deadline is near",
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
"""After a checkpoint, so that steps are repeated."""


class CrashRehearsal(TrainingCallback):
    name = "rehearsal"

    def __init__(self, folder: Path, *, checkpoint_every: int) -> None:
        self._marker = folder / REHEARSED
        self._every = checkpoint_every

    def on_step_begin(self, number: int, steps: int) -> None:
        if self._marker.exists():
            return
        past_checkpoint = min(STEPS_BEFORE_CRASH, self._every - 1)
        halfway = max(steps // 2 // self._every, 1) * self._every + past_checkpoint + 1
        if number == min(halfway, steps):
            write_atomic(self._marker, f"killed before step {number}\n")
            os.kill(os.getpid(), signal.SIGKILL)


RECENT_STEPS = 16


class HeartbeatCallback(TrainingCallback):
    name = "pulse"

    def __init__(self, heart: Heart, folder: Path) -> None:
        self._heart = heart
        self._saved = Journal(folder / SAVED)
        self._first: int | None = None
        self._begun = 0.0
        self._here = 0
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def on_step_end(self, step: TrainStep, steps: int) -> None:
        self._here += 1
        self._recent.append(step.seconds)
        # Estimated only from the steps of this process.
        now = time.perf_counter()
        seconds_left: float | None = None
        if self._first is None:
            self._first, self._begun = step.step, now
        else:
            seconds_left = (now - self._begun) / (step.step - self._first) * (steps - step.step)
        self._heart.beat(
            "training",
            step.step,
            steps,
            seconds_left=seconds_left,
            loss=step.loss,
            gradient_norm=step.gradient_norm,
            tokens_per_second=step.tokens / step.seconds,
            step_seconds=statistics.median(self._recent),
            steps_here=self._here,
        )

    def on_save_begin(self, step: int) -> None:
        self._heart.move("checkpoint")

    def on_save_end(self, folder: Path, step: int) -> None:
        self._heart.move()
        # Only informative: a full disk must not end the run.
        with suppress(GraftError):
            self._saved.append({**clock.now().model_dump(), "step": step, "folder": folder.name})

    def on_train_stopping(self) -> None:
        self._heart.move("checkpoint")

    def on_train_end(self) -> None:
        self._heart.move()


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


def count_comparable_cases(finished: int, *, requested: int, common: int | None) -> int:
    """How many of the finished cases an evaluation counts.

    At most as many as the first evaluation set. If time cut the first one short, it sets four fifths of what
    it finished, so that a later one on a busier machine still gets that far.
    """
    if common is not None:
        return min(finished, common)
    return finished if finished == requested else max(int(RESERVE * finished), 1)


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
    return next((evaluation.step for evaluation in reversed(evaluations) if evaluation.better), None)


class TrainingEvaluator(Protocol):
    """Generates answers with the model in training and grades them. Leaves the model unchanged."""

    def choose(self, rows: Sequence[Row], *, metric: str, most: int) -> list[Row]:
        """The first rows to which the metric applies, the same every time."""

    def smaller_is_better(self, metric: str) -> bool: ...

    def evaluate(
        self, model: Any, rows: Sequence[Row], *, metric: str, seconds: float, progress: Callable[[], None]
    ) -> tuple[float, ...]:
        """Grade the first rows: as many as fit into `seconds`, at least one. `progress` is called for every
        token; an exception from it ends the evaluation.
        """


ROWS_TOGETHER = 8


class EvaluationCallback(TrainingCallback):
    name = "evaluation"

    def __init__(
        self,
        settings: EvalSettings,
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
        logged = find_evaluation(self._folder, step) if strategy.rank == 0 else None
        is_logged = strategy.broadcast(logged is not None)
        mine = logged if is_logged else self._evaluate(step.step)
        # The first process's evaluation, for all processes, so that they make the same decisions.
        shared = strategy.broadcast(mine.model_dump() if mine else None)
        evaluation = self._history.add(TrainingEvaluation.model_validate(shared))
        if strategy.rank == 0 and not is_logged:
            log_evaluation(self._folder, evaluation, step)
        self.latest = evaluation
        self._report(describe_evaluation(evaluation, of=len(self._rows), best_step=self._history.best_step))
        early_stopping = self._settings.early_stopping
        if early_stopping is not None and self._history.since >= early_stopping and step.step != steps:
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
        started_at = time.perf_counter()
        if self._settings.metric == LOSS:
            loss = self._running().mean_loss(self._rows, batch_size=ROWS_TOGETHER)
            value, cases = math.nan if loss is None else loss, len(self._rows)
        elif self._running().strategy.rank == 0:
            value, cases = self._grade_answers(step)
        else:
            return None
        seconds = time.perf_counter() - started_at
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
                raise GracefulStop(
                    f"stopped cleanly during the evaluation after step {step}",
                    fix="run the same command again: it resumes from the last checkpoint",
                )

        common = self._history.cases
        rows = self._rows[:common]
        grades = self._evaluator.evaluate(
            self._running().model,
            rows,
            metric=self._settings.metric,
            seconds=self._settings.seconds,
            progress=progress,
        )
        counted = grades[: count_comparable_cases(len(grades), requested=len(rows), common=common)]
        return sum(counted) / len(counted), len(counted)

    def _running(self) -> "TrainingEngine":
        assert self._engine is not None, "an evaluation needs a run that has begun"
        return self._engine


def choose_evaluation_rows(
    rows: Sequence[Row], *, settings: EvalSettings, evaluator: TrainingEvaluator | None
) -> Sequence[Row]:
    """The first validation rows to which the metric applies, or an error if there are none."""
    if settings.metric == LOSS:
        selected: Sequence[Row] = rows[: settings.cases]
    elif evaluator is None:
        raise EnvironmentFailure(
            f"the metric {settings.metric} cannot be measured here",
            why="the training worker was started alone, without an evaluator",
            fix="start the run with `graft train`, or set `train.eval.metric: loss`",
        )
    else:
        selected = evaluator.choose(rows, metric=settings.metric, most=settings.cases)
    if not selected:
        raise UserError(
            f"nothing to evaluate: {settings.metric} applies to no validation row"
            if rows
            else "nothing to evaluate: the validation split is empty",
            why="`train.eval.every` requests evaluations during training",
            fix="give `data.validation` a share, choose another `train.eval.metric`, or remove `every`",
        )
    return selected


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
