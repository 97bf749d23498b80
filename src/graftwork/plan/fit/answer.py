"""Answers `graft plan fit`: the fastest strategy that fits, or by how much none does. Pure.

Input: a question; rates of a probe and a traced peak if there are any. Output: a FitAnswer, every figure with
a range: the reasons for the strategy in sentences, and where nothing fits, what would, one change at a time,
each computed; and the strategy as the files that trainers take, as text: graft.yaml, a DeepSpeed JSON, an
accelerate YAML. Reads only the shipped catalogs, for models that would fit instead.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from graftwork.costmodel.gpu_memory import load_peak
from graftwork.costmodel.rates import StepRates, rates_of
from graftwork.costmodel.run import start_seconds
from graftwork.costmodel.streamed import describe_streamed
from graftwork.model.shape import describe_experts, linear_names, total_parameters
from graftwork.plan.catalog.hardware import describe_trade
from graftwork.plan.catalog.models import CatalogModel, list_models
from graftwork.plan.fit.candidates import (
    RESERVED_SPREAD,
    FitCandidate,
    allocated_figure,
    consider,
    fits,
    gpu_excess,
    host_excess,
    is_tight,
    may_fit,
    memory_level,
    name_of,
    own_limit,
    padded_gb,
    plain_candidate,
    preference,
    reserved_figure,
    say_why,
    speed_figure,
    strategy_of,
    time_spread,
    trained,
)
from graftwork.plan.fit.question import (
    gpu_room,
    half_precision,
    kind_of,
    late_chance,
    length_that_fits,
    truths,
    why_plain,
)
from graftwork.plan.fit.search import search, takes_own_step
from graftwork.records.base import GIB, Figure
from graftwork.records.plan import Considered, FitAnswer, FitQuestion, Level, Method, ModelShape

HOUR = 60.0
NIGHT_HOURS = 8


def give_verdict(
    question: FitQuestion, candidate: FitCandidate, *, level: Level, good: bool, minutes: Figure
) -> str:
    """The answer in one sentence."""
    machine, need = question.machine.name, reserved_figure(candidate, question, level)
    room = gpu_room(question, gpus=candidate.way.shared.gpus)
    what = f"{question.model} by {question.method} ({question.algorithm.upper()})"
    where = (
        "in memory"
        if question.machine.gpu is None
        else "of each GPU"
        if candidate.way.shared.gpus > 1
        else "of the GPU"
    )
    if good:
        tight = ", tight on host memory" if is_tight(candidate, question) and question.machine.gpu else ""
        return (
            f"{what} fits {machine}{tight}: {need.value:.1f} of {room.value:.1f} GiB {where}, "
            f"{candidate.tokens_per_second:,.0f} tokens/s, {say_time(minutes.value)} for the run."
        )
    lacking = []
    if (over := gpu_excess(candidate, question, level)) > 0:
        lacking.append(
            f"{over:.1f} GiB are lacking {where} ({need.high:.1f} may be needed, {room.value:.1f} are there)"
        )
    if (over := host_excess(candidate, question)) > 0:
        lacking.append(f"{over:.0f} GiB are lacking on the host")
    return f"{what} does not fit {machine}: " + " and ".join(lacking) + "."


def say_time(minutes: float) -> str:
    if minutes < 1.5:
        return f"{60 * minutes:.0f} s"
    if minutes < 1.9 * HOUR:
        return f"{minutes:.0f} min"
    return f"{minutes / HOUR:.1f} h" if minutes < 48 * HOUR else f"{minutes / HOUR / 24:.1f} days"


def give_reasons(
    question: FitQuestion,
    candidate: FitCandidate,
    considered: tuple[Considered, ...],
    *,
    good: bool,
) -> tuple[str, ...]:
    reasons = [*_about_the_step(question, candidate), *_about_the_machine(question, candidate)]
    if question.algorithm == "grpo":
        a_prompt = candidate.seconds_per_step * question.generations / question.batch_size
        writing = sum(candidate.step_parts.get(name, 0.0) for name in ("generation", "reading prompts"))
        graded = candidate.step_parts.get("rewards", 0.0)
        rewards = (
            f"{graded / candidate.seconds_per_step:.0%} for rewards" if graded else "rewards not counted"
        )
        reasons += [
            *say_why(question),
            f"{a_prompt:.1f} s per prompt, {writing / candidate.seconds_per_step:.0%} of it for "
            f"writing answers: {NIGHT_HOURS * 3600 / a_prompt:,.0f} prompts in {NIGHT_HOURS} "
            f"hours, {rewards}",
        ]
    if not good:
        reasons.append(
            "a smaller batch would not help: this is with one row at a time already"
            if candidate.way.micro_rows == 1 or candidate.tuning is not None
            else "fewer rows at a time would help"
        )
        return tuple(reasons)
    # How much faster it is than the next, and where another engine would be faster still.
    ours = candidate.tokens_per_second
    fitting = [option for option in considered if option.fits]
    same = [option for option in fitting if option.strategy.engine == candidate.way.engine]
    if same and ours > 1.005 * same[0].tokens_per_second.value:
        gain = ours / same[0].tokens_per_second.value - 1
        reasons.append(f"{name_of(candidate, question)} is {100 * gain:.0f} % faster than {same[0].name}")
    for option in fitting:
        speed = option.tokens_per_second.value
        if option.strategy.engine != candidate.way.engine and speed > ours:
            reasons.append(f"{option.name} would do {speed:,.0f} tokens/s: see it with --engine hf")
    return tuple(reasons)


def _about_the_step(question: FitQuestion, candidate: FitCandidate) -> list[str]:
    gpu, reasons = question.machine.gpu, []
    if question.algorithm != "sft" and candidate.way.own_step:
        reasons.append(
            "writing answers was timed on one H200 only (135M and 7.6B); other GPUs are computed from it"
            if question.algorithm == "grpo"
            else "not run on a GPU yet: comparing is computed, not measured"
        )
    if gpu is not None and half_precision(question) == "float16":
        suffix = "; it has no tensor cores either" if gpu.capability < 7.0 else ""
        reasons.append(f"{gpu.name} has no bfloat16: float16 with loss scaling{suffix}")
    if (
        question.engine == "graft"
        and gpu is not None
        and question.algorithm == "sft"
        and not candidate.way.own_step
        and candidate.streamed is None
    ):
        why = why_plain(question) or "several GPUs share the run"
        checkpointing = "with" if candidate.way.checkpointed else "without"
        rows = f"{candidate.way.micro_rows} row{'s' * (candidate.way.micro_rows != 1)} at a time"
        reasons.append(f"the plain step, {checkpointing} checkpointing, {rows}: {why}")
    if candidate.streamed is not None:
        reasons.append(
            f"{describe_streamed(candidate.streamed)}; all rows of a step go through a layer before the next "
            "is fetched"
        )
    if candidate.tuning is not None:
        tuning = candidate.tuning
        recomputed = question.adapted_layers - tuning.keep - tuning.lean
        reasons.append(
            f"activations: {tuning.keep} layers keep all, {tuning.lean} all but the widest tensor, "
            f"{recomputed} recompute them; training measures its first step and recomputes more layers "
            "if memory is short"
        )
        room, loaded_gib = own_limit(question), load_peak(question.shape, tuning) / GIB
        if loaded_gib > room:
            # Weights need more room on their way onto the GPU than the step does.
            reasons.append(f"loading alone takes {loaded_gib:.1f} GiB of the GPU, and there are {room:.1f}")
        if tuning.form != "whole":
            reasons.append(describe_trade(tuning.form))
    experts = describe_experts(question.shape, adapted=question.experts, four_bits=question.method == "qlora")
    return reasons if experts is None else [*reasons, experts]


def _about_the_machine(question: FitQuestion, candidate: FitCandidate) -> list[str]:
    """About GPUs that share the run, and about data in host memory."""
    gpus, used = question.machine.gpus, candidate.way.shared.gpus
    reasons = []
    if question.machine.gpu is not None and used < gpus:
        reasons.append(
            f"{gpus - used} of {gpus} GPUs stay idle: with this engine, no strategy over all of them fits "
            "and is faster; use each GPU for a separate run"
        )
    sent = candidate.step_parts.get("link between GPUs", 0.0)
    if used > 1:
        reasons.append(
            f"{100 * sent / candidate.seconds_per_step:.0f} % of a step is waiting for the link between GPUs"
        )
    if used > 1 and question.method == "qlora":
        reasons.append("4-bit weights cannot be cut up: each GPU holds the whole base (DDP)")
    if candidate.way.shared.offload != "none":
        low, high, ram = candidate.host.low, candidate.host.high, question.machine.ram_gib
        fit_note = "tight" if is_tight(candidate, question) else "enough"
        moved = candidate.step_parts.get("host transfers", 0.0) / candidate.seconds_per_step
        adam = candidate.step_parts.get("optimizer", 0.0) / candidate.seconds_per_step
        where = "waiting for Adam" if candidate.streamed is not None else "Adam on the CPU"
        reasons += [
            f"host memory is {fit_note}: {low:.0f} to {high:.0f} GiB of {ram:.0f} installed",
            f"{100 * moved:.0f} % of a step is waiting for transfers to and from the host, "
            f"{100 * adam:.0f} % is {where}",
        ]
        if question.method == "full" and candidate.streamed is None:
            reasons.append(
                "DeepSpeed's own estimator adds half as much again and would ask for "
                f"{padded_gb(question):.0f} GB on the host"
            )
    return reasons


LIGHTER: dict[Method, tuple[Method, ...]] = {
    "full": ("lora", "qlora"),
    "dora": ("lora", "qlora"),
    "lora": ("qlora",),
    "qlora": (),
}
GPU_COUNTS = (2, 3, 4, 8)
SHORTEST, GRAIN = 128, 64
TRIED_EXACTLY, SHORTER = 4, 0.9
SMALLER_TRIED = 2
LEAST_SHARE = 0.75
"""Largest share of a GPU for weights if training needs the rest."""


ROOMY = 0.12
"""Share of a GPU that must stay free to trust linear estimates without an exact count."""


def find_remedies(question: FitQuestion, *, rates: StepRates | None, level: Level) -> tuple[Considered, ...]:
    """Each kind of change that makes it fit, the smallest first."""
    on_gpu = question.machine.gpu is not None
    changes: list[tuple[str, dict[str, object]]] = [
        (f"{method} instead of {question.method}", {"method": method}) for method in LIGHTER[question.method]
    ]
    if question.offload != "auto":
        changes.append((f"offload auto instead of {question.offload}", {"offload": "auto"}))
    if question.engine == "graft" and on_gpu:
        changes.append(("transformers + PEFT instead of graft train (--engine hf)", {"engine": "hf"}))
    if question.optimizer != "adamw_8bit" and question.method == "full" and on_gpu:
        changes.append(
            (
                "the 8-bit AdamW (--optimizer adamw_8bit), with --engine hf",
                {"optimizer": "adamw_8bit", "engine": "hf"},
            )
        )
    remedies = []
    for name, change in changes:
        changed = question.model_copy(update=change)
        best = _best(changed, rates=rates, level=level)
        if best is not None:
            remedies.append(consider(best, changed, name=name, level=level))
    if (shorter := _shorter(question, rates=rates, level=level)) is not None:
        remedies.insert(min(1, len(remedies)), shorter)
    for find in (_more_gpus, _smaller_model):
        if (larger := find(question, rates=rates, level=level)) is not None:
            remedies.append(larger)
    return tuple(remedies)


def _best(question: FitQuestion, *, rates: StepRates | None, level: Level) -> FitCandidate | None:
    fitting, _ = search(question, rates=rates, level=level)
    for candidate in sorted(fitting, key=preference)[:TRIED_EXACTLY]:
        exact = candidate
        roomy = gpu_excess(candidate, question, level) < -ROOMY * gpu_room(question, gpus=1).value
        if candidate.setup is not None and rates is not None and not roomy:
            exact = plain_candidate(question, candidate.way, rates=rates, exact=True)
        if fits(exact, question, level):
            return exact
    return None


def cut_at(question: FitQuestion, most: int) -> FitQuestion:
    """The question with rows of at most this many tokens."""
    lengths = tuple(min(length, most) for length in question.lengths)
    update: dict[str, object] = {"lengths": lengths}
    if question.algorithm == "grpo":
        update["completion_tokens"] = max(most - question.prompt_tokens, 1)
    return question.model_copy(update=update)


def _shorter(question: FitQuestion, *, rates: StepRates | None, level: Level) -> Considered | None:
    """The longest rows that fit, to 64 tokens."""

    def has_room(tokens: int) -> bool:
        """Check our own step by its formula first: the search is the same, and slow."""
        shorter = cut_at(question, tokens)
        own_step = takes_own_step(shorter)
        if own_step and may_fit(shorter, spread=RESERVED_SPREAD[level]):
            return True
        if own_step and shorter.machine.gpus == 1:
            return False
        return bool(search(shorter, rates=rates, level=level, own_step=False)[0])

    least = SHORTEST + (question.prompt_tokens if question.algorithm == "grpo" else 0)
    lengths = range(least // GRAIN * GRAIN, max(question.lengths), GRAIN)
    fitting = bisect_left(lengths, True, key=lambda tokens: not has_room(tokens))
    most = lengths[fitting - 1] if fitting else 0
    for _ in range(TRIED_EXACTLY):
        if not most:
            break
        shorter = cut_at(question, most)
        best = _best(shorter, rates=rates, level=level)
        if best is not None:
            longer = sum(length > most for length in question.lengths) / len(question.lengths)
            cut = "every row" if longer == 1 else f"{100 * longer:.1f} % of the rows"
            name = f"rows of at most {most:,} tokens (cuts {cut})"
            return consider(best, shorter, name=name, level=level)
        # The search goes by straight lines: where they were too low, a tenth shorter is tried.
        most = int(SHORTER * most) // GRAIN * GRAIN
    return None


def _more_gpus(question: FitQuestion, *, rates: StepRates | None, level: Level) -> Considered | None:
    machine = question.machine
    if machine.gpu is None:
        return None
    for gpus in GPU_COUNTS:
        if gpus > machine.gpus:
            scaled_question = question.model_copy(
                update={"machine": machine.model_copy(update={"gpus": gpus})}
            )
            if (best := _best(scaled_question, rates=rates, level=level)) is not None:
                return consider(
                    best, scaled_question, name=f"{gpus} GPUs instead of {machine.gpus}", level=level
                )
    return None


def _smaller_model(question: FitQuestion, *, rates: StepRates | None, level: Level) -> Considered | None:
    """The largest of the catalog that fits, of the same family of names first."""
    parameters = total_parameters(question.shape)
    room = gpu_room(question, gpus=1).value * GIB

    def shared_name(model: CatalogModel) -> int:
        """How many words of its name a model shares with the requested one."""
        ours, theirs = question.model.lower().split("-"), model.name.lower().split("-")
        return next(
            (index for index, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(theirs)
        )

    smaller = sorted(
        (model for model in list_models() if total_parameters(model.shape) < 0.95 * parameters),
        key=lambda model: (shared_name(model), total_parameters(model.shape)),
        reverse=True,
    )
    tried = 0
    for model in smaller:
        if least_bytes(model.shape, question.method) > room or tried == SMALLER_TRIED:
            continue
        tried += 1
        smaller_question = question.model_copy(
            update={
                "model": model.name,
                "shape": model.shape,
                "architecture": model.architecture,
                "targets": linear_names(model.shape),
                "adapted_layers": model.shape.layers,
            }
        )
        if (best := _best(smaller_question, rates=rates, level=level)) is not None:
            return consider(
                best, smaller_question, name=f"{model.name} instead of {question.model}", level=level
            )
    return None


def least_bytes(shape: ModelShape, method: Method) -> float:
    """Return the memory that a GPU needs at the very least for the weights of a model."""
    a_weight = {"qlora": 0.5, "full": 0.0}.get(method, 1.0)
    return a_weight * total_parameters(shape) / LEAST_SHARE


SHOWN = 6


def fit(
    question: FitQuestion,
    *,
    rates: StepRates | None = None,
    correction: float = 1.0,
    level: Level | None = None,
    advise: bool = True,
) -> FitAnswer:
    """Answer a question. `correction` is a traced peak over the computed one of the same setup. Without
    `advise`, neither remedies nor other engines are tried: for callers with many questions.
    """
    ways = ways_of(question)
    if len(ways) == 1:
        return _fit(ways[0], rates=rates, correction=correction, level=level, advise=advise)
    answers = [_fit(way, rates=rates, correction=correction, level=level, advise=False) for way in ways]
    best, runner_up = sorted(answers, key=lambda answer: (not answer.fits, answer.run_minutes.value))
    if advise and not best.fits:
        best = _fit(best.question, rates=rates, correction=correction, level=level, advise=True)
    return compare_engines(best, runner_up, gpus=question.machine.gpus)


def _fit(
    question: FitQuestion,
    *,
    rates: StepRates | None,
    correction: float,
    level: Level | None,
    advise: bool,
) -> FitAnswer:
    gpu = question.machine.gpu
    rates = rates or (rates_of(gpu) if gpu is not None else None)
    level = level or level_of(question, rates)
    fitting, failing = search(question, rates=rates, level=level, correction=correction)
    best_candidate, weighed = weigh(
        fitting, failing, question, level=level, rates=rates, correction=correction
    )
    good = fits(best_candidate, question, level)
    remedies = () if good or not advise else find_remedies(question, rates=rates, level=level)
    exact = {candidate.way: candidate for candidate in weighed}
    computed = [exact.get(candidate.way, candidate) for candidate in (*fitting, *failing)]
    considered = _others(computed, question, best_candidate, level)
    if advise and question.engine == "graft" and question.algorithm == "sft" and gpu is not None:
        # What transformers and PEFT would make of a run that was asked of `graft train`.
        hf_question = question.model_copy(update={"engine": "hf"})
        if elsewhere := search(hf_question, rates=rates, level=level)[0]:
            best = min(elsewhere, key=preference)
            considered += (consider(best, hf_question, name=name_of(best, hf_question), level=level),)
    steps, spread = steps_of(question), time_spread(question, level)
    step = Figure.about(best_candidate.seconds_per_step, down=1 / spread, up=spread, unit="s")
    parameters = total_parameters(question.shape)
    start = start_seconds(kind_of(question), parameters=parameters, tuning=best_candidate.tuning)
    run = _minutes(step, steps, fixed=start)
    return FitAnswer(
        question=question,
        fits=good,
        certainty=level,
        total_parameters=Figure.exact(parameters),
        trainable_parameters=Figure.exact(trained(question)),
        peak_allocated_gib=allocated_figure(best_candidate, level),
        peak_reserved_gib=reserved_figure(best_candidate, question, level),
        gpu_gib=gpu_room(question, gpus=best_candidate.way.shared.gpus),
        host_gib=best_candidate.host,
        parts_gib=_parts(best_candidate, level),
        tokens_per_second=speed_figure(best_candidate, question, level),
        step_seconds=step,
        steps=Figure.exact(steps, "steps"),
        epoch_minutes=_minutes(step, steps / question.epochs, fixed=0.0),
        run_minutes=run,
        late_oom_chance=_late(question, best_candidate, level),
        strategy=strategy_of(best_candidate, question),
        others=tuple(option.strategy for option in considered if option.fits),
        reasons=give_reasons(question, best_candidate, considered, good=good),
        verdict=give_verdict(question, best_candidate, level=level, good=good, minutes=run),
        step_parts_seconds={
            name: Figure.about(seconds, down=1 / spread, up=spread, unit="s")
            for name, seconds in sorted(best_candidate.step_parts.items(), key=lambda part: -part[1])
        },
        considered=considered,
        remedies=remedies,
    )


def steps_of(question: FitQuestion) -> int:
    """Return the number of steps of the run. GRPO learns from the answers to all prompts, DPO from both
    replies of a pair.
    """
    times = {"sft": 1, "dpo": 2, "grpo": question.generations}[question.algorithm]
    return max(-(-round(question.rows * times * question.epochs) // question.batch_size), 1)


def level_of(question: FitQuestion, rates: StepRates | None) -> Level:
    """Confidence in the figures without a trace."""
    own_step = question.engine == "graft" and question.machine.gpus == 1 and why_plain(question) is None
    # graft's own step is counted tensor by tensor for every family that it computes.
    if question.machine.gpu is not None and memory_level(question.architecture) == "guessed" and not own_step:
        return "guessed"
    return "probed" if rates is not None and rates.certainty == "probed" else "computed"


def ways_of(question: FitQuestion) -> tuple[FitQuestion, ...]:
    """With preferences and reinforcement learning, `graft train` uses one GPU of several; TRL, with
    transformers and PEFT, uses all of them.
    """
    shared = question.model_copy(update={"engine": "hf"})
    if question.algorithm == "sft" or question.machine.gpus <= 1:
        return (question,)
    if question.engine == "hf":
        return (shared,)
    machine = question.machine.model_copy(update={"gpus": 1})
    return question.model_copy(update={"machine": machine}), shared


def compare_engines(best: FitAnswer, runner_up: FitAnswer, *, gpus: int) -> FitAnswer:
    """The answer of the better engine, with the other one among the alternatives."""
    own_only = best.question.engine == "graft"
    names = ("graft train on one GPU", f"TRL on {gpus} GPUs")
    mine, rival_name = names if own_only else reversed(names)
    reasons = []
    if best.fits and runner_up.fits:
        times = runner_up.run_minutes.value / best.run_minutes.value
        reasons.append(f"{mine} is {times:.1f} × as fast as {rival_name}")
    elif best.fits:
        reasons.append(f"{rival_name} does not fit")
    if own_only:
        idle = "the other GPU stays" if gpus == 2 else f"the other {gpus - 1} GPUs stay"
        write = (
            ", or let a server write the answers (`train.rollouts.endpoint`)"
            if best.question.algorithm == "grpo"
            else ""
        )
        reasons.append(f"{idle} idle: train something else there{write}")
    else:
        reasons.append("the seconds of TRL are derived, not measured")
    considered = Considered(
        name=rival_name,
        fits=runner_up.fits,
        peak_reserved_gib=runner_up.peak_reserved_gib,
        gpu_gib=runner_up.gpu_gib,
        host_gib=runner_up.host_gib,
        tokens_per_second=runner_up.tokens_per_second,
        strategy=runner_up.strategy,
    )
    return best.model_copy(
        update={
            "reasons": (*reasons, *best.reasons),
            "considered": (considered, *best.considered)[:SHOWN],
            "others": ((runner_up.strategy,) if runner_up.fits else ()) + best.others,
        }
    )


def weigh(
    fitting: Sequence[FitCandidate],
    failing: Sequence[FitCandidate],
    question: FitQuestion,
    *,
    level: Level,
    rates: StepRates | None,
    correction: float = 1.0,
) -> tuple[FitCandidate, list[FitCandidate]]:
    """The fastest that fits, computed tensor by tensor; else the one closest to fitting. And all that were
    computed so.
    """

    def exactly(one: FitCandidate) -> FitCandidate:
        if one.setup is None or rates is None:
            return one
        return plain_candidate(question, one.way, rates=rates, correction=correction, exact=True)

    def lacking(one: FitCandidate) -> float:
        return max(gpu_excess(one, question, level), 0.0) + max(host_excess(one, question), 0.0)

    exact: list[FitCandidate] = []
    best: FitCandidate | None = None
    for candidate in sorted(fitting, key=preference):
        # With GRPO, less room than it seemed means more rounds of answers: exactly, it may be slower.
        if best is not None and preference(best)[:-1] <= preference(candidate)[:-1]:
            break
        exact.append(exactly(candidate))
        if fits(exact[-1], question, level):
            best = exact[-1] if best is None else min(best, exact[-1], key=preference)
    if best is None:
        exact += [exactly(item) for item in sorted(failing, key=lacking)[:1]]
        best = min(exact, key=lacking)
    return best, exact


def _minutes(step: Figure, steps: float, *, fixed: float) -> Figure:
    value, low, high = (((block * steps) + fixed) / 60 for block in (step.value, step.low, step.high))
    return Figure(value=value, low=low, high=high, unit="min")


def _parts(candidate: FitCandidate, level: Level) -> dict[str, Figure]:
    """The allocated bytes by purpose, then the allocator's overhead."""
    spread = RESERVED_SPREAD[level]
    exact = ("weights", "adapters", "optimizer", "gradients")
    parts = {}
    for name, size in sorted(candidate.peak.parts.items(), key=lambda part: -part[1]):
        if size > 0:
            wide = 0.01 if name in exact else spread
            parts[name] = Figure.about(size / GIB, down=1 - wide, up=1 + wide, unit="GiB")
    unallocated = max(candidate.peak.reserved - candidate.peak.allocated, 0.0) / GIB
    parts["allocator"] = Figure(value=unallocated, low=0.0, high=2 * unallocated, unit="GiB")
    return parts


