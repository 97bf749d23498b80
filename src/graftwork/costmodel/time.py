"""Seconds of a training step on a card: rates of the card, graft's own step, the plain step. Pure.

In: a card of the catalog or rates of a probe, a decoder's shape, how the step is set. Out: seconds by parts.
Every constant says where it comes from; those without a source were fitted to
benchmarks/results/train_gpu.json (H200, 2026-11). `probed_rates.py` replaces shares by what was measured.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from graftwork.costmodel.card_memory import weights_again
from graftwork.model.shape import adapter_parameters, layer_parameters, linear_sizes, total_parameters
from graftwork.records.base import Record
from graftwork.records.fit import Level, PlainSetup, StepTime
from graftwork.records.hardware import Gpu
from graftwork.records.plan import ModelShape, Tuning
from graftwork.records.units import ELEMENT_BYTES

START_SECONDS = {"cpu": 10.0, "cuda": 20.0}
"""From the start of a run to its first step: interpreter, libraries, weights, and on a card its kernels
(measured on small bases: 11 s on two cores)."""
POWER_FREE_SHARE, LOST_TO_A_TFLOP_A_WATT = 0.95, 0.215
"""Share of the stated products that a step reaches, and what it loses where a card has more of them than
watts to feed them. Measured: 640 of 989 on an H200 (1.41 TFLOPS a watt; benchmarks/results/train_gpu.json,
2026-11). Published: an RTX 5060 Ti reaches 81 % of its peak over a whole step (0.26 TFLOPS a watt;
IST-DASLab/llmq). A straight line through both; derived for all others."""
LEAST_SHARE, MOST_SHARE = 0.40, 0.89

EIGHT_SHARE = 0.90
"""8-bit products reach less of their peak than 16-bit ones: 1150 of 1979 against 640 of 989 (H200)."""
BANDWIDTH_SHARE, GDDR_SHARE = 0.73, 0.88
"""3.5 of 4.8 TB/s within a step on an H200; the slower memory of cards without HBM is used up better, and
their large caches hold some of it: derived."""
WITH_HBM = (6.0, 7.0, 8.0, 9.0, 10.0)
"""Compute capabilities of cards with stacked memory."""
ATTENTION_SHARE = 0.66
"""Of what products reach, what attention does: 420 of 640 on an H200."""
MEASURED_ATTENTION, MEASURED_LENGTH = 420e12, 2048
"""Where that was measured; how it grows with the length is published (FlashAttention-3, 2024: causal, on an
H100, 0.5, 0.75, 1, 1.2, 1.3 of it at 512, 1k, 2k, 4k and 8k). Slower cards are full sooner: derived."""
HALF_FULL_LENGTH = 920
NARROW_HEADS = 0.85
"""Heads of 64 over heads of 128; the same source has 0.75 for its own kernels."""
UNEVEN_SHARE = 0.75
"""Rows of different lengths go through another kernel than rows of one length: derived."""
OLD_ATTENTION_SHARE = 0.30
"""Before Ampere there is no flash attention 2: derived."""
HOST_SHARE = 0.65
"""Of the connector's stated rate: 20 of 31.5 GB/s (PCIe 4.0 x16) staged through the host, published."""
TURNING, DEQUANTISING = 0.65, 0.22
"""Of the bandwidth, what turning 8-bit weights over and opening NF4 reach within a step (H200)."""
FIXED_SECONDS, FIXED_A_LAYER = 0.002, 0.00018
"""A pass's beginning and end on the host; and what each adapted block's small tensors add to the clipping
and the update (H200, 16 cores: 7 ms with 28 blocks; how it divides is a guess)."""
LAUNCH_SECONDS = 8e-6
"""One small kernel called from Python: 7 to 9 µs on the host of an H200 (2026-11). The host decides."""
OLD_SHARE = 0.75
"""Cards before Ampere reach less with the libraries of today: derived."""
SUSTAINED_TFLOPS = {"T4": 24.0}
"""Half-precision products that a power cap leaves of the stated rate when they go on for long, where that is
published. T4: 24 of 65 at 4096³ with cuBLAS; at 70 W that is what to expect of continuous products
(forums.developer.nvidia.com/t/264462, 2023). The smaller products of a step reach less: `OLD_SHARE` of it."""
FIRST_WITH_TENSOR_CORES = 7.0
CONSUMER = ("RTX 3", "RTX 4", "RTX 5")
"""Cards whose products summed in float32 run at half the rate of their silicon."""


