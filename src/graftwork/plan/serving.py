"""Answers `graft plan serve`: a row for each width of weights, one chosen, limits and advice. Pure.

Input: a model, a machine, the load. Output: a ServeAnswer: bytes of the fullest place (a GPU, or the machine)
with every user's context full; seconds by a roofline with the shares that engines reach, all users asking
again at once. Advice is the same question asked with one thing changed.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from graftwork.model.shape import (
    adapter_parameters,
    cache_bytes,
    layer_parameters,
    linear_names,
    total_parameters,
)
from graftwork.plan.catalog.hardware import GUESSED
from graftwork.plan.catalog.models import CatalogModel, require_dense
from graftwork.plan.serving_question import (
    CASES,
    CHECKED_FORM,
    FORMATS,
    GPU_SHARE,
    GUESSED_RATES,
    HOST_LINK_SHARE,
    HOST_SHARE,
    MEASURED_DECODE,
    MEASURED_PREFILL,
    MESSAGE_SECONDS,
    READING_SECONDS,
    SLOW_SECONDS,
    WORKSPACE,
    EngineName,
    EngineTraits,
    Form,
    FormRow,
    Holding,
    Latency,
    ServeAnswer,
    ServeLoad,
    ServeQuestion,
    SpecialistRow,
    SpreadCase,
    Word,
    find_engine,
    forms_of,
    say_seconds,
    say_verdict,
    weigh,
)
from graftwork.records.base import GIB, Figure
from graftwork.records.errors import UserError
from graftwork.records.hardware import Gpu, Machine


class CacheLayout(NamedTuple):
    """The most heavily used place: a GPU, or the machine's own memory."""

    split: int
    """GPUs that one model is split over."""
    copies: int
    """Whole models on this place."""
    users: int
    """Users that this place serves."""


def lay_out(question: ServeQuestion) -> CacheLayout:
    gpus = max(question.gpus, 1)
    if question.copies == 1 or gpus == 1:
        return CacheLayout(split=gpus, copies=question.copies, users=question.users)
    copies = math.ceil(question.copies / gpus)
    # Users are spread evenly over the models, so the fullest GPU has its share of them.
    users = math.ceil(question.users * copies / question.copies)
    return CacheLayout(split=1, copies=copies, users=users)


def engine_of(question: ServeQuestion) -> EngineTraits:
    return find_engine(question.engine, on_gpu=question.gpus > 0)


def weights_of(question: ServeQuestion, form: Form) -> tuple[float, float]:
    """Bytes held, and bytes read per token."""
    return weigh(question.shape, form=form, engine=question.engine)


def available_bytes(question: ServeQuestion) -> float:
    """Bytes available to serving on one place."""
    machine = question.machine
    memory = machine.ram_gib * HOST_SHARE if machine.gpu is None else machine.gpu.memory_gib * GPU_SHARE
    if question.memory_limit_gib is not None:
        # A limit is for all GPUs together.
        memory = min(memory, question.memory_limit_gib / max(question.gpus, 1))
    return memory * GIB


def hold(question: ServeQuestion, form: Form) -> Holding:
    """Memory in use, compared with what is available."""
    cases = [held_bytes(question, form, case=case) for case in CASES]
    available = available_bytes(question) / GIB
    memory = _gib([sum(parts.values()) for parts in cases])
    return Holding(
        memory_gib=memory,
        available_gib=Figure.exact(available, "GiB"),
        spare_gib=Figure(
            value=available - memory.value,
            low=available - memory.high,
            high=available - memory.low,
            unit="GiB",
        ),
        parts_gib={name: _gib([parts[name] for parts in cases]) for name in cases[0]},
        fits=in_words(memory, available),
    )


def _gib(by_case: list[float]) -> Figure:
    best, likely, worst = (value / GIB for value in by_case)
    return Figure(value=likely, low=best, high=worst, unit="GiB")


def in_words(figure: Figure, most: float) -> Word:
    """Say whether a figure stays under `most`."""
    if figure.high <= most:
        return "yes"
    if figure.value <= most:
        return "likely"
    return "unlikely" if figure.low <= most else "no"


