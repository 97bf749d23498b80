"""Live traffic, forecast or measured: drift, shadow, canary, escalation and the learned router."""

from typing import Literal

from pydantic import Field

from graftwork.records.base import Record
from graftwork.records.errors import EXIT_DONE, EXIT_NEGATIVE_RESULT, EXIT_NOT_ENOUGH_EVIDENCE


class DriftShare(Record):
    """Prompts that differ from every training prompt, with the bounds of the 95 % interval."""

    prompts: int
    unlike: int
    share: float
    low: float
    high: float


class GroupDrift(DriftShare):
    """The same for the prompts that are nearest to training rows of one role."""

    group: str


class PromptDrift(Record):
    """`expected` is the share that differs without any drift. Without a share, `why_not` says why."""

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
    """The mean grade of its own answers; None if there is no pair."""
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

    @property
    def exit_code(self) -> int:
        worse = any(check.outcome == "worse" for check in self.checks)
        return EXIT_NEGATIVE_RESULT if worse else EXIT_DONE


CanaryDecision = Literal["promoted", "rolled_back", "undecided"]
_EXIT_CODES: dict[CanaryDecision, int] = {
    "promoted": EXIT_DONE,
    "rolled_back": EXIT_NEGATIVE_RESULT,
    "undecided": EXIT_NOT_ENOUGH_EVIDENCE,
}


class RunningCanary(Record):
    """State of a canary for endpoints. After `until` they send every session to the champion again."""

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
    """Statistics of one release in the canary."""

    release: str
    sessions: int
    failures: int
    """Exchanges without an answer, and those whose caller left."""
    failed_checks: int
    """Exchanges whose answer failed a check of `serve.escalate`, even where another model answered."""
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
    """Confidence of the decision as a whole."""
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


class MeasuredShare(Record):
    """A mean of values from 0 to 1 over `n` cases, with its 95 % interval, clustered by session."""

    value: float
    low: float
    high: float
    n: int


class EscalationOption(Record):
    """The pair where the large model answers if one of `checks` fails. No checks: the small model alone."""

    checks: tuple[str, ...]
    escalated: MeasuredShare
    quality: MeasuredShare
    cost_per_1000: float | None
    """Dollars for 1,000 requests; None if the cost of one of the models is not known."""
    cost_low: float | None = None
    cost_high: float | None = None


class EscalationPoint(Record):
    """The pair where the large model answers below a mean log-probability, or if a check fails."""

    threshold: float
    escalated: MeasuredShare
    quality: MeasuredShare
    cost_per_1000: float | None
    cost_low: float | None = None
    cost_high: float | None = None


class EscalationCurve(Record):
    """Thresholds of the small model's log-probability: chosen on validation cases, shown on test cases."""

    points: tuple[EscalationPoint, ...]
    """From the lowest threshold, at which only checks escalate, to the highest; on the test cases."""
    chosen: EscalationPoint
    """The chosen threshold on the test cases."""
    validation_cases: int
    validation_escalated: float
    validation_quality: float
    max_rate: float
    """The largest share of escalated validation cases that was allowed."""
    prefix_tokens: int | None = None
    """The log-probability is the mean of the first N tokens; None: of all."""
    auc: float | None = None
    """How well log-probabilities separate right from wrong answers on the test cases: 0.5 is not at all."""


class EscalationForecast(Record):
    small: str
    large: str
    metric: str
    """What `quality` is the mean of."""
    cases: int
    chosen: EscalationOption
    options: tuple[EscalationOption, ...]
    """The small model alone, then the checks added one by one, the one with the largest gain first."""
    large_alone: EscalationOption
    gain_over_small: float
    gain_low: float
    gain_high: float
    loss_to_large: float
    """Quality of the large model alone less that of the pair."""
    loss_low: float
    loss_high: float
    remarks: tuple[str, ...] = ()
    curve: EscalationCurve | None = None
    """None if no threshold of log-probabilities was asked for."""
    made_at: str = ""
    model: str = ""
    """The name whose requests are predicted, as requests give it."""


class LiveFigure(Record):
    """A predicted figure and its actual value."""

    name: str
    predicted: float | None
    predicted_low: float | None
    predicted_high: float | None
    live: float | None
    live_low: float | None = None
    live_high: float | None = None
    n: int = 0
    agrees: bool | None = None
    """Whether the two intervals overlap; None if one of them is not known."""


class EscalationLive(Record):
    """What escalation does on live traffic, against what was predicted."""

    predicted_at: str
    requests: int
    figures: tuple[LiveFigure, ...]
    remarks: tuple[str, ...] = ()

    @property
    def agrees(self) -> bool:
        return all(figure.agrees is not False for figure in self.figures)


class RouterCard(Record):
    """What a router was trained on and how good it is. Figures are of the test split."""

    id: str
    labels: tuple[str, ...]
    """Models that it chooses from."""
    main: str
    """The model that answers where it is unsure."""
    threshold: float
    """Probability below which it is unsure, chosen on the validation split."""
    target: float
    datasets: dict[str, str]
    """Content hash of each model's dataset."""
    trained_on: int
    chosen_on: int
    accuracy: MeasuredShare
    """Accuracy over all questions, by the likeliest model."""
    sure_accuracy: MeasuredShare
    """Accuracy over the questions it is sure about."""
    unsure: MeasuredShare
    calibration_error: float
    """Mean distance of stated probability and accuracy over ten groups of equal width."""
    confusion: dict[str, dict[str, int]]
    """Questions by their model, then by the model chosen; `unsure` is one of these."""


class TrainedRouter(Record):
    """`milliseconds`: CPU time of one decision on this machine."""

    card: RouterCard
    path: str
    milliseconds: float
