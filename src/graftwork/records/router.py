"""The learned router of a family: which models it knows, and how often it was right on held-out questions."""

from graftwork.records.base import Record
from graftwork.records.measured import MeasuredShare


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
