"""What graft.yaml says about evaluation, checked when it is read."""

from difflib import get_close_matches

from pydantic import Field, field_validator

from graftwork.evaluate.fields import AnswerFields
from graftwork.evaluate.metrics import METRICS
from graftwork.records.base import Record


def require_known(name: str, known: tuple[str, ...]) -> None:
    """A metric that is not there is refused, with the nearest one that is."""
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
        raise ValueError(f"there is no metric {name}; {hint}")


class EvaluateSettings(Record):
    """How base and adapter are asked, and what is measured. Decoding is always greedy."""

    max_cases: int | None = Field(default=None, ge=1)
    """At most so many held-out cases; all of them without it."""
    max_new_tokens: int = Field(default=64, ge=1)
    """An answer longer than this is cut off and counts as truncated."""
    batch_size: int = Field(default=32, ge=1)
    """Answers generated side by side."""
    metrics: tuple[str, ...] = tuple(METRICS)
    """What is graded: names of the metrics."""
    worked_example: bool = True
    """Show the base one worked example from the training split, so that the comparison is fair."""
    confidence: float = Field(default=0.95, gt=0.5, lt=1)
    """The confidence of every interval."""
    latency_cases: int = Field(default=8, ge=1)
    """Cases asked once more, one at a time, to measure the latency of a single request."""
    fields: AnswerFields = AnswerFields()
    """Which keys of a reply hold the answer, the citations and the refusal."""

    @field_validator("metrics")
    @classmethod
    def _metrics_are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not names:
            raise ValueError("name at least one metric")
        for name in names:
            require_known(name, tuple(METRICS))
        return tuple(dict.fromkeys(names))