def _late(question: FitQuestion, candidate: FitCandidate, level: Level) -> Figure:
    """Probability that a batch of long rows runs out of memory after a good start, over the range of the true
    peak.
    """
    room = gpu_room(question, gpus=candidate.way.shared.gpus).value * GIB
    lasting = sum(candidate.peak.parts.get(name, 0.0) for name in ("weights", "adapters", "optimizer"))
    rows = candidate.way.micro_rows if not candidate.way.own_step else 1

    def chance(spread: float) -> float:
        peaks = truths(candidate.floor, spread=spread)
        longest = max(question.lengths)
        fitting = [
            length_that_fits(room=room, floor=lasting, at_longest=peak, longest=longest) for peak in peaks
        ]
        return late_chance(
            question.lengths,
            rows_in_run=question.rows,
            rows_at_once=rows,
            largest_that_fits=fitting,
        )

    spread = RESERVED_SPREAD[level]
    values = sorted((chance(0.0), chance(spread), chance(2 * spread)))
    return Figure(value=chance(spread), low=values[0], high=values[-1])


def _others(
    computed: Sequence[FitCandidate], question: FitQuestion, chosen: FitCandidate, level: Level
) -> tuple[Considered, ...]:
    """The best of each kind that was not chosen: those that fit by speed, then those that do not by need."""
    fitting = [item for item in computed if fits(item, question, level)]
    failing = [item for item in computed if not fits(item, question, level)]
    best: dict[str, FitCandidate] = {}
    for item in (
        *sorted(fitting, key=preference),
        *sorted(failing, key=lambda item: item.peak.reserved),
    ):
        best.setdefault(name_of(item, question), item)
    best.pop(name_of(chosen, question), None)
    return tuple(
        consider(item, question, name=name, level=level) for name, item in list(best.items())[:SHOWN]
    )