def held_bytes(question: ServeQuestion, form: Form, *, case: int) -> dict[str, float]:
    """Memory use of one place, by purpose."""
    engine, layout, shape = engine_of(question), lay_out(question), question.shape
    weights, _ = weights_of(question, form)
    # The widest moment of a prompt on its way through a layer, and logits in float32, twice.
    inside = engine.prompt_tokens * (2 * shape.intermediate_size + 4 * shape.hidden_size) * engine.cache_bytes
    workspace = inside + 2 * max(engine.logit_rows, question.users) * shape.vocab_size * 4
    # Keys and values are held in the blocks that the engine sets aside.
    tokens = math.ceil(question.context / engine.cache_block) * engine.cache_block
    cache = layout.users * cache_bytes(shape, tokens=tokens, width=engine.cache_bytes)
    return {
        "weights": weights * CHECKED_FORM[case] * layout.copies / layout.split,
        "adapters": layout.copies * question.adapters * adapter_bytes(question, engine) / layout.split,
        "cache": cache / min(layout.split, shape.kv_heads),
        "workspace": layout.copies * workspace * WORKSPACE[case] / layout.split,
        "runtime": layout.copies * engine.runtime_gib[case] * GIB,
    }


def adapter_bytes(question: ServeQuestion, engine: EngineTraits) -> float:
    """Bytes of one adapter, in the type of the cache: 16 bits, or float32 without rounding."""
    shape = question.shape
    layers = min(question.adapter_layers or shape.layers, shape.layers)
    count = adapter_parameters(shape, rank=question.rank, targets=question.targets, layers=layers)
    return float(count * engine.cache_bytes)


class ServingRates(NamedTuple):
    """Rates of one place, as its maker states them."""

    bytes_per_second: float
    flops: float


def time_answers(question: ServeQuestion, form: Form) -> Latency:
    """Every figure at this load, with its range."""
    layout = lay_out(question)
    prompts = [prompt_seconds(question, form, case=case) for case in range(3)]
    steps = [step_seconds(question, form, case=case) for case in range(3)]
    firsts = [layout.users * prompt for prompt in prompts]
    answers = [
        first + question.answer * sum(step.values()) for first, step in zip(firsts, steps, strict=True)
    ]
    rates = [question.users * question.answer / seconds for seconds in answers]
    parts = {name: _figure([question.answer * step[name] for step in steps], "s") for name in steps[0]}
    return Latency(
        first_token_alone_seconds=_figure(prompts, "s"),
        first_token_seconds=_figure(firsts, "s"),
        token_seconds=_figure([sum(step.values()) for step in steps], "s"),
        answer_seconds=_figure(answers, "s"),
        tokens_per_second=_figure(rates, "tokens/s"),
        parts_seconds={"prompts": _figure(firsts, "s"), **parts},
    )


def _figure(by_case: list[float], unit: str) -> Figure:
    return Figure(value=by_case[SpreadCase.LIKELY], low=min(by_case), high=max(by_case), unit=unit)


