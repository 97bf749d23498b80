"""What a place asks for a machine, and under which rules. Dated facts with a source."""

from typing import Literal

from graftwork.records.base import Record


class Offer(Record):
    """A machine at a price."""

    place: str
    """As in `Place.name`."""
    gpu: str
    """A name or alias of the catalog of cards."""
    gpus: int = 1
    usd_per_hour: float | None = None
    spot_usd_per_hour: float | None = None
    usd_per_month: float | None = None
    """A subscription that holds `hours_a_month` of this card."""
    hours_a_month: float | None = None
    instance: str = ""
    region: str = ""
    vcpus: float | None = None
    memory_gib: float | None = None
    source: str
    dated: str


class Place(Record):
    """Where a run can be put, and what that place asks of it."""

    name: str
    title: str
    kind: Literal["cloud", "notebook", "managed", "own"]
    session_hours: float | None = None
    """Longest time that one job may run."""
    free_hours_a_week: float | None = None
    free_hours_a_day: float | None = None
    spot: bool = False
    preemptions_per_hour: float | None = None
    """Of its spot machines; None where nobody states it."""
    storage_usd_gib_month: float = 0.0
    egress_usd_gib: float = 0.0
    setup_minutes: float = 10.0
    """From the order to the first step: machine, packages, weights."""
    smallest_billed_minutes: float = 0.0
    disk_gib: float | None = None
    """Of a session, where the place sets it; None where one orders as much as one needs."""
    driven_by: Literal["api", "by hand"] = "api"
    notes: str = ""
    source: str
    dated: str
