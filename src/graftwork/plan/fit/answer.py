"""Answers `graft plan fit`: the fastest strategy that fits, or by how much none does. Pure.

In: a question; rates of a probe and a traced peak where there are any. Out: a FitAnswer, every figure with a
range: the reasons for the strategy in sentences, and where nothing fits, what would, one change at a time,
each computed. Reads only the shipped catalogs, for models that would fit instead.
"""

from collections.abc import Iterator
from typing import NamedTuple

from graftwork.costmodel.rates import StepRates, rates_of
from graftwork.costmodel.run_time import start_seconds
from graftwork.costmodel.streamed import describe_streamed
from graftwork.model.shape import describe_experts, linear_names, total_parameters
from graftwork.plan.catalog.models import CatalogModel, list_models
from graftwork.plan.catalog.quantization import describe_trade
from graftwork.plan.fit import plain_step
from graftwork.plan.fit.candidate import (
    RESERVED_SPREAD,
    FitCandidate,
    allocated_figure,
    card_excess,
    consider,
    fits,
    host_excess,
    is_tight,
    memory_level,
    name_of,
    preference,
    reserved_figure,
    speed_figure,
    strategy_of,
    time_spread,
)
from graftwork.plan.fit.own_step import loading_gib, may_fit, own_limit
from graftwork.plan.fit.plain_step import padded_gb, plain_candidate, trained
from graftwork.plan.fit.question import (
    card_room,
    half_precision,
    kind_of,
    late_chance,
    length_that_fits,
    truths,
    why_plain,
)
from graftwork.plan.fit.search import Searched, search, takes_own_step
from graftwork.records.base import Figure
from graftwork.records.plan import Considered, FitAnswer, FitQuestion, Level, Method, ModelShape, Tuning
from graftwork.records.units import GIB

HOUR = 60.0
NIGHT_HOURS = 8


def give_verdict(
    question: FitQuestion, chosen: FitCandidate, *, level: Level, good: bool, minutes: Figure
) -> str:
    """The answer in one sentence."""
    machine, need = question.machine.name, reserved_figure(chosen, question, level)
    room = card_room(question, cards=chosen.way.shared.cards)
    what = f"{question.model} by {question.method} ({question.algorithm.upper()})"
    where = (
        "in memory"
        if question.machine.gpu is None
        else "of each card"
        if chosen.way.shared.cards > 1
        else "of the card"
    )
    if good:
        tight = ", tight on host memory" if is_tight(chosen, question) and question.machine.gpu else ""
        return (
            f"{what} fits {machine}{tight}: {need.value:.1f} of {room.value:.1f} GiB {where}, "
            f"{chosen.tokens_per_second:,.0f} tokens/s, {say_time(minutes.value)} for the run."
        )
    lacking = []
    if (over := card_excess(chosen, question, level)) > 0:
        lacking.append(
            f"{over:.1f} GiB are lacking {where} ({need.high:.1f} may be needed, {room.value:.1f} are there)"
        )
    if (over := host_excess(chosen, question)) > 0:
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
    chosen: FitCandidate,
    considered: tuple[Considered, ...],
    *,
    level: Level,
    good: bool,
) -> tuple[str, ...]:
    reasons = [*_about_the_step(question, chosen), *_about_the_cards(question, chosen)]
    if chosen.way.shared.offload != "none":
        reasons += _about_the_host(question, chosen)
    if question.algorithm == "grpo":
        reasons += [*plain_step.say_why(question), *_prompts_a_night(question, chosen)]
    if good:
        reasons += _compared_with_others(question, chosen, considered)
    if not good:
        reasons.append(
            "a smaller batch would not help: this is with one row at a time already"
            if chosen.way.micro_rows == 1 or chosen.tuning is not None
            else "fewer rows at a time would help"
        )
    return tuple(reasons)


