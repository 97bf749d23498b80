"""Answers `graft plan fit`: the fastest strategy that fits, or by how much none does. Pure.

In: a question; rates of a probe and a traced peak where there are any. Out: a FitAnswer, every figure with a
range. Reads only the shipped catalogs, for models that would fit instead.
"""

from typing import NamedTuple

from graftwork.costmodel.rates import StepRates, rates_of
from graftwork.costmodel.run_time import start_seconds
from graftwork.model.shape import total_parameters
from graftwork.plan.fit.candidate import (
    RESERVED_SPREAD,
    FitCandidate,
    allocated_figure,
    card_excess,
    consider,
    fits,
    host_excess,
    memory_level,
    name_of,
    preference,
    reserved_figure,
    speed_figure,
    strategy_of,
    time_spread,
)
from graftwork.plan.fit.plain_step import plain_candidate, trained
from graftwork.plan.fit.question import (
    card_room,
    kind_of,
    late_chance,
    length_that_fits,
    truths,
    why_plain,
)
from graftwork.plan.fit.reasons import give_reasons, give_verdict
from graftwork.plan.fit.remedies import find_remedies
from graftwork.plan.fit.search import Searched, search
from graftwork.records.base import Figure
from graftwork.records.plan import Considered, FitAnswer, FitQuestion, Level
from graftwork.records.units import GIB

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
