"""Seconds of graft's own step on a GPU: compiled, recorded as CUDA graphs, or neither. Pure.

Input: a decoder's shape, a Tuning, what the GPU reaches, the rows. Output: seconds by parts. A group of
kernels takes the longest of its launches, its operations and its traffic. Packs are filled up to the recorded
sizes.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from graftwork.costmodel.gpu_memory import weights_again
from graftwork.costmodel.rates import OPENED_NF4_BYTES, UNEVEN_SHARE, StepRates
from graftwork.costmodel.run import COMPILED_SHAPES, RECORDED_SHAPES, round_tokens, token_step
from graftwork.model.shape import joined_sizes, layer_parameters, layout_of_shape
from graftwork.records.plan import ModelShape, StepTime, Tuning

ELEMENTWISE_BYTES, AGAIN_BYTES = 46, 16
"""Traffic per token, block and unit of width besides the products if layers are compiled: norms, gates, sums,
thin products; and the part that a block repeats if it is recomputed from its input.
"""
NORM_BYTES, ROTARY_BYTES, GATE_BYTES = 70, 8, 23
"""The same for handwritten kernels, forward and backward: per value of the hidden state, of queries, keys and
values, and of the MLP's inner state.
"""
OTHER_GATE = 3.0
"""Cost of an activation without a fused kernel, relative to the gate's kernel."""
THIN_BYTES, CODE_BYTES = 4.2, 2.5
"""Bytes per value that goes into or comes out of a product: the adapters' thin products read and write it
several times, partly in the cache; its 8-bit code is made from it.
"""
KERNELS = {"elementwise": 13, "thin": 28, "codes": 8}
"""Kernels of a block, forward and backward. Attention has four, products eight."""
COMPILED_KERNELS = 30
FORWARD_SHARE = 0.35
"""Work besides products in blocks below the first adapted one, as a share of both passes: they only run
forward.
"""
THIN_SECONDS = 6.3e-6
"""Minimum time of a thin product: its sums are long, and few multiprocessors share them."""
LOGIT_BYTES, CODED_LOGIT_BYTES = 8, 6
"""Traffic per logit: written, read twice, its gradient; and the extra traffic of its 8-bit code."""
OPTIMIZER_BYTES = 28
"""Bytes per parameter of AdamW in float32: four tensors read, three written."""
HEAD_GO_SECONDS, BLOCK_GO_SECONDS = 2e-5, 3e-5
"""Overhead of more, smaller products: those of the head and the blocks fill the GPU less."""
HOST_TABLE_SHARE = 1.0
"""Share of the transfer rate that a kernel reaches when it gathers rows of a table in pinned memory."""
GPU_KERNELS_PER_BLOCK = 70
"""Kernels of a block in both passes when Python launches them: not compiled and not recorded."""
HOST_OVER_LAUNCH = 1.5
"""Host time of one of graft's kernels relative to a bare launch: there is no autograd."""
BYTES_PER_WEIGHT = {"whole": 2, "four": 2, "eight": 1}
ATTENTION_PASSES = 3.5
"""Attention in forward passes: one forward, two and a half backward."""
CAPPED_SHARE = 0.33
"""Share of the rate of fused attention that kernels with capped scores reach (Gemma 2 on an H200)."""
ATTENTION_SECONDS = (7.5e-6, 2.2e-5)
"""Minimum time of attention, forward and backward: its kernels process rows block by block."""

FIXED = "beginning and end"


class TrainedPart(NamedTuple):
    """Number of blocks with adapters, number of trained parameters, and the rates of the GPU."""

    adapted: int
    trainable: int
    rates: StepRates


class RowStatistics(NamedTuple):
    """Row statistics that the time of a step depends on, besides its tokens."""

    mean_length: float
    """Mean over tokens of the length of the row that a token is in."""
    trained_share: float = 1.0
    uneven: bool = False
    """Rows differ in length."""

    @classmethod
    def of(cls, lengths: Sequence[int], *, trained_share: float = 1.0) -> "RowStatistics":
        squares = sum(length * length for length in lengths)
        return RowStatistics(squares / sum(lengths), trained_share, uneven=min(lengths) < max(lengths))


