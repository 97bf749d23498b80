"""Where a run's minutes and memory went, and where that left the plan's range."""

from graftwork.records.base import Record
from graftwork.records.figure import Figure


class RunParts(Record):
    """What was measured of a finished run, by parts. A part that nobody could measure is absent."""

    seconds: dict[str, float] = {}
    memory_gib: dict[str, float] = {}


class Drift(Record):
    """A figure that came out beyond its stated range, and the part that caused most of it."""

    figure: str
    planned: Figure
    actual: float
    component: str | None = None
    """None where the parts are not known."""
    component_planned: float | None = None
    component_actual: float | None = None
    says: str


class Bias(Record):
    """How far a kind of figure was off over past runs."""

    figure: str
    runs: int
    off: Figure
    """Actual over planned, less one: the median, and the range that holds all runs."""
    inside: Figure
    """Share of runs that came out within the stated range."""


class LearnedMemory(Record):
    """What earlier runs of the same kind took over what was reckoned for them."""

    factor: float
    low: float
    high: float
    runs: int
