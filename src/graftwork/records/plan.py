"""Predictions of a run, how far they were off, and answers to questions of fit."""

import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from graftwork.records.base import Figure, Record
from graftwork.records.hardware import Machine

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
    linears: dict[str, tuple[int, int]] = {}
    """(inputs, outputs) of a block's linear layers by the end of their path, where they are not Llama's."""
    parameters: int | None = None
    """Counted, where they are not what a Llama of these sizes has."""
    block_parameters: int | None = None
    experts: int = 0
    """Experts of a block; none in a dense model."""
    experts_used: int = 0
    """Experts that a token is routed to."""
    expert_inner: int = 0
    architecture: str = ""
    """`model_type` of a family whose blocks graft's own steps compute otherwise than Llama's."""
    remembered: tuple[int, ...] = ()
    """Positions that each layer remembers while answers are written, 0 for all: windows and states. Empty if
    every layer remembers all; only then answers have slots."""
    not_written_out: str | None = None
    """Why graft's own training steps do not compute its blocks, by its config; None if they do."""


FREE_SHARE = 0.9
"""Share of the cores that counts as undisturbed; a measurement that got less shared them."""


class DeviceFacts(Record):
    """What the plan knows of the machine. `gflops` is None until it is measured."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_gib: float
    threads: int
    gflops: float | None = None
    weights_s: float | None = None
    """Bytes per second that a CPU reads of weights which it multiplies with a single row."""
    core_share: float | None = None
    """The part of the cores that the measurement of a CPU got; small on a busy machine."""
    core_gflops: float | None = None
    """Rate of one core by CPU time, so that the load of other processes does not affect it."""
    core_weights_s: float | None = None
    """The same for reading weights."""
    capability: float | None = None
    """Compute capability of the oldest GPU: 8.0 has bfloat16, 8.9 and later 8-bit products."""
    certainty: Certainty = "computed"

    @property
    def cores(self) -> float:
        """Number of cores that other processes leave free."""
        return self.threads * (1.0 if self.core_share is None else self.core_share)

    @property
    def is_busy(self) -> bool:
        """Whether others used the cores while it was measured."""
        return self.core_share is not None and self.core_share < FREE_SHARE

    @property
    def when_free(self) -> "DeviceFacts":
        """The same machine where others use nothing of it: the fast end of ranges."""
        if not self.is_busy or self.gflops is None:
            return self
        gflops = max(self.gflops, (self.core_gflops or 0.0) * self.threads)
        weights_s = max(self.weights_s or 0.0, self.core_weights_s or 0.0) or None
        return self.model_copy(update={"gflops": gflops, "weights_s": weights_s, "core_share": 1.0})


class Tuning(Record):
    """How a step on a GPU spends its memory. Nothing here changes what is learned, but for `form`."""

    form: Literal["whole", "eight", "four"]
    """Frozen weights in the model's type, in 8 bits with 8-bit products, or in NF4."""
    head: Literal["whole", "eight"]
    micro_tokens: int
    """Tokens of one forward and backward pass."""
    longest: int
    """Tokens of the longest row."""
    keep: int
    """Blocks, from the top, that keep all that their backward pass needs."""
    lean: int
    """Blocks below them that compute the widest tensor of their MLP again; the rest keep only their input."""
    chunk_tokens: int
    """Tokens of one go through a block that computes again."""
    head_tokens: int
    """Places whose logits are there at once."""
    turned: bool
    """8-bit weights are held in both directions, which saves turning them over in every step."""
    host_embedding: bool
    """The embedding table stays in host memory; only the rows of a batch travel."""
    compiled: bool = True
    """Layers compiled: pays where a run is longer than compiling takes. Their passes are always recorded."""
    recorded: bool = False
    """Passes are recorded as CUDA graphs although nothing is compiled: one launch instead of thousands."""
    limit_gib: float
    peak_gib: float
    """Estimated share of the limit."""
    seconds_per_token: float
    """Estimated with the rates used to choose it: it ranks settings and is not a promise."""
    sampling_gib: float = 0.0
    """Memory beyond the limit that is set apart for answers sampled between steps."""


class CpuStepPlan(Record):
    """How the step that is written for CPUs spends memory to save work."""

    packed: bool
    """Frozen weights are held once more, laid out for the CPU's products; adapted blocks' twice."""
    kept: Literal["memory", "file", "nowhere"]
    """Where the frozen blocks' output waits for the next epoch."""
    distinct_tokens: int
    """Tokens of all rows, each counted once, after their common beginning."""
    restarted: bool = False
    """The process is killed halfway to rehearse a crash."""


