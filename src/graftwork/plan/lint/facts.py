"""A training configuration in one form, whatever wrote it; and what stands around it.

In: what a reader found, what the command line adds. Out: records for the rules. Does not know any
file format, nor what is wrong with the figures.
"""

from typing import Literal

from graftwork.records.base import Record
from graftwork.records.hardware import Gpu
from graftwork.records.plan import ModelShape

Severity = Literal["error", "warning", "note"]
Kind = Literal["graft", "training", "deepspeed", "axolotl", "llama-factory"]
Method = Literal["lora", "qlora", "dora", "full"]
Precision = Literal["bfloat16", "float16", "float32"]
When = Literal["steps", "epoch", "no", "best"]


class ConfigLocation(Record):
    """Where something is said: a key of the file with its line, or an option of the command line."""

    key: str
    line: int | None = None


class Configuration(Record):
    """What is said about a run. None: nothing is said, and nothing is guessed in its place."""

    file: str
    kind: Kind
    places: dict[str, ConfigLocation] = {}
    """Where each field below was found."""
    unfilled: dict[str, str] = {}
    """Keys whose value is a placeholder of a template."""
    texts_for_numbers: dict[str, str] = {}
    """Keys whose number YAML 1.1 reads as a text: `2e-4` lacks the point that it asks for."""

    model: str | None = None
    method: Method | None = None
    algorithm: str | None = None
    rank: int | None = None
    alpha: float | None = None
    stabilised: bool = False
    targets: tuple[str, ...] | None = None
    learning_rate: float | None = None
    optimizer: str | None = None

    rows: int | None = None
    test_rows: int | None = None
    epochs: float | None = None
    max_steps: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    cards: int | None = None
    batch: int | None = None
    """Rows of an optimizer step, where the file fixes them: DeepSpeed's train_batch_size, our batch_rows."""
    warmup_steps: int | None = None
    warmup_share: float | None = None

    save_when: When | None = None
    save_steps: int | None = None
    eval_when: When | None = None
    eval_steps: int | None = None
    keep_best: bool = False
    best_metric: str | None = None
    stops_early: bool = False

    max_length: int | None = None
    packing: bool | None = None
    document_masks: bool | None = None
    precision: Precision | None = None
    both_halves: bool = False
    """bf16 and fp16 are both switched on."""
    weights_dtype: Precision | None = None
    """What the frozen or trained weights are loaded in, where it is said apart from `precision`."""
    bits: int | None = None
    compute_dtype: Precision | None = None
    """What weights of four bits are multiplied in."""
    flash_attention: bool | None = None
    tf32: bool | None = None
    recompute: bool | None = None
    """Gradient checkpointing."""
    zero_stage: int | None = None
    offload_optimizer: bool = False
    offload_weights: bool = False

    gpu: str | None = None
    on_processor: bool = False
    ram_gib: float | None = None
    spot: bool | None = None
    mirror: str | None = None
    deadline_minutes: float | None = None
    expected_minutes: float | None = None

    stated_batch: int | None = None
    stated_epoch_steps: int | None = None
    stated_steps: int | None = None
    stated_weights_gb: float | None = None
    stated_memory_gb: float | None = None
    stated_download_gb: float | None = None
    stated_trainable: int | None = None
    serving_gb: float | None = None
    target_rate: float | None = None
    """A rate that held-out cases must prove."""
    data_model: str | None = None
    deployed_model: str | None = None

    def where(self, *fields: str) -> str:
        """File and line of the first of these fields that is said somewhere."""
        place = next((self.places[field] for field in fields if field in self.places), None)
        if place is None:
            return self.file
        if place.key.startswith("--"):
            return place.key
        return f"{self.file}:{place.line}" if place.line else self.file

    def key(self, *fields: str) -> str:
        """The name that this file gives to the first of these fields that is said."""
        return next((self.places[field].key for field in fields if field in self.places), "")


class Peaks(Record):
    """GiB of a card at its largest micro-batch, reckoned: as it is set, and with gradient checkpointing."""

    as_set: float
    recomputed: float
    tokens: int
    """Of the longest row that the limit lets through."""


class Around(Record):
    """What is known beside the file: the model's shape, the card, the lengths of the rows."""

    shape: ModelShape | None = None
    parameters: int | None = None
    trainable: int | None = None
    """What the named adapter has on this shape."""
    gpu: Gpu | None = None
    on_processor: bool = False
    lengths: tuple[int, ...] = ()
    peaks: Peaks | None = None


class LintFinding(Record):
    """One thing that is not as it looks."""

    rule: str
    severity: Severity
    what: str
    why: str
    fix: str
    where: str
    key: str = ""
    source: str = ""
