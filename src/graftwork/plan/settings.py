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
        "of this project, otherwise 24.",
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
    gate_minutes: float = Field(
        60.0, ge=0, description="Time from its last session until others may build on it."
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
    models: dict[str, WeekModelSettings] = Field({}, description="Settings by model name.")


class PlanSettings(Record):
    """Limits for plans."""

    memory_limit_gib: float | None = Field(
        None, gt=0, description="Memory limit for training. Default: the memory of the machine."
    )
    week: WeekSettings = Field(
        default_factory=WeekSettings,
        # When and where a run was planned changes nothing about it: releases do not record it.
        exclude=True,
        description="What `graft plan week` plans for.",
    )