def _prompts_a_night(question: FitQuestion, chosen: FitCandidate) -> list[str]:
    a_prompt = chosen.seconds_a_step * question.generations / question.batch_rows
    writing = sum(chosen.step_parts.get(name, 0.0) for name in ("generation", "reading prompts"))
    graded = chosen.step_parts.get("rewards", 0.0)
    rewards = f"{graded / chosen.seconds_a_step:.0%} for rewards" if graded else "rewards not counted"
    return [
        f"{a_prompt:.1f} s a prompt, {writing / chosen.seconds_a_step:.0%} of it for writing answers: "
        f"{NIGHT_HOURS * 3600 / a_prompt:,.0f} prompts in {NIGHT_HOURS} hours, {rewards}"
    ]


def _compared_with_others(
    question: FitQuestion, chosen: FitCandidate, considered: tuple[Considered, ...]
) -> list[str]:
    """How much faster it is than the next, and where another engine would be faster still."""
    ours = chosen.tokens_per_second
    same = [option for option in considered if option.fits and option.strategy.engine == chosen.way.engine]
    reasons = []
    if same and ours > 1.005 * same[0].tokens_per_second.value:
        gain = ours / same[0].tokens_per_second.value - 1
        reasons.append(f"{name_of(chosen, question)} is {100 * gain:.0f} % faster than {same[0].name}")
    for option in considered:
        if (
            option.fits
            and option.strategy.engine != chosen.way.engine
            and option.tokens_per_second.value > ours
        ):
            speed = option.tokens_per_second.value
            reasons.append(f"{option.name} would do {speed:,.0f} tokens/s: see it with --engine hf")
    return reasons


def _about_the_step(question: FitQuestion, chosen: FitCandidate) -> list[str]:
    gpu, reasons = question.machine.gpu, []
    if question.algorithm != "sft" and chosen.way.own_step:
        reasons.append(
            "writing answers was timed on one H200 only (135M and 7.6B); other cards are computed from it"
            if question.algorithm == "grpo"
            else "not run on a card yet: comparing is computed, not measured"
        )
    if gpu is not None and half_precision(question) == "float16":
        more = "; it has no tensor cores either" if gpu.capability < 7.0 else ""
        reasons.append(f"{gpu.name} has no bfloat16: float16 with loss scaling{more}")
    if (
        question.engine == "graft"
        and gpu is not None
        and question.algorithm == "sft"
        and not chosen.way.own_step
        and chosen.streamed is None
    ):
        why = why_plain(question) or "several cards share the run"
        how = "with" if chosen.way.checkpointed else "without"
        rows = f"{chosen.way.micro_rows} row{'s' * (chosen.way.micro_rows != 1)} at a time"
        reasons.append(f"the plain step, {how} checkpointing, {rows}: {why}")
    if chosen.streamed is not None:
        reasons.append(
            f"{describe_streamed(chosen.streamed)}; all rows of a step go through a layer before the next is "
            "fetched"
        )
    if chosen.tuning is not None:
        tuning = chosen.tuning
        again = question.adapted_layers - tuning.keep - tuning.lean
        reasons.append(
            f"activations: {tuning.keep} layers keep all, {tuning.lean} all but the widest tensor, {again} "
            "recompute them; training measures its first step and recomputes more layers if memory is short"
        )
        reasons += _about_loading(question, tuning)
        if tuning.form != "whole":
            reasons.append(describe_trade(tuning.form))
    experts = describe_experts(question.shape, adapted=question.experts, four_bits=question.method == "qlora")
    return reasons if experts is None else [*reasons, experts]


def _about_loading(question: FitQuestion, tuning: Tuning) -> list[str]:
    """Where weights need more room on their way onto the card than the step does."""
    room, taken = own_limit(question), loading_gib(question, tuning)
    if taken <= room:
        return []
    return [f"loading alone takes {taken:.1f} GiB of the card, and there are {room:.1f}"]


