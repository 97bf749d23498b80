"""Seconds of the project's step on a processor. Pure.

In: a decoder's shape, a batch's tokens, the processor. Out: seconds by parts.
"""

from graftwork.model.shape import adapter_parameters, layer_parameters, linear_names
from graftwork.records.fit import StepTime
from graftwork.records.hardware import Cpu
from graftwork.records.plan import ModelShape

STEP_SHARE = 0.55
"""Of a processor's products, what a whole step reaches (benchmarks/results/train_cpu.json, 2 cores)."""
BANDWIDTH_SHARE = 0.6
ELEMENTWISE_BYTES = 92
"""Traffic a token, block and unit of width, in float32, where it does not stay in the caches."""
OPTIMIZER_BYTES = 28


def processor_step(
    shape: ModelShape,
    *,
    tokens: int,
    adapted: int,
    cpu: Cpu,
    method: str,
    trained_share: float = 1.0,
    mean_length: float | None = None,
    rank: int = 16,
) -> StepTime:
    """One batch of `tokens` tokens. The head is computed where a token is predicted, and nowhere else."""
    weights = layer_parameters(shape)
    rate = (cpu.half_gflops or cpu.gflops) * 1e9 * STEP_SHARE
    backward = 2 if method == "full" else 1
    products = 2.0 * weights * tokens * (shape.layers + backward * adapted)
    head = 2.0 * shape.vocab_size * shape.hidden_size * tokens * trained_share * (1 + backward)
    length = mean_length or float(tokens)
    scores = 2.0 * length * shape.heads * shape.head_dim * tokens * (shape.layers + 2 * adapted)
    trainable = adapter_parameters(
        shape, rank=rank, targets=linear_names(shape), layers=adapted, method=method
    )
    bandwidth = cpu.bandwidth_gb_s * 1e9 * BANDWIDTH_SHARE
    spread = ELEMENTWISE_BYTES * (shape.hidden_size + shape.intermediate_size) * adapted * tokens
    return StepTime(
        parts={
            "products": products / rate,
            "attention": scores / rate,
            "head": head / rate,
            # The caches hold what one block leaves to the next for small batches; the worst is shown.
            "elementwise": spread / bandwidth,
        },
        once_a_step={"optimizer": trainable * OPTIMIZER_BYTES / bandwidth},
    )
