"""What one run costs at one offer, and when it is done.

In: an offer as it is billed, the hours of training, the terms. Out: dollars by what they are for, hours of
machine and clock. One number at a time: ranges are made by whoever asks thrice. Does not rank.
"""

import math
from typing import NamedTuple

from graftwork.plan.cost.disk import DiskNeed
from graftwork.plan.cost.interruption import Hazard, expect
from graftwork.plan.cost.intervals import Rhythm, choose_rhythm
from graftwork.plan.cost.nouns import Candidate, Terms
from graftwork.plan.cost.sessions import HOURS_A_MONTH, cut
from graftwork.records.units import GIB

WRITE_BYTES_A_SECOND = 200e6
"""Network disks of clouds; a local NVMe is ten times faster."""
SAVE_SECONDS = 2.0
ASSUMED_SPOT_RATE = 0.05
"""Interruptions an hour where nobody states them: once in twenty hours. Between a fifth and four times it."""
ASSUMED_SPREAD = (0.2, 4.0)
LOADING_MINUTES = 2.0
"""Until the weights are in the card, wherever it stands."""
CRASH_RATE = 1 / 500
"""Of a machine that nobody takes away: crashes, power, a hand on the wrong key. An assumption."""


class Tweak(NamedTuple):
    """Factors by which a question of the kind "what if" differs from what is known."""

    price: float = 1.0
    hours: float = 1.0
    rate: float = 1.0


PLAIN = Tweak()


class Bill(NamedTuple):
    """Dollars and hours of one run."""

    cost: float
    paid_first: float
    parts: dict[str, float]
    machine: float
    clock: float
    sessions: int
    interruptions: float
    lost: float
    rate: float
    possible: bool
    rhythm: Rhythm
    hazard: Hazard


def hazard_of(candidate: Candidate, *, terms: Terms, disk: DiskNeed, rate_factor: float = 1.0) -> Hazard:
    """How this machine is taken away."""
    spot = candidate.billing == "spot"
    return Hazard(
        rate=spot_rate(candidate, terms) * rate_factor if spot else CRASH_RATE,
        save=(SAVE_SECONDS + disk.checkpoint_gib * GIB / WRITE_BYTES_A_SECOND) / 3600,
        restart=max(candidate.place.setup_minutes, LOADING_MINUTES) / 60,
        wait=terms.spot_wait_hours if spot else 0.0,
    )


def spot_rate(candidate: Candidate, terms: Terms) -> float:
    """The user's figure before the catalog's before our assumption."""
    for stated in (terms.preemptions_per_hour, candidate.place.preemptions_per_hour):
        if stated is not None:
            return stated
    return ASSUMED_SPOT_RATE


def reckon_bill(
    candidate: Candidate,
    *,
    terms: Terms,
    disk: DiskNeed,
    rows: float,
    hours: float | None = None,
    tweak: Tweak = PLAIN,
) -> Bill:
    """One run of `hours` hours of training (the fit's own where none are given)."""
    training = (candidate.run.hours.value if hours is None else hours) * tweak.hours
    hazard = hazard_of(candidate, terms=terms, disk=disk, rate_factor=tweak.rate)
    rhythm = choose_rhythm(
        hours=training,
        steps=candidate.run.steps,
        rows=rows,
        hazard=hazard,
        evaluation_rows=terms.evaluation_rows,
    )
    looking = rhythm.evaluations * rhythm.evaluation_hours
    expected = expect(hazard, work=training + looking, saves=rhythm.saves)
    stay = cut(
        candidate.place,
        work=expected.machine - hazard.restart,
        setup=hazard.restart,
        save=hazard.save,
        hours_a_month=candidate.offer.hours_a_month if candidate.billing == "subscription" else None,
    )
    clock = stay.clock + expected.clock - expected.machine
    saving = rhythm.saves * hazard.save
    spent = {
        "training": training,
        "evaluation": looking,
        "saves": saving,
        "interruptions": expected.lost,
        "setup": stay.machine - training - looking - saving - expected.lost,
    }
    paid, first = _machine_dollars(candidate, terms=terms, machine=stay.machine, price_factor=tweak.price)
    an_hour = paid / stay.machine if stay.possible and stay.machine else 0.0
    parts = {name: an_hour * took for name, took in spent.items()} if stay.possible else {}
    parts["storage"] = disk.total_gib.value * candidate.place.storage_usd_gib_month * _months(clock)
    parts["transfer"] = disk.result_gib * candidate.place.egress_usd_gib
    beside = parts["storage"] + parts["transfer"]
    return Bill(
        cost=paid + beside,
        paid_first=first + beside,
        parts=parts,
        machine=stay.machine,
        clock=clock,
        sessions=stay.sessions,
        interruptions=expected.interruptions,
        lost=expected.lost,
        rate=hazard.rate,
        possible=stay.possible,
        rhythm=rhythm,
        hazard=hazard,
    )


def _machine_dollars(
    candidate: Candidate, *, terms: Terms, machine: float, price_factor: float
) -> tuple[float, float]:
    """Dollars that a run bears of the machine, and dollars that go out before it is done."""
    if not math.isfinite(machine):
        return 0.0, 0.0
    offer = candidate.offer
    if candidate.billing == "free":
        return 0.0, 0.0
    if candidate.billing == "electricity":
        kilowatts = (candidate.run.watts + terms.host_watts) / 1000
        dollars = kilowatts * machine * terms.electricity_usd_kwh * price_factor
        return dollars, dollars
    if candidate.billing == "subscription":
        a_month = (offer.usd_per_month or 0.0) * price_factor
        held = offer.hours_a_month or HOURS_A_MONTH
        months = math.ceil(terms.runs_a_month * machine / held - 1e-9)
        return a_month * months / terms.runs_a_month, a_month * math.ceil(machine / held - 1e-9)
    unit = candidate.place.smallest_billed_minutes / 60
    # What is begun is paid: a place that bills by the hour bills two for 61 minutes.
    billed = math.ceil(machine / unit - 1e-9) * unit if unit else machine
    dollars = candidate.usd_per_hour * price_factor * billed
    return dollars, dollars


def _months(hours: float) -> float:
    return hours / HOURS_A_MONTH if math.isfinite(hours) else 0.0