class PlainStep(Record):
    """How the plain step of a run goes through its rows. Nothing here changes what is learned."""

    micro_rows: int
    """Rows of one forward and backward pass of a process."""
    checkpointed: bool = False
    """Blocks keep only their input and compute the rest again."""
    peak_gib: float
    """Estimated memory of each GPU or of the host."""
    parts_gib: dict[str, float] = {}
    seconds_per_token: float | None = None
    """Time per token of all processes together, at the rates that the plan was chosen by; without
    communication.
    """


class StreamedStep(Record):
    """How full fine-tuning streams a model from host memory. What is learned depends on `dtype` only."""

    micro_rows: int
    """Rows that go through a block at once; all rows of a step do before the next block is fetched."""
    dtype: Literal["float32", "bfloat16"]
    """Type of weights, gradients and activations on the device; the weights on the host are in float32."""
    host_inputs: int = 0
    """Blocks, from the bottom, whose inputs wait in host memory for the backward pass."""
    head_tokens: int | None = None
    """Positions whose logits exist at once; None: all of a pass."""
    update: Literal["host", "gpu"] = "host"
    """Where Adam runs: on the CPU, or on the GPU with its states streamed through."""
    limit_gib: float
    peak_gib: float
    host_gib: float
    parts_gib: dict[str, float] = {}
    seconds_per_token: float | None = None


class RolloutLoad(Record):
    """Answers that are sampled for a step, and what they cost besides tokens."""

    prompts: int
    answers: int
    """To each prompt."""
    prompt_tokens: float
    max_tokens: int
    answer_tokens: float
    """Expected of an answer."""
    prompts_at_once: int | None = None
    """Prompts that are answered together; None: all of a step."""
    longest_prompt: int | None = None
    """None: all prompts have the same length."""
    has_turns: bool = False
    """Whether an answer is an episode, whose later turns are read again from the beginning."""
    on_server: bool = False
    """Whether a server answers: then nothing is sampled here."""
    batches: int = 1
    supervised_rows: int = 0
    """Rows of supervised training next to them in a step."""
    reward_seconds: float = 0.0
    """Time to reward one answer, if known."""
    reference_rows: int = 0
    """Answers of a step that the model of the start reads too, for the KL divergence."""

    @property
    def rows(self) -> int:
        return self.prompts * self.answers

    @property
    def rows_at_once(self) -> int:
        return min(self.prompts_at_once or self.prompts, self.prompts) * self.answers

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return math.ceil(self.prompt_tokens) if self.longest_prompt is None else self.longest_prompt


class Workload(Record):
    """What is to be trained, as numbers: the rows that were chosen and the adapter's shape."""

    lengths: tuple[int, ...]
    trained_tokens: int
    batch_size: int
    epochs: int
    rank: int
    targets: tuple[str, ...]
    adapted_layers: int
    method: str = "lora"
    ranks: dict[str, int] = {}
    """Other ranks, by the names of layers."""
    shared_tokens: int = 0
    """First tokens that all rows have in common, read once a batch."""
    validation_tokens: int = 0
    checkpoints: int = 1
    most_replies: int = 0
    """Most trained tokens of one batch; 0 if only the mean is known."""
    experts: bool = False
    """Experts have adapters too."""
    cpu_step: CpuStepPlan | None = None
    """None if the run takes a GPU's step or the plain one."""
    rollouts: RolloutLoad | None = None
    """Answers that the model samples before each step; None but for reinforcement learning."""
    reference_tokens: int = 0
    """Tokens that are read once before training, for preferences."""


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
    tuning: Tuning | None = None
    """How a GPU's memory is spent; None if the plain step or a CPU's is used."""
    plain: PlainStep | None = None
    """How the plain step is taken where that had to be chosen; None: all rows of a step at once."""
    streamed: StreamedStep | None = None
    """How the model is streamed from host memory; None if it is on the device."""
    prompts_at_once: int | None = None
    """Prompts of a step that are answered together, where memory has no room for all of them."""
    train: dict[str, Any]
    notes: tuple[str, ...] = ()
    base_note: str = ""
    """What is to be known about the base's weights; empty if they are what they are called."""
    parts: dict[str, Figure] = {}
    """What figures are made of, as "minutes.load" or "peak_memory_gib.weights"; "peak_memory_gib.computed" is
    the peak before earlier runs corrected it."""