class StepRates(Record):
    """Reached rates, in operations and bytes a second; and the peaks that no estimate may beat."""

    name: str
    half: float
    """16-bit products in a whole step."""
    eight: float | None = None
    """8-bit products; None where the card has none."""
    single: float
    """32-bit products."""
    bandwidth: float
    attention: float
    host: float
    """Bytes to and from host memory."""
    fixed_seconds: float = FIXED_SECONDS
    fixed_a_layer: float = FIXED_A_LAYER
    launch_seconds: float = LAUNCH_SECONDS
    turning: float = TURNING
    dequantising: float = DEQUANTISING
    has_bf16: bool = True
    peak_half: float
    peak_eight: float | None = None
    peak_bandwidth: float
    layer_factor: float = 1.0
    """Measured seconds of a layer over those computed, where a real step was timed."""
    form_factors: dict[str, float] = {}
    """The same for each form of the weights that was timed."""
    head_factor: float = 1.0
    """The same for the head and the loss."""
    certainty: Level = "computed"

    def products(self, dtype: str) -> float:
        """Rate of products in this type. Without bfloat16 in hardware it goes by 32 bits."""
        if dtype == "float32" or (dtype == "bfloat16" and not self.has_bf16):
            return self.single
        return self.half

    def attention_at(self, length: float, head_dim: int) -> float:
        """Attention's rate over rows of this length: short rows and narrow heads do not fill a card."""
        half_full = HALF_FULL_LENGTH * min(1.0, self.attention / MEASURED_ATTENTION)
        full = self.attention * (1 + half_full / MEASURED_LENGTH)
        return full * length / (length + half_full) * (NARROW_HEADS if head_dim < 96 else 1.0)

    def factor_of(self, form: str) -> float:
        """What blocks with weights in this form take over what is computed for them."""
        return self.form_factors.get(form, self.layer_factor)

    @property
    def best_eight(self) -> float:
        return self.eight if self.eight is not None else self.half


def rates_of(gpu: Gpu) -> StepRates:
    """What this card is expected to reach, before it is probed."""
    share = _share(gpu)
    old, stacked = gpu.capability < 8.0, gpu.capability in WITH_HBM
    half = gpu.half_tflops * 1e12 * share
    peak_eight = gpu.eight_tflops * 1e12 if gpu.has_fp8 and gpu.eight_tflops else None
    return StepRates(
        name=gpu.name,
        half=half,
        eight=peak_eight * share * EIGHT_SHARE if peak_eight is not None else None,
        single=min(gpu.half_tflops * 1e12 * single_share(gpu) * MOST_SHARE, half),
        bandwidth=gpu.bandwidth_gb_s * 1e9 * (BANDWIDTH_SHARE if stacked else GDDR_SHARE),
        attention=half * (OLD_ATTENTION_SHARE if old else ATTENTION_SHARE),
        host=gpu.pcie_gb_s * 1e9 * HOST_SHARE,
        has_bf16=gpu.has_bf16,
        peak_half=gpu.half_tflops * 1e12,
        peak_eight=peak_eight,
        peak_bandwidth=gpu.bandwidth_gb_s * 1e9,
    )


def _share(gpu: Gpu) -> float:
    if gpu.name in SUSTAINED_TFLOPS:
        return SUSTAINED_TFLOPS[gpu.name] / gpu.half_tflops * OLD_SHARE
    share = POWER_FREE_SHARE - LOST_TO_A_TFLOP_A_WATT * gpu.half_tflops / gpu.watts
    share = min(max(share, LEAST_SHARE), MOST_SHARE)
    return share * OLD_SHARE if gpu.capability < 8.0 else share


