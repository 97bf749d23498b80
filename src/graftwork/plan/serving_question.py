"""A question about serving, the records of its answer, and the efficiency of engines. Pure.

Input: facts: the shape of a model, the figures of a machine, the load; it does not know where they were read.
Every figure of an answer has a range. Constants have sources: [M] measured, on the machine named; [D] derived
from such measurements or guessed from them. A share is of the maker's figure (memory bandwidth, dense
products). `best` is never over 1: nothing here answers faster than the machine's roofline.
"""

from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from graftwork.model.shape import linear_sizes, total_parameters
from graftwork.records.base import Figure, Record
from graftwork.records.hardware import Machine
from graftwork.records.plan import ModelShape

Form = Literal["32 bits", "16 bits", "8 bits", "4 bits"]
"""Bits of a weight in a block, rounded."""
EngineName = Literal["vllm", "llama.cpp", "embedded"]
Word = Literal["yes", "likely", "unlikely", "no"]
"""Whether the whole range is good, the value is, only the better end is, or nothing is."""
ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class ServeLoad(Record):
    """Options about serving: how the model is run, and the load."""

    engine: str | None = None
    weights: str = "auto"
    adapters: int = 0
    rank: int = 16
    adapter_layers: int | None = None
    """Layers that carry an adapter; None: all."""
    copies: int = 1
    users: int = 1
    context: int = 2048
    answer: int = 500
    prompt: int | None = None
    """By default the whole context except the answer: nothing is cached."""
    limit_seconds: float | None = None
    memory_limit_gib: float | None = None


class ServeQuestion(Record):
    """A model, its load, and the machine it runs on."""

    model: str
    doubt: str = ""
    """What is uncertain about the shape."""
    shape: ModelShape
    machine: Machine
    engine: EngineName
    form: Form | Literal["auto"] = "auto"
    adapters: int = Field(default=0, ge=0)
    rank: int = Field(default=16, ge=1)
    adapter_layers: int | None = Field(default=None, ge=1)
    targets: tuple[str, ...] = ALL_LINEAR
    copies: int = Field(default=1, ge=1)
    """Full models, each with its own weights, that share the machine."""
    users: int = Field(default=1, ge=1)
    """Concurrent users, each asking again at once: the full load."""
    context: int = Field(default=2048, ge=2)
    """Tokens cached for a user: the conversation so far and the answer."""
    answer: int = Field(default=500, ge=1)
    prompt: int = Field(ge=1)
    """Tokens that must be processed for an answer; the rest of the context is cached."""
    limit_seconds: float | None = Field(default=None, gt=0)
    memory_limit_gib: float | None = Field(default=None, gt=0)
    """Memory limit of serving, if lower than that of the machine."""

    @model_validator(mode="after")
    def _context_holds_prompt_and_answer(self) -> Self:
        if self.prompt + self.answer > self.context:
            raise ValueError(
                f"{self.context} tokens of context do not hold {self.prompt} read and {self.answer} written"
            )
        return self

    @property
    def gpus(self) -> int:
        return self.machine.gpus if self.machine.gpu is not None else 0


class Latency(Record):
    """Latencies at this load."""

    first_token_alone_seconds: Figure
    """For a single user."""
    first_token_seconds: Figure
    """For the last of all users, if all ask at once."""
    token_seconds: Figure
    """Between two tokens of one answer while all users get theirs."""
    answer_seconds: Figure
    """From question to last token, if all users ask again as soon as they are answered."""
    tokens_per_second: Figure
    """Over all users, prompts being read in between."""
    parts_seconds: dict[str, Figure]
    """Parts of the time of an answer: reading prompts, then weights, cache, links and steps of all its
    tokens.
    """


class Holding(Record):
    """Memory use: of one GPU if there are several, else of the machine."""

    memory_gib: Figure
    available_gib: Figure
    spare_gib: Figure
    """Free memory; negative if it is missing."""
    parts_gib: dict[str, Figure]
    fits: Word


class FormRow(Record):
    """The same question with weights of a different width."""

    form: Form
    format: str
    bits: Figure
    """Over all weights."""
    one_model_gib: Figure
    holding: Holding
    latency: Latency
    fits: bool
    meets_limit: Word | None
    """None if no limit was named."""
    chosen: bool = False


