"""A question of fit and its answer: what is to be trained on what, and what will come of it."""

from typing import Any, Literal

from graftwork.records.base import Figure, Record
from graftwork.records.hardware import Machine
from graftwork.records.plan import ModelShape, StreamedStep, Tuning

Method = Literal["lora", "qlora", "dora", "full"]
Algorithm = Literal["sft", "dpo", "grpo"]
Precision = Literal["bfloat16", "float16", "float32"]
Optimizer = Literal["adamw_fused", "adamw_foreach", "adamw_loop", "adamw_8bit", "sgd"]
Sharding = Literal["none", "ddp", "zero2", "zero3", "fsdp2"]
Offload = Literal["none", "optimizer", "weights"]
Level = Literal["guessed", "computed", "traced", "probed"]


class PlainSetup(Record):
    """One micro-batch of transformers and PEFT, as far as memory and time depend on it."""

    method: Method = "lora"
    rank: int = 16
    targets: tuple[str, ...]
    adapted_layers: int
    dtype: Precision = "bfloat16"
    adapter_dtype: Precision = "float32"
    autocast: bool = True
    rows: int = 1
    tokens: int
    """Of one row, with its padding."""
    checkpointed: int = 0
    """Layers that keep only their input and compute the rest again."""
    loss: Literal["plain", "fused"] = "plain"
    optimizer: Optimizer = "adamw_fused"
    liger: bool = False
    """Norms, rotary positions and the gate are one kernel each: Liger's."""
    attention: Literal["flash", "math"] = "flash"
    deterministic: bool = False
    """Attention adds up in the same order every time, which takes more memory where heads are few."""
    experts: bool = False
    """Experts have adapters too."""
    kbit_upcast: bool = True
    """`prepare_model_for_kbit_training` was called: weights that are not in four bits are in float32."""
    fused_nf4: bool = False
    """Weights in four bits are opened by graft's kernel, not by bitsandbytes."""


class MemoryPeak(Record):
    """The most that a card holds, in bytes, and what it is for at that moment."""

    allocated: float
    reserved: float
    parts: dict[str, float]
    """Of the allocated bytes: weights, adapters, gradients, optimizer, activations, logits, workspace."""
    phase: str
    """Where the peak occurs: forward, loss, backward, optimizer, generation."""


class StepTime(Record):
    """Seconds of one micro-batch by what they are spent on, and of what comes once a step."""

    parts: dict[str, float]
    once_a_step: dict[str, float] = {}


class FitOptions(Record):
    """What may be stated about a run; the rest follows from the model and the machine."""

    method: Method = "qlora"
    algorithm: Algorithm = "sft"
    engine: Literal["graft", "hf"] = "graft"
    seq: int | tuple[int, ...] = 2048
    """One length for all rows, or the length of every row that there is."""
    rows: int | None = None
    epochs: float = 1.0
    batch_rows: int = 16
    trained_share: float = 1.0
    rank: int = 16
    targets: tuple[str, ...] | None = None
    adapted_layers: int | None = None
    experts: bool = False
    optimizer: Optimizer = "adamw_fused"
    offload: Literal["auto", "none", "optimizer", "weights"] = "auto"
    memory_limit_gib: float | None = None
    prompt_tokens: int = 512
    completion_tokens: int = 512
    generations: int = 8
    reward_seconds: float = 0.0


class FitQuestion(Record):
    """What the user wants to know."""

    model: str
    shape: ModelShape
    architecture: str = "llama"
    method: Method = "lora"
    algorithm: Algorithm = "sft"
    engine: Literal["graft", "hf"] = "graft"
    lengths: tuple[int, ...]
    """Tokens of the rows: one number, or the dataset's own."""
    rows: int
    """Rows of an epoch; `lengths` may be a sample of them."""
    epochs: float = 1.0
    batch_rows: int = 16
    """Rows of an optimizer step, over all cards."""
    trained_share: float = 1.0
    """Of the tokens, those that are predicted."""
    rank: int = 16
    targets: tuple[str, ...]
    adapted_layers: int
    experts: bool = False
    """Experts have adapters too."""
    optimizer: Optimizer = "adamw_fused"
    offload: Literal["auto", "none", "optimizer", "weights"] = "auto"
    memory_limit_gib: float | None = None
    machine: Machine
    prompt_tokens: int = 512
    """GRPO: tokens of a prompt, of an answer, and answers to a prompt."""
    completion_tokens: int = 512
    generations: int = 8
    reward_seconds: float = 0.0
    """GRPO: of the rewards of one answer; 0 where it is not known."""


