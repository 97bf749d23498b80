"""What live traffic says: about its distance from the training data, a challenger, a canary."""

from typing import Literal

from pydantic import Field

from graftwork.records.base import Record
from graftwork.records.errors import EXIT_ANSWER_IS_NO, EXIT_DONE, EXIT_NOT_ENOUGH_EVIDENCE


class DriftShare(Record):
    """Prompts that are unlike any training prompt, with the bounds of the 95 % interval."""

    prompts: int
    unlike: int
    share: float
    low: float
    high: float


class GroupDrift(DriftShare):
    """The same for the prompts that are nearest to training rows of one role."""

    group: str


class PromptDrift(Record):
    """`expected` is the share that is unlike without any drift. Without a share, `why_not` says why."""

    dataset: str = ""
    all: DriftShare | None = None
    expected: float = 0.0
    by_group: tuple[GroupDrift, ...] = ()
    examples: tuple[str, ...] = ()
    """The most unlike prompts, shortened. Captures are redacted before they are stored."""
    due: bool = False
    reason: str = ""
    """Why a retraining is due or not."""
    why_not: str = ""


class ShadowCheck(Record):
    """One check on the pairs of answers that both have a grade for."""

    check: str
    pairs: int
    champion: float | None
    """The mean grade of its own answers; None where there is no pair."""
    challenger: float | None
    wins: int
    """Sessions in which the challenger's answer was better."""
    losses: int
    ties: int
    low: float
    """Challenger less champion, valid at any time and for all checks together."""
    high: float

    @property
    def outcome(self) -> str:
        return "better" if self.low > 0 else "worse" if self.high < 0 else "open"


class ShadowSummary(Record):
    """Copies that a challenger answered of requests that a champion was asked."""

    champion: str
    challenger: str
    copies: int
    """Copies that were asked, with those that failed and those that were interrupted."""
    sessions: int
    """Sessions that are compared: each counts once."""
    failed: int
    """Copies without an answer; they count as wrong."""
    interrupted: int
    """Copies that made way for users; they are not compared."""
    checks: tuple[ShadowCheck, ...]
    confidence: float
    champion_ms: float | None = None
    """Median time of an answer."""
    challenger_ms: float | None = None
    remarks: tuple[str, ...] = ()


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
