"""`graft train`'s own step on one card: the best tunings under the card's memory, reckoned through. Pure.

In: a question, what the card reaches. Out: candidates. The engine measures its first step and keeps less
where that was too much; so what decides is whether the leanest tuning fits.
"""

import math
from functools import lru_cache
from typing import NamedTuple

from graftwork.model.shape import total_parameters
from graftwork.model.step_memory import peak_bytes
from graftwork.plan.fit.candidate import GIB, RESERVED_SPREAD, Candidate, Way
from graftwork.plan.fit.offload import host_memory
from graftwork.plan.fit.plain_steps import trained
from graftwork.plan.fit.room import card_room
from graftwork.plan.fit.sharding import Shared
from graftwork.plan.memory_card import card_peak
from graftwork.plan.time import Rates, card_step
from graftwork.plan.tuning import choose_tuning
from graftwork.records.fit import FitQuestion, Level, MemoryPeak
from graftwork.records.plan import ModelShape, Tuning

ALONE = Shared("none", "none", 1)
LARGE_PARAMETERS = 1e9
"""8-bit products only above: small models are quick in 16 bits, and 8 cost them most."""
LEAST_CHUNK, LEAST_HEAD = 1024, 256
LIMITS_A_DOUBLING, LIMITS_TRIED = 4, 1
FIXED, HALF_BYTES = "beginning and end", 2.0
WORTH_A_LIMIT = 1.02
"""A lower limit must be set by hand: for less than this it is not."""


def own_step_candidates(question: FitQuestion, *, rates: Rates, level: Level) -> list[Candidate]:
    """The fastest tuning that fits; where none does, the leanest that there is.

    A tuning that fills the card needs room to give way; where it has none, one with a margin is taken.
    """
    room, spread = card_room(question, cards=1).value, RESERVED_SPREAD[level]
    best: Tuning | None = None
    fastest = 0.0
    for limit in (room, *lower_limits(room), room / (1 + spread)):
        if best is not None and limit == room / (1 + spread):
            break
        tuning = _tune(question, limit=limit)
        if tuning is None or min(_floor(question, tuning), tuning.peak_gib * GIB) * (1 + spread) > room * GIB:
            continue
        seconds = _step_parts(question, tuning, rates=rates)
        rate = question.batch_rows / sum(seconds.values())
        if rate > WORTH_A_LIMIT * fastest:
            best, fastest = tuning, rate
    return [_reckon(question, best or leanest_tuning(question), rates=rates)]


def _floor(question: FitQuestion, tuning: Tuning) -> float:
    """Bytes with nothing kept, which is what the engine comes down to by itself."""
    bare = tuning.model_copy(update={"keep": 0, "lean": 0})
    return peak_bytes(question.shape, bare, trainable=trained(question), adapted=question.adapted_layers)


def lower_limits(room: float) -> tuple[float, ...]:
    """Limits below the room that may be faster: the trainer ranks tunings by the rates of one card for all.

    They stand on a fixed scale, so that a larger card tries what a smaller one found.
    """
    first = math.ceil(LIMITS_A_DOUBLING * math.log2(room)) - 1
    return tuple(2.0 ** ((first - at) / LIMITS_A_DOUBLING) for at in range(LIMITS_TRIED))


def may_fit(question: FitQuestion, *, spread: float) -> bool:
    """Whether the leanest tuning has room, by the formula alone: quick enough to be asked often."""
    lean = leanest_tuning(question)
    needed = peak_bytes(question.shape, lean, trainable=trained(question), adapted=question.adapted_layers)
    return needed * (1 + spread) <= card_room(question, cards=1).value * GIB


