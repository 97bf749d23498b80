"""A run without a card: what the plain step on a processor holds and takes. Pure."""

from collections.abc import Iterator
from typing import NamedTuple

from graftwork.costmodel.plain_memory import WIDTH, Distribution
from graftwork.costmodel.processor import processor_step, training_memory
from graftwork.costmodel.time import StepRates
from graftwork.model.shape import total_parameters
from graftwork.plan.fit.candidate import FitCandidate, StrategyOption, fits
from graftwork.plan.fit.own_step import ALONE, own_step_candidates
from graftwork.plan.fit.plain_step import plain_candidate, trained
from graftwork.plan.fit.question import half_precision, why_plain
from graftwork.records.figure import Figure
from graftwork.records.fit import FitQuestion, Level, MemoryPeak, Offload, Sharding
from graftwork.records.hardware import Cpu
from graftwork.records.plan import Workload
from graftwork.records.units import GIB

UNKNOWN_CPU = Cpu(
    name="a processor",
    cores=8,
    gflops=280.0,
    bandwidth_gb_s=40.0,
    watts=65.0,
    source="guessed: 35 GFLOPS a core, two channels of DDR4",
    dated="2026-11-15",
)


def processor_candidate(question: FitQuestion) -> FitCandidate:
    """All rows of a step at once, in host memory."""
    shape = question.shape
    mean = sum(question.lengths) / len(question.lengths)
    work = Workload(
        lengths=question.lengths if len(question.lengths) > 1 else question.lengths * question.batch_rows,
        trained_tokens=round(
            mean * question.trained_share * max(len(question.lengths), question.batch_rows)
            if len(question.lengths) == 1
            else sum(question.lengths) * question.trained_share
        ),
        batch_rows=question.batch_rows,
        epochs=1,
        rank=question.rank,
        targets=question.targets,
        adapted_layers=question.adapted_layers,
        method=question.method,
    )
    parts = training_memory(
        shape,
        work,
        parameters=total_parameters(shape),
        trainable=trained(question),
        width=WIDTH[half_precision(question)],
    )
    tokens = question.batch_rows * mean
    step = processor_step(
        shape,
        tokens=round(tokens),
        adapted=question.adapted_layers,
        cpu=question.machine.cpu or UNKNOWN_CPU,
        method=question.method,
        trained_share=question.trained_share,
        mean_length=mean,
        rank=question.rank,
    )
    seconds = {**step.parts, **step.once_a_step}
    # The C library takes and gives back pages: what is reserved is what is there.
    held = {name: float(size) for name, size in parts.model_dump().items() if isinstance(size, int | float)}
    peak = MemoryPeak(allocated=parts.total, reserved=parts.total, parts=held, phase="loss")
    return FitCandidate(
        way=StrategyOption("graft", False, ALONE, question.batch_rows, 0),
        setup=None,
        tuning=None,
        peak=peak,
        floor=peak.reserved,
        host=Figure.about(parts.total / GIB, down=0.85, up=1.2, unit="GiB"),
        seconds_a_step=sum(seconds.values()),
        step_parts=seconds,
        tokens_a_step=tokens,
        passes=1,
    )


class Searched(NamedTuple):
    """What was reckoned: the ways that fit, and those that do not with the least that each needs."""

    fitting: tuple[FitCandidate, ...]
    failing: tuple[FitCandidate, ...]


def search(
    question: FitQuestion,
    *,
    rates: StepRates | None,
    level: Level = "computed",
    correction: float = 1.0,
    own_step: bool = True,
) -> Searched:
    """Every way with as many rows at a time as fit. `correction` is a traced peak over the computed one."""
    fitting: list[FitCandidate] = []
    failing: list[FitCandidate] = []
    if question.machine.gpu is None or rates is None:
        found = [processor_candidate(question)]
        return _sorted_out(question, found, level)
    for way in _families(question):
        rows = 1
        while True:
            candidate = plain_candidate(
                question, way._replace(micro_rows=rows), rates=rates, correction=correction
            )
            if not fits(candidate, question, level):
                if rows == 1:
                    failing.append(candidate)
                break
            fitting.append(candidate)
            if rows * way.shared.cards >= question.batch_rows:
                break
            rows = min(2 * rows, -(-question.batch_rows // way.shared.cards))
    if own_step and takes_own_step(question):
        own = _sorted_out(question, own_step_candidates(question, rates=rates, level=level), level)
        fitting += own.fitting
        failing += own.failing
    return Searched(tuple(fitting), tuple(failing))


def _sorted_out(question: FitQuestion, found: list[FitCandidate], level: Level) -> Searched:
    good = tuple(one for one in found if fits(one, question, level))
    return Searched(good, tuple(one for one in found if one not in good))


def takes_own_step(question: FitQuestion) -> bool:
    return question.engine == "graft" and why_plain(question) is None


def _families(question: FitQuestion) -> Iterator[StrategyOption]:
    """Ways of the plain step, before the number of rows is chosen."""
    layers = question.shape.layers
    graft = question.engine == "graft"
    # Both engines checkpoint all blocks or none.
    depths = (0, layers)
    for shared in _sharings(question, graft=graft):
        if graft and shared.cards == 1 and takes_own_step(question):
            continue
        for checkpointed in depths:
            yield StrategyOption("graft" if graft else "hf", False, shared, 1, checkpointed)


def _sharings(question: FitQuestion, *, graft: bool) -> Iterator[Distribution]:
    """How cards can share it, with what may wait in host memory."""
    cards = question.machine.gpus
    yield Distribution("none", "none", 1)
    kinds: tuple[Sharding, ...] = ("zero2", "zero3", "fsdp2")
    if question.method == "qlora":
        # 4-bit weights and their scales must stay together; there is nothing else to cut up.
        kinds = ()
    elif (graft and half_precision(question) == "float16") or question.optimizer == "adamw_8bit":
        # DeepSpeed scales by itself, and keeps states of its own.
        kinds = ("fsdp2",)
    if cards > 1:
        yield Distribution("ddp", "none", cards)
    for kind in kinds:
        if cards == 1 and (graft or kind == "fsdp2"):
            # Alone, there is nothing to share; only DeepSpeed's offload makes sense.
            continue
        for offload in _offloads(question, kind, graft=graft):
            if cards > 1 or offload != "none":
                yield Distribution(kind, offload, cards)


def _offloads(question: FitQuestion, kind: Sharding, *, graft: bool) -> Iterator[Offload]:
    """What may wait in host memory: what was asked for, what the kind can, what is worth it."""
    able: tuple[Offload, ...] = {
        "zero2": ("none", "optimizer"),
        # Our own setting moves both or nothing.
        "zero3": ("none", "weights") if graft else ("none", "optimizer", "weights"),
        "fsdp2": ("none", "weights"),
    }[kind]
    for offload in able:
        if offload == "optimizer" and question.method != "full":
            continue
        if offload != "none" and question.optimizer == "adamw_8bit":
            # Its states are stepped on the card.
            continue
        if question.offload in ("auto", offload):
            yield offload
