"""The nouns of a purchase: what a machine can, what it costs over the years, when it has paid for itself."""

from graftwork.records.base import Figure, Record
from graftwork.records.fit import Method


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


class Choice(Record):
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
    choices: tuple[Choice, ...]
    best: str | None
    answer: str
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
