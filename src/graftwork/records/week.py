"""A week of training: sessions at places, what each model gets of them, and how good the plan is.

Times are minutes since the start of the week, and moments with a time zone next to them for people.
"""

from datetime import datetime
from typing import Literal

from graftwork.records.base import Record

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
    """A session as people read it."""

    starts_at: datetime
    ends_at: datetime
    hours: float
    """Reference hours of training."""
    cost_usd: float
    by_hand: bool


class ModelWeek(Record):
    """What a model gets."""

    model: str
    sessions: int
    hours: float
    """Reference hours of its own training in this week."""
    inherited_hours: float
    """Reference hours that count since it starts from another model's adapter."""
    learned_before: float
    """Share of what can be gained that it had before the week, by its curve."""
    learned_after: float
    value: float
    """Points of the objective."""
    another_hour: float
    """Points that one more reference hour would bring."""
    curve: str
    half_hours: float


class PlaceWeek(Record):
    """What a place gives."""

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
    """A change of the terms, and what it would bring."""

    change: str
    value: float
    gain: float


class CurveCheck(Record):
    """The plan under another assumption: what it would be worth, and what the best plan would."""

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
    """Of the greedy plan; None if it found none."""
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
    """Points: 100 is every model as good as it can become, weighted by priority."""
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
    """What planning took."""

    @property
    def best_bound(self) -> float:
        """No plan of any scenario that was compared is worth more."""
        return max([self.bound, *(found.bound for found in self.scenarios)])

    @property
    def best_gap(self) -> float:
        return share_missed(self.value, self.best_bound)
