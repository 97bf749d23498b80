"""How long answers take: a roofline with the shares of it that engines reach. Pure.

Reading a prompt is bound by products, making a token by memory: all weights are read for every step, once for
all users who share it, and every user's keys and values beside them. All users are taken to ask again as soon
as they are answered; then each answer waits for everybody's prompt once: users × prompt + answer × step.
"""

from typing import NamedTuple

from graftwork.model.shape import layer_parameters
from graftwork.plan.catalog.hardware import GUESSED
from graftwork.plan.serving.engines import (
    GUESSED_RATES,
    HOST_LINK_SHARE,
    MESSAGE_SECONDS,
    Case,
    Engine,
)
from graftwork.plan.serving.layout import Layout, engine_of, lay_out, weights_of
from graftwork.plan.serving.memory import cache_bytes_a_token
from graftwork.plan.serving.question import Form, Latency, ServeQuestion
from graftwork.records.base import Figure
from graftwork.records.errors import UserMistake
from graftwork.records.hardware import Machine


class StepParts(NamedTuple):
    """Seconds of one step: a token for every user."""

    weights: float
    """Reading them, or multiplying where so many users share a step that this takes longer."""
    cache: float
    links: float
    overhead: float


class Rates(NamedTuple):
    """What one place gives, as its maker states it."""

    bytes_a_second: float
    flops: float


def time_answers(question: ServeQuestion, form: Form) -> Latency:
    """Every figure at this load, with its range."""
    layout = lay_out(question)
    prompts = [prompt_seconds(question, form, case=case) for case in range(3)]
    steps = [step_seconds(question, form, case=case) for case in range(3)]
    firsts = [layout.users * one for one in prompts]
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
    return Figure(value=by_case[Case.LIKELY], low=min(by_case), high=max(by_case), unit=unit)


def prompt_seconds(question: ServeQuestion, form: Form, *, case: int) -> float:
    """Until the first token of one prompt: products, and at least one reading of the weights."""
    engine, layout, shape = engine_of(question), lay_out(question), question.shape
    rates = rates_of(question.machine, form, case=case)
    tokens = question.prompt
    flops = 2.0 * layer_parameters(shape) * shape.layers * tokens + 2.0 * shape.vocab_size * shape.hidden_size
    # Every new token looks at what was held before and at half of what is new.
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


def rates_of(machine: Machine, form: Form, *, case: int) -> Rates:
    """The rates that this width of weights is multiplied and read with."""
    if machine.gpu is not None:
        gpu = machine.gpu
        tflops = (
            gpu.eight_tflops if form == "8 bits" and gpu.has_fp8 and gpu.eight_tflops else gpu.half_tflops
        )
        return Rates(gpu.bandwidth_gb_s * 1e9, tflops * 1e12)
    if machine.cpu is None:
        raise UserMistake(
            "the machine has neither a card nor a processor with known figures",
            why="how fast it answers follows from its bandwidth and its products a second",
            fix="name one: --gpu NAME or --cpu NAME",
        )
    doubt = GUESSED_RATES[case] if machine.cpu.source == GUESSED else 1.0
    return Rates(doubt * machine.cpu.bandwidth_gb_s * 1e9, doubt * machine.cpu.gflops * 1e9)


def _groups(question: ServeQuestion, engine: Engine, layout: Layout) -> int:
    """How often a step reads weights: users of other models share none, nor of adapters that do not mix."""
    kinds = layout.copies
    if not engine.mixes_adapters:
        kinds *= max(question.adapters, 1)
    return min(kinds, layout.users)


def _adapter_factor(question: ServeQuestion, engine: Engine, case: int) -> float:
    return engine.adapter_factor[case] if question.adapters else 1.0


def _link_seconds(question: ServeQuestion, layout: Layout, *, tokens: int, messages: int, case: int) -> float:
    """Cards that share a model exchange the hidden state of every token twice a layer."""
    gpu = question.machine.gpu
    if layout.split == 1 or gpu is None:
        return 0.0
    link = question.machine.link_gb_s or gpu.nvlink_gb_s or gpu.pcie_gb_s * HOST_LINK_SHARE
    travelling = 2 * (layout.split - 1) / layout.split * tokens * question.shape.hidden_size * 2
    exchanges = 2 * question.shape.layers
    return exchanges * (messages * MESSAGE_SECONDS[case] + travelling / (link * 1e9))