def _about_the_cards(question: FitQuestion, chosen: FitCandidate) -> list[str]:
    cards, used = question.machine.gpus, chosen.way.shared.cards
    reasons = []
    if question.machine.gpu is not None and used < cards:
        reasons.append(
            f"{cards - used} of {cards} cards stay idle: with this engine, no strategy over all of them fits "
            "and is faster; use each card for a separate run"
        )
    sent = chosen.step_parts.get("link between cards", 0.0)
    if used > 1:
        reasons.append(
            f"{100 * sent / chosen.seconds_a_step:.0f} % of a step is waiting for the link between cards"
        )
    if used > 1 and question.method == "qlora":
        reasons.append("4-bit weights cannot be cut up: each card holds the whole base (DDP)")
    return reasons


def _about_the_host(question: FitQuestion, chosen: FitCandidate) -> list[str]:
    ram = question.machine.ram_gib
    how = "tight" if is_tight(chosen, question) else "enough"
    moved = chosen.step_parts.get("host transfers", 0.0) / chosen.seconds_a_step
    adam = chosen.step_parts.get("optimizer", 0.0) / chosen.seconds_a_step
    streamed = chosen.streamed
    where = "waiting for Adam" if streamed is not None else "Adam on the processor"
    reasons = [
        f"host memory is {how}: {chosen.host.low:.0f} to {chosen.host.high:.0f} GiB of {ram:.0f} installed",
        f"{100 * moved:.0f} % of a step is waiting for transfers to and from the host, "
        f"{100 * adam:.0f} % is {where}",
    ]
    if question.method == "full" and streamed is None:
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
CARDS = (2, 3, 4, 8)
SHORTEST, GRAIN = 128, 64
TRIED_EXACTLY, SHORTER = 4, 0.9
SMALLER_TRIED = 2
LEAST_SHARE = 0.75
"""Of a card, what weights may take where anything is to be learned with the rest."""


ROOMY = 0.12
"""Of a card, what must stay free for straight lines to be trusted without a count to the tensor."""


class QuestionChange(NamedTuple):
    """A question that differs in one thing."""

    says: str
    question: FitQuestion


def find_remedies(question: FitQuestion, *, rates: StepRates | None, level: Level) -> tuple[Considered, ...]:
    """Each kind of change that makes it fit, the smallest first."""
    found = []
    for change in _changes(question):
        best = _best(change.question, rates=rates, level=level)
        if best is not None:
            found.append(consider(best, change.question, name=change.says, level=level))
    if (shorter := _shorter(question, rates=rates, level=level)) is not None:
        found.insert(min(1, len(found)), shorter)
    for finding in (_more_cards, _smaller_model):
        if (more := finding(question, rates=rates, level=level)) is not None:
            found.append(more)
    return tuple(found)


def _best(question: FitQuestion, *, rates: StepRates | None, level: Level) -> FitCandidate | None:
    gpu = question.machine.gpu
    known = rates or (rates_of(gpu) if gpu is not None else None)
    fitting = search(question, rates=known, level=level).fitting
    for item in sorted(fitting, key=preference)[:TRIED_EXACTLY]:
        exact = item
        roomy = card_excess(item, question, level) < -ROOMY * card_room(question, cards=1).value
        if item.setup is not None and known is not None and not roomy:
            exact = plain_candidate(question, item.way, rates=known, exact=True)
        if fits(exact, question, level):
            return exact
    return None


def _has_room(question: FitQuestion, *, rates: StepRates | None, level: Level) -> bool:
    """Whether anything fits. Our own step is asked by its formula first: the search is the same, and slow."""
    if takes_own_step(question) and may_fit(question, spread=RESERVED_SPREAD[level]):
        return True
    if takes_own_step(question) and question.machine.gpus == 1:
        return False
    gpu = question.machine.gpu
    known = rates or (rates_of(gpu) if gpu is not None else None)
    return bool(search(question, rates=known, level=level, own_step=False).fitting)


