"""What graft.yaml says about the gate, checked when it is read."""

from typing import Literal, Self

from pydantic import field_validator, model_validator

from graftwork.evaluate.metrics import ALWAYS_MEASURED, METRICS, RATES
from graftwork.evaluate.settings import require_known
from graftwork.records.base import Record

Bound = Literal["lower", "upper", "value"]


class Rule(Record):
    """One promise: a metric over or under a limit, by a bound of its interval."""

    metric: str
    over: float | None = None
    """The metric must lie over this. Rates are written as 0.95, not 95."""
    under: float | None = None
    """The metric must lie under this."""
    bound: Bound | None = None
    """What is held against the limit; the lower bound for `over`, the upper for `under`."""
    severity: Literal["must", "invariant"] = "must"
    """A broken invariant ends the attempt (abort); a broken must asks for another one (iterate)."""

    @model_validator(mode="after")
    def _one_limit_that_fits(self) -> Self:
        require_known(self.metric, (*METRICS, *ALWAYS_MEASURED))
        if (self.over is None) == (self.under is None):
            raise ValueError(f"the rule for {self.metric} needs `over` or `under`, and not both")
        if self.metric in RATES and not 0 <= self.limit <= 1:
            raise ValueError(
                f"{self.metric} is a rate between 0 and 1, not {self.limit:g}: for 95 % write 0.95"
            )
        return self

    @property
    def limit(self) -> float:
        return self.over if self.over is not None else self.under if self.under is not None else 0.0

    @property
    def held_bound(self) -> Bound:
        return self.bound or ("lower" if self.over is not None else "upper")


class GateSettings(Record):
    """When an adapter may be served."""

    rules: tuple[Rule, ...] = (
        Rule(metric="json_valid", over=0.95),
        Rule(metric="citation_coverage", over=0.85),
        Rule(metric="refusal_correct", over=0.80),
    )
    """All of them must hold."""
    primary: str | None = None
    """A metric, named beforehand, on which the adapter must beat the base (exact McNemar test)."""

    @field_validator("rules")
    @classmethod
    def _some_rules(cls, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        if not rules:
            raise ValueError("a gate without rules would let anything through: name at least one")
        return rules

    @field_validator("primary")
    @classmethod
    def _primary_is_known(cls, name: str | None) -> str | None:
        if name is not None:
            require_known(name, tuple(METRICS))
        return name