class SpecialistRow(Record):
    """Number of specialists that fit the machine, as full models and as adapters on one base."""

    form: Form
    one_model_gib: Figure
    one_adapter_gib: Figure
    whole_models: Figure
    adapters: Figure
    asked: int
    asked_whole_gib: Figure
    """Memory of the requested number as full models, all GPUs together, and as adapters on one base."""
    asked_adapters_gib: Figure


class ServeAnswer(Record):
    """The prediction, with the verdict first."""

    verdict: str
    good: bool
    """Whether it fits and, if a limit was given, meets it."""
    fits: bool
    meets_limit: bool | None
    certainty: Literal["computed"] = "computed"
    question: ServeQuestion
    weights: Form
    memory_gib: Figure
    available_gib: Figure
    spare_gib: Figure
    parts_gib: dict[str, Figure]
    first_token_alone_seconds: Figure
    first_token_seconds: Figure
    token_seconds: Figure
    answer_seconds: Figure
    tokens_per_second: Figure
    parts_seconds: dict[str, Figure]
    most_users: Figure
    most_users_in_time: Figure | None
    longest_context: Figure
    quantisations: tuple[FormRow, ...]
    specialists: tuple[SpecialistRow, ...]
    advice: tuple[str, ...]
    notes: tuple[str, ...]
    sources: tuple[str, ...]
    """Sources of the machine's figures, and of what engines reach."""


SLOW_SECONDS = 60.0
"""People do not wait longer for an answer."""
READING_SECONDS = 0.2
"""People read some five tokens per second; slower than that and they wait for every token."""


def say_verdict(question: ServeQuestion, row: FormRow) -> str:
    """One sentence: fits or not and by how much, in time or not."""
    memory, available = row.holding.memory_gib, row.holding.available_gib.value
    room = f"{memory.value:.1f} of {available:.1f} GiB" + (" of each GPU" if question.gpus > 1 else "")
    if not row.fits:
        if row.holding.fits == "likely":
            return f"may not fit: {row.form} take {room}, and up to {memory.high:.1f}"
        return f"does not fit: {row.form} take {room}, {-row.holding.spare_gib.value:.1f} GiB too much"
    answer, limit = row.latency.answer_seconds, question.limit_seconds
    duration = f"an answer takes {say_range(answer)}"
    form_note = f"in {row.form}, with {room}"
    if limit is None:
        slow = answer.value >= SLOW_SECONDS
        return (
            f"fits, but {duration}, which is too slow; {form_note}"
            if slow
            else f"fits, and {duration} {form_note}"
        )
    if row.meets_limit in ("no", "unlikely"):
        return f"too slow: {duration}, and the limit is {say_seconds(limit)}; {form_note}"
    met = "is likely to be met" if row.meets_limit == "likely" else "is met"
    return f"fits, and {duration}: the limit of {say_seconds(limit)} {met}; {form_note}"


def say_range(figure: Figure) -> str:
    return f"{say_seconds(figure.value)} ({say_seconds(figure.low)} … {say_seconds(figure.high)})"


def say_seconds(seconds: float) -> str:
    """In milliseconds, seconds, minutes or hours."""
    if seconds < 0.2:
        return f"{1000 * seconds:.{0 if seconds >= 0.00995 else 1}f} ms"
    if seconds < 100:
        return f"{seconds:.{0 if seconds >= 9.95 else 1}f} s"
    if seconds < 5400:
        return f"{seconds / 60:.{0 if seconds >= 597 else 1}f} min"
    return f"{seconds / 3600:.1f} h"


MEASURED_DECODE = """Bytes read a token over stated bandwidth, one user, [M] by others, read 2026-11-15:
RTX 5060 Ti Qwen2.5-Coder-7B Q8_0 49.6 tokens/s: 0.83 (inventivehq.com/blog, GGUF quality benchmark);
L4 8B FP16 16.7: 0.84 (dev.to/leaseweb); A100 about 8B 16 bits in vLLM 80: 0.59 or 0.77, as it had 80 or 40 GB
(hao-ai-lab/JacobiForcing#6); RTX 3080 8B Q4_K_M 112: 0.68, RTX 4090 8B Q6_K 93: 0.57
(dmatora/LLM-inference-speed-benchmarks#12, #10); RTX 4090 7B 4 bits 191: 0.69 (mlc-ai/llm-perf-bench#1);
EPYC 9554 Phi-4 14B Q4_K_M 28.7: 0.55, Q8_0 19.2: 0.63 (ahelpme.com/?p=6685); Threadripper 5995WX 7B Q4_0
33.7: 0.66 (llama.cpp#7497); two EPYC 9334 8B Q4_K_M 27.8, FP16 8.1: 0.28, 0.26 of one socket
(dev.to/leaseweb)."""