def gpu_step_time(shape: ModelShape, tuning: Tuning, part: TrainedPart, rows: RowStatistics) -> StepTime:
    """Return the time of one pass of `tuning.micro_tokens` tokens and of the optimizer's update."""
    rates, adapted = part.rates, part.adapted
    blocks = block_seconds(
        shape, tuning, adapted=adapted, rates=rates, mean_length=rows.mean_length, uneven=rows.uneven
    )
    host = shape.hidden_size * 2 * tuning.micro_tokens / (rates.host * HOST_TABLE_SHARE)
    factor = rates.factor_of(tuning.form)
    head = head_seconds(shape, tuning, rates=rates, trained_share=rows.trained_share)
    busy = {name: factor * seconds for name, seconds in blocks.items()} | {"head": rates.head_factor * head}
    launching = 0.0
    if not (tuning.compiled or tuning.recorded):
        # Seconds of the host; a recording is launched at once.
        launching = GPU_KERNELS_PER_BLOCK * shape.layers * rates.launch_seconds * HOST_OVER_LAUNCH
    parts = {
        **busy,
        "waiting for launches": max(0.0, launching - sum(busy.values())),
        "embedding from the host": host if tuning.host_embedding else 0.0,
        FIXED: rates.fixed_seconds,
    }
    update = part.trainable * OPTIMIZER_BYTES / rates.bandwidth + rates.fixed_per_layer * adapted
    return StepTime(
        parts={name: seconds for name, seconds in parts.items() if seconds},
        once_per_step={"optimizer": update},
    )


def gpu_passes(tuning: Tuning, tokens: float) -> int:
    """Return the passes of an optimizer step of `tokens` tokens."""
    return max(math.ceil(tokens / tuning.micro_tokens), 1)


def filled_tokens(tuning: Tuning, tokens: float, *, uneven: bool) -> float:
    """Return the tokens of a pass, padded to the next size: half a size on average if steps differ."""
    shapes = COMPILED_SHAPES if tuning.compiled else RECORDED_SHAPES
    if not uneven:
        return round_tokens(round(tokens), room=tuning.micro_tokens, shapes=shapes)
    step = token_step(tuning.micro_tokens, shapes)
    return min(
        tokens + step / 2,
        max(tokens, round_tokens(tuning.micro_tokens, room=tuning.micro_tokens, shapes=shapes)),
    )


def gpu_step_parts(
    shape: ModelShape, tuning: Tuning, part: TrainedPart, rows: RowStatistics, *, tokens: float
) -> dict[str, float]:
    """Return the seconds of an optimizer step of `tokens` tokens, by purpose."""
    passes = gpu_passes(tuning, tokens)
    filled = filled_tokens(tuning, tokens / passes, uneven=rows.uneven)
    # Tokens that fill a pack up predict nothing.
    rows = rows._replace(trained_share=rows.trained_share * tokens / passes / filled)
    step = gpu_step_time(shape, tuning.model_copy(update={"micro_tokens": round(filled)}), part, rows)
    return {name: seconds * passes for name, seconds in step.parts.items()} | step.once_per_step


def gpu_seconds_per_token(shape: ModelShape, tuning: Tuning, part: TrainedPart) -> float:
    """Return the cost of a token if every row is as long as the longest and a pass is a step."""
    step = gpu_step_time(shape, tuning, part, RowStatistics(tuning.longest))
    return (sum(step.parts.values()) + sum(step.once_per_step.values())) / tuning.micro_tokens


