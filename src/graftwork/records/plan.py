"""What will happen, said before it happens; and how far that was off."""

from typing import Any, Literal

from graftwork.records.base import Record
from graftwork.records.figure import Figure

Certainty = Literal["computed", "probed", "learned"]


class ModelShape(Record):
    """The numbers of a decoder that memory and time depend on."""

    name: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tied_embeddings: bool
    max_positions: int


class DeviceFacts(Record):
    """What the plan knows of the machine. `gflops` is None until somebody measured it."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_gib: float
    threads: int
    gflops: float | None = None
    certainty: Certainty = "computed"


class Workload(Record):
    """What is to be trained, as numbers: the rows that were chosen and the adapter's shape."""

    lengths: tuple[int, ...]
    trained_tokens: int
    batch_rows: int
    epochs: int
    rank: int
    targets: tuple[str, ...]
    adapted_layers: int
    shared_tokens: int = 0
    """First tokens that all rows have in common, read once a batch."""
    validation_tokens: int = 0
    checkpoints: int = 1


class Plan(Record):
    """The run as figures. `train` holds the resolved training settings that produce them."""

    base: str
    base_fingerprint: str
    dataset_hash: str
    method: str
    dtype: str
    device: DeviceFacts
    certainty: Certainty
    total_parameters: Figure
    trainable_parameters: Figure
    peak_memory_gib: Figure
    disk_gib: Figure
    tokens: Figure
    trained_tokens: Figure
    steps: Figure
    tokens_per_second: Figure
    minutes: Figure
    fits: bool
    train: dict[str, Any]
    notes: tuple[str, ...] = ()


class Residual(Record):
    """One figure of the plan beside what came of it."""

    name: str
    planned: Figure
    actual: float

    @property
    def off(self) -> float:
        """Actual over planned, less one: +0.1 is a tenth more than planned."""
        return self.actual / self.planned.value - 1 if self.planned.value else 0.0

    @property
    def inside(self) -> bool:
        return self.planned.holds(self.actual)
