"""Those who stand beside the loop, one file each: who watches, examines, tells, stops in time."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graftwork.records.dataset import Row
from graftwork.records.run import TrainStep

if TYPE_CHECKING:
    from graftwork.train.engine import StepResult, TrainingEngine


class EarlyStop(Exception):
    """Raised after a step: nothing more is to be gained; the run ends here, well."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TrainingCallback:
    """Does nothing at any time; those that do something override what they need.

    Expected errors (StoppedInOrder, Diverged) may be raised anywhere and end the run.
    """

    name = "attendant"

    def on_train_begin(self, engine: "TrainingEngine", *, done: int, steps: int) -> None:
        """The run goes on after step `done`."""

    def on_step_begin(self, number: int, steps: int) -> None: ...

    def accept_gradient(self, number: int, measured: "StepResult", rows: Sequence[Row]) -> bool:
        """Between gradient and update: False passes this step over without an update."""
        return True

    def on_step_end(self, step: TrainStep, steps: int) -> None: ...

    def score(self) -> float | None:
        """How good the model of this step is, smaller is better, if this callback just looked."""
        return None

    def wants_checkpoint(self, step: TrainStep) -> bool:
        """Whether one is to be made after this step, though none is due."""
        return False

    def on_save_begin(self, step: int) -> None: ...

    def on_save_end(self, folder: Path, step: int) -> None: ...

    def on_train_stopping(self) -> None:
        """The loop waits now until the last checkpoint is safe, here and at the mirror."""

    def on_train_end(self) -> None:
        """The run is over, well or badly."""

    def state(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any]) -> None: ...
