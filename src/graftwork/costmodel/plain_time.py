"""Seconds of a step of transformers + PEFT on a GPU, kernel group by kernel group. Pure.

In: a decoder's shape and family, how the step is set, what the GPU reaches. Out: seconds by parts. A group
of kernels takes the longest of its launches, its operations and its traffic. The host calls each kernel from
Python: where that takes longer than the GPU, the GPU waits.
"""

from collections.abc import Sequence
from typing import NamedTuple

from graftwork.costmodel.rates import OPENED_NF4_BYTES, PLAIN_DEQUANTISING, StepRates
from graftwork.model.families import ModelFamily, family_or_llama
from graftwork.model.shape import adapter_parameters, layer_parameters, linear_sizes, total_parameters
from graftwork.records.plan import ModelShape, PlainSetup, StepTime

FIXED, WAITING = "beginning and end", "waiting for launches"


class Cost(NamedTuple):
    """Of a module: kernels of the forward and the backward pass, and bytes of traffic a value of 16 bits."""

    forward: float
    backward: float
    read: float = 0.0
    back: float = 0.0


RMS_NORM = Cost(8, 14, 34, 70)
"""To float32, squared, averaged, scaled, back, times its weight; none of it is one kernel in transformers."""
LAYER_NORM = Cost(1, 2, 6, 14)
ROTARY = Cost(10, 12, 20, 34)
GATE, ACTIVATION = Cost(2, 3, 10, 18), Cost(1, 1, 4, 6)
FUSED_NORM, FUSED_ROTARY, FUSED_GATE = Cost(1, 1, 6, 10), Cost(1, 1, 8, 8), Cost(1, 1, 6, 14)
RESIDUAL = Cost(1, 1, 6, 6)
ATTENTION = Cost(1, 4)
STEPWISE_ATTENTION = Cost(16, 22, 30, 42)
"""Written out, where scores are capped: bytes are those of a score."""
ADAPTER = Cost(8, 11)
"""Of one linear layer: both factors and the input change type, two thin products, a scale, a sum; backward
four thin products. Kernels were counted on the modules of transformers 5 and PEFT 0.21 under autocast."""
ADAPTER_INPUT = (14, 22)
"""Bytes of traffic a value of the layer's input, forward and backward."""
ADAPTER_OUTPUT = (12, 8)
NO_AUTOCAST_ADAPTER = Cost(4, 7)
LOSS_BYTES = {"plain": 38, "fused": 6}
"""Traffic a logit: the plain loss brings them to float32 and writes their gradient twice."""
OUTSIDE_KERNELS = 50
"""Embedding, positions, mask, last norm, loss."""
CAST_BYTES = 6
"""Four read, two written."""
HOST_OVER_LAUNCH = 4.0
"""Seconds of the host a kernel of transformers + PEFT, over those of a bare launch: modules, hooks, autograd,
and as many views as kernels (H200 hosts, 2026-11: 5.3 to 9.8 ms a block of a Llama, from run to
run; chosen so that all of them are within the stated range)."""
HOST_A_TENSOR = 1.2e-5
"""Seconds of the host a learned tensor: clipping, update and zeroing."""
TENSORS_A_TARGET = 2
OVERLAP = 6.0
"""How sharply the longer of host and GPU decides: parts of a step are bound by one, parts by the other."""
PLAIN_OPTIMIZER_BYTES = {
    "adamw_fused": 7.0,
    "adamw_foreach": 17.0,
    "adamw_loop": 17.0,
    "adamw_8bit": 4.5,
    "sgd": 3.0,
}
"""Tensors read and written a step, of the parameter's own width."""
LOOP_KERNELS = {"adamw_loop": 12.0}
"""Kernels a learned tensor, where the update goes through them one by one."""
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


