"""A week of training: sessions at places, what each model gets of them, and how good the plan is.

Times are minutes since the start of the week, and moments with a time zone next to them for people. Windows
are weekly, as people write them: `22:00-08:00`, `mon-fri 18:00-23:00`, `sat,sun 00:00-24:00`.
"""

import re
from datetime import datetime
from typing import Annotated, Literal, NamedTuple

from pydantic import AfterValidator

from graftwork.records.base import Record

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
MINUTES_PER_DAY = 24 * 60

_CLOCK = r"(?:[01]?\d|2[0-3]):[0-5]\d|24:00"
_DAY = "|".join(DAYS)
_DAYS = rf"(?:{_DAY})(?:-(?:{_DAY}))?"
_WINDOW = re.compile(rf"^(?:(?P<days>{_DAYS}(?:,{_DAYS})*) +)?(?P<start>{_CLOCK})-(?P<end>{_CLOCK})$")
_MOMENT = re.compile(rf"^(?:(?P<day>{_DAY}) +)?(?P<clock>{_CLOCK})$")


class WeeklyWindow(NamedTuple):
    """A window that opens on some days. `end` above 1440 is on the next day."""

    days: tuple[int, ...]
    start: int
    end: int


def parse_window(text: str) -> WeeklyWindow:
    """An end that is not after the start is on the next day."""
    match = _WINDOW.match(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a window: write 22:00-08:00 or mon-fri 18:00-23:00")
    start, end = _minutes(match["start"]), _minutes(match["end"])
    if start == end:
        raise ValueError(f"{text!r} is empty: write 00:00-24:00 for the whole day")
    return WeeklyWindow(_days(match["days"]), start, end if end > start else end + MINUTES_PER_DAY)


def parse_moment(text: str) -> tuple[int | None, int]:
    """The day of the week, None for each, and the minute of that day."""
    match = _MOMENT.match(text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a time: write 00:00 or sat 00:00")
    return DAYS.index(match["day"]) if match["day"] else None, _minutes(match["clock"])


def _minutes(clock: str) -> int:
    hours, minutes = clock.split(":")
    return int(hours) * 60 + int(minutes)


def _days(text: str | None) -> tuple[int, ...]:
    """`fri-mon` goes round the end of the week."""
    if not text:
        return tuple(range(7))
    days: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        day, end = DAYS.index(first), DAYS.index(last or first)
        days.add(day)
        while day != end:
            day = (day + 1) % 7
            days.add(day)
    return tuple(sorted(days))


def _checked_window(text: str) -> str:
    parse_window(text)
    return text


def _checked_moment(text: str) -> str:
    parse_moment(text)
    return text


def _checked_zone(text: str) -> str:
    from zoneinfo import ZoneInfo

    try:
        ZoneInfo(text)
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(f"{text!r} is not a time zone: write a name such as Europe/Berlin or UTC") from error
    return text


WindowText = Annotated[str, AfterValidator(_checked_window)]
MomentText = Annotated[str, AfterValidator(_checked_moment)]
ZoneName = Annotated[str, AfterValidator(_checked_zone)]


Scenario = Literal["sequential", "parallel", "iterative"]


class Session(Record):
    """One model trained at one place: set-up and fetching first, saving at the end."""

    place: str
    model: str
    start: int
    end: int
    train: int
    """Minutes of training; the rest is set-up and transfer."""
    lane: int = 0
    """Which of several sessions at once."""
    round: int = 0
    """Sessions of a later round start from the main model's later adapter."""
    fixed: bool = False
    """It has been, or runs: replanning keeps it."""


class ShownSession(Session):
    """A session for display."""

    starts_at: datetime
    ends_at: datetime
    hours: float
    """Reference hours of training."""
    cost_usd: float
    by_hand: bool


class ModelWeek(Record):
    """The share of the week for a model."""

    model: str
    sessions: int
    hours: float
    """Reference hours of its own training in this week."""
    inherited_hours: float
    """Reference hours that count since it starts from another model's adapter."""
    learned_before: float
    """Share of the possible gain that it had before the week, by its curve."""
    learned_after: float
    value: float
    """Points of the objective."""
    another_hour: float
    """Points that one more reference hour would add."""
    curve: str
    half_hours: float


class PlaceWeek(Record):
    """Use of a place."""

    place: str
    sessions: int
    used_hours: float
    trained_hours: float
    overhead_hours: float
    left_hours: float
    """Hours of open time within the quotas that no session uses."""
    offered_hours: float
    cost_usd: float


class WhatIf(Record):
    """A change of the terms, and its effect."""

    change: str
    value: float
    gain: float


class CurveCheck(Record):
    """The plan under another assumption: its value, and that of the best plan."""

    assumption: str
    value: float
    best_value: float
    best_scenario: Scenario
    loss: float
    """Share of the best plan's value that this plan would miss."""


class ScenarioResult(Record):
    """One strategy on the same objective."""

    scenario: Scenario
    value: float
    bound: float
    cost_usd: float
    greedy_value: float | None
    """Value of the greedy plan; None if it found none."""
    first_seconds: float
    """Until the first plan that keeps every rule."""
    seconds: float
    gap: float
    """Share of the bound that the plan does not reach: no plan is better by more."""
    optimal: bool


def share_missed(value: float, best: float) -> float:
    """How far a value is below another, as a share of it."""
    return max(0.0, 1 - value / best) if best > 0 else 0.0


class WeekSchedule(Record):
    """A week that keeps every rule."""

    start: datetime
    end: datetime
    now: datetime
    timezone: str
    scenario: Scenario
    sessions: tuple[ShownSession, ...]
    models: tuple[ModelWeek, ...]
    places: tuple[PlaceWeek, ...]
    value: float
    """Points: 100 is every model at its best, weighted by priority."""
    bound: float
    """No plan of this scenario is worth more."""
    gap: float
    optimal: bool
    cost_usd: float
    cap_usd: float | None
    scenarios: tuple[ScenarioResult, ...]
    what_if: tuple[WhatIf, ...] = ()
    curve_checks: tuple[CurveCheck, ...] = ()
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    """Planning time."""

    @property
    def best_bound(self) -> float:
        """No plan of any scenario that was compared is worth more."""
        return max([self.bound, *(result.bound for result in self.scenarios)])

    @property
    def best_gap(self) -> float:
        return share_missed(self.value, self.best_bound)
