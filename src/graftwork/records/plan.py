"""Predictions of a run, and how far they were off."""

import math
from typing import Any, Literal

from graftwork.records.base import Figure, Record

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
    """Of them, those that a token goes through."""
    expert_inner: int = 0
    architecture: str = ""
    """`model_type` of a family whose blocks graft's own steps compute otherwise than Llama's."""
    remembered: tuple[int, ...] = ()
    """Positions that each layer remembers while answers are written, 0 for all: windows and states. Empty if
    every layer remembers all; only then answers have slots."""
    not_written_out: str | None = None
    """Why graft's own training steps do not compute its blocks, by its config; None if they do."""


class DeviceFacts(Record):
    """What the plan knows of the machine. `gflops` is None until it is measured."""

    kind: Literal["cpu", "cuda"]
    name: str
    memory_gib: float
    threads: int
    gflops: float | None = None
    weights_s: float | None = None
    """Bytes a second that a processor reads of weights which it multiplies with a single row."""
    core_share: float | None = None
    """The part of the cores that the measurement of a processor got; small on a busy machine."""
    capability: float | None = None
    """Compute capability of the oldest card: 8.0 has bfloat16, 8.9 and later 8-bit products."""
    certainty: Certainty = "computed"

    @property
    def cores(self) -> float:
        """Of a processor, those that others leave."""
        return self.threads * (1.0 if self.core_share is None else self.core_share)


class Tuning(Record):
    """How a step on a card spends its memory. Nothing here changes what is learned, but for `form`."""

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
    seconds_a_token: float
    """Estimated with the rates used to choose it: it ranks settings and is no promise."""
    sampling_gib: float = 0.0
    """Memory beyond the limit that is set apart for answers sampled between steps."""


class ProcessorStep(Record):
    """How the step that is written for processors spends memory to save work."""

    packed: bool
    """Frozen weights are held once more, laid out for the processor's products; adapted blocks' twice."""
    kept: Literal["memory", "file", "nowhere"]
    """Where the frozen blocks' output waits for the next epoch."""
    distinct_tokens: int
    """Of all rows, each counted once, behind their common beginning."""
    restarted: bool = False
    """The process is killed halfway to rehearse a crash."""


class PlainStep(Record):
    """How the plain step of a run goes through its rows. Nothing here changes what is learned."""

    micro_rows: int
    """Rows of one forward and backward pass of a process."""
    checkpointed: bool = False
    """Blocks keep only their input and compute the rest again."""
    peak_gib: float
    """Estimated memory of each card or of the host."""
    parts_gib: dict[str, float] = {}
    seconds_a_token: float | None = None
    """Of all processes together, by the rates that it was chosen by; without what they send each other."""


class StreamedStep(Record):
    """How full fine-tuning streams a model from host memory. What is learned depends on `dtype` only."""

    micro_rows: int
    """Rows that go through a block at once; all rows of a step do before the next block is fetched."""
    dtype: Literal["float32", "bfloat16"]
    """Of weights, gradients and activations on the device; the weights on the host are in float32."""
    host_inputs: int = 0
    """Blocks, from the bottom, whose inputs wait in host memory for the backward pass."""
    head_tokens: int | None = None
    """Positions whose logits exist at once; None: all of a pass."""
    update: Literal["host", "card"] = "host"
    """Where Adam runs: on the processor, or on the card with its states streamed through."""
    limit_gib: float
    peak_gib: float
    host_gib: float
    parts_gib: dict[str, float] = {}
    seconds_a_token: float | None = None


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
    """Of one answer, where it is known."""
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
    batch_rows: int
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
    """Most trained tokens of one batch; 0 where only the mean is known."""
    experts: bool = False
    """Experts have adapters too."""
    processor: ProcessorStep | None = None
    """None where the run takes a card's step or the plain one."""
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
    """How a card's memory is spent; None where the plain step or a processor's is used."""
    plain: PlainStep | None = None
    """How the plain step is taken where that had to be chosen; None: all rows of a step at once."""
    streamed: StreamedStep | None = None
    """How the model is streamed from host memory; None where it is on the device."""
    prompts_at_once: int | None = None
    """Prompts of a step that are answered together, where memory has no room for all of them."""
    train: dict[str, Any]
    notes: tuple[str, ...] = ()
    base_note: str = ""
    """What is to be known about the base's weights; empty where they are what they are called."""
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
    """None where the parts are not known."""
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


class LearnedMemory(Record):
    """Measured over estimated memory of earlier runs of the same kind."""

    factor: float
    low: float
    high: float
    runs: int