def prompt_seconds(question: ServeQuestion, form: Form, *, case: int) -> float:
    """Time to the first token of one prompt: products, and at least one read of the weights."""
    engine, layout, shape = engine_of(question), lay_out(question), question.shape
    rates = rates_of(question.machine, form, case=case)
    tokens = question.prompt
    flops = 2.0 * layer_parameters(shape) * shape.layers * tokens + 2.0 * shape.vocab_size * shape.hidden_size
    # Every new token attends to what was held before and at half of what is new.
    cached = question.context - question.answer - tokens
    flops += 4.0 * shape.heads * shape.head_dim * shape.layers * tokens * (cached + tokens / 2)
    multiply = flops / (rates.flops * engine.compute[form][case] * layout.split)
    _, weights = weights_of(question, form)
    read = weights / (rates.bytes_per_second * engine.bandwidth[form][case] * layout.split)
    pieces = -(-tokens // engine.prompt_tokens)
    overhead = pieces * (engine.layer_seconds[case] * shape.layers + engine.step_seconds[case])
    links = _link_seconds(question, layout, tokens=tokens, messages=pieces, case=case)
    return max(multiply, read) * _adapter_factor(question, engine, case) + overhead + links


def step_seconds(question: ServeQuestion, form: Form, *, case: int) -> dict[str, float]:
    """One token for every user of the most heavily used place, halfway through an answer: seconds by part."""
    engine, layout, shape = engine_of(question), lay_out(question), question.shape
    rates = rates_of(question.machine, form, case=case)
    bandwidth = rates.bytes_per_second * engine.bandwidth[form][case]
    # How often a step reads weights: users of other models share none, nor of adapters that do not mix.
    kinds = layout.copies * (1 if engine.mixes_adapters else max(question.adapters, 1))
    groups = min(kinds, layout.users)
    _, weights = weights_of(question, form)
    read = groups * weights / (bandwidth * layout.split)
    flops = 2.0 * (layer_parameters(shape) * shape.layers + shape.vocab_size * shape.hidden_size)
    multiply = layout.users * flops / (rates.flops * engine.compute[form][case] * layout.split)
    tokens = question.context - question.answer / 2
    cache = cache_bytes(shape, tokens=tokens, rows=layout.users, width=engine.cache_bytes)
    return {
        # Reading them, or multiplying where so many users share a step that this takes longer.
        "weights": max(read, multiply) * _adapter_factor(question, engine, case),
        "cache": cache / (bandwidth * min(layout.split, shape.kv_heads)),
        "links": _link_seconds(question, layout, tokens=layout.users, messages=1, case=case),
        "overhead": groups * (engine.layer_seconds[case] * shape.layers + engine.step_seconds[case]),
    }


def rates_of(machine: Machine, form: Form, *, case: int) -> ServingRates:
    """The rates at which this width of weights is multiplied and read."""
    if machine.gpu is not None:
        gpu = machine.gpu
        tflops = (
            gpu.eight_tflops if form == "8 bits" and gpu.has_fp8 and gpu.eight_tflops else gpu.half_tflops
        )
        return ServingRates(gpu.bandwidth_gb_s * 1e9, tflops * 1e12)
    if machine.cpu is None:
        raise UserError(
            "the machine has neither a GPU nor a CPU with known figures",
            why="how fast it answers follows from its bandwidth and its products a second",
            fix="specify one: --gpu NAME or --cpu NAME",
        )
    doubt = GUESSED_RATES[case] if machine.cpu.source == GUESSED else 1.0
    return ServingRates(doubt * machine.cpu.bandwidth_gb_s * 1e9, doubt * machine.cpu.gflops * 1e9)


def _adapter_factor(question: ServeQuestion, engine: EngineTraits, case: int) -> float:
    return engine.adapter_factor[case] if question.adapters else 1.0


def _link_seconds(
    question: ServeQuestion, layout: CacheLayout, *, tokens: int, messages: int, case: int
) -> float:
    """GPUs that share a model exchange the hidden state of every token twice per layer."""
    gpu = question.machine.gpu
    if layout.split == 1 or gpu is None:
        return 0.0
    link = question.machine.link_gb_s or gpu.nvlink_gb_s or gpu.pcie_gb_s * HOST_LINK_SHARE
    sent_bytes = 2 * (layout.split - 1) / layout.split * tokens * question.shape.hidden_size * 2
    exchanges = 2 * question.shape.layers
    return exchanges * (messages * MESSAGE_SECONDS[case] + sent_bytes / (link * 1e9))


NAMES_OF_FORMS: dict[str, Form | Literal["auto"]] = {
    "auto": "auto",
    **dict.fromkeys(("fp32", "f32", "float32", "32"), "32 bits"),
    **dict.fromkeys(("fp16", "bf16", "f16", "float16", "bfloat16", "16"), "16 bits"),
    **dict.fromkeys(("int8", "fp8", "q8", "q8_0", "8bit", "8"), "8 bits"),
    **dict.fromkeys(("int4", "nf4", "awq", "gptq", "q4", "q4_k_m", "4bit", "4"), "4 bits"),
}
NAMES_OF_ENGINES: dict[str, EngineName] = {
    "vllm": "vllm",
    "llama.cpp": "llama.cpp",
    "llamacpp": "llama.cpp",
    "embedded": "embedded",
}


def make_question(model: CatalogModel, load: ServeLoad, *, machine: Machine) -> ServeQuestion:
    require_dense(model)
    context, answer = load.context, load.answer
    read = context - answer if load.prompt is None else load.prompt
    if read < 1 or read + answer > context:
        raise UserError(
            f"a context of {context} tokens does not hold {max(read, 1)} read and {answer} written",
            why="both stay in the model's memory until the last token",
            fix="raise --context, or lower --answer or --prompt",
            where="--context",
        )
    return ServeQuestion(
        model=model.name,
        doubt=model.doubt,
        shape=model.shape,
        machine=machine,
        engine=find_engine_name(load.engine, machine=machine),
        form=find_form(load.weights),
        targets=linear_names(model.shape),
        prompt=read,
        **load.model_dump(exclude={"engine", "weights", "prompt"}),
    )


def find_form(name: str) -> Form | Literal["auto"]:
    plain = name.lower().removesuffix(" bits").removesuffix("-bit").strip()
    form = NAMES_OF_FORMS.get(plain)
    if form is None:
        raise UserError(
            f"weights cannot be served as {name!r}",
            fix="use one of auto, fp32, fp16, bf16, int8, fp8, 4bit",
            where="--weights",
        )
    return form


def find_engine_name(name: str | None, *, machine: Machine) -> EngineName:
    """vLLM on a GPU, llama.cpp on a CPU, unless another is named."""
    if name is None:
        return "llama.cpp" if machine.gpu is None else "vllm"
    engine = NAMES_OF_ENGINES.get(name.lower())
    if engine is None:
        raise UserError(
            f"there is no engine {name!r}", fix="use one of vllm, llama.cpp, embedded", where="--engine"
        )
    if engine == "vllm" and machine.gpu is None:
        raise UserError(
            "vLLM is planned for GPUs only",
            fix="specify a GPU with --gpu, or --engine llama.cpp",
            where="--engine",
        )
    if engine == "embedded" and machine.gpu is not None:
        raise UserError(
            "the embedded engine is planned for CPUs only", fix="leave --engine out", where="--engine"
        )
    return engine


BEARABLE_SECONDS = 20.0
"""Target of a remedy if no limit was given."""
SHORT_ANSWER = 50
FIRST_WITH_VLLM = 7.0

Rows = Callable[[ServeQuestion], tuple[FormRow, ...]]


def advise(
    question: ServeQuestion, row: FormRow, *, rows: tuple[FormRow, ...], gpus: tuple[Gpu, ...], ask: Rows
) -> tuple[str, ...]:
    """Suggest changes, cheapest first; nothing if all is well."""
    slow = row.latency.answer_seconds.value > (question.limit_seconds or SLOW_SECONDS)
    if row.fits and not slow:
        return tuple(_say_reading(question, row))
    target = question.limit_seconds or BEARABLE_SECONDS
    hints = [*_other_forms(row, rows=rows), *_shared_base(question, row), *_less_load(question, row, target)]
    hints += _other_gpu(question, gpus=gpus, target=target, ask=ask)
    return (*hints, *_say_reading(question, row))


def _other_forms(row: FormRow, *, rows: tuple[FormRow, ...]) -> Iterator[str]:
    """The widest format that meets the requirements; if none does, the fastest that fits."""
    fitting = [candidate for candidate in rows if candidate.fits and candidate.form != row.form]
    # In time, or without a limit.
    of_use = ("yes", "likely") if row.fits else ("yes", "likely", None)
    best = next((candidate for candidate in fitting if candidate.meets_limit in of_use), None) or min(
        fitting, key=lambda candidate: candidate.latency.answer_seconds.value, default=None
    )
    if best is None:
        return
    if not row.fits or best.latency.answer_seconds.value < row.latency.answer_seconds.value:
        yield (
            f"{best.form} ({best.format}): {best.holding.memory_gib.value:.1f} GiB, "
            f"{say_seconds(best.latency.answer_seconds.value)} an answer"
        )


def _shared_base(question: ServeQuestion, row: FormRow) -> Iterator[str]:
    """Whole models, and adapters in llama.cpp, read their weights one after the other."""
    if question.copies > 1:
        shared = question.model_copy(update={"copies": 1, "adapters": question.copies})
        holding, latency = hold(shared, row.form), time_answers(shared, row.form)
        yield (
            f"{question.copies} adapters of rank {question.rank} on one base: "
            f"{holding.memory_gib.value:.1f} GiB{'' if holding.fits == 'yes' else ' (does not fit either)'}, "
            f"{say_seconds(latency.answer_seconds.value)} an answer"
        )
    if question.adapters > 1 and question.users > 1 and question.engine == "llama.cpp" and not question.gpus:
        # Our own engine reads float32, but once for all adapters.
        ours = question.model_copy(update={"engine": "embedded"})
        answer = time_answers(ours, "32 bits").answer_seconds.value
        if hold(ours, "32 bits").fits == "yes" and answer < row.latency.answer_seconds.value:
            yield (
                f"--engine embedded mixes adapters in one batch, in float32: {say_seconds(answer)} an answer"
            )


def _less_load(question: ServeQuestion, row: FormRow, target: float) -> Iterator[str]:
    single_user = question.model_copy(update={"users": 1})
    if not row.fits:
        holding = hold(single_user, row.form)
        if question.users > 1 and holding.fits == "yes":
            yield f"fewer users at once: one takes {holding.memory_gib.value:.1f} GiB"
        return
    latency = row.latency
    prompts = latency.parts_seconds["prompts"].value
    if prompts > latency.answer_seconds.value / 3:
        yield (
            f"reading prompts takes {say_seconds(prompts)} of it: keep what all prompts begin with "
            "(prefix caching), or shorten them"
        )
    answer_tokens = int((target - prompts) / latency.token_seconds.value)
    if SHORT_ANSWER <= answer_tokens < question.answer:
        yield f"answers of at most {answer_tokens} tokens take {say_seconds(target)}"
    if question.users > 1:
        seconds = time_answers(single_user, row.form).answer_seconds.value
        yield f"one user at a time: {say_seconds(seconds)} an answer"


def _other_gpu(question: ServeQuestion, *, gpus: tuple[Gpu, ...], target: float, ask: Rows) -> Iterator[str]:
    """The cheapest single GPU, by launch price, that meets the requirements."""
    current_gpu = question.machine.gpu
    priced = [
        (gpu.launch_usd, gpu.name, gpu)
        for gpu in gpus
        if gpu.launch_usd is not None and (current_gpu is None or gpu.name != current_gpu.name)
    ]
    for usd, name, gpu in sorted(priced, key=lambda each: each[:2]):
        machine = Machine(gpu=gpu, gpus=1, cpu=question.machine.cpu, ram_gib=question.machine.ram_gib)
        changes = {"machine": machine, "engine": "vllm", "form": "auto", "memory_limit_gib": None}
        for row in ask(question.model_copy(update=changes)):
            answer = row.latency.answer_seconds
            if row.fits and in_words(answer, target) in ("yes", "likely"):
                yield (
                    f"one {name} (${usd:,.0f} at launch): {say_seconds(answer.value)} an answer in {row.form}"
                )
                return


def _say_reading(question: ServeQuestion, row: FormRow) -> Iterator[str]:
    token = row.latency.token_seconds.value
    if token > READING_SECONDS:
        yield f"a token every {say_seconds(token)} is slower than people read"


def list_notes(question: ServeQuestion, row: FormRow) -> tuple[str, ...]:
    """What the figures are based on, and what they leave out."""
    shape, gpu = question.shape, question.machine.gpu
    notes = [
        "load: "
        + (f"{question.users} users ask" if question.users > 1 else "one user asks")
        + f" again as soon as answered; {question.prompt} tokens read, {question.answer} written, "
        f"{question.context} held for each"
    ]
    notes += question.machine.assumed
    if question.doubt:
        notes.append(question.doubt)
    if question.context > shape.max_positions:
        notes.append(
            f"{question.context} tokens are more than the {shape.max_positions} the model was made for"
        )
    if question.gpus > 1 and question.copies == 1 and shape.heads % question.gpus:
        notes.append(f"{shape.heads} heads cannot be split evenly over {question.gpus} GPUs: engines refuse")
    if question.adapters > 1 and not find_engine(question.engine, on_gpu=gpu is not None).mixes_adapters:
        notes.append("llama.cpp reads the weights once for each adapter in use: its users do not share steps")
    if gpu is not None and row.form == "8 bits" and not gpu.has_fp8:
        notes.append(f"{gpu.name} has no FP8: 8 bits save memory, products run in half precision")
    if gpu is not None and row.form == "16 bits" and not gpu.has_bf16:
        notes.append(f"{gpu.name} has no bfloat16: serve in float16")
    if gpu is not None and question.engine == "vllm" and gpu.capability < FIRST_WITH_VLLM:
        notes.append(f"vLLM does not run on {gpu.name} (it needs compute capability 7.0): --engine llama.cpp")
    if question.machine.cpu is not None and gpu is None and question.machine.cpu.source == GUESSED:
        notes.append(
            f"{question.machine.cpu.name} is not in the catalog: its rates are guessed from its "
            f"{question.machine.cpu.cores} cores, within a factor of two"
        )
    if row.form in ("8 bits", "4 bits"):
        notes.append("fewer bits change answers: evaluate and gate the quantized model before it serves")
    return tuple(notes)


def list_sources(machine: Machine) -> tuple[str, ...]:
    """List the sources of the figures that the answer rests on, one per line."""
    device = machine.gpu or machine.cpu
    facts = () if device is None else (f"{device.name}: {device.source} ({device.dated or 'not dated'})",)
    return (*facts, " ".join(MEASURED_DECODE.split()), " ".join(MEASURED_PREFILL.split()))


MOST_USERS = 4096
MOST_SPECIALISTS = 4096
CHECKED = 0.01


def most_users(question: ServeQuestion, form: Form) -> Figure:
    """Users whose full contexts are held at once."""
    return _by_case(
        lambda users, case: _fits(question.model_copy(update={"users": users}), form, case),
        most=MOST_USERS,
        unit="users",
    )


def most_users_in_time(question: ServeQuestion, form: Form) -> Figure | None:
    """Users who fit and are all answered within the limit; None without a limit."""
    limit = question.limit_seconds
    if limit is None:
        return None

    def good(users: int, case: int) -> bool:
        with_users = question.model_copy(update={"users": users})
        answer = time_answers(with_users, form).answer_seconds
        return _fits(with_users, form, case) and (answer.low, answer.value, answer.high)[case] <= limit

    return _by_case(good, most=MOST_USERS, unit="users")


def longest_context(question: ServeQuestion, form: Form) -> Figure:
    """Tokens that every user can have, no more than the model was made for."""
    return _by_case(
        lambda tokens, case: _fits(question.model_copy(update={"context": tokens}), form, case),
        most=question.shape.max_positions,
        unit="tokens",
    )


def list_specialists(question: ServeQuestion) -> tuple[SpecialistRow, ...]:
    """For every width of weights: the number of full models, and of adapters on one base."""
    specialists = max(question.copies, question.adapters)
    whole = question.model_copy(update={"adapters": 0})
    shared = question.model_copy(update={"copies": 1})
    one_adapter = adapter_bytes(question, engine_of(question)) / GIB

    def most(base: ServeQuestion, field: str, unit: str, form: Form) -> Figure:
        # With as many models on every GPU the users spread best: one model fewer may not fit.
        step = max(base.gpus, 1) if field == "copies" else 1
        return _by_case(
            lambda count, case: _fits(base.model_copy(update={field: count}), form, case),
            most=MOST_SPECIALISTS,
            unit=unit,
            step=step,
        )

    return tuple(
        SpecialistRow(
            form=form,
            one_model_gib=_one_model(question, form),
            one_adapter_gib=Figure.exact(one_adapter, "GiB"),
            whole_models=most(whole, "copies", "models", form),
            adapters=most(shared, "adapters", "adapters", form),
            asked=specialists,
            asked_whole_gib=_total(whole.model_copy(update={"copies": specialists}), form),
            asked_adapters_gib=_total(shared.model_copy(update={"adapters": specialists}), form),
        )
        for form in forms_of(question.engine, on_gpu=question.gpus > 0)
    )


def _one_model(question: ServeQuestion, form: Form) -> Figure:
    weights, _ = weights_of(question, form)
    return Figure.about(weights / GIB, down=1 - CHECKED, up=1 + CHECKED, unit="GiB")


def _total(question: ServeQuestion, form: Form) -> Figure:
    """Sum over all places: every model counted on its GPU."""
    # As if one place held all: what is split is whole again, what is spread is side by side.
    together = question.machine.model_copy(update={"gpus": min(question.gpus, 1)})
    pooled = question.model_copy(update={"machine": together})
    return _gib([sum(held_bytes(pooled, form, case=case).values()) for case in CASES])


def _fits(question: ServeQuestion, form: Form, case: int) -> bool:
    return sum(held_bytes(question, form, case=case).values()) <= available_bytes(question)


def _by_case(good: Callable[[int, int], bool], *, most: int, unit: str, step: int = 1) -> Figure:
    """In each case the largest valid number up to `most`, among 1 and the multiples of `step`, assuming that
    of these more is never better; 0 if 1 is invalid.
    """
    numbers = (0, 1, *range(step, most + 1, step))
    valid = [bisect_left(numbers, True, lo=1, key=lambda number: not good(number, case)) for case in CASES]
    return _figure([numbers[count - 1] for count in valid], unit)


def serve(question: ServeQuestion, *, gpus: tuple[Gpu, ...] = ()) -> ServeAnswer:
    """Predict serving. `gpus` are searched if this machine does not suffice."""
    rows = ask_every_form(question)
    row = _choose(question, rows)
    rows = tuple(each_row.model_copy(update={"chosen": each_row is row}) for each_row in rows)
    meets = None if row.meets_limit is None else row.meets_limit in ("yes", "likely")
    return ServeAnswer(
        verdict=say_verdict(question, row),
        good=row.fits and meets is not False,
        fits=row.fits,
        meets_limit=meets,
        question=question,
        weights=row.form,
        memory_gib=row.holding.memory_gib,
        available_gib=row.holding.available_gib,
        spare_gib=row.holding.spare_gib,
        parts_gib=row.holding.parts_gib,
        **dict(row.latency),
        most_users=most_users(question, row.form),
        most_users_in_time=most_users_in_time(question, row.form),
        longest_context=longest_context(question, row.form),
        quantisations=rows,
        specialists=list_specialists(question),
        advice=advise(question, row, rows=rows, gpus=gpus, ask=ask_every_form),
        notes=list_notes(question, row),
        sources=list_sources(question.machine),
    )


def ask_every_form(question: ServeQuestion) -> tuple[FormRow, ...]:
    """The question with every width of weights that the engine serves, the widest first."""
    return tuple(_row(question, form) for form in forms_of(question.engine, on_gpu=question.gpus > 0))


def _row(question: ServeQuestion, form: Form) -> FormRow:
    holding, latency = hold(question, form), time_answers(question, form)
    weights, _ = weights_of(question, form)
    limit = question.limit_seconds
    return FormRow(
        form=form,
        format=FORMATS[question.engine, form],
        bits=Figure.exact(8 * weights / total_parameters(question.shape), "bits"),
        one_model_gib=_one_model(question, form),
        holding=holding,
        latency=latency,
        fits=holding.fits == "yes",
        meets_limit=None if limit is None else in_words(latency.answer_seconds, limit),
    )


def _choose(question: ServeQuestion, rows: tuple[FormRow, ...]) -> FormRow:
    """The requested width; else the widest that meets the limit, else the fastest that fits, else the
    smallest. Without a limit, answers too slow for any user are excluded.
    """
    if question.form != "auto":
        for row in rows:
            if row.form == question.form:
                return row
        raise UserError(
            f"{question.engine} does not serve weights in {question.form} here",
            fix=f"use one of {', '.join(row.form for row in rows)}, or another engine",
            where="--weights",
        )
    fitting = [row for row in rows if row.fits]
    for row in fitting:
        quick = row.latency.answer_seconds.value < SLOW_SECONDS
        if row.meets_limit in ("yes", "likely") or (row.meets_limit is None and quick):
            return row
    return min(fitting, key=lambda row: row.latency.answer_seconds.value, default=rows[-1])
