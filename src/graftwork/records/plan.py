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
    """(inputs, outputs) of a block's linear layers by the suffix of their path, if they are not Llama's."""
    parameters: int | None = None
    """Counted parameters, if they differ from a Llama of these sizes."""
    block_parameters: int | None = None
    experts: int = 0
    """Experts of a block; none in a dense model."""
    experts_used: int = 0
    """Experts that a token is routed to."""
    expert_inner: int = 0
    architecture: str = ""
    """`model_type` of a family whose blocks graft's own steps compute differently from Llama's."""
    remembered: tuple[int, ...] = ()
    """Positions that each layer remembers during generation, 0 for all: windows and states. Empty if every
    layer remembers all; only then answers have slots.
    """
    not_written_out: str | None = None
    """Why graft's own training steps do not compute its blocks, by its config; None if they do."""


FREE_SHARE = 0.9
"""Share of the cores that counts as undisturbed; a measurement that got less shared them."""


class DeviceFacts(Record):
    """Facts about the machine for the plan. `gflops` is None until it is measured."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_gib: float
    threads: int
    gflops: float | None = None
    weights_s: float | None = None
    """Bytes per second that a CPU reads of weights in products with a single row."""
    core_share: float | None = None
    """The share of the cores that the measurement of a CPU got; small on a busy machine."""
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
        """Whether other processes used the cores during the measurement."""
        return self.core_share is not None and self.core_share < FREE_SHARE

    @property
    def when_free(self) -> "DeviceFacts":
        """The same machine without other load: the fast end of ranges."""
        if not self.is_busy or self.gflops is None:
            return self
        gflops = max(self.gflops, (self.core_gflops or 0.0) * self.threads)
        weights_s = max(self.weights_s or 0.0, self.core_weights_s or 0.0) or None
        return self.model_copy(update={"gflops": gflops, "weights_s": weights_s, "core_share": 1.0})


class Tuning(Record):
    """How a step on a GPU uses its memory. Nothing here changes what is learned, except `form`."""

    form: Literal["whole", "eight", "four"]
    """Frozen weights in the model's type, in 8 bits with 8-bit products, or in NF4."""
    head: Literal["whole", "eight"]
    micro_tokens: int
    """Tokens of one forward and backward pass."""
    longest: int
    """Tokens of the longest row."""
    keep: int
    """Blocks, from the top, that save everything that their backward pass needs."""
    lean: int
    """Blocks below them that recompute the widest tensor of their MLP; the rest save only their input."""
    chunk_tokens: int
    """Tokens per chunk of a recomputed block."""
    head_tokens: int
    """Positions whose logits exist at the same time."""
    turned: bool
    """8-bit weights are held in both layouts, which saves transposing them in every step."""
    host_embedding: bool
    """The embedding stays in host memory; only the rows of a batch are transferred."""
    compiled: bool = True
    """Layers are compiled: worthwhile if a run takes longer than compiling. Their passes are always
    recorded.
    """
    recorded: bool = False
    """Passes are recorded as CUDA graphs although nothing is compiled: one launch instead of thousands."""
    limit_gib: float
    peak_gib: float
    """Estimated share of the limit."""
    seconds_per_token: float
    """Estimated with the rates used to choose it: it ranks settings and is not a promise."""
    sampling_gib: float = 0.0
    """Memory outside the limit that is reserved for answers sampled between steps."""


class CpuStepPlan(Record):
    """How the step that is written for CPUs uses memory to save work."""

    packed: bool
    """Frozen weights are stored a second time, laid out for the CPU's products; those of adapted blocks
    twice.
    """
    kept: Literal["memory", "file", "nowhere"]
    """Where the frozen blocks' output is cached for the next epoch."""
    distinct_tokens: int
    """Tokens of all rows, each counted once, after their common beginning."""
    restarted: bool = False
    """The process is killed halfway to rehearse a crash."""


