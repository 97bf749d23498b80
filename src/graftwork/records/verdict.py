"""Ship it or not, rule by rule."""

from typing import Literal

from graftwork.records import errors
from graftwork.records.base import Record

Decision = Literal["deploy", "iterate", "abort", "not_enough_evidence"]
RuleOutcome = Literal["pass", "fail", "unknown"]
RuleKind = Literal["limit", "invariant", "guardrail", "primary", "win", "loss"]

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
    """Fresh cases, pairs or timed requests like these that settle the rule in four evaluations of five."""
    sessions_to_decide: int | None = None
    """The sessions that those come of; None where every case is independent."""
    cases_with_these: int | None = None
    """The same where the cases of this evaluation are among them: a further look at them costs more."""
    kind: RuleKind = "limit"
    against: str = ""
    """The subject that the candidate was compared with; empty where the figure is not a comparison."""
    margin: float | None = None
    """How much worse a guardrail allows, in the metric's own unit."""
    n: int | None = None
    """Cases, pairs or measurements that the figure rests on."""
    p_value: float | None = None
    adjusted_p: float | None = None
    """p after Holm's correction, where several adapters were judged in one go."""
    test: str = ""
    """How p or the interval was found, as the report names it."""
    vacuous: str = ""
    """Why the rule cannot be decided: no case is of the kind that it is about. It is then never a pass."""
    must: bool = True
    """False where another rule replaces this one: a cost win for the primary metric, or the reverse."""


class Verdict(Record):
    decision: Decision
    reason: str
    rules: tuple[RuleResult, ...]
    advice: tuple[str, ...] = ()
    report_hash: str
    rules_hash: str = ""
    """What the rules of the gate were, so that a change of them shows."""
    cases_needed: int | None = None
    """Fresh cases that would settle every open rule, at the rates seen so far."""
    notes: tuple[str, ...] = ()
    """What to know besides the rules: that they were changed, that the test set is worn."""
    statistics: int = 1
    """Which statistics judged: 2 since tests are of means over sessions and looks at a test set cost."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.decision]


class NextStart(Record):
    """Between two training sessions of one model: which checkpoint the next one starts from."""

    start: Literal["this", "before"]
    certain: bool
    """Whether the cases prove it; if not, `reason` says what it rests on."""
    reason: str
    rules: tuple[RuleResult, ...] = ()
    cases_needed: int | None = None
    adapter_hash: str = ""
    """The adapter to start from; empty where it is not known."""
    adapter_folder: str = ""