class Strategy(Record):
    """How the run is best set."""

    engine: Literal["graft", "hf"]
    precision: Precision
    weights: Literal["16 bits", "8 bits", "4 bits (NF4)", "32 bits"]
    micro_rows: int
    """Rows of one pass on one card."""
    micro_tokens: int
    accumulation: int
    checkpointed_layers: int
    sharding: Sharding = "none"
    offload: Offload = "none"
    optimizer: Optimizer = "adamw_fused"
    packing: bool = True
    tuning: Tuning | None = None
    streamed: StreamedStep | None = None
    """How layers are streamed from host memory, where they are."""
    train: dict[str, Any] = {}
    """The `train:` section of graft.yaml that does this."""


class Considered(Record):
    """Another way with its figures: one that was not taken, or one that a change would make possible."""

    name: str
    fits: bool
    peak_reserved_gib: Figure
    card_gib: Figure
    host_gib: Figure
    tokens_per_second: Figure
    strategy: Strategy


class FitAnswer(Record):
    """What will happen, every figure with its range; and what would have to change where it does not fit."""

    question: FitQuestion
    fits: bool
    certainty: Level
    total_parameters: Figure
    trainable_parameters: Figure
    peak_allocated_gib: Figure
    peak_reserved_gib: Figure
    card_gib: Figure
    """What there is of a card for the allocator: the total less the context and others' use."""
    host_gib: Figure
    parts_gib: dict[str, Figure]
    tokens_per_second: Figure
    step_seconds: Figure
    steps: Figure
    epoch_minutes: Figure
    run_minutes: Figure
    late_oom_chance: Figure
    """That a batch of long rows runs out of memory after the start."""
    strategy: Strategy
    others: tuple[Strategy, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why this strategy; and where nothing fits: by how much, and what would make it fit."""
    verdict: str = ""
    """The answer in one sentence."""
    step_parts_seconds: dict[str, Figure] = {}
    """What an optimizer step is spent on."""
    considered: tuple[Considered, ...] = ()
    """Other ways to do this very run, the best of each kind."""
    remedies: tuple[Considered, ...] = ()
    """Where it does not fit: changes that make it fit, each fully computed."""


Form = Literal["whole", "eight", "four"]


class DeviceName(Record):
    """Which device it is, and with what it is driven: a probe is good for the same three."""

    kind: Literal["cpu", "cuda"]
    name: str
    driver: str = ""
    torch: str = ""


class ProbeJob(Record):
    """What a probe is to look at."""

    shape: ModelShape
    folder: str
    """Where the disk is tried: what is written there is removed again."""
    length: int = 2048
    """Tokens of a row in the real steps."""
    tokens: tuple[int, ...] = (8192, 2048)
    """Tokens of a pass on a card. The first are tried first; each number has to be recorded."""
    rank: int = 16
    forms: tuple[Form, ...] = ()
    """Frozen weights on a card; empty: 8 bits where the card has them, else 16."""
    threads: int | None = None
    seconds: float = 30.0
    """When this much is spent, what is left is left out."""


class ProductRate(Record):
    """How fast one product of a decoder's layer goes."""

    layer: str
    tokens: int
    inputs: int
    outputs: int
    dtype: str
    flops: float
    """A second."""


class ProbedStep(Record):
    """A real step of the project's own with few layers. `seconds` is the median."""

    layers: int
    tokens: int
    length: int
    trainable: int
    trained_share: float = 1.0
    """Of the tokens, those that were predicted."""
    seconds: float
    spread: float
    """Half the range of the middle half, over the median."""
    peak_bytes: float
    tuning: Tuning | None = None
    """None on a processor."""


class ProbeFacts(Record):
    """The device as it was found, in bytes, seconds and operations a second. None: could not be measured."""

    device: DeviceName
    memory_gib: float
    capability: float | None = None
    threads: int
    shape: ModelShape
    rank: int
    products: tuple[ProductRate, ...] = ()
    copy_bytes_s: float
    """Read and written, together."""
    context_bytes: float | None = None
    to_device_bytes_s: float | None = None
    from_device_bytes_s: float | None = None
    launch_seconds: float | None = None
    disk_write_bytes_s: float | None = None
    disk_read_bytes_s: float | None = None
    steps: tuple[ProbedStep, ...] = ()
    took: dict[str, float] = {}
    """Seconds of each part of the probe."""
    left_out: tuple[str, ...] = ()
    """What could not be measured, and why."""
    seconds: float
    at: str
