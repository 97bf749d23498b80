"""Ship it or not, rule by rule."""

from typing import Literal

from graftwork.records import errors
from graftwork.records.base import Record

Decision = Literal["deploy", "iterate", "abort", "not_enough_evidence"]
RuleOutcome = Literal["pass", "fail", "unknown"]

EXIT_CODES: dict[Decision, int] = {
    "deploy": errors.EXIT_DONE,
    "iterate": errors.EXIT_ITERATE,
    "abort": errors.EXIT_ABORT,
    "not_enough_evidence": errors.EXIT_NOT_ENOUGH_EVIDENCE,
}


class RuleResult(Record):
    """One rule, the figure it looked at, and one plain sentence."""

    metric: str
    rule: str
    outcome: RuleOutcome
    value: float | None
    low: float | None
    high: float | None
    limit: float
    sentence: str
    cases_to_decide: int | None = None


class Verdict(Record):
    decision: Decision
    reason: str
    rules: tuple[RuleResult, ...]
    advice: tuple[str, ...] = ()
    report_hash: str

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.decision]