def _changes(question: FitQuestion) -> Iterator[QuestionChange]:
    for method in LIGHTER[question.method]:
        yield QuestionChange(
            f"{method} instead of {question.method}", question.model_copy(update={"method": method})
        )
    if question.offload != "auto":
        yield QuestionChange(
            f"offload auto instead of {question.offload}", question.model_copy(update={"offload": "auto"})
        )
    if question.engine == "graft" and question.machine.gpu is not None:
        yield QuestionChange(
            "transformers + PEFT instead of graft train (--engine hf)",
            question.model_copy(update={"engine": "hf"}),
        )
    if question.optimizer != "adamw_8bit" and question.method == "full" and question.machine.gpu is not None:
        yield QuestionChange(
            "the 8-bit AdamW (--optimizer adamw_8bit), with --engine hf",
            question.model_copy(update={"optimizer": "adamw_8bit", "engine": "hf"}),
        )


def cut_at(question: FitQuestion, most: int) -> FitQuestion:
    """The question with rows of at most so many tokens."""
    lengths = tuple(min(length, most) for length in question.lengths)
    update: dict[str, object] = {"lengths": lengths}
    if question.algorithm == "grpo":
        update["completion_tokens"] = max(most - question.prompt_tokens, 1)
    return question.model_copy(update=update)


def _shorter(question: FitQuestion, *, rates: StepRates | None, level: Level) -> Considered | None:
    """The longest rows that fit, to 64 tokens."""
    low = (SHORTEST + (question.prompt_tokens if question.algorithm == "grpo" else 0)) // GRAIN
    high = (max(question.lengths) - 1) // GRAIN
    found: int | None = None
    while low <= high:
        middle = (low + high) // 2
        if _has_room(cut_at(question, middle * GRAIN), rates=rates, level=level):
            found, low = middle * GRAIN, middle + 1
        else:
            high = middle - 1
    best = None
    for _ in range(TRIED_EXACTLY):
        if found is None or best is not None:
            break
        best = _best(cut_at(question, found), rates=rates, level=level)
        # The search goes by straight lines: where they were too low, a tenth shorter is tried.
        found = found if best is not None else int(SHORTER * found) // GRAIN * GRAIN or None
    if found is None or best is None:
        return None
    most = found
    longer = sum(length > most for length in question.lengths) / len(question.lengths)
    cut = "every row" if longer == 1 else f"{100 * longer:.1f} % of the rows"
    return consider(
        best, cut_at(question, most), name=f"rows of at most {most:,} tokens (cuts {cut})", level=level
    )


def _more_cards(question: FitQuestion, *, rates: StepRates | None, level: Level) -> Considered | None:
    machine = question.machine
    if machine.gpu is None:
        return None
    for cards in CARDS:
        if cards > machine.gpus:
            more = question.model_copy(update={"machine": machine.model_copy(update={"gpus": cards})})
            if (best := _best(more, rates=rates, level=level)) is not None:
                return consider(best, more, name=f"{cards} cards instead of {machine.gpus}", level=level)
    return None


def _smaller_model(question: FitQuestion, *, rates: StepRates | None, level: Level) -> Considered | None:
    """The largest of the catalog that fits, of the same family of names first."""
    here = total_parameters(question.shape)
    room = card_room(question, cards=1).value * GIB
    smaller = sorted(
        (model for model in list_models() if total_parameters(model.shape) < 0.95 * here),
        key=lambda model: (_shared_name(model, question), total_parameters(model.shape)),
        reverse=True,
    )
    tried = 0
    for model in smaller:
        if least_bytes(model.shape, question.method) > room or tried == SMALLER_TRIED:
            continue
        tried += 1
        other = question.model_copy(
            update={
                "model": model.name,
                "shape": model.shape,
                "architecture": model.architecture,
                "targets": linear_names(model.shape),
                "adapted_layers": model.shape.layers,
            }
        )
        if (best := _best(other, rates=rates, level=level)) is not None:
            return consider(best, other, name=f"{model.name} instead of {question.model}", level=level)
    return None


def least_bytes(shape: ModelShape, method: Method) -> float:
    """Of the weights alone, what a card must hold of a model at the very least."""
    a_weight = {"qlora": 0.5, "full": 0.0}.get(method, 1.0)
    return a_weight * total_parameters(shape) / LEAST_SHARE


