"""When a place may be used, for how long, how fast it is and at which price: what a week is planned with."""

from typing import Literal, Self

from pydantic import Field, model_validator

from graftwork.records.base import Record
from graftwork.records.week import MomentText, WindowText, ZoneName


class QuotaSettings(Record):
    """Hours that a place gives: between resets, or within any so many hours."""

    hours: float = Field(gt=0, description="Hours of sessions, set-up included.")
    per: Literal["week", "day"] | None = Field(None, description="Reset every week or every day.")
    resets: MomentText | None = Field(
        None,
        description="When it resets: `sat 00:00` for a week, `00:00` for a day. Default: mon 00:00, 00:00.",
    )
    within_hours: float | None = Field(
        None, gt=0, description="Instead of `per`: the hours count within any window of this length, as 24."
    )

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> Self:
        if (self.per is None) == (self.within_hours is None):
            raise ValueError(
                "a quota is either per week or day, or within some hours: give `per` or `within_hours`"
            )
        if self.within_hours is not None and self.hours > self.within_hours:
            raise ValueError("a quota of more hours than its window has limits nothing")
        return self


class PlaceCalendarSettings(Record):
    """A place in the plan of a week. What is not set comes from the catalog's place of the same name."""

    place: str = Field(
        "", description="The place that runs the jobs, as --place takes it. Default: this name."
    )
    catalog: str = Field(
        "", description="A place of `graft plan catalog places` whose terms hold here. Default: this name."
    )
    gpu: str = Field("", description="Its card, from which the planner computes its speed.")
    gpus: int = Field(1, ge=1, description="How many of them a session has.")
    speed: float | None = Field(
        None, gt=0, description="Training per hour in hours of the reference place, instead of the planner's."
    )
    models: tuple[str, ...] = Field((), description="Train only these models here. Default: all.")
    at_once: int = Field(1, ge=1, le=8, description="Sessions at the same time.")
    windows: tuple[WindowText, ...] = Field(
        (), description="When sessions may run, as `22:00-07:00` or `sat-sun 00:00-24:00`. Default: always."
    )
    quotas: tuple[QuotaSettings, ...] = Field((), description="Limits on the hours of sessions.")
    timezone: ZoneName | None = Field(None, description="Of windows and resets. Default: plan.week.timezone.")
    session_hours: float | None = Field(None, gt=0, description="The longest session, set-up included.")
    shortest_minutes: int = Field(60, ge=5, description="A session trains at least so long.")
    setup_minutes: float | None = Field(None, ge=0, description="From the start of a session to training.")
    transfer_minutes: float = Field(
        0.0,
        ge=0,
        description="Fetching the checkpoint at the start of a session, and again saving it at the end.",
    )
    usd_per_hour: float | None = Field(None, ge=0, description="Price of an hour of a session.")
    by_hand: Literal["no", "start", "whole"] | None = Field(
        None, description="Whether a person must be there: to start a session, or during all of it."
    )
