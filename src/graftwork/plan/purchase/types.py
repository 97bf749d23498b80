"""Types of a purchase: what a machine can do, what it costs over the years, when it has paid for itself."""

import re
from typing import NamedTuple

from graftwork.records.base import Figure, Record
from graftwork.records.errors import UserMistake
from graftwork.records.plan import Method


class Reach(Record):
    """How far a machine goes with a method."""

    method: Method
    longest: int | None
    """Tokens of the longest row that fits, of the lengths that were tried; None: not even the shortest."""
    hours: Figure | None = None
    """Of the team's run with this method at its own length; None where that does not fit."""
    why_not: str = ""


class MachineReach(Record):
    """What one machine can do of what was asked."""

    label: str
    gpu: str
    gpus: int
    watts: float
    fits: bool
    why_not: str = ""
    hours: Figure
    """Of the team's own run."""
    strategy: str = ""
    link: str = ""
    alone_hours: Figure | None = None
    """Of the team's run on one of several cards, where it fits one."""
    reaches: tuple[Reach, ...] = ()


class Rental(Record):
    """The best offer of a place for the team's run."""

    label: str
    place: str
    cost_usd: Figure
    hours_to_result: Figure
    dated: str
    stale: bool


class Payback(Record):
    """When a purchase has cost less than renting there."""

    against: str
    place: str
    cost_usd: Figure
    """Of a run there."""
    saves_usd_a_run: Figure
    months: Figure | None
    """None: never, a run there costs no more than the power here."""
    in_time: bool
    """Within the years that were asked about."""


class PurchaseChoice(Record):
    """One way to go on: keep, buy this, or rent."""

    label: str
    machine: MachineReach | None
    price_usd: Figure
    price_source: str
    residual_usd: Figure
    possible: bool
    why_not: str = ""
    hours_a_run: Figure
    hours_a_week: Figure
    speed_up: Figure | None = None
    """Of one run, over what the team has; None where that cannot do the run at all."""
    runs_at_once: int = 1
    """Where a run fits one card, each of several can have its own."""
    throughput: Figure | None = None
    """Runs in the same time, over what the team has."""
    power_usd_a_run: Figure
    cost_usd_a_run: Figure
    """Over the years: what is paid and not got back, spread over the runs, and the power."""
    total_usd: Figure
    becomes_possible: tuple[str, ...] = ()
    paybacks: tuple[Payback, ...] = ()
    pays_above_usd_per_hour: Figure | None = None
    """Worth of an hour of waiting from which this is the best choice; None: from none on, or never."""
    pays_unrented_above_usd_per_hour: Figure | None = None
    """The same where nothing may be rented: data that must stay here."""


class Purchase(Record):
    """The choices, and the answer in one sentence."""

    run: dict[str, object]
    runs_a_week: float
    years: float
    electricity_usd_kwh: float
    residual_share: float
    waiting_usd_per_hour: float
    choices: tuple[PurchaseChoice, ...]
    best: str | None
    answer: str
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


_COUNTED = re.compile(r"^\s*(?P<count>\d+)\s*[xX×]\s*(?P<name>.*\D.*)$")


class PurchaseOption(NamedTuple):
    """A machine to buy, and its price."""

    name: str
    cards: int
    usd: float | None


def read_purchase_option(text: str, *, option: str) -> PurchaseOption:
    """The machine with all its cards, and the price of what must be bought for it."""
    cards, sign, price = text.partition("=")
    counted = _COUNTED.match(cards)
    name = (counted["name"] if counted else cards).strip()
    count = int(counted["count"]) if counted else 1
    if not name or count < 1:
        raise _mistake(text, option)
    if not sign:
        return PurchaseOption(name, count, None)
    try:
        usd = float(price.strip().lstrip("$").replace(",", ""))
    except ValueError:
        usd = -1.0
    if not 0 <= usd < float("inf"):
        raise _mistake(text, option)
    return PurchaseOption(name, count, usd)


def _mistake(text: str, option: str) -> UserMistake:
    return UserMistake(
        f"{option} {text!r} does not name a card",
        why="its memory, speed and price are needed",
        fix=f'write it as {option} "2x RTX 5060 Ti 16GB=700" (how many in all, which, dollars to pay)',
        where=option,
    )