MEASURED_PREFILL = """Operations over stated rate, [M] by others, read 2026-11-15: RTX 4090 8B Q6_K 4,668
tokens/s: 0.42 of half precision (dmatora#10); Threadripper 5995WX 7B Q4_0 189 to 210: 0.45 to 0.5 of float32
(llama.cpp#7497); Threadripper 7995WX TinyLlama bf16 1,929, q8_0 1,268: 0.4, 0.26 of float32 (llamafile)."""


class Spread(NamedTuple):
    """The range of a figure."""

    best: float
    likely: float
    worst: float


class SpreadCase:
    """Index of a case in a spread."""

    BEST, LIKELY, WORST = range(3)


CASES = (SpreadCase.BEST, SpreadCase.LIKELY, SpreadCase.WORST)


class EngineTraits(NamedTuple):
    """An engine on one kind of place."""

    bandwidth: dict[Form, Spread]
    """Share of memory bandwidth during decoding, by the width of weights."""
    compute: dict[Form, Spread]
    """Share of the dense rate during prefill."""
    layer_seconds: Spread
    """Overhead of every layer and step, besides its products: starting kernels, waiting for threads."""
    step_seconds: Spread
    """Overhead of every step: scheduling the batch, sampling the token."""
    adapter_factor: Spread
    """Time of a step whose users have different adapters relative to one without."""
    mixes_adapters: bool
    """Users of different adapters share one step; otherwise weights are read once for each adapter."""
    cache_bytes: int
    """Bytes per number in the KV cache."""
    cache_block: int
    """Tokens that are allocated at once."""
    runtime_gib: Spread
    """Memory of each process before the model: interpreter, libraries, the GPU's context, recorded graphs."""
    prompt_tokens: int
    """Tokens of a prompt that are read at once; a longer prompt is read in chunks of this size."""
    logit_rows: int
    """Positions whose logits are held at once, at least."""


ON_GPU_BANDWIDTH: dict[Form, Spread] = {
    "32 bits": Spread(0.92, 0.78, 0.55),
    "16 bits": Spread(0.92, 0.78, 0.55),
    "8 bits": Spread(0.90, 0.78, 0.55),
    "4 bits": Spread(0.85, 0.66, 0.45),
}
"""[D] from MEASURED_DECODE: 0.59 to 0.84 in 8 and 16 bits, 0.57 to 0.69 in fewer."""

ON_GPU_COMPUTE: dict[Form, Spread] = {
    "32 bits": Spread(0.80, 0.55, 0.30),
    "16 bits": Spread(0.80, 0.55, 0.30),
    "8 bits": Spread(0.75, 0.50, 0.25),
    "4 bits": Spread(0.75, 0.45, 0.20),
}
"""[D] A large product reaches 0.8 (an H200: 790 of 989, [M]), a whole prefill pass less; 4-bit weights are
dequantized to 16 bits before they are multiplied.
"""

ON_CPU_BANDWIDTH: dict[Form, Spread] = {
    "32 bits": Spread(0.85, 0.65, 0.26),
    "16 bits": Spread(0.85, 0.65, 0.26),
    "8 bits": Spread(0.80, 0.62, 0.26),
    "4 bits": Spread(0.75, 0.56, 0.26),
}
"""[D] from MEASURED_DECODE: 0.55 to 0.66 on one socket with all channels filled, 0.26 to 0.28 with two
sockets or empty channels.
"""

ON_CPU_COMPUTE: dict[Form, Spread] = {
    "32 bits": Spread(0.80, 0.45, 0.20),
    "16 bits": Spread(0.80, 0.40, 0.20),
    "8 bits": Spread(1.00, 0.40, 0.20),
    "4 bits": Spread(1.00, 0.40, 0.20),
}
"""[D] from MEASURED_PREFILL, of the float32 rate; integer products can be faster, which is not assumed."""