GRAFT, DEEPSPEED, ACCELERATE = "graft.train.yaml", "ds_config.json", "accelerate.yaml"
CLIPPING = 1.0
BUCKET = 500_000_000
LEARNING_RATES = {"full": 1e-5, "lora": 2e-4, "qlora": 2e-4, "dora": 2e-4}
"""Usual starting values; not a finding of ours."""


def settings_files(answer: FitAnswer) -> dict[str, str]:
    """All configuration files for this strategy."""
    files = {
        DEEPSPEED: json.dumps(deepspeed_config(answer), indent=2) + "\n",
        ACCELERATE: _yaml(accelerate_config(answer), title=_title(answer)),
    }
    if answer.strategy.train:
        files[GRAFT] = _yaml(graft_sections(answer), title=_title(answer))
    return files


def graft_sections(answer: FitAnswer) -> dict[str, Any]:
    """The sections to add to graft.yaml."""
    sections: dict[str, Any] = {"train": dict(answer.strategy.train)}
    planned = answer.strategy.tuning or answer.strategy.streamed
    limit = planned.limit_gib if planned is not None else answer.question.memory_limit_gib
    if limit is not None:
        # Without one, the trainer takes 94 % of the GPU.
        sections["plan"] = {"memory_limit_gib": math.floor(100 * limit + 1e-6) / 100}
    return sections


