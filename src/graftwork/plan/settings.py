"""The limits that a plan must keep, and what a week is planned for."""

from datetime import datetime
from typing import Literal

from pydantic import Field

from graftwork.records.base import Record
from graftwork.records.week import MomentText, WindowText, ZoneName


class WeekModelSettings(Record):
    """The value of a model in a week, and what it depends on."""

    priority: float = Field(1.0, gt=0, description="Its weight in the objective.")
    half_hours: float | None = Field(
        None,
        gt=0,
        description="Reference hours until half of the possible gain is reached. Default: fitted from runs "
        "of this project, otherwise plan.week.half_hours.",
    )
    done_hours: float = Field(0.0, ge=0, description="Reference hours of training before the week.")
    least_hours: float = Field(0.0, ge=0, description="Minimum reference hours.")
    most_hours: float | None = Field(None, gt=0, description="Maximum reference hours.")
    deadline: datetime | None = Field(
        None,
        description="Deadline for its last session and gate; without an offset, in the week's time zone.",
    )
    after: tuple[str, ...] = Field((), description="Models that must be trained, and gated, before it.")
    starts_from: str | None = Field(
        None,
        description="The model whose adapter it starts from, in the sequential and iterative scenarios; "
        "`base`: none. Default: main, if train.start_from says so.",
    )
    gate_minutes: float | None = Field(
        None,
        ge=0,
        description="Time from its last session until others may build on it. Default: plan.week's.",
    )


class WeekSettings(Record):
    """A week of training: places, budget, and the value of the models."""

    timezone: ZoneName = Field(
        "UTC", description="Time zone of the week, and of people and places without their own."
    )
    starts: MomentText = Field("mon 00:00", description="When a week starts.")
    people: tuple[WindowText, ...] = Field(
        (), description="When somebody is available to start sessions manually. Default: never."
    )
    spend_usd: float | None = Field(
        None, ge=0, description="Budget for a week. Default: fleet.caps.month_usd."
    )
    scenario: Literal["auto", "sequential", "parallel", "iterative"] = Field(
        "auto", description="sequential, parallel, iterative, or the best of them."
    )
    half_hours: float = Field(
        24.0,
        gt=0,
        description="Reference hours until half of the possible gain is reached, for models without runs: an "
        "assumption.",
    )
    inherit: float = Field(
        0.25,
        ge=0,
        le=1,
        description="Share of the main model's hours that counts for a model that starts from it; at most as "
        "many as it trains from there on. An assumption.",
    )
    carry: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of a model's own hours that counts after it moves to the main model's adapter. An "
        "assumption.",
    )
    gate_minutes: float = Field(
        60.0, ge=0, description="Time from a model's last session until others may build on it."
    )
    reference: str = Field(
        "", description="The place whose hours are reference hours. Default: the first of fleet.places."
    )
    models: dict[str, WeekModelSettings] = Field({}, description="Settings by model name.")


class PlanSettings(Record):
    """Limits for plans."""

    memory_limit_gib: float | None = Field(
        None, gt=0, description="Memory limit for training. Default: the memory of the machine."
    )
    time_limit_minutes: float | None = Field(None, gt=0, description="Time limit for the run.")
    week: WeekSettings = Field(
        default_factory=WeekSettings,
        # When and where a run was planned changes nothing about it: releases do not record it.
        exclude=True,
        description="What `graft plan week` plans for.",
    )
