"""All ways to do a run that the engine knows, from the simplest on; what cannot fit is cut off early. Pure.

In: a question. Out: candidates with their figures. A way that does not fit with some rows at a time is
not tried with more: memory only grows with them.
"""

from collections.abc import Iterator
from typing import NamedTuple

from graftwork.plan.fit.candidate import Candidate, Way, fits
from graftwork.plan.fit.own_step import own_step_candidates
from graftwork.plan.fit.plain_steps import plain_candidate
from graftwork.plan.fit.processor import processor_candidate
from graftwork.plan.fit.setups import half_precision, why_plain
from graftwork.plan.fit.sharding import Shared
from graftwork.plan.timing.rates import Rates
from graftwork.records.fit import FitQuestion, Level, Offload, Sharding


class Searched(NamedTuple):
    """What was reckoned: the ways that fit, and those that do not with the least that each needs."""

    fitting: tuple[Candidate, ...]
    failing: tuple[Candidate, ...]


def search(
    question: FitQuestion,
    *,
    rates: Rates | None,
    level: Level = "computed",
    correction: float = 1.0,
    own_step: bool = True,
) -> Searched:
    """Every way with as many rows at a time as fit. `correction` is a traced peak over the computed one."""
    fitting: list[Candidate] = []
    failing: list[Candidate] = []
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


def _sorted_out(question: FitQuestion, found: list[Candidate], level: Level) -> Searched:
    good = tuple(one for one in found if fits(one, question, level))
    return Searched(good, tuple(one for one in found if one not in good))


def takes_own_step(question: FitQuestion) -> bool:
    return question.engine == "graft" and why_plain(question) is None


def _families(question: FitQuestion) -> Iterator[Way]:
    """Ways of the plain step, before the number of rows is chosen."""
    layers = question.shape.layers
    graft = question.engine == "graft"
    # Both engines checkpoint all blocks or none.
    depths = (0, layers)
    for shared in _sharings(question, graft=graft):
        if graft and shared.cards == 1 and takes_own_step(question):
            continue
        for checkpointed in depths:
            yield Way("graft" if graft else "hf", False, shared, 1, checkpointed)


def _sharings(question: FitQuestion, *, graft: bool) -> Iterator[Shared]:
    """How cards can share it, with what may wait in host memory."""
    cards = question.machine.gpus
    yield Shared("none", "none", 1)
    kinds: tuple[Sharding, ...] = ("zero2", "zero3", "fsdp2")
    if question.method == "qlora":
        # 4-bit weights and their scales must stay together; there is nothing else to cut up.
        kinds = ()
    elif (graft and half_precision(question) == "float16") or question.optimizer == "adamw_8bit":
        # DeepSpeed scales by itself, and keeps states of its own.
        kinds = ("fsdp2",)
    if cards > 1:
        yield Shared("ddp", "none", cards)
    for kind in kinds:
        if cards == 1 and (graft or kind == "fsdp2"):
            # Alone, there is nothing to share; only DeepSpeed's offload makes sense.
            continue
        for offload in _offloads(question, kind, graft=graft):
            if cards > 1 or offload != "none":
                yield Shared(kind, offload, cards)


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