def single_share(gpu: Gpu) -> float:
    """32-bit products over 16-bit ones, by generation: the catalog states only the latter. Derived from
    the makers' tables (H100 67 of 989, A100 19.5 of 312, V100 15.7 of 125, RTX 4090 82.6 of 165)."""
    if gpu.capability < FIRST_WITH_TENSOR_CORES:
        return 1 / 2
    if gpu.capability < 8.0:
        return 1 / 8
    if gpu.capability in (8.0, 9.0, 10.0):
        return 1 / 16
    name = gpu.name.upper().removeprefix("NVIDIA ").removeprefix("GEFORCE ")
    return 1 / 2 if name.startswith(CONSUMER) and " ADA" not in name else 1 / 4


ELEMENTWISE_BYTES, AGAIN_BYTES = 46, 16
"""Traffic a token, block and unit of width besides the products: norms, gates, sums, thin products; and
what of it a block does once more that starts from its input."""
LOGIT_BYTES = 12
"""Traffic a logit: written, its exponent, its gradient, its 8-bit code."""
OPTIMIZER_BYTES = 28
"""AdamW in float32: four tensors read, three written."""
HEAD_GO_SECONDS, BLOCK_GO_SECONDS = 2e-5, 3e-5
"""More, smaller goes: the head's and the blocks' products run less full."""
NF4_BYTES = 2.5
"""Half a byte read, two written."""
HOST_TABLE_SHARE = 0.25
"""Of the transfers' rate: rows gathered from a table in pages that can be swapped."""
CARD_KERNELS_A_BLOCK = 70
"""Of both passes, where nothing is compiled and recorded."""
BYTES_A_WEIGHT = {"whole": 2, "four": 2, "eight": 1}
ATTENTION_PASSES = 3.5
"""One forward, two and a half backward."""


FIXED = "beginning and end"


class TrainedPart(NamedTuple):
    """How many blocks have adapters, how many parameters are trained, and what the card reaches."""

    adapted: int
    trainable: int
    rates: StepRates


class RowStatistics(NamedTuple):
    """What the time of a step depends on besides its tokens."""

    mean_length: float
    """The mean over tokens: the length of the row that a token is in."""
    trained_share: float = 1.0
    uneven: bool = False
    """Rows differ in length."""

    @classmethod
    def of(cls, lengths: Sequence[int], *, trained_share: float = 1.0) -> "RowStatistics":
        squares = sum(length * length for length in lengths)
        return cls(squares / sum(lengths), trained_share, uneven=min(lengths) < max(lengths))


class Blocks(NamedTuple):
    """Seconds of all blocks, by parts."""

    products: float
    again: float
    attention: float
    elementwise: float
    changing: float


def card_step(shape: ModelShape, tuning: Tuning, part: TrainedPart, rows: RowStatistics) -> StepTime:
    """One pass of `tuning.micro_tokens` tokens, and the optimizer's update."""
    rates, adapted = part.rates, part.adapted
    blocks = block_seconds(
        shape, tuning, adapted=adapted, rates=rates, mean_length=rows.mean_length, uneven=rows.uneven
    )
    host = shape.hidden_size * 2 * tuning.micro_tokens / (rates.host * HOST_TABLE_SHARE)
    factor = rates.factor_of(tuning.form)
    head = head_seconds(shape, tuning, rates=rates, trained_share=rows.trained_share)
    busy = {
        "products": factor * blocks.products,
        "computed again": factor * blocks.again,
        "attention": factor * blocks.attention,
        "elementwise": factor * blocks.elementwise,
        "changing the weights' form": factor * blocks.changing,
        "head": rates.head_factor * head,
    }
    launching = 0.0 if tuning.compiled else CARD_KERNELS_A_BLOCK * shape.layers * rates.launch_seconds
    parts = {
        **busy,
        "waiting for launches": max(0.0, launching - sum(busy.values())),
        "embedding from the host": host if tuning.host_embedding else 0.0,
        FIXED: rates.fixed_seconds,
    }
    update = part.trainable * OPTIMIZER_BYTES / rates.bandwidth + rates.fixed_a_layer * adapted
    return StepTime(
        parts={name: seconds for name, seconds in parts.items() if seconds},
        once_a_step={"optimizer": update},
    )


