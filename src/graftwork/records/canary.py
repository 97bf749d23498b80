"""A canary: a new release that answers a small share of live sessions until it is promoted or rolled back."""

from typing import Literal

from pydantic import Field

from graftwork.records.base import Record
from graftwork.records.errors import EXIT_ANSWER_IS_NO, EXIT_DONE, EXIT_NOT_ENOUGH_EVIDENCE

CanaryDecision = Literal["promoted", "rolled_back", "undecided"]
_EXIT_CODES: dict[CanaryDecision, int] = {
    "promoted": EXIT_DONE,
    "rolled_back": EXIT_ANSWER_IS_NO,
    "undecided": EXIT_NOT_ENOUGH_EVIDENCE,
}


class RunningCanary(Record):
    """What endpoints need to know. After `until` they send every session to the champion again."""

    alias: str
    """Requests for it take part."""
    canary: str
    """The alias of the new release."""
    share: float = Field(gt=0, lt=1)
    until: float
    """Seconds since 1970; the command that watches the canary extends it."""
    is_starting: bool = False
    """The alias is claimed, and the new release is not its canary yet."""


class CanaryArm(Record):
    """What one release did in the canary."""

    release: str
    sessions: int
    failures: int
    """Exchanges without an answer, and those whose caller left."""
    failed_checks: int
    """Exchanges whose answer failed a check of `serve.escalate`, also where another model answered."""
    successes: float
    """Sum of the marks of the metric."""
    graded: float


class CanaryReport(Record):
    """How a canary ended, and on what evidence."""

    alias: str
    champion: CanaryArm
    canary: CanaryArm
    share: float
    metric: str
    decision: CanaryDecision
    reason: str
    difference: float
    """The canary's mean mark less the champion's."""
    low: float
    high: float
    """The interval of the difference, valid however often it was looked at."""
    confidence: float
    """Of the decision as a whole."""
    e_value: float
    failures_e_value: float
    experiment: str | None
    started_at: str
    ended_at: str
    seconds: float
    remarks: tuple[str, ...] = ()
    file: str = ""

    @property
    def exit_code(self) -> int:
        return _EXIT_CODES[self.decision]
