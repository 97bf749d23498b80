"""The run on each machine, by asking the fit: whether it fits, hours, steps, the strategy.

In: a question, a card. Out: a CardRun. Hours that the user measured on one card replace our own level: other
cards keep their ratio to it. Where `graft train` has no strategy that fits, transformers and PEFT are tried.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

from graftwork.costmodel.rates import rates_of
from graftwork.costmodel.run_time import start_seconds
from graftwork.model.shape import total_parameters
from graftwork.plan.catalog.hardware import USUAL_RAM_GIB
from graftwork.plan.cost.bill import CardRun
from graftwork.plan.fit.answer import choose, level_of, ways_of
from graftwork.plan.fit.candidate import (
    TIME_SPREAD,
    card_excess,
    fits,
    host_excess,
    reserved_figure,
    strategy_of,
)
from graftwork.plan.fit.plain_step import trained
from graftwork.plan.fit.question import card_room, host_room
from graftwork.plan.fit.search import search
from graftwork.records.base import Figure
from graftwork.records.errors import UserMistake
from graftwork.records.hardware import Gpu, Machine
from graftwork.records.plan import FitQuestion, Strategy


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
    ways = ways_of(question)
    if len(ways) == 1 and question.engine == "graft":
        # Of several ways one is with transformers already.
        found = _known(ways[0])
        ways = ways if found.fits else (*ways, question.model_copy(update={"engine": "hf"}))
    best = min(map(_known, ways), key=lambda brief: (not brief.fits, brief.hours.value))
    # All cards are paid for, whether or not they are used.
    return best._replace(question=best.question.model_copy(update={"machine": question.machine}))


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
    level = level_of(question, rates)
    searched = search(question, rates=rates, level=level)
    chosen = choose(searched, question, level=level, rates=rates, correction=1.0)
    good = fits(chosen, question, level)
    answers = {"sft": 1, "dpo": 2, "grpo": question.generations}[question.algorithm]
    steps = max(-(-round(question.rows * answers * question.epochs) // question.batch_rows), 1)
    spread = TIME_SPREAD[level]
    seconds = chosen.seconds_a_step * steps
    start = start_seconds("cuda", parameters=total_parameters(question.shape))
    hours = Figure(
        value=(seconds + start) / 3600,
        low=(seconds / spread + start) / 3600,
        high=(seconds * spread + start) / 3600,
        unit="h",
    )
    reason = ""
    if card_excess(chosen, question, level) > 0:
        room = card_room(question, cards=chosen.way.shared.cards).value
        reason = f"takes up to {reserved_figure(chosen, question, level).high:.1f} of {room:.1f} GiB"
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


SCALED_RANGE = (0.8, 1.25)
"""Of hours on another card than the measured one: the ratio of two estimates."""


class MeasuredRun(NamedTuple):
    """Hours that the user's run took on a card."""

    gpu: str
    gpus: int
    hours: float


Fit = Callable[[Machine], Brief]


def machine_of(gpu: Gpu, *, count: int, ram_gib: float | None) -> Machine:
    """A machine whose memory no price list states has the usual one for each card."""
    return Machine(gpu=gpu, gpus=count, ram_gib=ram_gib or USUAL_RAM_GIB * count)


def card_run(brief: Brief, *, factor: float = 1.0, measured: bool = False) -> CardRun:
    """What the costs need of a fit; `factor` is measured over computed hours."""
    machine, question = brief.question.machine, brief.question
    gpu = machine.gpu
    if gpu is None:
        raise ValueError("a comparison of places is about cards")
    hours, certainty = brief.hours, "computed"
    if measured:
        hours, certainty = Figure.exact(hours.value * factor, "h"), "measured"
    elif factor != 1.0:
        down, up = SCALED_RANGE
        hours = Figure.about(hours.value * factor, down=down, up=up, unit="h")
        certainty = "scaled from your measurement"
    mean = sum(question.lengths) / max(len(question.lengths), 1)
    return CardRun(
        gpu=gpu.name,
        gpus=machine.gpus,
        fits=brief.fits,
        why_not=brief.why_not,
        hours=hours,
        steps=brief.steps,
        tokens=mean * question.rows,
        total_parameters=total_parameters(question.shape),
        trainable_parameters=trained(question),
        full=question.method == "full",
        # A way that takes one card of several leaves the others idle.
        watts=gpu.watts * (machine.gpus if brief.strategy.sharding != "none" else 1),
        certainty=certainty,
        strategy=in_words(brief.strategy),
    )


def in_words(strategy: Strategy) -> str:
    parts = [strategy.weights, f"{strategy.micro_rows} rows a pass"]
    if strategy.engine == "hf":
        parts.append("by transformers and PEFT")
    if strategy.checkpointed_layers:
        parts.append(f"{strategy.checkpointed_layers} layers checkpointed")
    if strategy.offload != "none":
        parts.append(f"{strategy.offload} offloaded")
    if strategy.sharding != "none":
        parts.append(strategy.sharding)
    return ", ".join(parts)


class RunEstimator:
    """Asks the fit once for each machine, and remembers."""

    def __init__(
        self,
        fit: Fit,
        *,
        find: Callable[[str], Gpu],
        measured: MeasuredRun | None = None,
        all_ram_matters: bool = False,
    ) -> None:
        """`all_ram_matters`: where states of all parameters may wait on the host."""
        self._fit, self._find, self._measured, self._all_ram = fit, find, measured, all_ram_matters
        self._known: dict[tuple[str, int, float | None], CardRun] = {}
        self._answers: dict[tuple[str, int, float | None], Brief] = {}
        self._factor = 1.0
        if measured is not None:
            answer = self._answer(measured.gpu, measured.gpus, None)
            computed = answer.hours.value
            self._factor = measured.hours / computed if computed else 1.0

    def __call__(self, gpu: str, gpus: int, ram_gib: float | None) -> CardRun:
        # One name for a card, and memory that no adapter needs left out: the fit is asked less often.
        enough = (
            None if ram_gib is None or (ram_gib >= USUAL_RAM_GIB * gpus and not self._all_ram) else ram_gib
        )
        key = (self._find(gpu).name, gpus, enough)
        if key not in self._known:
            answer = self._answer(*key)
            self._known[key] = card_run(answer, factor=self._factor, measured=self._is_measured(answer))
        return self._known[key]

    def _answer(self, gpu: str, gpus: int, ram_gib: float | None) -> Brief:
        key = (gpu, gpus, ram_gib)
        if key not in self._answers:
            machine = machine_of(self._find(gpu), count=gpus, ram_gib=ram_gib)
            self._answers[key] = self._fit(machine)
        return self._answers[key]

    def _is_measured(self, answer: Brief) -> bool:
        if self._measured is None or answer.question.machine.gpu is None:
            return False
        same = self._find(self._measured.gpu).name == answer.question.machine.gpu.name
        return same and self._measured.gpus == answer.question.machine.gpus


def describe_run(question: FitQuestion) -> dict[str, object]:
    """What is compared, for later readers of the table."""
    return {
        "model": question.model,
        "method": question.method,
        "algorithm": question.algorithm,
        "rows": question.rows,
        "epochs": question.epochs,
        "tokens_a_row": round(sum(question.lengths) / max(len(question.lengths), 1)),
        "batch_rows": question.batch_rows,
        "rank": question.rank,
    }
