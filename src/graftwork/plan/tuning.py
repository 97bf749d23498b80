"""How a card's memory is best spent: as much as there is, no more, on what saves the most time. Pure.

In: a decoder's shape, what is trained, the memory limit, what the card can and reaches. Out: a Tuning, or
None where nothing fits. All settings that fit are reckoned and the fastest is taken: how many tokens at a
time, which blocks keep what, weights in which form, the embedding here or on the host.
"""

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Literal, NamedTuple

from graftwork.model.step_memory import SLACK, best_levels, extra_bytes, peak_bytes
from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.memory_card import card_peak, load_peak
from graftwork.plan.time import Rates, card_seconds_a_token, rates_of
from graftwork.records.plan import ModelShape, Tuning

GIB = 2**30
FIRST_WITH_EIGHT = 8.9
"""Compute capability of Ada; Hopper is 9.0."""

RECKONED_FOR = "H200"
"""The card whose rates settings are ranked by where nobody says which one it is."""

TOKENS = (1024, 2048, 4096, 8192, 16384)
HEAD_TOKENS = (2048, 1024, 512, 256)
CHUNK_TOKENS = (4096, 2048, 1024)

REPLAYED = 6
"""Settings that are replayed through the allocator, the fastest first."""
FEWER = 2
"""Blocks that keep less where the replay shows that there is no room for all."""


def choose_tuning(
    shape: ModelShape,
    *,
    method: str,
    adapted: int,
    trainable: int,
    limit_gib: float,
    step_tokens: int,
    longest: int,
    eight: bool,
    rates: Rates | None = None,
) -> Tuning | None:
    """The fastest setting within the limit. `eight` says whether 8-bit products may be used; `rates` are
    those of the card at hand."""
    form: Literal["whole", "eight", "four"] = "four" if method == "qlora" else "eight" if eight else "whole"
    trained = Trained(adapted, trainable, rates or default_rates())
    best: Tuning | None = None
    for head in heads(shape, eight=eight):
        ways = list(_settings(form, head, step_tokens=step_tokens, longest=longest, limit_gib=limit_gib))
        found = _fastest(shape, _loadable(shape, ways), trained)
        if found is not None and (best is None or found.seconds_a_token < best.seconds_a_token):
            best = found
        if best is not None and best.keep >= adapted:
            # Memory is no matter any more.
            break
    return best


def heads(shape: ModelShape, *, eight: bool) -> tuple[Literal["whole", "eight"], ...]:
    """In which bits the head may be, the fastest first. Products in 8 bits want sizes that 16 divides; and a
    head passes through 32 bits on its way into 8, for which a small card may have no room."""
    return ("eight", "whole") if eight and shape.vocab_size % 16 == 0 else ("whole",)


def _loadable(shape: ModelShape, ways: list[Tuning]) -> list[Tuning]:
    """Those whose weights come onto the card at all."""
    needed: dict[tuple[bool, bool], int] = {}
    for tuning in ways:
        key = (tuning.turned, tuning.host_embedding)
        if key not in needed:
            needed[key] = load_peak(shape, tuning)
    return [one for one in ways if needed[one.turned, one.host_embedding] <= one.limit_gib * GIB]


def _fastest(shape: ModelShape, ways: list[Tuning], trained: "Trained") -> Tuning | None:
    filled = [found for tuning in ways if (found := _fill(shape, tuning, trained)) is not None]
    # By a margin for what the allocator rounds up; without one, the smallest may still fit.
    filled.sort(key=lambda tuning: tuning.seconds_a_token)
    best: Tuning | None = None
    for tuning in filled[:REPLAYED]:
        fitting = _replayed(shape, tuning, trained)
        if fitting is not None:
            timed = _timed(shape, fitting, trained)
            if best is None or timed.seconds_a_token < best.seconds_a_token:
                best = timed
            if timed.keep + timed.lean == tuning.keep + tuning.lean:
                # Nothing had to be given up, and those behind it were slower to begin with.
                return best
    if best is None and ways:
        # Where the fastest do not fit after all, the smallest may.
        smallest = min(ways, key=lambda tuning: _peak(shape, tuning, trained))
        fitting = _replayed(shape, smallest, trained)
        best = None if fitting is None else _timed(shape, fitting, trained)
    return best