def block_seconds(
    shape: ModelShape,
    tuning: Tuning,
    *,
    adapted: int,
    rates: StepRates,
    mean_length: float,
    uneven: bool = False,
) -> dict[str, float]:
    """Return the time of the blocks, by parts, before the correction by a probe."""
    tokens, weights = tuning.micro_tokens, layer_parameters(shape)
    rate = rates.best_eight if tuning.form == "eight" else rates.half
    # All products with a block's weights, one way.
    products = sum(
        rates.product_seconds(tokens, inputs, outputs, rate, width=BYTES_PER_WEIGHT[tuning.form])
        for inputs, outputs in joined_sizes(shape).values()
    )
    goes = -(-tokens // tuning.chunk_tokens)
    recomputed = adapted - tuning.keep - tuning.lean
    width = shape.hidden_size + shape.intermediate_size
    attending = rates.attention_at(mean_length, shape.head_dim)
    attending *= CAPPED_SHARE if layout_of_shape(shape).capped else UNEVEN_SHARE if uneven else 1.0
    mixing = 2 * mean_length * shape.heads * shape.head_dim * tokens / attending
    forward = max(mixing, ATTENTION_SECONDS[0])
    backward = max(mixing * (ATTENTION_PASSES - 1), ATTENTION_SECONDS[1])
    again_weights = weights_again(shape, (tuning.keep, tuning.lean), adapted)
    trained = adapted + FORWARD_SHARE * (shape.layers - adapted)
    return {
        "products": products * (shape.layers + adapted),
        "computed again": products * again_weights / weights
        + recomputed * forward
        + recomputed * AGAIN_BYTES * width * tokens / rates.bandwidth
        + BLOCK_GO_SECONDS * (adapted - tuning.keep) * goes,
        "attention": forward * shape.layers + backward * adapted,
        "elementwise": _elementwise(shape, tuning, rates) * trained,
        "changing the weights' form": _changing(
            tuning, weights=weights, layers=shape.layers, adapted=adapted, rates=rates
        ),
    }


def _elementwise(shape: ModelShape, tuning: Tuning, rates: StepRates) -> float:
    """Seconds of a block's kernels other than products with its weights and attention."""
    tokens, h, i = tuning.micro_tokens, shape.hidden_size, shape.intermediate_size
    if tuning.compiled:
        traffic = ELEMENTWISE_BYTES * (h + i) * tokens / rates.bandwidth
        return max(traffic, COMPILED_KERNELS * rates.kernel_seconds)
    heads = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    values = sum(sum(size) for size in joined_sizes(shape).values())
    layout = layout_of_shape(shape)
    norm_positions = (layout.before_attention, layout.after_attention, layout.before_mlp, layout.after_mlp)
    norms = sum(norm is not None for norm in norm_positions)
    gate = GATE_BYTES if layout.gated and layout.activation == "silu" else OTHER_GATE * GATE_BYTES
    bytes_ = {
        "elementwise": NORM_BYTES * h * norms / 2 + ROTARY_BYTES * heads + gate * i,
        "thin": THIN_BYTES * values,
        "codes": CODE_BYTES * values if tuning.form == "eight" else 0,
    }
    least = {"thin": THIN_SECONDS}
    return sum(
        max(size * tokens / rates.bandwidth, KERNELS[group] * least.get(group, rates.kernel_seconds))
        for group, size in bytes_.items()
        if size
    )


def _changing(tuning: Tuning, *, weights: int, layers: int, adapted: int, rates: StepRates) -> float:
    """Time to transpose or dequantize weights: a block that is recomputed does so chunk by chunk."""
    goes = -(-tuning.micro_tokens // tuning.chunk_tokens)
    if tuning.form == "eight" and not tuning.turned:
        turned = weights * (tuning.keep + (adapted - tuning.keep) * goes)
        return 2 * turned / (rates.bandwidth * rates.turning)
    if tuning.form == "four":
        recomputed = adapted - tuning.keep - tuning.lean
        opened = layers - recomputed + tuning.keep + 2 * tuning.lean * goes + 3 * recomputed * goes
        return OPENED_NF4_BYTES * weights * opened / (rates.bandwidth * rates.dequantising)
    return 0.0


def head_seconds(shape: ModelShape, tuning: Tuning, *, rates: StepRates, trained_share: float = 1.0) -> float:
    """Time for logits and their gradient, a chunk at a time, at positions that predict."""
    table = shape.vocab_size * shape.hidden_size
    predicted_tokens = tuning.micro_tokens * trained_share
    goes = max(1.0, predicted_tokens / tuning.head_tokens)
    product = rates.best_eight if tuning.head == "eight" else rates.half
    reading = goes * 2 * table * BYTES_PER_WEIGHT[tuning.head] / rates.bandwidth
    turning = goes * 2 * table / (rates.bandwidth * rates.turning)
    logit_bytes = LOGIT_BYTES + (CODED_LOGIT_BYTES if tuning.head == "eight" else 0)
    return (
        max(predicted_tokens * 4.0 * table / product, reading)
        + predicted_tokens * shape.vocab_size * logit_bytes / rates.bandwidth
        + HEAD_GO_SECONDS * goes
        + (turning if tuning.head == "eight" and not tuning.turned else 0.0)
    )
