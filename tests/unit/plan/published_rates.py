"""What others have published for other cards and engines, next to our estimates for the same. Pure.

A comparison, not a proof: their engines, versions and settings are not ours, and no one here has run them.
Out: one line a figure, so labelled.
"""

from typing import Literal

from graftwork.costmodel.plain_step import plain_step, trained_parameters
from graftwork.costmodel.rates import StepRates
from graftwork.model.shape import layer_parameters, linear_names
from graftwork.records.base import Record
from graftwork.records.plan import ModelShape, PlainSetup, StepTime

COMPILED_TRAFFIC = 0.25
"""Of the elementwise traffic of transformers and PEFT: ours on an H200 has 46 bytes where they have 185."""
BYTES_TO_HOST = 2
BYTES_FROM_HOST = 2
"""Weights in bfloat16 come and gradients go, once a step, where they live on the host."""


class Published(Record):
    """A figure with its source and its date."""

    engine: str
    model: str
    gpu: str
    method: Literal["lora", "qlora", "full"]
    tokens_per_second: float
    rows: int
    length: int
    checkpointed: bool
    compiled: bool
    """Its elementwise work is compiled or written by hand, as transformers' is not."""
    offloaded: bool = False
    step_tokens: int
    source: str
    dated: str


PUBLISHED = (
    Published(
        engine="torchtune, compiled",
        model="llama-3.1-8b",
        gpu="RTX 4090",
        method="lora",
        tokens_per_second=3083,
        rows=2,
        length=2048,
        checkpointed=True,
        compiled=True,
        step_tokens=2 * 2048,
        source="torchtune README, Llama-3.1-8B, packed 2048, batch 2",
        dated="2025",
    ),
    Published(
        engine="torchtune, compiled",
        model="llama-3.1-8b",
        gpu="RTX 4090",
        method="qlora",
        tokens_per_second=2413,
        rows=2,
        length=2048,
        checkpointed=True,
        compiled=True,
        step_tokens=2 * 2048,
        source="torchtune README, Llama-3.1-8B, packed 2048, batch 2",
        dated="2025",
    ),
    *(
        Published(
            engine=engine,
            model="qwen2.5-7b",
            gpu=gpu,
            method="full",
            tokens_per_second=rate,
            rows=8,
            length=1024,
            checkpointed=offloaded,
            compiled=engine == "llmq",
            offloaded=offloaded,
            step_tokens=500_000,
            source="IST-DASLab/llmq README; batch, length and what is computed again are guessed",
            dated="2025",
        )
        for engine, gpu, rate, offloaded in (
            ("llmq", "RTX 5060 Ti 16GB", 889, True),
            ("llmq", "RTX 4090", 2775, True),
            ("llmq", "H100 SXM", 14_000, False),
            ("LLaMA-Factory, ZeRO-3", "RTX 4090", 2523, True),
        )
    ),
)


class PublishedComparison(Record):
    """A published figure and ours for the same work on the same card."""

    published: Published
    estimated: float
    off: float
    """Estimated over published, less one."""


def compare_published(published: Published, shape: ModelShape, rates: StepRates) -> PublishedComparison:
    """Tokens a second as `plain_step` estimates them, with what travels to the host where all lives there."""
    setup = PlainSetup(
        method=published.method,
        targets=linear_names(shape),
        adapted_layers=shape.layers,
        rows=published.rows,
        tokens=published.length,
        checkpointed=shape.layers if published.checkpointed else 0,
        loss="fused",
    )
    step = plain_step(shape, setup, rates=rates)
    if published.compiled:
        step = _compiled(step, shape, setup, rates)
    tokens = published.rows * published.length
    passes = max(1, published.step_tokens // tokens)
    seconds = passes * sum(step.parts.values()) + sum(step.once_per_step.values())
    if published.offloaded:
        moved = trained_parameters(shape, setup) * (BYTES_TO_HOST + BYTES_FROM_HOST)
        seconds += moved / rates.host
    estimated = passes * tokens / seconds
    return PublishedComparison(
        published=published, estimated=estimated, off=estimated / published.tokens_per_second - 1
    )


def _compiled(step: StepTime, shape: ModelShape, setup: PlainSetup, rates: StepRates) -> StepTime:
    """With as much less traffic next to the products as our own compiled step has."""
    recomputed = 2.0 * layer_parameters(shape) * setup.rows * setup.tokens * setup.checkpointed / rates.half
    parts = dict(step.parts)
    parts["elementwise"] *= COMPILED_TRAFFIC
    if setup.checkpointed:
        parts["computed again"] = recomputed + (parts["computed again"] - recomputed) * COMPILED_TRAFFIC
    return step.model_copy(update={"parts": parts})
