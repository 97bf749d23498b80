"""The limits that a plan must keep."""

from pydantic import Field

from graftwork.records.base import Record


class PlanSettings(Record):
    """Limits for plans."""

    memory_limit_gib: float | None = Field(
        None, gt=0, description="Memory limit for training. Default: what the machine has."
    )
    time_limit_minutes: float | None = Field(None, gt=0, description="Time limit for the run.")
