"""Passes the figures of each step on to the trackers that graft.yaml names.

In: steps, and looks where there were any. Out: the same figures in each tracker. A tracker that
fails, or whose server does not come to an end, costs its own curve and a word, never the run. A resumed
run goes on in the same tracker run; steps that are done again are not told again.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from graftwork.files.disk import write_atomic
from graftwork.process.pool import CallThread
from graftwork.records.run import TrainingEvaluation, TrainStep
from graftwork.text.unsaid import leave_secrets_unsaid
from graftwork.train.attend.attendant import Attendant
from graftwork.train.engine import Engine
from graftwork.train.files import TRACKED
from graftwork.train.trackers.tracker import OpenRun, load_tracker

SECRETS = (
    *("MLFLOW_TRACKING_URI", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"),
    *("TRACKIO_SERVER_URL", "TRACKIO_WRITE_TOKEN", "WANDB_API_KEY", "WANDB_BASE_URL", "HF_TOKEN"),
)
"""What an error of a tracker must not repeat: the word about it is kept with the run."""
PATIENCE_SECONDS = 60.0
"""For one call of a tracker. The timeouts of their libraries begin anew with every byte that arrives."""

T = TypeVar("T")


class Track(Attendant):
    name = "track"

    def __init__(
        self,
        trackers: Sequence[str],
        *,
        run_id: str,
        settings: Mapping[str, Any],
        folder: Path,
        latest_look: Callable[[], TrainingEvaluation | None] = lambda: None,
        on_word: Callable[[str], None] = lambda _word: None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        self._trackers = trackers
        self._patience = patience
        self._apart: dict[str, CallThread] = {}
        self._run_id = run_id
        self._settings = settings
        self._folder = folder
        self._latest_look = latest_look
        self._on_word = on_word
        self._open: dict[str, OpenRun] = {}
        self._told = 0

    def begins(self, engine: Engine, *, done: int, steps: int) -> None:
        mark = self._folder / TRACKED
        self._told = int(mark.read_text()) if mark.exists() else 0
        for name in self._trackers:
            # Whatever a library raises, the run goes on.
            try:
                begin = partial(load_tracker(name).open_run, self._run_id, self._settings)
                self._apart[name] = CallThread(f"tracker {name}")
                self._open[name] = self._call(name, partial(begin, self._folder / name))
            except Exception as error:
                self._give_up(name, error)

    def after_step(self, step: TrainStep, steps: int) -> None:
        if not self._open or step.step <= self._told:
            return
        self._told = step.step
        # Marked first: a kill in between costs one point of a curve and never doubles one.
        write_atomic(self._folder / TRACKED, str(step.step), durable=False)
        figures = name_figures(step, self._latest_look())
        for name, run in list(self._open.items()):
            try:
                self._call(name, partial(run.log, step.step, figures))
            except Exception as error:
                del self._open[name]
                self._give_up(name, error)

    def ends(self) -> None:
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
        said = leave_secrets_unsaid(first, environment=os.environ, variables=SECRETS)
        self._on_word(
            f"the tracker {name} is left out from here on: {type(error).__name__}"
            + (f": {said}" if said else "")
        )


def name_figures(step: TrainStep, look: TrainingEvaluation | None) -> dict[str, float]:
    """The figures of a step by the names that they have in every tracker."""
    figures = {
        "train/loss": step.loss,
        "train/learning_rate": step.learning_rate,
        "train/gradient_norm": step.gradient_norm,
    }
    if step.seconds > 0:
        figures["train/tokens_per_second"] = step.tokens / step.seconds
    if look is not None and look.step == step.step:
        figures[f"look/{look.metric}"] = look.value
        figures["look/cases"] = float(look.cases)
    return figures