def plain_step(
    shape: ModelShape, setup: PlainSetup, *, rates: StepRates, architecture: str = "llama"
) -> StepTime:
    """One forward and backward pass of `rows` rows, and the optimizer's step."""
    family = family_or_llama(architecture)
    tokens, layers, adapted = setup.rows * setup.tokens, shape.layers, setup.adapted_layers
    cast = setup.autocast and setup.dtype == "float32"
    width = 1.5 if cast else WIDTHS[setup.dtype] / 2
    forward, backward = _products(shape, setup, rates)
    spread = _elementwise(shape, setup, family, rates, width=width)
    attention = _attention(shape, setup, family, rates)
    table, head = shape.vocab_size * shape.hidden_size, 3 if setup.method == "full" else 2
    parts = {
        "products": forward * layers + backward * adapted,
        "computed again": setup.checkpointed * (forward + spread.forward + attention.forward),
        "attention": attention.forward * layers + attention.backward * adapted,
        "elementwise": spread.forward * layers + spread.backward * adapted,
        "head": head * rates.product_seconds(tokens, shape.hidden_size, shape.vocab_size, _rate(setup, rates))
        + LOSS_BYTES[setup.loss] * shape.vocab_size * tokens / rates.bandwidth,
    }
    if cast:
        weights = layer_parameters(shape) * layers + table
        parts["bringing weights to 16 bits"] = CAST_BYTES * weights / rates.bandwidth
    if setup.method == "qlora":
        passes = layers + adapted + setup.checkpointed
        opened = OPENED_NF4_BYTES * layer_parameters(shape) * passes
        share = rates.dequantising if setup.fused_nf4 else PLAIN_DEQUANTISING
        parts["opening NF4"] = opened / (rates.bandwidth * share)
    parts = {name: rates.plain_factor * seconds for name, seconds in parts.items()}
    busy = sum(parts.values())
    host = launches(shape, setup, architecture=architecture) * rates.launch_seconds * HOST_OVER_LAUNCH
    parts[WAITING] = longer(host * rates.host_factor, busy) - busy
    parts[FIXED] = rates.fixed_seconds
    return StepTime(
        parts={name: seconds for name, seconds in parts.items() if seconds},
        once_a_step={"optimizer": _optimizer(shape, setup, rates)},
    )


def longer(host: float, busy: float) -> float:
    """What a pass takes whose host and GPU work at the same time."""
    most = max(host, busy)
    return (
        float(most * ((host / most) ** OVERLAP + (busy / most) ** OVERLAP) ** (1 / OVERLAP)) if most else 0.0
    )


def launches(shape: ModelShape, setup: PlainSetup, *, architecture: str = "llama") -> float:
    """Kernels of one micro-batch that are called one by one."""
    forward, backward = _kernels(shape, setup, family_or_llama(architecture))
    return forward * (shape.layers + setup.checkpointed) + backward * setup.adapted_layers + OUTSIDE_KERNELS


def _kernels(shape: ModelShape, setup: PlainSetup, family: ModelFamily) -> tuple[float, float]:
    """Of a block: forward, and backward."""
    linears = len(linear_sizes(shape))
    modules = [cost for cost, _ in _modules(shape, setup, family)] + [_attention_cost(setup, family)]
    forward, backward = sum(m.forward for m in modules), sum(m.backward for m in modules)
    if setup.method == "full":
        # Each frozen weight would need no gradient of its own; each learned one does.
        return forward + linears, backward + 2 * linears
    adapter = ADAPTER if setup.autocast else NO_AUTOCAST_ADAPTER
    adapted = _targets(shape, setup)
    return (
        forward + linears + adapter.forward * len(adapted),
        backward + linears + adapter.backward * len(adapted),
    )


def _modules(shape: ModelShape, setup: PlainSetup, family: ModelFamily) -> list[tuple[Cost, int]]:
    """What a block has besides its linear layers and attention, each with its width."""
    h, q, kv = shape.hidden_size, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rms, rotary, gate = (FUSED_NORM, FUSED_ROTARY, FUSED_GATE) if setup.liger else (RMS_NORM, ROTARY, GATE)
    norm = LAYER_NORM if family.norm_bias else rms
    found = [(norm, h)] * family.norms + [(RESIDUAL, h)] * 2
    found += [(rms, q), (rms, kv)] if family.head_norms != "none" else []
    found += [] if family.positions else [(rotary, q + kv)]
    names = {path.rsplit(".", 1)[-1] for path in linear_sizes(shape)}
    gated = bool(names & {"gate_proj", "gate_up_proj"})
    return [*found, (gate if gated else ACTIVATION, shape.intermediate_size)]


def _targets(shape: ModelShape, setup: PlainSetup) -> list[tuple[int, int]]:
    if setup.method == "full":
        return []
    sizes = linear_sizes(shape)
    return [size for path, size in sizes.items() if path.rsplit(".", 1)[-1] in setup.targets]


def _rate(setup: PlainSetup, rates: StepRates) -> float:
    """Under autocast weights in float32 are multiplied in 16 bits, once they have been brought there."""
    if setup.autocast and setup.dtype == "float32":
        return rates.products("bfloat16" if rates.has_bf16 else "float16")
    return rates.products(setup.dtype)


