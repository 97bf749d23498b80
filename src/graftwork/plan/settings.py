"""The limits that a plan must keep."""

from pydantic import Field

from graftwork.records.base import Record


class PlanSettings(Record):
    """What the team has."""

    memory_limit_gib: float | None = Field(
        None, gt=0, description="Most memory that training may take; by default what the machine has."
    )
    time_limit_minutes: float | None = Field(None, gt=0, description="Longest run that is acceptable.")