VLLM = EngineTraits(
    bandwidth=ON_GPU_BANDWIDTH,
    compute=ON_GPU_COMPUTE,
    # [D] Recorded graphs: two dozen kernels a layer, of which the products were counted already.
    layer_seconds=Spread(2e-6, 8e-6, 30e-6),
    step_seconds=Spread(1e-4, 5e-4, 3e-3),
    # [D] Two thin products next to each thick one, gathered by adapter.
    adapter_factor=Spread(1.03, 1.15, 1.4),
    mixes_adapters=True,
    cache_bytes=2,
    cache_block=16,
    # Context 0.3 to 0.5 GiB [M], library workspaces and recorded graphs [D].
    runtime_gib=Spread(0.6, 1.0, 1.8),
    prompt_tokens=2048,
    logit_rows=256,
)
LLAMA_ON_GPU = VLLM._replace(
    layer_seconds=Spread(4e-6, 12e-6, 40e-6),
    # Its server does not put requests of different adapters into one batch (its documentation).
    adapter_factor=Spread(1.02, 1.1, 1.3),
    mixes_adapters=False,
    cache_block=256,
    runtime_gib=Spread(0.3, 0.5, 0.8),
    prompt_tokens=512,
    logit_rows=512,
)
LLAMA_ON_CPU = EngineTraits(
    bandwidth=ON_CPU_BANDWIDTH,
    compute=ON_CPU_COMPUTE,
    # [D] A dozen waits of all threads for each other.
    layer_seconds=Spread(5e-6, 3e-5, 2e-4),
    step_seconds=Spread(5e-5, 2e-4, 1e-3),
    adapter_factor=Spread(1.02, 1.1, 1.3),
    mixes_adapters=False,
    cache_bytes=2,
    cache_block=256,
    runtime_gib=Spread(0.1, 0.2, 0.4),
    prompt_tokens=512,
    logit_rows=512,
)
EMBEDDED = LLAMA_ON_CPU._replace(
    # [D] from SmolLM2-135M in float32, 14 tokens/s on two cores [M]: 71 ms; weights explain half.
    layer_seconds=Spread(2e-4, 8e-4, 2e-3),
    step_seconds=Spread(5e-4, 2e-3, 1e-2),
    # [M] Eight rows of a 0.5B shape: base 5.0 s, one adapter 5.1, seven adapters and the base mixed 6.9.
    adapter_factor=Spread(1.02, 1.2, 1.5),
    mixes_adapters=True,
    cache_bytes=4,
    cache_block=1,
    # [M] 0.50 with torch and transformers resident.
    runtime_gib=Spread(0.45, 0.5, 0.9),
    logit_rows=1,
)

FORMS_OF: dict[EngineName, tuple[Form, ...]] = {
    "vllm": ("16 bits", "8 bits", "4 bits"),
    "llama.cpp": ("32 bits", "16 bits", "8 bits", "4 bits"),
    "embedded": ("32 bits",),
}
GUESSED_RATES = Spread(2.0, 1.0, 0.5)
"""Rates of a CPU that is not in the catalog."""
GPU_SHARE = 0.95
"""Share of a GPU's memory to use; the rest is the driver's, the display's and the allocator's overhead. [D]
"""
HOST_SHARE = 0.92
"""Share of a machine's memory to use; the rest is the system's. [D]"""
HOST_LINK_SHARE = 0.6
"""Share of the link's rate if two GPUs communicate through the host: 19 to 20 of 32 GB/s on A40s [M]."""
MESSAGE_SECONDS = Spread(8e-6, 3e-5, 1e-4)
"""Latency of one exchange between GPUs, however small. [D]"""
CHECKED_FORM = Spread(0.99, 1.0, 1.01)
"""Ratio of the bytes of weights to what their formats imply: headers, alignment."""
WORKSPACE = Spread(0.6, 1.0, 1.8)
"""Ratio of a layer's transient memory to what was counted. [D]"""


def forms_of(name: EngineName, *, on_gpu: bool) -> tuple[Form, ...]:
    """The widths that an engine serves, the widest first. float32 is not served on a GPU."""
    return tuple(form for form in FORMS_OF[name] if not (on_gpu and form == "32 bits"))


