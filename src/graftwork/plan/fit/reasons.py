"""The reasons for a strategy and the verdict, in sentences with figures. Pure."""

from graftwork.costmodel.streamed import describe_streamed
from graftwork.model.shape import describe_experts
from graftwork.plan.catalog.quantization import describe_trade
from graftwork.plan.fit import plain_step
from graftwork.plan.fit.candidate import (
    FitCandidate,
    card_excess,
    host_excess,
    is_tight,
    name_of,
    reserved_figure,
)
from graftwork.plan.fit.own_step import loading_gib, own_limit
from graftwork.plan.fit.plain_step import padded_gb
from graftwork.plan.fit.question import card_room, half_precision, why_plain
from graftwork.records.base import Figure
from graftwork.records.plan import Considered, FitQuestion, Level, Tuning

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
