"""What escalation does, predicted on held-out cases: how often, how good, at what cost."""

from graftwork.records.base import Record
from graftwork.records.measured import MeasuredShare


class EscalationOption(Record):
    """The pair where the large model answers if one of `checks` fails. No checks: the small model alone."""

    checks: tuple[str, ...]
    escalated: MeasuredShare
    quality: MeasuredShare
    cost_per_1000: float | None
    """Dollars for 1,000 requests; None where the cost of one of the models is not known."""


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
