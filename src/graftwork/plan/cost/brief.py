"""The fit in short: whether a run fits a machine, how and for how long; without ranges of parts and remedies.

In: a question. Out: what costs need of its answer, for a hundred machines in the time of a few whole answers.
Takes the same ways as `plan.fit.answer.fit` and chooses as it does; where `graft train` itself has no way
that fits, transformers and PEFT are asked too, and the strategy says so.
"""

from functools import lru_cache
from typing import NamedTuple

from graftwork.plan.fit.answer import LOAD_SECONDS, as_done, choose
from graftwork.plan.fit.candidate import TIME_SPREAD, card_excess, fits, host_excess, reserved_figure
from graftwork.plan.fit.describe import strategy_of
from graftwork.plan.fit.room import card_room, host_room
from graftwork.plan.fit.strategies import search
from graftwork.plan.timing.rates import rates_of
from graftwork.records.base import Figure
from graftwork.records.errors import UserMistake
from graftwork.records.fit import FitQuestion, Level, Strategy

LEVEL: Level = "computed"


class Brief(NamedTuple):
    """What a machine makes of a run."""

    question: FitQuestion
    fits: bool
    why_not: str
    hours: Figure
    steps: float
    strategy: Strategy


def fit_in_brief(question: FitQuestion) -> Brief:
    """The best way of the engine asked for, as `fit` finds it; of transformers, where our own has none."""
    question = as_done(question)
    found = _known(question)
    if question.engine == "hf" or found.fits:
        return found
    other = _known(question.model_copy(update={"engine": "hf"}))
    return other if other.fits else found


def _known(question: FitQuestion) -> Brief:
    return _by_text(question.model_dump_json())


@lru_cache(maxsize=1024)
def _by_text(question: str) -> Brief:
    return _by(FitQuestion.model_validate_json(question))


def _by(question: FitQuestion) -> Brief:
    gpu = question.machine.gpu
    if gpu is None:
        raise UserMistake("a machine without a card is not compared", fix="name a card", where="--gpu")
    rates = rates_of(gpu)
    searched = search(question, rates=rates, level=LEVEL)
    chosen = choose(searched, question, level=LEVEL, rates=rates, correction=1.0)
    good = fits(chosen, question, LEVEL)
    answers = question.generations if question.algorithm == "grpo" else 1
    steps = max(-(-round(question.rows * answers * question.epochs) // question.batch_rows), 1)
    spread = TIME_SPREAD[LEVEL]
    seconds = chosen.seconds_a_step * steps
    hours = Figure(
        value=(seconds + LOAD_SECONDS) / 3600,
        low=(seconds / spread + LOAD_SECONDS) / 3600,
        high=(seconds * spread + LOAD_SECONDS) / 3600,
        unit="h",
    )
    reason = ""
    if card_excess(chosen, question, LEVEL) > 0:
        room = card_room(question, cards=chosen.way.shared.cards).value
        reason = f"takes up to {reserved_figure(chosen, question, LEVEL).high:.1f} of {room:.1f} GiB"
    elif host_excess(chosen, question) > 0:
        reason = f"takes {chosen.host.value:.0f} of {host_room(question):.0f} GiB of host memory"
    return Brief(
        question=question,
        fits=good,
        why_not=reason,
        hours=hours,
        steps=float(steps),
        strategy=strategy_of(chosen, question),
    )
