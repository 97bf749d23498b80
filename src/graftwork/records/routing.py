"""Who answers a request: escalation and the learned router of a family, as measured on held-out cases."""

from graftwork.records.base import Record


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
    """Dollars for 1,000 requests; None where the cost of one of the models is not known."""
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
    """The log-probability is the mean of the first so many tokens; None: of all."""
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
    """None where no threshold of log-probabilities was asked for."""
    made_at: str = ""
    model: str = ""
    """The name whose requests are predicted, as requests give it."""


class LiveFigure(Record):
    """A predicted figure and the same one as it came out."""

    name: str
    predicted: float | None
    predicted_low: float | None
    predicted_high: float | None
    live: float | None
    live_low: float | None = None
    live_high: float | None = None
    n: int = 0
    agrees: bool | None = None
    """Whether the two intervals overlap; None where one of them is not known."""


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
    """Of all questions, by the likeliest model."""
    sure_accuracy: MeasuredShare
    """Of those that it is sure about."""
    unsure: MeasuredShare
    calibration_error: float
    """Mean distance of stated probability and accuracy over ten groups of equal width."""
    confusion: dict[str, dict[str, int]]
    """Questions by their model, then by the model chosen; `unsure` is one of these."""


class TrainedRouter(Record):
    """`milliseconds`: processor time of one decision on this machine."""

    card: RouterCard
    path: str
    milliseconds: float
