"""Seconds of the project's own step on a card. Pure.

In: a decoder's shape, how the step is tuned, what the card reaches. Out: seconds by parts. Knows the
order of work in `train/gpu`, not how it is written. Constants without another source were fitted to
benchmarks/results/train_gpu.json (H200, 2026-11).
"""

from typing import NamedTuple

from graftwork.model.shape import layer_parameters
from graftwork.model.step_memory import weights_again
from graftwork.plan.timing.rates import UNEVEN_SHARE, StepRates
from graftwork.records.fit import StepTime
from graftwork.records.plan import ModelShape, Tuning

ELEMENTWISE_BYTES, AGAIN_BYTES = 46, 16
"""Traffic a token, block and unit of width beside the products: norms, gates, sums, thin products; and
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


class Blocks(NamedTuple):
    """Seconds of all blocks, by parts."""

    products: float
    again: float
    attention: float
    elementwise: float
    changing: float


def card_step(
    shape: ModelShape,
    tuning: Tuning,
    *,
    adapted: int,
    trainable: int,
    rates: StepRates,
    mean_length: float,
    trained_share: float = 1.0,
    uneven: bool = False,
) -> StepTime:
    """One pass of `tuning.micro_tokens` tokens in rows of `mean_length`, and the optimizer's step.

    The mean is one of tokens: the length of the row that a token of the data is in. `uneven` says that rows
    differ in length.
    """
    blocks = block_seconds(
        shape, tuning, adapted=adapted, rates=rates, mean_length=mean_length, uneven=uneven
    )
    host = shape.hidden_size * 2 * tuning.micro_tokens / (rates.host * HOST_TABLE_SHARE)
    factor = rates.factor_of(tuning.form)
    busy = {
        "products": factor * blocks.products,
        "computed again": factor * blocks.again,
        "attention": factor * blocks.attention,
        "elementwise": factor * blocks.elementwise,
        "changing the weights' form": factor * blocks.changing,
        "head": rates.head_factor * head_seconds(shape, tuning, rates=rates, trained_share=trained_share),
    }
    launching = 0.0 if tuning.compiled else CARD_KERNELS_A_BLOCK * shape.layers * rates.launch_seconds
    parts = {
        **busy,
        "waiting for launches": max(0.0, launching - sum(busy.values())),
        "embedding from the host": host if tuning.host_embedding else 0.0,
        "beginning and end": rates.fixed_seconds,
    }
    return StepTime(
        parts={name: seconds for name, seconds in parts.items() if seconds},
        once_a_step={
            "optimizer": trainable * OPTIMIZER_BYTES / rates.bandwidth + rates.fixed_a_layer * adapted
        },
    )


def card_seconds_a_token(
    shape: ModelShape, tuning: Tuning, *, adapted: int, trainable: int, rates: StepRates
) -> float:
    """What a token costs where every row is as long as the longest and a pass is a step."""
    step = card_step(
        shape, tuning, adapted=adapted, trainable=trainable, rates=rates, mean_length=tuning.longest
    )
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