def find_engine(name: EngineName, *, on_gpu: bool) -> EngineTraits:
    if name == "vllm":
        return VLLM
    if name == "embedded":
        return EMBEDDED
    return LLAMA_ON_GPU if on_gpu else LLAMA_ON_CPU


FORMATS: dict[tuple[EngineName, Form], str] = {
    ("vllm", "16 bits"): "BF16 / FP16",
    ("vllm", "8 bits"): "FP8 / INT8",
    ("vllm", "4 bits"): "AWQ / GPTQ",
    ("llama.cpp", "32 bits"): "F32",
    ("llama.cpp", "16 bits"): "BF16 / F16",
    ("llama.cpp", "8 bits"): "Q8_0",
    ("llama.cpp", "4 bits"): "Q4_K_M",
    ("embedded", "32 bits"): "float32",
}
PLAIN_BITS: dict[Form, float] = {"32 bits": 32.0, "16 bits": 16.0, "8 bits": 8.0, "4 bits": 4.0}

GROUP_BITS = 4 + 16 / 128 + 4 / 128
"""AWQ and GPTQ: a scale of 16 bits and a zero point of 4 for 128 weights."""
ROW_SCALE_BITS = 32
Q8_0 = 8.5
"""A block of 32 weights in a byte each, with a scale of two."""
Q5_0, Q4_K, Q5_K, Q6_K = 5.5, 4.5, 5.5, 6.5625
K_BLOCK = 256
"""Rows that cannot be split into blocks of 256 get Q5_0 for Q4_K, and Q8_0 for Q6_K."""


def weigh(shape: ModelShape, *, form: Form, engine: EngineName) -> tuple[float, float]:
    """Bytes of the whole model in this format: held, and read per generated token. Everything is read but the
    embedding, of which one row is.
    """
    table = shape.vocab_size * shape.hidden_size
    counted = table * (1 if shape.tied_embeddings else 2)
    counted += shape.layers * sum(a * b for a, b in linear_sizes(shape).values())
    if engine == "llama.cpp" and form in ("8 bits", "4 bits"):
        blocks = _gguf_block_bits(shape, form)
        # The table that is the head too is kept as the head is.
        embedding_bits, head_bits = (
            Q8_0 if form == "8 bits" else _k_bits(shape.hidden_size, careful=careful)
            for careful in (shape.tied_embeddings, True)
        )
        rest_bits = 32.0  # GGUF keeps vectors in float32.
    else:
        bits = GROUP_BITS if form == "4 bits" else PLAIN_BITS[form]
        row_scale = ROW_SCALE_BITS if form == "8 bits" else 0
        blocks = shape.layers * sum(
            inputs * outputs * bits + row_scale * outputs for inputs, outputs in linear_sizes(shape).values()
        )
        # Engines on a GPU leave what is outside the blocks in 16 bits.
        embedding_bits = head_bits = rest_bits = max(PLAIN_BITS[form], 16.0)
    # Norms and biases.
    other_bytes = max(total_parameters(shape) - counted, 0) * rest_bits / 8
    embedding = table * embedding_bits / 8
    head = 0.0 if shape.tied_embeddings else table * head_bits / 8
    weights = blocks / 8 + embedding + head + other_bytes
    return weights, weights if shape.tied_embeddings else weights - embedding


def _gguf_block_bits(shape: ModelShape, form: Form) -> float:
    bits, eighth = 0.0, shape.layers // 8
    for layer in range(shape.layers):
        # Q4_K_M: values and the way down, in the first and last eighth and every third layer between.
        sensitive = layer < eighth or layer >= 7 * shape.layers // 8 or (layer - eighth) % 3 == 2
        for path, (inputs, outputs) in linear_sizes(shape).items():
            name = path.rsplit(".", 1)[-1]
            careful = sensitive and name in ("v_proj", "down_proj")
            small = Q5_K if name == "qkv_proj" else _k_bits(inputs, careful=careful)
            bits += inputs * outputs * (Q8_0 if form == "8 bits" else small)
    return bits


def _k_bits(inputs: int, *, careful: bool) -> float:
    if inputs % K_BLOCK:
        return Q8_0 if careful else Q5_0
    return Q6_K if careful else Q4_K
