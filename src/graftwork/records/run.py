"""A training run: the job that a worker gets, the steps it logs, the outcome it leaves."""

from typing import Any, Literal

from graftwork.records.base import Record
from graftwork.records.plan import Plan, Residual

RunState = Literal["planned", "running", "stopped", "failed", "done"]


class TrainJob(Record):
    """All that a training worker is told. It is the worker's only argument, as a file."""

    run_id: str
    folder: str
    base_folder: str
    dataset_folder: str
    plan: Plan
    run: dict[str, Any] = {}
    """How the run is watched and kept: the `run` of the training settings."""
    start_adapter: str | None = None
    """A PEFT folder that training goes on from."""
    deadline: float | None = None
    """When the place is gone, as seconds since 1970."""


class TrainStep(Record):
    """One optimizer step, as the journal keeps it. `weights` is a digest of the adapter."""

    step: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    trained_tokens: int
    seconds: float
    weights: str = ""


class TrainOutcome(Record):
    """What a finished run leaves, beside the adapter folder itself."""

    run_id: str
    adapter_folder: str
    adapter_hash: str
    base_hash_before: str
    base_hash_after: str
    steps: int
    epochs: float
    first_loss: float
    final_loss: float
    validation_loss_before: float | None
    validation_loss_after: float | None
    seconds: float
    load_seconds: float
    tokens_per_second: float
    peak_memory_gib: float
    trainable_parameters: int
    restarts: int
    replayed_steps: int
    replay_identical: bool | None
    rows: int = 0
    """Rows that were trained on; fewer than the split holds where the settings give a budget."""
    residuals: tuple[Residual, ...] = ()
    versions: dict[str, str] = {}
    settings: dict[str, Any] = {}
