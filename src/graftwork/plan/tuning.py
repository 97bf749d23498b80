"""How a card's memory is best spent: as much as there is, no more, on what saves the most time. Pure.

In: a decoder's shape, what is trained, the memory limit, what the card can and reaches. Out: a Tuning, or
None where nothing fits. Names all settings that there are: how many tokens at a time, weights in which
form, the embedding here or on the host; `plan/tuning_search.py` adds which blocks keep what, and finds the
fastest that fits.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from itertools import product
from typing import Literal

from graftwork.plan.catalog.hardware import find_gpu
from graftwork.plan.memory_card import load_peak
from graftwork.plan.timing.rates import Rates, rates_of
from graftwork.plan.tuning_search import Trained, fastest
from graftwork.records.plan import ModelShape, Tuning
from graftwork.records.units import GIB

FIRST_WITH_EIGHT = 8.9
"""Compute capability of Ada; Hopper is 9.0."""

RECKONED_FOR = "H200"
"""The card whose rates settings are ranked by where nobody says which one it is."""

TOKENS = (1024, 2048, 4096, 8192, 16384)
HEAD_TOKENS = (2048, 1024, 512, 256)
CHUNK_TOKENS = (4096, 2048, 1024)


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
    settings = (
        setting
        for head in heads(shape, eight=eight)
        for setting in _settings(form, head, step_tokens=step_tokens, longest=longest, limit_gib=limit_gib)
    )
    return fastest(shape, _loadable(shape, settings, limit_gib=limit_gib), trained)


def heads(shape: ModelShape, *, eight: bool) -> tuple[Literal["whole", "eight"], ...]:
    """In which bits the head may be, the fastest first. Products in 8 bits want sizes that 16 divides; and a
    head passes through 32 bits on its way into 8, for which a small card may have no room."""
    return ("eight", "whole") if eight and shape.vocab_size % 16 == 0 else ("whole",)


def _loadable(shape: ModelShape, settings: Iterable[Tuning], *, limit_gib: float) -> list[Tuning]:
    """Those whose weights come onto the card at all."""
    needed: dict[tuple[str, bool, bool], int] = {}
    found = []
    for tuning in settings:
        key = (tuning.head, tuning.turned, tuning.host_embedding)
        if key not in needed:
            needed[key] = load_peak(shape, tuning)
        if needed[key] <= limit_gib * GIB:
            found.append(tuning)
    return found


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
    turns = (False, True) if form == "eight" else (False,)
    goes = {
        (micro, min(head_tokens, micro), min(chunk, micro))
        for micro, head_tokens, chunk in product(tokens, HEAD_TOKENS, CHUNK_TOKENS)
    }
    for (micro, head_tokens, chunk), turned, host in product(sorted(goes), turns, (False, True)):
        yield Tuning(
            form=form,
            head=head,
            micro_tokens=micro,
            longest=longest,
            keep=0,
            lean=0,
            chunk_tokens=chunk,
            head_tokens=head_tokens,
            turned=turned,
            host_embedding=host,
            limit_gib=limit_gib,
            peak_gib=0.0,
            seconds_a_token=0.0,
        )


@cache
def default_rates() -> Rates:
    return rates_of(find_gpu(RECKONED_FOR))
