"""What serving holds in memory and how long answers take. Pure.

In: a ServeQuestion and the width of weights. Out: bytes of the fullest place (a card, or the machine)
with every user's context full; seconds by a roofline with the shares that engines reach, all users asking
again at once.
"""

import math
from typing import NamedTuple

from graftwork.model.shape import adapter_parameters, layer_parameters
from graftwork.plan.catalog.hardware import GUESSED
from graftwork.plan.serving.engines import (
    CARD_SHARE,
    CHECKED_FORM,
    GUESSED_RATES,
    HOST_LINK_SHARE,
    HOST_SHARE,
    MESSAGE_SECONDS,
    WORKSPACE,
    EngineTraits,
    SpreadCase,
    WeightBytes,
    find_engine,
    weigh,
)
from graftwork.plan.serving.question import Form, Holding, Latency, ServeQuestion, Word
from graftwork.records.base import Figure
from graftwork.records.errors import UserMistake
from graftwork.records.hardware import Machine
from graftwork.records.plan import ModelShape
from graftwork.records.units import GIB


class CacheLayout(NamedTuple):
    """The fullest place: a card, or the machine's own memory."""

    split: int
    """Cards that one model is split over."""
    copies: int
    """Whole models on this place."""
    users: int
    """Users that this place answers."""


def lay_out(question: ServeQuestion) -> CacheLayout:
    cards = max(question.cards, 1)
    if question.copies == 1 or cards == 1:
        return CacheLayout(split=cards, copies=question.copies, users=question.users)
    copies = math.ceil(question.copies / cards)
    # Users are spread evenly over the models, so the fullest card has its share of them.
    users = math.ceil(question.users * copies / question.copies)
    return CacheLayout(split=1, copies=copies, users=users)


def engine_of(question: ServeQuestion) -> EngineTraits:
    return find_engine(question.engine, on_card=question.cards > 0)


def weights_of(question: ServeQuestion, form: Form) -> WeightBytes:
    return weigh(question.shape, form=form, engine=question.engine)


def available_bytes(question: ServeQuestion) -> float:
    """What serving may take of one place."""
    machine = question.machine
    memory = machine.ram_gib * HOST_SHARE if machine.gpu is None else machine.gpu.memory_gib * CARD_SHARE
    if question.memory_limit_gib is not None:
        # A limit is for all cards together.
        memory = min(memory, question.memory_limit_gib / max(question.cards, 1))
    return memory * GIB


class HeldBytes(NamedTuple):
    """Of one place, by what they are for."""

    weights: float
    adapters: float
    cache: float
    workspace: float
    runtime: float


def hold(question: ServeQuestion, form: Form) -> Holding:
    """What it takes, compared with what is available."""
    likely, least, most = (
        held_bytes(question, form, case=c) for c in (SpreadCase.LIKELY, SpreadCase.BEST, SpreadCase.WORST)
    )
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


def adapter_bytes(question: ServeQuestion, engine: EngineTraits) -> float:
    """One adapter, in the type of the cache: 16 bits, or float32 where nothing is rounded."""
    shape = question.shape
    layers = min(question.adapter_layers or shape.layers, shape.layers)
    count = adapter_parameters(shape, rank=question.rank, targets=question.targets, layers=layers)
    return float(count * engine.cache_bytes)


def cache_bytes(shape: ModelShape, tokens: int, *, engine: EngineTraits) -> float:
    """Keys and values of one user, in the blocks that the engine sets aside."""
    blocks = math.ceil(tokens / engine.cache_block)
    return float(blocks * engine.cache_block * cache_bytes_a_token(shape, engine=engine))


def cache_bytes_a_token(shape: ModelShape, *, engine: EngineTraits) -> int:
    return 2 * shape.layers * shape.kv_heads * shape.head_dim * engine.cache_bytes


def _workspace(question: ServeQuestion, engine: EngineTraits) -> float:
    """The widest moment of a prompt on its way through a layer, and logits in float32, twice."""
    shape = question.shape
    tokens = engine.prompt_tokens
    inside = tokens * (2 * shape.intermediate_size + 4 * shape.hidden_size) * engine.cache_bytes
    return inside + 2 * max(engine.logit_rows, question.users) * shape.vocab_size * 4


class StepParts(NamedTuple):
    """Seconds of one step: a token for every user."""

    weights: float
    """Reading them, or multiplying where so many users share a step that this takes longer."""
    cache: float
    links: float
    overhead: float


class ServingRates(NamedTuple):
    """What one place gives, as its maker states it."""

    bytes_a_second: float
    flops: float


def time_answers(question: ServeQuestion, form: Form) -> Latency:
    """Every figure at this load, with its range."""
    layout = lay_out(question)
    prompts = [prompt_seconds(question, form, case=case) for case in range(3)]
    steps = [step_seconds(question, form, case=case) for case in range(3)]
    firsts = [layout.users * prompt for prompt in prompts]
    answers = [first + question.answer * sum(step) for first, step in zip(firsts, steps, strict=True)]
    rates = [question.users * question.answer / seconds for seconds in answers]
    parts = {
        name: _figure([question.answer * getattr(step, name) for step in steps], "s")
        for name in StepParts._fields
    }
    return Latency(
        first_token_alone_seconds=_figure(prompts, "s"),
        first_token_seconds=_figure(firsts, "s"),
        token_seconds=_figure([sum(step) for step in steps], "s"),
        answer_seconds=_figure(answers, "s"),
        tokens_per_second=_figure(rates, "tokens/s"),
        parts_seconds={"prompts": _figure(firsts, "s"), **parts},
    )


