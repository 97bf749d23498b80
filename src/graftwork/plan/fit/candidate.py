"""One way to do the run, reckoned through: what it holds, what it takes, whether there is room. Pure."""

from typing import NamedTuple

from graftwork.plan.fit.room import TIGHT, card_room, host_room
from graftwork.plan.fit.sharding import Shared
from graftwork.records.base import Figure
from graftwork.records.fit import FitQuestion, Level, MemoryPeak, PlainSetup
from graftwork.records.plan import Tuning
from graftwork.records.units import GIB

ALLOCATED_SPREAD: dict[Level, float] = {"computed": 0.05, "traced": 0.03, "probed": 0.015}
RESERVED_SPREAD: dict[Level, float] = {"computed": 0.08, "traced": 0.04, "probed": 0.02}
"""How far the truth may lie from the figure, either way; docs/accuracy.md shows what was found."""
TIME_SPREAD: dict[Level, float] = {"computed": 1.35, "traced": 1.35, "probed": 1.08}
"""Factor, either way. A trace knows memory, not time."""
SIMPLEST = ("none", "ddp", "zero2", "fsdp2", "zero3")
PLAINEST = ("none", "optimizer", "weights")


class Way(NamedTuple):
    """How it could be done."""

    engine: str
    own_step: bool
    """`graft train`'s own step on one card; else the plain one."""
    shared: Shared
    micro_rows: int
    checkpointed: int


class Candidate(NamedTuple):
    """A way with its figures. Bytes and seconds."""

    way: Way
    setup: PlainSetup | None
    tuning: Tuning | None
    peak: MemoryPeak
    floor: float
    """The least that the engine comes down to by itself, reserved: our own step measures and keeps less."""
    host: Figure
    seconds_a_step: float
    step_parts: dict[str, float]
    tokens_a_step: float
    passes: int

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_a_step / self.seconds_a_step


def allocated_figure(candidate: Candidate, level: Level) -> Figure:
    value, spread = candidate.peak.allocated / GIB, ALLOCATED_SPREAD[level]
    return Figure.about(value, down=1 - spread, up=1 + spread, unit="GiB")


def reserved_figure(candidate: Candidate, question: FitQuestion, level: Level) -> Figure:
    """The range ends where an engine that measures its first step would give way."""
    value, spread = candidate.peak.reserved / GIB, RESERVED_SPREAD[level]
    high = value * (1 + spread)
    if candidate.tuning is not None:
        room = card_room(question, cards=candidate.way.shared.cards).value
        high = max(value, candidate.floor / GIB * (1 + spread), min(high, room))
    return Figure(value=value, low=value * (1 - spread), high=high, unit="GiB")


def fits(candidate: Candidate, question: FitQuestion, level: Level) -> bool:
    """No figure within the range may pass what there is; on the host the usual one may not."""
    return card_excess(candidate, question, level) <= 0 and host_excess(candidate, question) <= 0


def card_excess(candidate: Candidate, question: FitQuestion, level: Level) -> float:
    """GiB that are lacking on each card."""
    room = card_room(question, cards=candidate.way.shared.cards)
    return reserved_figure(candidate, question, level).high - room.value


def host_excess(candidate: Candidate, question: FitQuestion) -> float:
    """GiB that are lacking on the host."""
    if question.machine.gpu is None:
        return 0.0
    return candidate.host.value - host_room(question)


def is_tight(candidate: Candidate, question: FitQuestion) -> bool:
    """It fits, and whoever opens a browser beside it may see it swap."""
    return candidate.host.high > TIGHT * question.machine.ram_gib


def preference(candidate: Candidate) -> tuple[float, int, int, float]:
    """The fastest; of equals the simplest, then the smallest."""
    shared = candidate.way.shared
    return (
        candidate.seconds_a_step / candidate.tokens_a_step,
        SIMPLEST.index(shared.sharding),
        PLAINEST.index(shared.offload),
        candidate.peak.reserved,
    )
