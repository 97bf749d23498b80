"""Seconds of one micro-batch of transformers and PEFT on a card. Pure.

In: a decoder's shape, the setup, what the card reaches. Out: seconds by parts. Counts products,
elementwise traffic, changes of form, and the kernels that Python has to call one by one.
"""

from graftwork.model.shape import adapter_parameters, layer_parameters, linear_sizes, total_parameters
from graftwork.plan.timing.rates import StepRates
from graftwork.records.fit import PlainSetup, StepTime
from graftwork.records.plan import ModelShape

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
WIDTHS = {"float32": 4, "bfloat16": 2, "float16": 2}


def plain_step(shape: ModelShape, setup: PlainSetup, *, rates: StepRates) -> StepTime:
    """One forward and backward pass of `rows` rows, and the optimizer's step."""
    tokens, weights = setup.rows * setup.tokens, layer_parameters(shape)
    layers, adapted = shape.layers, setup.adapted_layers
    full = setup.method == "full"
    # Under autocast weights in float32 are multiplied in 16 bits, once they have been brought there.
    cast = setup.autocast and setup.dtype == "float32"
    product = rates.products("bfloat16" if cast and rates.has_bf16 else "float16" if cast else setup.dtype)
    width = 1.5 if cast else WIDTHS[setup.dtype] / 2
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
    parts["beginning and end"] = rates.fixed_seconds
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
    """Bytes a token and block beside the products, forward, in a type of two bytes."""
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
    width = WIDTHS[setup.dtype if setup.method == "full" else setup.adapter_dtype]
    return trainable * width * PLAIN_OPTIMIZER_BYTES[setup.optimizer] / rates.bandwidth


def trained_parameters(shape: ModelShape, setup: PlainSetup) -> int:
    if setup.method == "full" and setup.adapted_layers == shape.layers:
        return total_parameters(shape)
    return adapter_parameters(
        shape, rank=setup.rank, targets=setup.targets, layers=setup.adapted_layers, method=setup.method
    )