StageState = Literal["to do", "up to date", "if the gate says deploy", "not needed"]


class StagePlan(Record):
    """How long one stage of a run is expected to take."""

    stage: str
    title: str
    seconds: Figure
    """Nothing where the stage is up to date or not needed."""
    state: StageState
    runs: int = 0
    """Past runs of the stage that the figure rests on; without any it is computed."""
    note: str = ""


class RunPlan(Record):
    """How long a whole run is expected to take, stage by stage."""

    stages: tuple[StagePlan, ...]
    minutes: Figure
    """All stages together, those included that are done only if the gate says deploy."""
    rough: bool = False
    """The dataset is not prepared yet: training and evaluation are estimated from the size of the logs."""


class Residual(Record):
    """One figure of the plan with its actual value."""

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


class RunParts(Record):
    """What was measured of a finished run, by parts. A part that could not be measured is absent."""

    seconds: dict[str, float] = {}
    memory_gib: dict[str, float] = {}


class Drift(Record):
    """A figure that came out beyond its stated range, and the part that caused most of it."""

    figure: str
    planned: Figure
    actual: float
    component: str | None = None
    """None if the parts are not known."""
    component_planned: float | None = None
    component_actual: float | None = None
    says: str


class Bias(Record):
    """How far a kind of figure was off over past runs."""

    figure: str
    runs: int
    off: Figure
    """Actual over planned, less one: the median, and the range that holds all runs."""
    inside: Figure
    """Share of runs that came out within the stated range."""


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
    """Tokens of one row, with its padding."""
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
    """The most that a GPU holds, in bytes, and what it is for at that moment."""

    allocated: float
    reserved: float
    parts: dict[str, float]
    """What the allocated bytes are for: weights, adapters, gradients, optimizer, activations, logits,
    workspace.
    """
    phase: str
    """Where the peak occurs: forward, loss, backward, optimizer, generation."""

    def plus(self, parts: Mapping[str, float]) -> Self:
        """With bytes that are there besides, by what they are for."""
        size = sum(parts.values())
        together = {
            **self.parts,
            **{name: self.parts.get(name, 0.0) + extra for name, extra in parts.items()},
        }
        return self.model_copy(
            update={
                "allocated": self.allocated + size,
                "reserved": self.reserved + size,
                "parts": together,
            }
        )

    def times(self, factor: float) -> Self:
        """As far off as a trace found it to be."""
        return self.model_copy(
            update={
                "allocated": self.allocated * factor,
                "reserved": self.reserved * factor,
                "parts": {name: size * factor for name, size in self.parts.items()},
            }
        )


class StepTime(Record):
    """Seconds of one micro-batch by what they are spent on, and of what comes once a step."""

    parts: dict[str, float]
    once_per_step: dict[str, float] = {}


class FitOptions(Record):
    """What may be stated about a run; the rest follows from the model and the machine."""

    method: Method = "qlora"
    algorithm: Algorithm = "sft"
    engine: Literal["graft", "hf"] = "graft"
    seq: int | tuple[int, ...] = 2048
    """One length for all rows, or the length of every row that there is."""
    rows: int | None = None
    epochs: float = 1.0
    batch_size: int = 16
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
    batch_size: int = 16
    """Rows of an optimizer step, over all GPUs."""
    trained_share: float = 1.0
    """Share of the tokens that are predicted."""
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
    """GRPO: of the rewards of one answer; 0 if it is not known."""


class Strategy(Record):
    """How the run is best set."""

    engine: Literal["graft", "hf"]
    precision: Precision
    weights: Literal["16 bits", "8 bits", "4 bits (NF4)", "32 bits"]
    micro_rows: int
    """Rows of one pass on one GPU."""
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
    gpu_gib: Figure
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
    gpu_gib: Figure
    """What there is of a GPU for the allocator: the total less the context and others' use."""
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
    """Tokens of a pass on a GPU. The first are tried first; each number has to be recorded."""
    rank: int = 16
    forms: tuple[Form, ...] = ()
    """Frozen weights on a GPU; empty: 8 bits where the GPU has them, else 16."""
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
    """Share of the tokens that were predicted."""
    seconds: float
    spread: float
    """Half the range of the middle half, over the median."""
    peak_bytes: float
    tuning: Tuning | None = None
    """None on a CPU."""


class ProbeFacts(Record):
    """The device as it was found, in bytes, seconds and operations per second; None if not measured."""

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