class Trained(NamedTuple):
    """How many blocks have adapters, how many parameters those have, and what the card reaches."""

    adapted: int
    trainable: int
    rates: Rates


def _peak(shape: ModelShape, tuning: Tuning, trained: Trained) -> float:
    return peak_bytes(shape, tuning, trainable=trained.trainable, adapted=trained.adapted)


def _replayed(shape: ModelShape, tuning: Tuning, trained: Trained) -> Tuning | None:
    """The tuning with what the allocator would really hold; with fewer blocks that keep, where it must."""
    for _ in range(REPLAYED):
        peak = card_peak(shape, tuning, trainable=trained.trainable, adapted=trained.adapted)
        if peak.reserved <= tuning.limit_gib * GIB:
            return tuning.model_copy(update={"peak_gib": peak.reserved / GIB})
        if not tuning.keep + tuning.lean:
            return None
        tuning = tuning.model_copy(
            update={
                "keep": max(tuning.keep - FEWER, 0),
                "lean": max(tuning.lean + min(tuning.keep, FEWER) - FEWER, 0),
            }
        )
    return None


def _settings(
    form: Literal["whole", "eight", "four"],
    head: Literal["whole", "eight"],
    *,
    step_tokens: int,
    longest: int,
    limit_gib: float,
) -> Iterator[Tuning]:
    """Everything that is tried. A pass must hold the longest row, and no more than a step has."""
    most = max(step_tokens, longest)
    tokens = sorted({min(max(size, longest), most) for size in TOKENS})
    ways = product(tokens, HEAD_TOKENS, CHUNK_TOKENS, (False, True), (False, True))
    for micro, head_tokens, chunk, turned, host in ways:
        if turned and form != "eight":
            continue
        yield Tuning(
            form=form,
            head=head,
            micro_tokens=micro,
            longest=longest,
            keep=0,
            lean=0,
            chunk_tokens=min(chunk, micro),
            head_tokens=min(head_tokens, micro),
            turned=turned,
            host_embedding=host,
            limit_gib=limit_gib,
            peak_gib=0.0,
            seconds_a_token=0.0,
        )


def _fill(shape: ModelShape, tuning: Tuning, trained: Trained) -> Tuning | None:
    """The best use of what is left of the limit; None where there is nothing left to begin with."""
    limit, adapted = tuning.limit_gib * GIB, trained.adapted

    def peak(keep: int, lean: int) -> float:
        return _peak(shape, tuning.model_copy(update={"keep": keep, "lean": lean}), trained)

    if (nothing := peak(0, 0)) > limit:
        return None
    one_keeps = peak(1, 0) - SLACK * tuning.micro_tokens * extra_bytes(shape, "keep")
    room = (limit - max(nothing, one_keeps)) / SLACK
    keep, lean = best_levels(shape, room, tokens=tuning.micro_tokens, adapted=adapted)
    if not keep:
        # Nobody keeps, so that the widest tensors are never there for all tokens: there is more room.
        _, lean = best_levels(shape, (limit - nothing) / SLACK, tokens=tuning.micro_tokens, adapted=adapted)
    while (most := peak(keep, lean)) > limit:
        keep, lean = (keep - 1, lean + 1) if keep else (0, lean - 1)
    filled = tuning.model_copy(update={"keep": keep, "lean": lean, "peak_gib": most / GIB})
    return _timed(shape, filled, trained)


def _timed(shape: ModelShape, tuning: Tuning, trained: Trained) -> Tuning:
    seconds = card_seconds_a_token(
        shape, tuning, adapted=trained.adapted, trainable=trained.trainable, rates=trained.rates
    )
    return tuning.model_copy(update={"seconds_a_token": seconds})


@cache
def default_rates() -> Rates:
    return rates_of(find_gpu(RECKONED_FOR))