def _figure(by_case: list[float], unit: str) -> Figure:
    return Figure(value=by_case[SpreadCase.LIKELY], low=min(by_case), high=max(by_case), unit=unit)


def prompt_seconds(question: ServeQuestion, form: Form, *, case: int) -> float:
    """Until the first token of one prompt: products, and at least one reading of the weights."""
    engine, layout, shape = engine_of(question), lay_out(question), question.shape
    rates = rates_of(question.machine, form, case=case)
    tokens = question.prompt
    flops = 2.0 * layer_parameters(shape) * shape.layers * tokens + 2.0 * shape.vocab_size * shape.hidden_size
    # Every new token attends to what was held before and at half of what is new.
    held = question.context - question.answer - tokens
    flops += 4.0 * shape.heads * shape.head_dim * shape.layers * tokens * (held + tokens / 2)
    multiply = flops / (rates.flops * engine.compute[form][case] * layout.split)
    read = weights_of(question, form).read / (
        rates.bytes_a_second * engine.bandwidth[form][case] * layout.split
    )
    pieces = -(-tokens // engine.prompt_tokens)
    overhead = pieces * (engine.layer_seconds[case] * shape.layers + engine.step_seconds[case])
    links = _link_seconds(question, layout, tokens=tokens, messages=pieces, case=case)
    return max(multiply, read) * _adapter_factor(question, engine, case) + overhead + links


def step_seconds(question: ServeQuestion, form: Form, *, case: int) -> StepParts:
    """One token for every user of the fullest place, half of the answer being written."""
    engine, layout, shape = engine_of(question), lay_out(question), question.shape
    rates = rates_of(question.machine, form, case=case)
    bandwidth = rates.bytes_a_second * engine.bandwidth[form][case]
    groups = _groups(question, engine, layout)
    read = groups * weights_of(question, form).read / (bandwidth * layout.split)
    flops = 2.0 * (layer_parameters(shape) * shape.layers + shape.vocab_size * shape.hidden_size)
    multiply = layout.users * flops / (rates.flops * engine.compute[form][case] * layout.split)
    tokens = question.context - question.answer / 2
    cache = layout.users * tokens * cache_bytes_a_token(shape, engine=engine)
    return StepParts(
        weights=max(read, multiply) * _adapter_factor(question, engine, case),
        cache=cache / (bandwidth * min(layout.split, shape.kv_heads)),
        links=_link_seconds(question, layout, tokens=layout.users, messages=1, case=case),
        overhead=groups * (engine.layer_seconds[case] * shape.layers + engine.step_seconds[case]),
    )


def rates_of(machine: Machine, form: Form, *, case: int) -> ServingRates:
    """The rates that this width of weights is multiplied and read with."""
    if machine.gpu is not None:
        gpu = machine.gpu
        tflops = (
            gpu.eight_tflops if form == "8 bits" and gpu.has_fp8 and gpu.eight_tflops else gpu.half_tflops
        )
        return ServingRates(gpu.bandwidth_gb_s * 1e9, tflops * 1e12)
    if machine.cpu is None:
        raise UserMistake(
            "the machine has neither a card nor a processor with known figures",
            why="how fast it answers follows from its bandwidth and its products a second",
            fix="name one: --gpu NAME or --cpu NAME",
        )
    doubt = GUESSED_RATES[case] if machine.cpu.source == GUESSED else 1.0
    return ServingRates(doubt * machine.cpu.bandwidth_gb_s * 1e9, doubt * machine.cpu.gflops * 1e9)


def _groups(question: ServeQuestion, engine: EngineTraits, layout: CacheLayout) -> int:
    """How often a step reads weights: users of other models share none, nor of adapters that do not mix."""
    kinds = layout.copies
    if not engine.mixes_adapters:
        kinds *= max(question.adapters, 1)
    return min(kinds, layout.users)


def _adapter_factor(question: ServeQuestion, engine: EngineTraits, case: int) -> float:
    return engine.adapter_factor[case] if question.adapters else 1.0


def _link_seconds(
    question: ServeQuestion, layout: CacheLayout, *, tokens: int, messages: int, case: int
) -> float:
    """Cards that share a model exchange the hidden state of every token twice a layer."""
    gpu = question.machine.gpu
    if layout.split == 1 or gpu is None:
        return 0.0
    link = question.machine.link_gb_s or gpu.nvlink_gb_s or gpu.pcie_gb_s * HOST_LINK_SHARE
    travelling = 2 * (layout.split - 1) / layout.split * tokens * question.shape.hidden_size * 2
    exchanges = 2 * question.shape.layers
    return exchanges * (messages * MESSAGE_SECONDS[case] + travelling / (link * 1e9))