class PlainStep(Record):
    """How the plain step of a run processes its rows. Nothing here changes what is learned."""

    micro_rows: int
    """Rows of one forward and backward pass of a process."""
    checkpointed: bool = False
    """Blocks save only their input and are recomputed."""
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
    """Rows that pass through a block at once; all rows of a step do before the next block is fetched."""
    dtype: Literal["float32", "bfloat16"]
    """Type of weights, gradients and activations on the device; the weights on the host are in float32."""
    host_inputs: int = 0
    """Blocks, from the bottom, whose inputs are offloaded to host memory until the backward pass."""
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
    """Answers that are sampled for a step, and their cost besides tokens."""

    prompts: int
    answers: int
    """To each prompt."""
    prompt_tokens: float
    max_tokens: int
    answer_tokens: float
    """Expected tokens of an answer."""
    prompts_at_once: int | None = None
    """Prompts that are answered together; None: all of a step."""
    longest_prompt: int | None = None
    """None: all prompts have the same length."""
    has_turns: bool = False
    """Whether an answer is an episode, whose later turns are read again from the start."""
    on_server: bool = False
    """Whether a server generates the answers: then nothing is sampled here."""
    batches: int = 1
    supervised_rows: int = 0
    """Rows of supervised training in the same step."""
    reward_seconds: float = 0.0
    """Time to reward one answer, if known."""
    reference_rows: int = 0
    """Answers of a step that the initial model reads too, for the KL divergence."""

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
    """What is to be trained, as numbers: the selected rows and the adapter's shape."""

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
    """First tokens that all rows have in common, read once per batch."""
    validation_tokens: int = 0
    checkpoints: int = 1
    most_replies: int = 0
    """Most trained tokens of one batch; 0 if only the mean is known."""
    experts: bool = False
    """Experts have adapters too."""
    cpu_step: CpuStepPlan | None = None
    """None if the run uses a GPU's step or the plain one."""
    rollouts: RolloutLoad | None = None
    """Answers that the model samples before each step; None except for reinforcement learning."""
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
    """How a GPU's memory is used; None if the plain step or a CPU's is used."""
    plain: PlainStep | None = None
    """Setup of the plain step if it had to be chosen; None: all rows of a step at once."""
    streamed: StreamedStep | None = None
    """How the model is streamed from host memory; None if it is on the device."""
    prompts_at_once: int | None = None
    """Prompts of a step that are answered together, if not all of them fit into memory."""
    train: dict[str, Any]
    notes: tuple[str, ...] = ()
    base_note: str = ""
    """A note on the base's weights; empty if they are what their name says."""
    parts: dict[str, Figure] = {}
    """Parts of figures, as "minutes.load" or "peak_memory_gib.weights"; "peak_memory_gib.computed" is the
    peak before earlier runs corrected it.
    """


StageState = Literal["to do", "up to date", "if the gate says deploy", "not needed"]


class StagePlan(Record):
    """How long one stage of a run is expected to take."""

    stage: str
    title: str
    seconds: Figure
    """Zero if the stage is up to date or not needed."""
    state: StageState
    runs: int = 0
    """Past runs of the stage that the figure rests on; without any it is computed."""
    note: str = ""


class RunPlan(Record):
    """How long a whole run is expected to take, stage by stage."""

    stages: tuple[StagePlan, ...]
    minutes: Figure
    """All stages together, including those that only run if the gate says deploy."""
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
    """Measurements of a finished run, by parts. Parts that could not be measured are absent."""

    seconds: dict[str, float] = {}
    memory_gib: dict[str, float] = {}


class Drift(Record):
    """A figure outside its stated range, and the part that caused most of it."""

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
    """Share of runs within the stated range."""


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
    """Layers that save only their input and are recomputed."""
    loss: Literal["plain", "fused"] = "plain"
    optimizer: Optimizer = "adamw_fused"
    liger: bool = False
    """Norms, rotary positions and the gate are fused kernels: Liger's."""
    attention: Literal["flash", "math"] = "flash"
    deterministic: bool = False
    """Attention sums in a fixed order, which takes more memory if heads are few."""
    experts: bool = False
    """Experts have adapters too."""
    kbit_upcast: bool = True
    """`prepare_model_for_kbit_training` was called: weights that are not in four bits are in float32."""
    fused_nf4: bool = False
    """4-bit weights are dequantized by graft's kernel, not by bitsandbytes."""


