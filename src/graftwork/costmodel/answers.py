"""Seconds of answering prompts by the embedded engine, in batches and one at a time. Pure.

In: the shape of a model, the prompts and answers, what a processor or a GPU reaches. Out: seconds by what
they are spent on: reading prompts, writing answers, recording passes on a GPU. What starts and loads the
engine is in `run_time.py`.
"""

import math

from graftwork.costmodel.rates import StepRates
from graftwork.costmodel.rollouts import TOKEN_SECONDS_A_BLOCK
from graftwork.model.generate.sizes import PREFILL_TOKENS, DecoderSizes
from graftwork.model.shape import (
    active_layer_parameters,
    active_parameters,
    cache_bytes,
    total_parameters,
)
from graftwork.records.base import Record
from graftwork.records.plan import ModelShape

READING_SHARE, PADDED_READING_SHARE = 0.84, 0.60
"""Of a processor's matrix rate, what reading prompts reaches: side by side, and padded by the model's own
pass (SmolLM2, one core: 78 and 56 of 92 GFLOP/s)."""
WRITING_SHARE = 0.72
"""The same of rows that write together, besides reading the weights and their keys (SmolLM2, 72 rows)."""
BLOCK_SECONDS = 2.5e-4
"""Of a pass over one token in a block on a processor, besides what it multiplies: small operations."""
GUESSED_WEIGHTS_S = 10e9
"""Bytes a second that products with one row read, where they were not measured."""
LAUNCHED_BLOCK_SECONDS = 1.0e-3
"""Of a pass that is not recorded on a GPU: the host launches it kernel by kernel (H200: 22 ms for a token of
30 blocks by transformers, and half as much again for what surrounds it)."""
RECORDING_PASSES = 3
"""Two passes to warm up and one to record."""
CHOOSING_SECONDS = 3e-4
"""Of a GPU, for choosing the tokens of a pass and sending them to the host."""


class AnswerLoad(Record):
    """Prompts that one model answers, and how."""

    cases: int
    rows: int
    """Answered together at most."""
    prompt_tokens: float
    shared_tokens: float = 0.0
    """First tokens that all prompts have in common: read once for those that are answered together."""
    answer_tokens: float
    """Mean."""
    longest_answer: float
    """Passes that a batch takes; it ends with its longest answer."""

    @property
    def batches(self) -> int:
        return math.ceil(self.cases / max(self.rows, 1))

    @property
    def read_tokens(self) -> float:
        return self.batches * self.shared_tokens + self.cases * (self.prompt_tokens - self.shared_tokens)

    @property
    def columns(self) -> float:
        """That a token looks at, on average."""
        return self.prompt_tokens + self.answer_tokens / 2


def alone(load: AnswerLoad) -> AnswerLoad:
    """One of the requests by itself: nothing is shared, and it ends with its own last token."""
    return load.model_copy(
        update={"cases": 1, "rows": 1, "shared_tokens": 0.0, "longest_answer": load.answer_tokens}
    )


def processor_answers(
    shape: ModelShape, load: AnswerLoad, *, gflops: float, weights_s: float | None
) -> dict[str, float]:
    """On a processor with this matrix rate, and this rate of reading weights in thin products."""
    rate, reading_rate = gflops * 1e9, weights_s or GUESSED_WEIGHTS_S
    share = PADDED_READING_SHARE if shape.architecture else READING_SHARE
    tokens = load.cases * load.answer_tokens
    passes = load.batches * load.longest_answer
    # Each pass reads the weights once; each row of it its own keys and values.
    fixed = 4.0 * total_parameters(shape) / reading_rate + shape.layers * BLOCK_SECONDS
    keys = cache_bytes(shape, tokens=load.columns, rows=1, width=4.0) / reading_rate
    a_token = 2.0 * active_parameters(shape) / (rate * WRITING_SHARE) if load.rows > 1 else 0.0
    return {
        "reading": load.read_tokens * _read_flops(shape, load) / (rate * share),
        "writing": passes * fixed + tokens * (a_token + keys),
    }


def gpu_answers(shape: ModelShape, load: AnswerLoad, *, rates: StepRates) -> dict[str, float]:
    """On a GPU, which replays a recorded pass for every token and launches those over prompts."""
    sizes = DecoderSizes(padded=True)
    rows = sizes.rows(min(load.rows, load.cases))
    read = math.ceil(load.read_tokens / PREFILL_TOKENS) + load.batches
    weights = 2.0 * active_parameters(shape)
    columns = sizes.columns(math.ceil(load.prompt_tokens + load.longest_answer))
    bytes_read = weights + cache_bytes(shape, tokens=columns, rows=rows, width=2.0)
    products = rows * 2.0 * active_parameters(shape) / rates.half
    a_pass = shape.layers * TOKEN_SECONDS_A_BLOCK + max(bytes_read / rates.bandwidth, products)
    return {
        "reading": read * shape.layers * LAUNCHED_BLOCK_SECONDS
        + load.read_tokens * _read_flops(shape, load) / rates.half,
        "writing": load.batches * load.longest_answer * (a_pass + CHOOSING_SECONDS),
    }


def recording_answers(shape: ModelShape, *, sizes: int) -> float:
    """Seconds in which a GPU records passes of so many sizes."""
    return sizes * RECORDING_PASSES * shape.layers * LAUNCHED_BLOCK_SECONDS


def _read_flops(shape: ModelShape, load: AnswerLoad) -> float:
    """Of one token of a prompt: products with weights, and half of the prompt to look at."""
    attention = 2.0 * load.prompt_tokens * shape.heads * shape.head_dim
    return shape.layers * (2.0 * active_layer_parameters(shape) + attention)