def leanest_tuning(question: FitQuestion) -> Tuning:
    """The tuning that needs the least, whatever it costs in time."""
    longest, eight = max(question.lengths), uses_eight(question)
    lean = Tuning(
        form="four" if question.method == "qlora" else "eight" if eight else "whole",
        head="eight" if eight and question.shape.vocab_size % 16 == 0 else "whole",
        micro_tokens=longest,
        longest=longest,
        keep=0,
        lean=0,
        chunk_tokens=min(LEAST_CHUNK, longest),
        head_tokens=min(LEAST_HEAD, longest),
        turned=False,
        host_embedding=True,
        limit_gib=card_room(question, cards=1).value,
        peak_gib=0.0,
        seconds_a_token=0.0,
    )
    peak = peak_bytes(question.shape, lean, trainable=trained(question), adapted=question.adapted_layers)
    return lean.model_copy(update={"peak_gib": peak / GIB})


def uses_eight(question: FitQuestion) -> bool:
    """Whether frozen weights are multiplied in 8 bits, as `train.fp8: auto` decides."""
    gpu = question.machine.gpu
    return gpu is not None and gpu.has_fp8 and total_parameters(question.shape) >= LARGE_PARAMETERS


def _tune(question: FitQuestion, *, limit: float) -> Tuning | None:
    mean = sum(question.lengths) / len(question.lengths)
    return _chosen(
        question.shape.model_dump_json(),
        question.method,
        Sizes(
            adapted=question.adapted_layers,
            trainable=trained(question),
            step_tokens=round(question.batch_rows * mean),
            longest=max(question.lengths),
        ),
        limit,
        uses_eight(question),
    )


class Sizes(NamedTuple):
    """What of a run decides on its tuning."""

    adapted: int
    trainable: int
    step_tokens: int
    longest: int


@lru_cache(maxsize=512)
def _chosen(shape: str, method: str, sizes: Sizes, limit: float, eight: bool) -> Tuning | None:
    """Asked again and again by questions that differ in something else."""
    return choose_tuning(
        ModelShape.model_validate_json(shape), method=method, limit_gib=limit, eight=eight, **sizes._asdict()
    )


@lru_cache(maxsize=512)
def _peak(shape: str, tuning: str, trainable: int, adapted: int) -> MemoryPeak:
    return card_peak(
        ModelShape.model_validate_json(shape),
        Tuning.model_validate_json(tuning),
        trainable=trainable,
        adapted=adapted,
    )


def _step_parts(question: FitQuestion, tuning: Tuning, *, rates: Rates) -> dict[str, float]:
    """Seconds of an optimizer step by what they are spent on."""
    mean = sum(question.lengths) / len(question.lengths)
    step = card_step(
        question.shape,
        tuning,
        adapted=question.adapted_layers,
        trainable=trained(question),
        rates=rates,
        mean_length=mean,
        trained_share=question.trained_share,
    )
    tokens = question.batch_rows * mean
    # The last pass of a step is seldom full: its tokens count, its fixed costs too.
    parts = {name: seconds * tokens / tuning.micro_tokens for name, seconds in step.parts.items()}
    if FIXED in step.parts:
        parts[FIXED] = step.parts[FIXED] * _passes(question, tuning)
    return parts | step.once_a_step


def _passes(question: FitQuestion, tuning: Tuning) -> int:
    mean = sum(question.lengths) / len(question.lengths)
    return max(-(-round(question.batch_rows * mean) // tuning.micro_tokens), 1)


def _reckon(question: FitQuestion, tuning: Tuning, *, rates: Rates) -> Candidate:
    shape, trainable, adapted = question.shape, trained(question), question.adapted_layers
    mean = sum(question.lengths) / len(question.lengths)
    parts = _step_parts(question, tuning, rates=rates)
    peak = _peak(shape.model_dump_json(), tuning.model_dump_json(), trainable, adapted)
    return Candidate(
        way=Way("graft", True, ALONE, max(round(tuning.micro_tokens / mean), 1), adapted - tuning.keep),
        setup=None,
        tuning=tuning,
        peak=peak,
        floor=min(_floor(question, tuning), peak.reserved),
        host=host_memory(
            question, ALONE, trainable=trainable, base_bytes=total_parameters(shape) * HALF_BYTES
        ),
        seconds_a_step=sum(parts.values()),
        step_parts=parts,
        tokens_a_step=question.batch_rows * mean,
        passes=_passes(question, tuning),
    )
