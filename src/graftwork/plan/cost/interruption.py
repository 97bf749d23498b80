"""What interruptions take from a run, and how often to save because of them.

In: hours of work, how often the machine is taken away, what a save and a restart cost. Out: expected hours
of machine and of clock, and the interval between saves that makes them least. Interruptions are independent
of each other and of the work (Poisson); whoever has a machine that is taken away at known times needs
`sessions` instead. Knows neither prices nor places.

The derivation. A stretch of s hours ends with a save; whatever interrupts it loses it. With rate λ it is
survived with probability exp(-λs). After an interruption the machine must be set up again, r hours that can
be interrupted themselves and so take (exp(λr) - 1) / λ on the mean. Let A be the mean time for the stretch:

    A = ∫₀ˢ λ exp(-λt) (t + (exp(λr) - 1)/λ + A) dt + exp(-λs) s    =>    A = exp(λr) (exp(λs) - 1) / λ

With s = τ + c (work and save), A / τ is least where (1 - λτ) exp(λ(τ + c)) = 1. Young's √(2c/λ) is its
limit for rare interruptions.
"""

import math
from typing import NamedTuple

from graftwork.records.base import Record

NEVER = 1e-12
"""Interruptions of a whole run below which rounding is all that would be seen of them."""


class Hazard(Record):
    """How a machine is taken away, and what that costs. Hours, and interruptions an hour."""

    rate: float
    save: float
    """Writing one checkpoint, the training waiting for it."""
    restart: float
    """From the new machine to the first step: paid for, and can be interrupted itself."""
    wait: float = 0.0
    """Until there is another machine: not paid for."""


class Expected(NamedTuple):
    """Mean hours of a run under interruptions."""

    machine: float
    """Paid for: start, work, saves, lost work and restarts."""
    clock: float
    interruptions: float
    lost: float
    """Of the machine's hours, work that was done twice and restarts."""


def best_interval(hazard: Hazard) -> float:
    """Hours of work between two saves that cost the least; infinite where nothing interrupts."""
    if hazard.rate <= 0:
        return math.inf
    if hazard.save <= 0:
        return 0.0
    # With x = rate × interval: f(x) = ln(1 - x) + x + rate × save falls and bends down, so that Newton's way
    # from a point right of the crossing (Young's, or one that is nearer for dear saves) never passes it.
    dear = hazard.rate * hazard.save
    x = min(math.sqrt(2 * dear), 1 - math.exp(-1 - dear))
    for _ in range(40):
        step = (math.log1p(-x) + x + dear) * (1 - x) / x
        x += step
        if abs(step) <= 1e-12 * x:
            break
    return x / hazard.rate


def young_interval(hazard: Hazard) -> float:
    """The first-order rule, for comparison: √(2 × save / rate)."""
    return math.sqrt(2 * hazard.save / hazard.rate) if hazard.rate > 0 else math.inf


def choose_saves(hazard: Hazard, *, work: float) -> int:
    """Whole number of evenly spaced saves, the last at the end, with the least expected hours."""
    interval = best_interval(hazard)
    if interval <= 0:
        raise ValueError("a save that costs nothing has no best interval: state what it costs")
    fewest = max(1, math.floor(work / interval))
    return min((fewest, fewest + 1), key=lambda count: expect(hazard, work=work, saves=count).machine)


def expect(hazard: Hazard, *, work: float, saves: int) -> Expected:
    """Mean hours for `work` hours in `saves` even stretches, each followed by a save."""
    if saves < 1 or work < 0:
        raise ValueError(f"{saves} saves over {work} hours: at least one save, and no negative work")
    rate = hazard.rate
    bare = hazard.restart + work + saves * hazard.save
    if rate * bare <= NEVER:
        return Expected(machine=bare, clock=bare, interruptions=0.0, lost=0.0)
    start = _grown(rate, hazard.restart)
    stretch = math.exp(_held(rate * hazard.restart)) * _grown(rate, work / saves + hazard.save)
    # Below the bare hours only by rounding.
    machine = max(start + saves * stretch, bare)
    interruptions = rate * machine
    return Expected(
        machine=machine,
        clock=machine + interruptions * hazard.wait,
        interruptions=interruptions,
        lost=machine - bare,
    )


def _grown(rate: float, hours: float) -> float:
    """(exp(rate × hours) - 1) / rate: mean time to get `hours` in one piece."""
    return math.expm1(_held(rate * hours)) / rate


def _held(exponent: float) -> float:
    """A stretch of hundreds of mean lives never ends; keep that a number."""
    return min(exponent, 300.0)