def card_passes(tuning: Tuning, tokens: float) -> int:
    """Passes of an optimizer step of `tokens` tokens."""
    return max(math.ceil(tokens / tuning.micro_tokens), 1)


def card_step_parts(
    shape: ModelShape, tuning: Tuning, part: TrainedPart, rows: RowStatistics, *, tokens: float
) -> dict[str, float]:
    """Seconds of an optimizer step of `tokens` tokens, by what they are spent on."""
    step = card_step(shape, tuning, part, rows)
    # The last pass of a step is seldom full: its tokens count, and its fixed costs.
    parts = {name: seconds * tokens / tuning.micro_tokens for name, seconds in step.parts.items()}
    if FIXED in step.parts:
        parts[FIXED] = step.parts[FIXED] * card_passes(tuning, tokens)
    return parts | step.once_a_step


def card_seconds_a_token(shape: ModelShape, tuning: Tuning, part: TrainedPart) -> float:
    """What a token costs where every row is as long as the longest and a pass is a step."""
    step = card_step(shape, tuning, part, RowStatistics(tuning.longest))
    return (sum(step.parts.values()) + sum(step.once_a_step.values())) / tuning.micro_tokens


def block_seconds(
    shape: ModelShape,
    tuning: Tuning,
    *,
    adapted: int,
    rates: StepRates,
    mean_length: float,
    uneven: bool = False,
) -> Blocks:
    """The blocks alone, before what a probe says of them."""
    tokens, weights = tuning.micro_tokens, layer_parameters(shape)
    product = rates.best_eight if tuning.form == "eight" else rates.half
    # A product of few tokens waits for its weights instead.
    a_weight = max(2.0 * tokens / product, BYTES_A_WEIGHT[tuning.form] / rates.bandwidth)
    goes = -(-tokens // tuning.chunk_tokens)
    again = adapted - tuning.keep - tuning.lean
    width = shape.hidden_size + shape.intermediate_size
    attending = rates.attention_at(mean_length, shape.head_dim) * (UNEVEN_SHARE if uneven else 1.0)
    mixing = 2 * mean_length * shape.heads * shape.head_dim * tokens / attending
    again_weights = weights_again(shape, (tuning.keep, tuning.lean), adapted)
    return Blocks(
        products=a_weight * weights * (shape.layers + adapted),
        again=a_weight * again_weights
        + again * mixing
        + again * AGAIN_BYTES * width * tokens / rates.bandwidth
        + BLOCK_GO_SECONDS * (adapted - tuning.keep) * goes,
        attention=mixing * (shape.layers - adapted + ATTENTION_PASSES * adapted),
        elementwise=_elementwise(shape, adapted) * width * tokens / rates.bandwidth,
        changing=_changing(tuning, weights=weights, layers=shape.layers, adapted=adapted, rates=rates),
    )


def _elementwise(shape: ModelShape, adapted: int) -> float:
    """Blocks below the first adapted one go forward only."""
    return ELEMENTWISE_BYTES * adapted + AGAIN_BYTES * (shape.layers - adapted)


def _changing(tuning: Tuning, *, weights: int, layers: int, adapted: int, rates: StepRates) -> float:
    """Weights turned over or opened: a block that computes again does so chunk by chunk."""
    goes = -(-tuning.micro_tokens // tuning.chunk_tokens)
    if tuning.form == "eight" and not tuning.turned:
        turned = weights * (tuning.keep + (adapted - tuning.keep) * goes)
        return 2 * turned / (rates.bandwidth * rates.turning)
    if tuning.form == "four":
        again = adapted - tuning.keep - tuning.lean
        opened = layers - again + tuning.keep + 2 * tuning.lean * goes + 3 * again * goes
        return NF4_BYTES * weights * opened / (rates.bandwidth * rates.dequantising)
    return 0.0


def head_seconds(shape: ModelShape, tuning: Tuning, *, rates: StepRates, trained_share: float = 1.0) -> float:
    """Logits and their gradient, a chunk at a time, where a token is predicted."""
    table = shape.vocab_size * shape.hidden_size
    places = tuning.micro_tokens * trained_share
    goes = max(1.0, places / tuning.head_tokens)
    product = rates.best_eight if tuning.head == "eight" else rates.half
    reading = goes * 2 * table * BYTES_A_WEIGHT[tuning.head] / rates.bandwidth
    turning = goes * 2 * table / (rates.bandwidth * rates.turning)
    return (
        max(places * 4.0 * table / product, reading)
        + places * shape.vocab_size * LOGIT_BYTES / rates.bandwidth
        + HEAD_GO_SECONDS * goes
        + (turning if tuning.head == "eight" and not tuning.turned else 0.0)
    )


NORM_BYTES = 32
"""Traffic a value of one RMSNorm: to float32, squared, scaled, back, times its weight."""
RESIDUAL_BYTES, ROTARY_BYTES, GATE_BYTES = 6, 18, 10
LORA_BYTES = 12
"""A value of an adapted linear's output: written by B, scaled, added to the base's."""
UPCAST_BYTES = 6
"""A value that is brought to float32 for an adapter in float32 outside autocast."""
BACKWARD_TRAFFIC = 1.3
"""Traffic of the backward pass over that of the forward pass."""
LOSS_BYTES = {"plain": 30, "fused": 6}
"""Traffic a logit: the plain loss brings them to float32 and writes their gradient twice."""
PLAIN_NF4_BYTES = 2.5
CAST_BYTES = 6
"""Four read, two written."""
KERNELS_A_BLOCK, KERNELS_A_TARGET = 44, 6
"""Kernels of a block's forward pass, and those that each adapted linear adds."""
BACKWARD_KERNELS = 1.6
PLAIN_OPTIMIZER_BYTES = {
    "adamw_fused": 7.0,
    "adamw_foreach": 17.0,
    "adamw_loop": 17.0,
    "adamw_8bit": 4.5,
    "sgd": 3.0,
}
"""Tensors read and written a step, of the parameter's own width."""


def plain_step(shape: ModelShape, setup: PlainSetup, *, rates: StepRates) -> StepTime:
    """One forward and backward pass of `rows` rows, and the optimizer's step."""
    tokens, weights = setup.rows * setup.tokens, layer_parameters(shape)
    layers, adapted = shape.layers, setup.adapted_layers
    full = setup.method == "full"
    # Under autocast weights in float32 are multiplied in 16 bits, once they have been brought there.
    cast = setup.autocast and setup.dtype == "float32"
    product = rates.products("bfloat16" if cast and rates.has_bf16 else "float16" if cast else setup.dtype)
    width = 1.5 if cast else ELEMENT_BYTES[setup.dtype] / 2
    forward = 2.0 * weights * tokens
    backward = forward * (2 if full else 1)
    table = shape.vocab_size * shape.hidden_size
    head = 2.0 * table * tokens * (3 if full else 2)
    spread = _traffic(shape, setup) * width * tokens
    parts = {
        "products": (forward * layers + backward * adapted) / product,
        "computed again": setup.checkpointed * (forward / product + spread / rates.bandwidth),
        "attention": _attention(shape, setup, rates),
        "elementwise": spread * (layers + BACKWARD_TRAFFIC * adapted) / rates.bandwidth,
        "head": head / product + LOSS_BYTES[setup.loss] * shape.vocab_size * tokens / rates.bandwidth,
    }
    if cast:
        parts["bringing weights to 16 bits"] = CAST_BYTES * (weights * layers + table) / rates.bandwidth
    if setup.method == "qlora":
        passes = layers + adapted + setup.checkpointed
        parts["opening NF4"] = PLAIN_NF4_BYTES * weights * passes / (rates.bandwidth * rates.dequantising)
    busy = sum(parts.values())
    parts["waiting for launches"] = max(0.0, launches(shape, setup) * rates.launch_seconds - busy)
    parts[FIXED] = rates.fixed_seconds
    return StepTime(
        parts={name: seconds for name, seconds in parts.items() if seconds},
        once_a_step={"optimizer": _optimizer(shape, setup, rates)},
    )


def launches(shape: ModelShape, setup: PlainSetup) -> float:
    """Kernels of one micro-batch that are called one by one."""
    targets = 0 if setup.method == "full" else len(setup.targets)
    a_block = KERNELS_A_BLOCK + KERNELS_A_TARGET * targets
    again = setup.checkpointed * a_block
    return a_block * (shape.layers + BACKWARD_KERNELS * setup.adapted_layers) + again


def _traffic(shape: ModelShape, setup: PlainSetup) -> float:
    """Bytes a token and block besides the products, forward, in a type of two bytes."""
    h, i = shape.hidden_size, shape.intermediate_size
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    bytes_: float = 2 * NORM_BYTES * h + 2 * RESIDUAL_BYTES * h + ROTARY_BYTES * (q + kv) + GATE_BYTES * i
    if setup.method == "full":
        return bytes_
    slow_adapter = setup.adapter_dtype == "float32" and not setup.autocast and setup.dtype != "float32"
    for path, (inputs, outputs) in linear_sizes(shape).items():
        if path.rsplit(".", 1)[-1] in setup.targets:
            bytes_ += LORA_BYTES * outputs * (1.5 if slow_adapter else 1.0)
            bytes_ += UPCAST_BYTES * inputs if slow_adapter else 0
    return bytes_


def _attention(shape: ModelShape, setup: PlainSetup, rates: StepRates) -> float:
    """Forward, and 2.5 times that backward; the math path computes both halves and moves them."""
    tokens = setup.rows * setup.tokens
    once = 2.0 * setup.tokens * shape.heads * shape.head_dim * tokens
    passes = shape.layers + 2.5 * setup.adapted_layers + setup.checkpointed
    if setup.attention == "flash":
        return once * passes / rates.attention_at(setup.tokens, shape.head_dim)
    scores = setup.rows * shape.heads * setup.tokens**2
    return passes * (2 * once / rates.products(setup.dtype) + 24 * scores / rates.bandwidth)


def _optimizer(shape: ModelShape, setup: PlainSetup, rates: StepRates) -> float:
    trainable = trained_parameters(shape, setup)
    width = ELEMENT_BYTES[setup.dtype if setup.method == "full" else setup.adapter_dtype]
    return trainable * width * PLAIN_OPTIMIZER_BYTES[setup.optimizer] / rates.bandwidth


def trained_parameters(shape: ModelShape, setup: PlainSetup) -> int:
    if setup.method == "full" and setup.adapted_layers == shape.layers:
        return total_parameters(shape)
    return adapter_parameters(
        shape, rank=setup.rank, targets=setup.targets, layers=setup.adapted_layers, method=setup.method
    )


def link_seconds(bytes: float, *, cards: int, gb_s: float) -> float:
    """A ring all-reduce: every card sends and receives 2 (n - 1) / n of the bytes, one way at `gb_s`."""
    if cards < 2:
        return 0.0
    return 2 * (cards - 1) / cards * bytes / (gb_s * 1e9)


def expected_longest(lengths: Sequence[int], rows: int) -> float:
    """Tokens that each row of a batch is padded to, on average: the longest of `rows` drawn ones."""
    ordered, count = sorted(lengths), len(lengths)
    total, below = 0.0, 0.0
    for at, length in enumerate(ordered, start=1):
        upto = (at / count) ** rows
        total += length * (upto - below)
        below = upto
    return total
