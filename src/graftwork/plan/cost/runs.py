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
from graftwork.plan.fit.answer import level_of, steps_of, ways_of, weigh
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


def fit_in_brief(question: FitQuestion) -> CardRun:
    """The best way of the engine asked for, as `fit` finds it; of transformers, where our own has none."""
    ways = ways_of(question)
    runs = [_run_of(way.model_dump_json()) for way in ways]
    if len(ways) == 1 and question.engine == "graft" and not runs[0].fits:
        # Of several ways one is with transformers already.
        runs.append(_run_of(question.model_copy(update={"engine": "hf"}).model_dump_json()))
    best = min(runs, key=lambda run: (not run.fits, run.hours.value))
    # All cards are paid for, whether or not they are used.
    return best.model_copy(update={"gpus": question.machine.gpus})


@lru_cache(maxsize=1024)
def _run_of(text: str) -> CardRun:
    question = FitQuestion.model_validate_json(text)
    gpu = question.machine.gpu
    if gpu is None:
        raise UserMistake("a machine without a card is not compared", fix="name a card", where="--gpu")
    rates = rates_of(gpu)
    level = level_of(question, rates)
    fitting, failing = search(question, rates=rates, level=level)
    chosen, _ = weigh(fitting, failing, question, level=level, rates=rates)
    steps = steps_of(question)
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
    strategy = strategy_of(chosen, question)
    return CardRun(
        gpu=gpu.name,
        gpus=question.machine.gpus,
        fits=fits(chosen, question, level),
        why_not=reason,
        hours=hours,
        steps=float(steps),
        tokens=sum(question.lengths) / max(len(question.lengths), 1) * question.rows,
        total_parameters=total_parameters(question.shape),
        trainable_parameters=trained(question),
        full=question.method == "full",
        # A way that takes one card of several leaves the others idle.
        watts=gpu.watts * (question.machine.gpus if strategy.sharding != "none" else 1),
        strategy=in_words(strategy),
    )


SCALED_RANGE = (0.8, 1.25)
"""Of hours on another card than the measured one: the ratio of two estimates."""


class MeasuredRun(NamedTuple):
    """Hours that the user's run took on a card."""

    gpu: str
    gpus: int
    hours: float


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
    """Asks the fit of this training once for each machine, and remembers."""

    def __init__(
        self, question: FitQuestion, *, find: Callable[[str], Gpu], measured: MeasuredRun | None = None
    ) -> None:
        self._question, self._find, self._measured = question, find, measured
        self._runs: dict[tuple[str, int, float | None], CardRun] = {}
        self._factor = 1.0
        if measured is not None:
            computed = self._fit(measured.gpu, measured.gpus, None).hours.value
            self._factor = measured.hours / computed if computed else 1.0

    def __call__(self, gpu: str, gpus: int, ram_gib: float | None) -> CardRun:
        # One name for a card, and memory that no adapter needs left out: the fit is asked less often. Where
        # all parameters are trained, their states may wait on the host.
        if ram_gib is not None and ram_gib >= USUAL_RAM_GIB * gpus and self._question.method != "full":
            ram_gib = None
        key = (self._find(gpu).name, gpus, ram_gib)
        if key not in self._runs:
            run, measured = self._fit(*key), self._measured
            same = measured is not None and (self._find(measured.gpu).name, measured.gpus) == key[:2]
            if same or self._factor != 1.0:
                down, up = (1.0, 1.0) if same else SCALED_RANGE
                scaled = run.hours.value * self._factor
                certainty = "measured" if same else "scaled from your measurement"
                hours = Figure.about(scaled, down=down, up=up, unit="h")
                run = run.model_copy(update={"hours": hours, "certainty": certainty})
            self._runs[key] = run
        return self._runs[key]

    def _fit(self, gpu: str, gpus: int, ram_gib: float | None) -> CardRun:
        # A machine whose memory no price list states has the usual one for each card.
        machine = Machine(gpu=self._find(gpu), gpus=gpus, ram_gib=ram_gib or USUAL_RAM_GIB * gpus)
        return fit_in_brief(self._question.model_copy(update={"machine": machine}))


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