class MemoryPeak(Record):
    """Peak memory of a GPU, in bytes, and its parts at that moment."""

    allocated: float
    reserved: float
    parts: dict[str, float]
    """What the allocated bytes are for: weights, adapters, gradients, optimizer, activations, logits,
    workspace.
    """
    phase: str
    """Where the peak occurs: forward, loss, backward, optimizer, generation."""

    def plus(self, parts: Mapping[str, float]) -> Self:
        """Add further bytes, by purpose."""
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
        """Scale by the ratio that a trace found."""
        return self.model_copy(
            update={
                "allocated": self.allocated * factor,
                "reserved": self.reserved * factor,
                "parts": {name: size * factor for name, size in self.parts.items()},
            }
        )


class StepTime(Record):
    """Seconds of one micro-batch by purpose, and of what happens once per step."""

    parts: dict[str, float]
    once_per_step: dict[str, float] = {}


class FitOptions(Record):
    """Options of a run; the rest follows from the model and the machine."""

    method: Method = "qlora"
    algorithm: Algorithm = "sft"
    engine: Literal["graft", "hf"] = "graft"
    seq: int | tuple[int, ...] = 2048
    """One length for all rows, or the length of every row."""
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
    """The user's question."""

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
    """GRPO: tokens of a prompt, of an answer, and answers per prompt."""
    completion_tokens: int = 512
    generations: int = 8
    reward_seconds: float = 0.0
    """GRPO: time of the rewards of one answer; 0 if unknown."""


class Strategy(Record):
    """The best settings of the run."""

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
    """How layers are streamed from host memory, if they are."""
    train: dict[str, Any] = {}
    """The `train:` section of graft.yaml that does this."""


class Considered(Record):
    """An alternative with its figures: one that was not chosen, or one that a change would make possible."""

    name: str
    fits: bool
    peak_reserved_gib: Figure
    gpu_gib: Figure
    host_gib: Figure
    tokens_per_second: Figure
    strategy: Strategy


class FitAnswer(Record):
    """The prediction, with ranges; and what would have to change if it does not fit."""

    question: FitQuestion
    fits: bool
    certainty: Level
    total_parameters: Figure
    trainable_parameters: Figure
    peak_allocated_gib: Figure
    peak_reserved_gib: Figure
    gpu_gib: Figure
    """Memory of a GPU available to the allocator: the total less the context and other processes."""
    host_gib: Figure
    parts_gib: dict[str, Figure]
    tokens_per_second: Figure
    step_seconds: Figure
    steps: Figure
    epoch_minutes: Figure
    run_minutes: Figure
    late_oom_chance: Figure
    """Probability that a batch of long rows runs out of memory after the start."""
    strategy: Strategy
    others: tuple[Strategy, ...] = ()
    reasons: tuple[str, ...] = ()
    """Why this strategy; and if nothing fits: by how much, and what would make it fit."""
    verdict: str = ""
    """The answer in one sentence."""
    step_parts_seconds: dict[str, Figure] = {}
    """Parts of an optimizer step."""
    considered: tuple[Considered, ...] = ()
    """Other ways to do the same run, the best of each kind."""
    remedies: tuple[Considered, ...] = ()
    """If it does not fit: changes that make it fit, each fully computed."""


Form = Literal["whole", "eight", "four"]


class DeviceName(Record):
    """Identity of a device with its driver and libraries: a probe is valid for the same three."""

    kind: Literal["cpu", "cuda"]
    name: str
    driver: str = ""
    torch: str = ""


class ProbeJob(Record):
    """What a probe measures."""

    shape: ModelShape
    folder: str
    """Where the disk is measured; test files are removed again."""
    length: int = 2048
    """Tokens of a row in the real steps."""
    tokens: tuple[int, ...] = (8192, 2048)
    """Tokens of a pass on a GPU. The first are tried first; each number has to be recorded."""
    rank: int = 16
    forms: tuple[Form, ...] = ()
    """Frozen weights on a GPU; empty: 8 bits where the GPU has them, else 16."""
    threads: int | None = None
    seconds: float = 30.0
    """Time limit: when it is spent, the remaining parts are left out."""


class ProductRate(Record):
    """Rate of one product of a decoder's layer."""

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
    """Measurements of the device, in bytes, seconds and operations per second; None if not measured."""

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
