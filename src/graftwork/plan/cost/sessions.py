"""What sessions and quotas make of a run: how many sessions, and when it is done.

In: hours of work and the limits of a place. Out: sessions, hours of machine with the start of each, and hours
on the clock until the result. The end of a session is known beforehand: the run saves before it, nothing is
lost. Knows no prices.
"""

import math
from typing import NamedTuple

from graftwork.records.hardware import PlaceTerms

HOURS_A_WEEK = 168.0
HOURS_A_DAY = 24.0
HOURS_A_MONTH = 730.0


class Stay(NamedTuple):
    """A run cut into sessions."""

    sessions: int
    machine: float
    """Hours, with setting up at the start of each session."""
    clock: float
    possible: bool = True


def cut(
    place: PlaceTerms, *, work: float, setup: float, save: float = 0.0, hours_a_month: float | None = None
) -> Stay:
    """`work` hours in sessions of the place, each of which begins with `setup` and ends with `save`."""
    longest = min(
        (limit for limit in (place.session_hours, place.free_hours_a_day, place.free_hours_a_week) if limit),
        default=math.inf,
    )
    useful = longest - setup - save
    if useful <= 0:
        return Stay(sessions=0, machine=math.inf, clock=math.inf, possible=False)
    sessions = max(1, math.ceil(work / useful - 1e-9)) if math.isfinite(useful) else 1
    # The last save of the run is part of its work.
    machine = work + sessions * setup + (sessions - 1) * save
    return Stay(sessions=sessions, machine=machine, clock=_clock(place, machine, hours_a_month))


def _clock(place: PlaceTerms, machine: float, hours_a_month: float | None) -> float:
    """Hours until the last is done when each quota is used from its first hour on."""
    quotas = (
        (place.free_hours_a_day, HOURS_A_DAY),
        (place.free_hours_a_week, HOURS_A_WEEK),
        (hours_a_month, HOURS_A_MONTH),
    )
    return max([machine, *(_under_quota(machine, quota, every) for quota, every in quotas if quota)])


def _under_quota(machine: float, quota: float, every: float) -> float:
    """Full periods that are used up, then what is left of the work in the next."""
    full = math.ceil(machine / quota - 1e-9) - 1
    return full * every + machine - full * quota