def deepspeed_config(answer: FitAnswer) -> dict[str, Any]:
    """DeepSpeed's configuration. Stage 0 if nothing is sharded: then it is equivalent to DDP."""
    strategy, question = answer.strategy, answer.question
    gpus = gpus_of(answer)
    stage = {"zero2": 2, "zero3": 3, "fsdp2": 3}.get(strategy.sharding, 0)
    zero: dict[str, Any] = {"stage": stage}
    if stage:
        zero |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": BUCKET}
        if strategy.offload != "none":
            zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if stage == 3 and strategy.offload == "weights":
            zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    micro, accumulation = strategy.micro_rows, strategy.accumulation
    config: dict[str, Any] = {
        "train_batch_size": micro * accumulation * gpus,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": CLIPPING,
        "bf16": {"enabled": strategy.precision == "bfloat16"},
        "fp16": {"enabled": strategy.precision == "float16"},
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
    }
    if question.method == "full":
        config["optimizer"] = {"type": "AdamW", "params": {"lr": LEARNING_RATES["full"], "weight_decay": 0.0}}
    return config


def accelerate_config(answer: FitAnswer) -> dict[str, Any]:
    """Configuration for `accelerate launch --config_file`."""
    strategy, gpus = answer.strategy, gpus_of(answer)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": {"zero2": "DEEPSPEED", "zero3": "DEEPSPEED", "fsdp2": "FSDP"}.get(
            strategy.sharding, "MULTI_GPU" if gpus > 1 else "NO"
        ),
        "mixed_precision": {"bfloat16": "bf16", "float16": "fp16", "float32": "no"}[strategy.precision],
        "num_machines": 1,
        "num_processes": gpus,
        "machine_rank": 0,
        "main_training_function": "main",
        "use_cpu": answer.question.machine.gpu is None,
    }
    if strategy.sharding in ("zero2", "zero3"):
        # The rest is in DeepSpeed's own file; accelerate refuses settings that are in both.
        del config["mixed_precision"]
        config["deepspeed_config"] = {
            "deepspeed_config_file": DEEPSPEED,
            "zero3_init_flag": strategy.sharding == "zero3",
        }
    if strategy.sharding == "fsdp2":
        config["fsdp_config"] = {
            "fsdp_version": 2,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "fsdp_reshard_after_forward": True,
            "fsdp_offload_params": strategy.offload == "weights",
            "fsdp_cpu_ram_efficient_loading": True,
            "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            "fsdp_activation_checkpointing": strategy.checkpointed_layers > 0,
        }
    return config


def gpus_of(answer: FitAnswer) -> int:
    """GPUs that the strategy uses."""
    return answer.question.machine.gpus if answer.strategy.sharding != "none" else 1


def _title(answer: FitAnswer) -> str:
    strategy = answer.strategy
    return (
        f"# {answer.verdict}\n"
        f"# {strategy.micro_rows} row(s) at a time × {strategy.accumulation} × {gpus_of(answer)} GPU(s); "
        f"{answer.certainty} by `graft plan fit`\n"
    )


def _yaml(content: dict[str, Any], *, title: str) -> str:
    import yaml

    return title + yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
