"""Callbacks that report: the heartbeat with the progress of the run, and the trackers that graft.yaml names.

In: steps, checkpoints and evaluations. Out: heartbeats, and the metrics of each step in each tracker. A
tracker that fails or hangs is dropped with a message and never stops the run. A resumed run continues the
same tracker run; repeated steps are not logged again.
"""

import os
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from graftwork.files.disk import Journal, write_atomic
from graftwork.process import clock
from graftwork.process.heartbeat import Heart
from graftwork.process.pool import CallThread
from graftwork.records.errors import GraftError
from graftwork.records.run import TrainingEvaluation, TrainStep
from graftwork.text.messages import redact_variables
from graftwork.train.callbacks import TrainingCallback
from graftwork.train.run_folder import SAVED, TRACKED
from graftwork.train.trackers import TrackedRun, load_tracker

if TYPE_CHECKING:
    from graftwork.train.engine import TrainingEngine

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
        # Estimated from the steps of this process alone.
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


SECRETS = (
    *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
    *("TRACKIO_SERVER_URL", "TRACKIO_WRITE_TOKEN", "WANDB_API_KEY", "WANDB_BASE_URL", "HF_TOKEN"),
)
"""Values that a tracker's error message must not repeat: the message is kept with the run."""
PATIENCE_SECONDS = 60.0
"""For one call of a tracker: the timeouts of their libraries restart with every byte that arrives."""

T = TypeVar("T")


class TrackerCallback(TrainingCallback):
    name = "track"

    def __init__(
        self,
        trackers: Sequence[str],
        *,
        run_id: str,
        settings: Mapping[str, Any],
        folder: Path,
        latest_evaluation: Callable[[], TrainingEvaluation | None] = lambda: None,
        report: Callable[[str], None] = lambda _message: None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._trackers = trackers
        self._patience = patience
        self._apart: dict[str, CallThread] = {}
        self._run_id = run_id
        self._settings = settings
        self._folder = folder
        self._latest_evaluation = latest_evaluation
        self._report = report
        self._open: dict[str, TrackedRun] = {}
        self._logged = 0

    def on_train_begin(self, engine: "TrainingEngine", *, done: int, steps: int) -> None:
        mark = self._folder / TRACKED
        self._logged = int(mark.read_text()) if mark.exists() else 0
        for name in self._trackers:
            # The run continues, whatever a library raises.
            try:
                begin = partial(load_tracker(name).open_run, self._run_id, self._settings)
                self._apart[name] = CallThread(f"tracker {name}")
                self._open[name] = self._call(name, partial(begin, self._folder / name))
            except Exception as error:
                self._give_up(name, error)

    def on_step_end(self, step: TrainStep, steps: int) -> None:
        if not self._open or step.step <= self._logged:
            return
        self._logged = step.step
        # Marked first: a crash in between loses one point of a curve and never doubles one.
        write_atomic(self._folder / TRACKED, str(step.step), durable=False)
        metrics = tracked_metrics(step, self._latest_evaluation())
        for name, run in list(self._open.items()):
            try:
                self._call(name, partial(run.log, step.step, metrics))
            except Exception as error:
                del self._open[name]
                self._give_up(name, error)

    def on_train_end(self) -> None:
        for name, run in self._open.items():
            try:
                self._call(name, run.close)
            except Exception as error:
                self._give_up(name, error)
        self._open = {}

    def _call(self, name: str, work: Callable[[], T]) -> T:
        return self._apart[name].call(work, seconds=self._patience)

    def _give_up(self, name: str, error: Exception) -> None:
        first = next(iter(str(error).strip().splitlines()), "")
        message = redact_variables(first, environment=os.environ, variables=SECRETS)
        self._report(
            f"tracker {name} is disabled for the rest of the run: {type(error).__name__}"
            + (f": {message}" if message else "")
        )


def tracked_metrics(step: TrainStep, evaluation: TrainingEvaluation | None) -> dict[str, float]:
    """The metrics of a step, under the same names in every tracker."""
    metrics = {
        "train/loss": step.loss,
        "train/learning_rate": step.learning_rate,
        "train/gradient_norm": step.gradient_norm,
    }
    if step.seconds > 0:
        metrics["train/tokens_per_second"] = step.tokens / step.seconds
    if evaluation is not None and evaluation.step == step.step:
        metrics[f"look/{evaluation.metric}"] = evaluation.value
        metrics["look/cases"] = float(evaluation.cases)
    return metrics
