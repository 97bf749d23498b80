"""The settings of a training run."""

from typing import Literal

from pydantic import Field

from graftwork.records.base import Record

Target = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ALL_LINEARS: tuple[Target, ...] = (
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)


class TrainSettings(Record):
    """How the adapter is trained. Everything that changes the result stands here."""

    method: Literal["lora"] = "lora"
    rank: int = Field(8, ge=1, le=512, description="Rank of the adapters.")
    alpha: float = Field(16, gt=0, description="The adapters act with alpha / rank.")
    targets: tuple[Target, ...] = Field(
        ALL_LINEARS, min_length=1, description="Linear layers with an adapter."
    )
    upper_layers: int | None = Field(
        None, ge=1, description="Adapt only this many layers from the top; below them nothing is trained."
    )
    epochs: int = Field(2, ge=1, description="How often every row is seen.")
    batch_rows: int = Field(8, ge=1, description="Rows in one optimizer step.")
    learning_rate: float = Field(5e-4, gt=0, le=1, description="The highest rate; it falls as a cosine.")
    warmup_share: float = Field(0.1, ge=0, lt=1, description="Share of the steps in which the rate rises.")
    weight_decay: float = Field(0.0, ge=0, description="Decay of the adapter's weights.")
    max_gradient_norm: float = Field(1.0, gt=0, description="Longer gradients are shortened to this.")
    max_rows: int | None = Field(None, ge=1, description="Train on at most so many rows: a budget of time.")
    validation_rows: int = Field(24, ge=0, description="Rows for the loss before and after.")
    checkpoint_every: int = Field(10, ge=1, description="Steps between checkpoints.")
    keep_checkpoints: int = Field(2, ge=1, description="Good checkpoints that stay.")
    threads: int | None = Field(None, ge=1, description="Processor threads; all by default.")
    seed: int = Field(17, ge=0, description="Order of the rows and first weights.")
    max_restarts: int = Field(3, ge=0, description="How often a crashed worker is started again.")
    rehearse_crash: bool = Field(
        False, description="Kill the worker once with -9 halfway, in the open, to show that nothing is lost."
    )
