"""What a machine can do: the team's run, and how long rows may be with each method.

In: a way to ask the fit, and a machine. Out: a MachineReach. Lengths are tried from a ladder by halving, for
what fits at a length fits below it. Knows no prices.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from graftwork.plan.buying.nouns import MachineReach, Reach
from graftwork.plan.cost.brief import Brief
from graftwork.plan.cost.runs import card_run
from graftwork.records.fit import Method
from graftwork.records.hardware import Machine

METHODS: tuple[Method, ...] = ("qlora", "lora", "full")
LADDER = (512, 1024, 2048, 4096, 8192, 16384)


class Ask(NamedTuple):
    """The fit of the team's run on a machine, with another method or length where these are given."""

    fit: Callable[[Machine, Method | None, int | None], Brief]
    max_positions: int


def reach_of(machine: Machine, ask: Ask) -> MachineReach:
    answer = ask.fit(machine, None, None)
    run = card_run(answer)
    alone = ask.fit(machine.model_copy(update={"gpus": 1}), None, None) if machine.gpus > 1 else None
    return MachineReach(
        label=machine.name,
        gpu=run.gpu,
        gpus=run.gpus,
        watts=run.watts,
        fits=run.fits,
        why_not=run.why_not,
        hours=run.hours,
        strategy=run.strategy,
        link=link_words(machine),
        alone_hours=alone.hours if alone is not None and alone.fits else None,
        reaches=tuple(_reach(machine, method, ask, own=answer) for method in METHODS),
    )


def link_words(machine: Machine) -> str:
    """How two of its cards meet."""
    gpu = machine.gpu
    if gpu is None or machine.gpus < 2:
        return "one card"
    if machine.link_gb_s is not None:
        return f"{machine.link_gb_s:g} GB/s between cards, as stated"
    if gpu.nvlink_gb_s:
        return f"NVLink, {gpu.nvlink_gb_s:g} GB/s one way"
    return f"through the host: each card's connector gives {gpu.pcie_gb_s:g} GB/s one way at best"


def news(have: MachineReach, other: MachineReach) -> tuple[str, ...]:
    """What the other machine can and the one that is there cannot."""
    found = []
    before = {reach.method: reach for reach in have.reaches}
    for reach in other.reaches:
        was = before.get(reach.method)
        longest = was.longest if was else None
        if reach.longest is not None and longest is None:
            found.append(f"{reach.method} at all, up to {reach.longest:,} tokens")
        elif reach.longest is not None and longest is not None and reach.longest > longest:
            found.append(f"{reach.method} up to {reach.longest:,} tokens instead of {longest:,}")
    return tuple(found)


def _reach(machine: Machine, method: Method, ask: Ask, *, own: Brief) -> Reach:
    lengths = [length for length in LADDER if length <= ask.max_positions] or [ask.max_positions]
    answers: dict[int, Brief] = {}

    def fits(length: int) -> bool:
        answers[length] = ask.fit(machine, method, length)
        return answers[length].fits

    longest = _last_that(lengths, fits)
    at_own = own if own.question.method == method else ask.fit(machine, method, None)
    shortest = answers.get(lengths[0])
    return Reach(
        method=method,
        longest=longest,
        hours=at_own.hours if at_own.fits else None,
        why_not="" if longest is not None or shortest is None else shortest.why_not,
    )


def _last_that(lengths: Sequence[int], holds: Callable[[int], bool]) -> int | None:
    """The last for which it holds, where it holds up to a point and not beyond."""
    low, high = 0, len(lengths)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if holds(lengths[middle]) else (low, middle)
    return lengths[low - 1] if low else None
