"""Callbacks: what may watch a training loop, refuse a gradient or end the run.

To add one: subclass TrainingCallback and add it in `run_setup.py`. What it must remember across a crash goes
into `state`, which every checkpoint carries under the callback's name.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftwork.records.dataset import Row
from graftwork.records.run import TrainStep

if TYPE_CHECKING:
    from graftwork.train.engine import StepResult, TrainingEngine


class EarlyStop(Exception):
    """Raised after a step to finish the run successfully before its last step."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TrainingCallback:
    """Does nothing; subclasses override what they need.

    Expected errors (StoppedInOrder, Diverged) may be raised from any method and end the run.
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
        """How good the model of this step is (smaller is better), if this callback just evaluated it."""
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