def _shared_name(model: CatalogModel, question: FitQuestion) -> int:
    """How much of its name a model shares with the asked one."""
    ours, theirs = question.model.lower().split("-"), model.name.lower().split("-")
    return next((at for at, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(theirs))


SHOWN = 6


def fit(
    question: FitQuestion,
    *,
    rates: StepRates | None = None,
    correction: float = 1.0,
    level: Level | None = None,
    advise: bool = True,
) -> FitAnswer:
    """`correction` is a traced peak over the computed one of the same setup.

    Without `advise`, neither remedies nor other engines are tried: for callers with many questions.
    """
    ways = ways_of(question)
    if len(ways) == 1:
        return _fit(ways[0], rates=rates, correction=correction, level=level, advise=advise)
    answers = [_fit(way, rates=rates, correction=correction, level=level, advise=False) for way in ways]
    best, other = sorted(answers, key=lambda answer: (not answer.fits, answer.run_minutes.value))
    if advise and not best.fits:
        best = _fit(best.question, rates=rates, correction=correction, level=level, advise=True)
    return compare_engines(best, other, cards=question.machine.gpus)


def _fit(
    question: FitQuestion,
    *,
    rates: StepRates | None,
    correction: float,
    level: Level | None,
    advise: bool,
) -> FitAnswer:
    gpu = question.machine.gpu
    known = rates or (rates_of(gpu) if gpu is not None else None)
    certainty = level or level_of(question, known)
    searched = search(question, rates=known, level=certainty, correction=correction)
    chosen, exact = weigh(searched, question, level=certainty, rates=known, correction=correction)
    searched = _as_weighed(searched, exact, question, level=certainty)
    good = fits(chosen, question, certainty)
    remedies = () if good or not advise else find_remedies(question, rates=rates, level=certainty)
    elsewhere = _with_transformers(question, certainty, known) if advise else ()
    considered = (*_others(searched, question, chosen, certainty), *elsewhere)
    return _answer(question, chosen, considered, good=good, level=certainty, remedies=remedies)


def level_of(question: FitQuestion, rates: StepRates | None) -> Level:
    """How sure the figures are without a trace."""
    own = question.engine == "graft" and question.machine.gpus == 1 and why_plain(question) is None
    # graft's own step is counted tensor by tensor for every family that it computes.
    if question.machine.gpu is not None and memory_level(question.architecture) == "guessed" and not own:
        return "guessed"
    return "probed" if rates is not None and rates.certainty == "probed" else "computed"


def ways_of(question: FitQuestion) -> tuple[FitQuestion, ...]:
    """With preferences and reinforcement learning, `graft train` takes one card of several; TRL, with
    transformers and PEFT, takes all of them."""
    shared = question.model_copy(update={"engine": "hf"})
    if question.algorithm == "sft" or question.machine.gpus <= 1:
        return (question,)
    if question.engine == "hf":
        return (shared,)
    machine = question.machine.model_copy(update={"gpus": 1})
    return question.model_copy(update={"machine": machine}), shared


def compare_engines(best: FitAnswer, other: FitAnswer, *, cards: int) -> FitAnswer:
    """The answer of the better engine, with the other one among those that were considered."""
    alone = best.question.engine == "graft"
    names = ("graft train on one card", f"TRL on {cards} cards")
    mine, others = names if alone else reversed(names)
    reasons = []
    if best.fits and other.fits:
        times = other.run_minutes.value / best.run_minutes.value
        reasons.append(f"{mine} is {times:.1f} × as fast as {others}")
    elif best.fits:
        reasons.append(f"{others} does not fit")
    if alone:
        rest = "the other card stays" if cards == 2 else f"the other {cards - 1} cards stay"
        write = (
            ", or let a server write the answers (`train.rollouts.endpoint`)"
            if best.question.algorithm == "grpo"
            else ""
        )
        reasons.append(f"{rest} idle: train something else there{write}")
    else:
        reasons.append("the seconds of TRL are derived, not measured")
    considered = Considered(
        name=others,
        fits=other.fits,
        peak_reserved_gib=other.peak_reserved_gib,
        card_gib=other.card_gib,
        host_gib=other.host_gib,
        tokens_per_second=other.tokens_per_second,
        strategy=other.strategy,
    )
    return best.model_copy(
        update={
            "reasons": (*reasons, *best.reasons),
            "considered": (considered, *best.considered)[:SHOWN],
            "others": ((other.strategy,) if other.fits else ()) + best.others,
        }
    )


class Weighed(NamedTuple):
    """The candidate that is chosen, and all that were computed tensor by tensor."""

    best: FitCandidate
    exact: tuple[FitCandidate, ...]


def choose(
    searched: Searched, question: FitQuestion, *, level: Level, rates: StepRates | None, correction: float
) -> FitCandidate:
    """The fastest that fits, computed tensor by tensor; else the one that lacks the least."""
    return weigh(searched, question, level=level, rates=rates, correction=correction).best


def weigh(
    searched: Searched, question: FitQuestion, *, level: Level, rates: StepRates | None, correction: float
) -> Weighed:
    """As `choose`, with the candidates that did not fit once they were computed tensor by tensor."""

    def exactly(one: FitCandidate) -> FitCandidate:
        if one.setup is None or rates is None:
            return one
        return plain_candidate(question, one.way, rates=rates, correction=correction, exact=True)

    def lacking(one: FitCandidate) -> float:
        return max(card_excess(one, question, level), 0.0) + max(host_excess(one, question), 0.0)

    exact: list[FitCandidate] = []
    best: FitCandidate | None = None
    for candidate in sorted(searched.fitting, key=preference):
        # With GRPO, less room than it seemed means more rounds of answers: exactly, it may be slower.
        if best is not None and preference(best)[:-1] <= preference(candidate)[:-1]:
            break
        exact.append(exactly(candidate))
        if fits(exact[-1], question, level):
            best = exact[-1] if best is None else min(best, exact[-1], key=preference)
    if best is None:
        exact += [exactly(item) for item in sorted(searched.failing, key=lacking)[:1]]
        best = min(exact, key=lacking)
    return Weighed(best, tuple(exact))


def _answer(
    question: FitQuestion,
    chosen: FitCandidate,
    considered: tuple[Considered, ...],
    *,
    good: bool,
    level: Level,
    remedies: tuple[Considered, ...],
) -> FitAnswer:
    speed = speed_figure(chosen, question, level)
    steps = max(-(-_rows_of_run(question) // question.batch_rows), 1)
    spread = time_spread(question, level)
    step = Figure.about(chosen.seconds_a_step, down=1 / spread, up=spread, unit="s")
    fixed = start_seconds(
        kind_of(question),
        parameters=total_parameters(question.shape),
        tuning=chosen.tuning,
    )
    run = _minutes(step, steps, fixed=fixed)
    return FitAnswer(
        question=question,
        fits=good,
        certainty=level,
        total_parameters=Figure.exact(total_parameters(question.shape)),
        trainable_parameters=Figure.exact(trained(question)),
        peak_allocated_gib=allocated_figure(chosen, level),
        peak_reserved_gib=reserved_figure(chosen, question, level),
        card_gib=card_room(question, cards=chosen.way.shared.cards),
        host_gib=chosen.host,
        parts_gib=_parts(chosen, level),
        tokens_per_second=speed,
        step_seconds=step,
        steps=Figure.exact(steps, "steps"),
        epoch_minutes=_minutes(step, steps / question.epochs, fixed=0.0),
        run_minutes=run,
        late_oom_chance=_late(question, chosen, level),
        strategy=strategy_of(chosen, question),
        others=tuple(option.strategy for option in considered if option.fits),
        reasons=give_reasons(question, chosen, considered, level=level, good=good),
        verdict=give_verdict(question, chosen, level=level, good=good, minutes=run),
        step_parts_seconds={
            name: Figure.about(seconds, down=1 / spread, up=spread, unit="s")
            for name, seconds in sorted(chosen.step_parts.items(), key=lambda part: -part[1])
        },
        considered=considered,
        remedies=remedies,
    )


def _rows_of_run(question: FitQuestion) -> int:
    """Rows that are learned from: with GRPO the answers to all prompts, with DPO both replies of a pair."""
    times = {"sft": 1, "dpo": 2, "grpo": question.generations}[question.algorithm]
    return round(question.rows * times * question.epochs)


def _minutes(step: Figure, steps: float, *, fixed: float) -> Figure:
    value, low, high = (((block * steps) + fixed) / 60 for block in (step.value, step.low, step.high))
    return Figure(value=value, low=low, high=high, unit="min")


def _parts(chosen: FitCandidate, level: Level) -> dict[str, Figure]:
    """The allocated bytes by what they are for, then what the allocator takes beyond them."""
    spread = RESERVED_SPREAD[level]
    exact = ("weights", "adapters", "optimizer", "gradients")
    parts = {}
    for name, size in sorted(chosen.peak.parts.items(), key=lambda part: -part[1]):
        if size > 0:
            wide = 0.01 if name in exact else spread
            parts[name] = Figure.about(size / GIB, down=1 - wide, up=1 + wide, unit="GiB")
    beyond = max(chosen.peak.reserved - chosen.peak.allocated, 0.0) / GIB
    parts["allocator"] = Figure(value=beyond, low=0.0, high=2 * beyond, unit="GiB")
    return parts


def _late(question: FitQuestion, chosen: FitCandidate, level: Level) -> Figure:
    """How likely a batch of long rows runs out after a good start, over what the peak may truly be."""
    room = card_room(question, cards=chosen.way.shared.cards).value * GIB
    lasting = sum(chosen.peak.parts.get(name, 0.0) for name in ("weights", "adapters", "optimizer"))
    rows = chosen.way.micro_rows if not chosen.way.own_step else 1

    def chance(spread: float) -> float:
        peaks = truths(chosen.floor, spread=spread)
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


def _as_weighed(
    searched: Searched, exact: tuple[FitCandidate, ...], question: FitQuestion, *, level: Level
) -> Searched:
    """What was searched quickly, with the exact figures where there are some."""
    known = {candidate.way: candidate for candidate in exact}
    found = [known.get(block.way, block) for block in (*searched.fitting, *searched.failing)]
    good = tuple(item for item in found if fits(item, question, level))
    return Searched(good, tuple(item for item in found if not fits(item, question, level)))


def _others(
    searched: Searched, question: FitQuestion, chosen: FitCandidate, level: Level
) -> tuple[Considered, ...]:
    """The best of each kind that was not taken: those that fit by speed, then those that do not by need."""
    found: dict[str, Considered] = {}
    taken = name_of(chosen, question)
    for candidate in sorted(searched.fitting, key=preference):
        name = name_of(candidate, question)
        if name != taken and name not in found:
            found[name] = consider(candidate, question, name=name, level=level)
    for candidate in sorted(searched.failing, key=lambda item: item.peak.reserved):
        name = name_of(candidate, question)
        if name != taken and name not in found:
            found[name] = consider(candidate, question, name=name, level=level)
    return tuple(found.values())[:SHOWN]


def _with_transformers(
    question: FitQuestion, level: Level, rates: StepRates | None
) -> tuple[Considered, ...]:
    """What transformers and PEFT would make of a run that was asked of `graft train`."""
    if question.engine != "graft" or question.algorithm != "sft" or question.machine.gpu is None:
        return ()
    other = question.model_copy(update={"engine": "hf"})
    fitting = search(other, rates=rates, level=level).fitting
    if not fitting:
        return ()
    best = min(fitting, key=preference)
    return (consider(best, other, name=name_of(best, other), level=level),)
