"""What serving holds in memory, by parts. Pure.

In: a question and the width of weights. Out: bytes of the fullest place: a card, or the machine's memory.
The cache is counted at full load: every user with a full context.
"""

import math
from typing import NamedTuple

from graftwork.model.shape import adapter_parameters
from graftwork.plan.serving.engines import CHECKED_FORM, WORKSPACE, Case, Engine
from graftwork.plan.serving.layout import available_bytes, engine_of, lay_out, weights_of
from graftwork.plan.serving.question import Form, Holding, ServeQuestion, Word
from graftwork.records.base import Figure
from graftwork.records.plan import ModelShape
from graftwork.records.units import GIB


class HeldBytes(NamedTuple):
    """Of one place, by what they are for."""

    weights: float
    adapters: float
    cache: float
    workspace: float
    runtime: float


def hold(question: ServeQuestion, form: Form) -> Holding:
    """What it takes, beside what there is."""
    likely, least, most = (held_bytes(question, form, case=c) for c in (Case.LIKELY, Case.BEST, Case.WORST))
    available = available_bytes(question) / GIB
    memory = Figure(value=sum(likely) / GIB, low=sum(least) / GIB, high=sum(most) / GIB, unit="GiB")
    return Holding(
        memory_gib=memory,
        available_gib=Figure.exact(available, "GiB"),
        spare_gib=Figure(
            value=available - memory.value,
            low=available - memory.high,
            high=available - memory.low,
            unit="GiB",
        ),
        parts_gib={
            name: Figure(
                value=value / GIB, low=getattr(least, name) / GIB, high=getattr(most, name) / GIB, unit="GiB"
            )
            for name, value in likely._asdict().items()
        },
        fits=in_words(memory, available),
    )


def in_words(figure: Figure, most: float) -> Word:
    """Whether a figure stays under `most`."""
    if figure.high <= most:
        return "yes"
    if figure.value <= most:
        return "likely"
    return "unlikely" if figure.low <= most else "no"


def held_bytes(question: ServeQuestion, form: Form, *, case: int) -> HeldBytes:
    engine, layout = engine_of(question), lay_out(question)
    weights = weights_of(question, form).held * CHECKED_FORM[case] * layout.copies / layout.split
    cache_split = min(layout.split, question.shape.kv_heads)
    return HeldBytes(
        weights=weights,
        adapters=layout.copies * question.adapters * adapter_bytes(question, engine) / layout.split,
        cache=layout.users * cache_bytes(question.shape, question.context, engine=engine) / cache_split,
        workspace=layout.copies * _workspace(question, engine) * WORKSPACE[case] / layout.split,
        runtime=layout.copies * engine.runtime_gib[case] * GIB,
    )


def adapter_bytes(question: ServeQuestion, engine: Engine) -> float:
    """One adapter, in the type of the cache: 16 bits, or float32 where nothing is rounded."""
    shape = question.shape
    count = adapter_parameters(shape, rank=question.rank, targets=question.targets, layers=shape.layers)
    return float(count * engine.cache_bytes)


def cache_bytes(shape: ModelShape, tokens: int, *, engine: Engine) -> float:
    """Keys and values of one user, in the blocks that the engine sets aside."""
    blocks = math.ceil(tokens / engine.cache_block)
    return float(blocks * engine.cache_block * cache_bytes_a_token(shape, engine=engine))


def cache_bytes_a_token(shape: ModelShape, *, engine: Engine) -> int:
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * engine.cache_bytes


def _workspace(question: ServeQuestion, engine: Engine) -> float:
    """The widest moment of a prompt on its way through a layer, and logits in float32, twice."""
    shape = question.shape
    tokens = engine.prompt_tokens
    inside = tokens * (2 * shape.intermediate_size + 4 * shape.hidden_size) * engine.cache_bytes
    return inside + 2 * max(engine.logit_rows, question.users) * shape.vocab_size * 4