def _products(shape: ModelShape, setup: PlainSetup, rates: StepRates) -> tuple[float, float]:
    """Seconds of a block's products with weights: forward, and backward."""
    tokens, rate = setup.rows * setup.tokens, _rate(setup, rates)
    sizes = list(linear_sizes(shape).values())
    if shape.experts:
        # Those of the experts that a token goes through, as one wide MLP.
        inner = shape.experts_used * shape.expert_inner
        sizes += [(shape.hidden_size, 2 * inner), (inner, shape.hidden_size)]
    forward = sum(rates.product_seconds(tokens, inputs, outputs, rate) for inputs, outputs in sizes)
    backward = sum(rates.product_seconds(tokens, outputs, inputs, rate) for inputs, outputs in sizes)
    return forward, backward * (2 if setup.method == "full" else 1)


class BothPasses(NamedTuple):
    forward: float
    backward: float


def _elementwise(
    shape: ModelShape, setup: PlainSetup, family: ModelFamily, rates: StepRates, *, width: float
) -> BothPasses:
    """Seconds of all that is no product with a weight and no attention, of one block."""
    used = _modules(shape, setup, family)
    tokens = setup.rows * setup.tokens
    read = sum(cost.read * size for cost, size in used)
    back = sum(cost.back * size for cost, size in used)
    for inputs, outputs in _targets(shape, setup):
        read += ADAPTER_INPUT[0] * inputs + ADAPTER_OUTPUT[0] * outputs
        back += ADAPTER_INPUT[1] * inputs + ADAPTER_OUTPUT[1] * outputs
    kernels = _kernels(shape, setup, family)
    return BothPasses(
        max(read * width * tokens / rates.bandwidth, kernels[0] * rates.kernel_seconds),
        max(back * width * tokens / rates.bandwidth, kernels[1] * rates.kernel_seconds),
    )


def _attention_cost(setup: PlainSetup, family: ModelFamily) -> Cost:
    return STEPWISE_ATTENTION if setup.attention == "math" or family.capped_attention else ATTENTION


def _attention(shape: ModelShape, setup: PlainSetup, family: ModelFamily, rates: StepRates) -> BothPasses:
    """Of one block; step by step it computes both halves of the scores and moves them."""
    tokens = setup.rows * setup.tokens
    once = 2.0 * setup.tokens * shape.heads * shape.head_dim * tokens
    if _attention_cost(setup, family) is ATTENTION:
        seconds = once / rates.attention_at(setup.tokens, shape.head_dim)
        return BothPasses(seconds, 2.5 * seconds)
    scores = setup.rows * shape.heads * setup.tokens**2
    products = 2 * once / rates.products(setup.dtype)
    return BothPasses(
        products + STEPWISE_ATTENTION.read * scores / rates.bandwidth,
        2 * products + STEPWISE_ATTENTION.back * scores / rates.bandwidth,
    )


def _optimizer(shape: ModelShape, setup: PlainSetup, rates: StepRates) -> float:
    """The GPU's update, or the host's calls where these take longer."""
    trainable = trained_parameters(shape, setup)
    width = WIDTHS[setup.dtype if setup.method == "full" else setup.adapter_dtype]
    moved = trainable * width * PLAIN_OPTIMIZER_BYTES[setup.optimizer] / rates.bandwidth
    tensors = setup.adapted_layers * (
        len(_targets(shape, setup)) * TENSORS_A_TARGET or len(linear_sizes(shape))
    )
    called = tensors * LOOP_KERNELS.get(setup.optimizer, 0.0) * rates.launch_seconds
    return max(moved, tensors * HOST_A_TENSOR * rates.host_factor + called)


def trained_parameters(shape: ModelShape, setup: PlainSetup) -> int:
    if setup.method == "full" and setup.adapted_layers == shape.layers:
        return total_parameters(shape)
    return adapter_parameters(
        shape, rank=setup.rank, targets=setup.targets, layers=setup.adapted_layers, method=setup.method
    )


def expected_longest(lengths: Sequence[int], rows: int) -> float:
    """Tokens that each row of a batch is padded to, on average: the longest of `rows` drawn ones."""
    ordered, count = sorted(lengths), len(lengths)
    total, below = 0.0, 0.0
    for at, length in enumerate(ordered, start=1):
        upto = (at / count) ** rows
        total += length * (upto - below)
        below = upto
    return total
