"""The `gate` settings of graft.yaml, validated when they are read.

Input: rules as people write them. Output: frozen settings with a hash, so that a change of the rules shows.
Knows the names of the metrics, not how they are measured.
"""

import math
from difflib import get_close_matches
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from graftwork.evaluate.settings import require_known
from graftwork.grading.metrics import (
    COSTS,
    FIRST_TOKEN,
    GRADERS,
    JUDGE_PREFERENCE,
    LATENCY,
    LATENCY_P95,
    MEMORY,
    PERPLEXITY,
    TOKENS_PER_SECOND,
    TRUNCATED,
    WITH_CONTEXT,
)
from graftwork.records.base import Record, fingerprint

Bound = Literal["lower", "upper", "value"]
Against = Literal["base", "champion", "log", "prompt", "logged_prompt"]
Statistic = Literal["median", "mean", "p95"]
Evidence = Literal["interval", "value"]

LIMITS = ("over", "under", "at_least", "at_most")
TIMED = (LATENCY, FIRST_TOKEN)
"""Measured per request, so that a mean and a percentile are available."""
REQUESTS = (*TIMED, LATENCY_P95)
"""Figures measured on single requests: more requests settle a rule, not more cases."""
FIGURES = (LATENCY, FIRST_TOKEN, TOKENS_PER_SECOND, MEMORY, PERPLEXITY, *COSTS)
"""Measured in addition to the grades of answers: what they cost."""
KNOWN = (*GRADERS, *WITH_CONTEXT, JUDGE_PREFERENCE, TRUNCATED, *FIGURES)
NO_PRIMARY = "none"
"""Value of `gate.primary` if an adapter may be deployed without being better at anything."""
NEARLY = 0.85
"""Similarity from which an unknown name counts as a misspelling."""


def require_metric(name: str) -> None:
    """Refuse a misspelled metric. Any other name may be a check of the project.

    The project refuses checks that it does not evaluate. Here a rule on a figure that is not measured stays
    unproven and lets nothing through.
    """
    if name not in KNOWN and is_like_metric(name):
        try:
            require_known(name, KNOWN)
        except ValueError as error:
            raise ValueError(f"{error} (a check of your own needs a name less like a metric's)") from error


def is_like_metric(name: str) -> bool:
    """Whether the gate takes the name for a misspelled metric, so that no check can have a rule under it."""
    is_prefix = any(metric.startswith(name) for metric in KNOWN)
    return is_prefix or bool(get_close_matches(name, KNOWN, n=1, cutoff=NEARLY))


class GateRule(Record):
    """One promise: a metric beyond a limit, or not worse than another subject by more than a margin."""

    metric: str
    over: float | None = None
    """The metric must be above this. Rates are written as 0.95, not 95."""
    under: float | None = None
    """The metric must be below this."""
    at_least: float | None = None
    """As `over`, and just this much is enough."""
    at_most: float | None = None
    """As `under`, and just this much is allowed."""
    margin: float | None = Field(default=None, gt=0)
    """A guardrail: the metric may be worse by less than this, in its own unit (0.02 is 2 points)."""
    against: Against | None = None
    """Whom a guardrail compares with: the base, the champion, the log, the prompted base (`prompt`)
    or the base with the logged system prompt (`logged_prompt`)."""
    at: Statistic | None = None
    """Statistic of measured times: their median (the default), mean or 95th percentile."""
    bound: Bound | None = None
    """What is held against the limit; the lower bound for `over`, the upper for `under`."""
    severity: Literal["must", "invariant"] = "must"
    """A broken invariant ends the attempt (abort); a broken must asks for another one (iterate)."""

    @model_validator(mode="after")
    def _one_limit_that_fits(self) -> Self:
        require_metric(self.metric)
        limits = [name for name in (*LIMITS, "margin") if getattr(self, name) is not None]
        if len(limits) != 1:
            raise ValueError(
                f"the rule for {self.metric} needs `over` or `under`, and not both; or a `margin`"
            )
        if not math.isfinite(self.limit):
            raise ValueError(f"the rule for {self.metric} needs a number, not {self.limit}")
        if self.metric == JUDGE_PREFERENCE and self.margin is None:
            raise ValueError(
                f"{self.metric} says which of two answers is better, and has no value for a single "
                "answer: give it a "
                "`margin`, or make it the `primary` metric"
            )
        # Every grade is between 0 and 1, a custom metric's too: a limit outside always holds or never.
        if self.metric not in FIGURES and not 0 <= self.limit <= 1:
            raise ValueError(
                f"{self.metric} is a rate between 0 and 1, not {self.limit:g}: for 95 % write 0.95"
            )
        if self._holds_always:
            raise ValueError(f"`{self._way}: {self.limit:g}` for {self.metric} is always true")
        if self.metric not in FIGURES and self.margin == 1:
            raise ValueError(f"a margin of 100 points for {self.metric} allows everything: 0.02 is 2 points")
        if self.margin is None and self.against is not None:
            raise ValueError(
                f"the rule for {self.metric} compares with the {self.against}: give it a `margin` "
                "(0.02 is 2 points), set before the run"
            )
        if self.at not in (None, "median") and self.metric not in TIMED:
            raise ValueError(f"`at: {self.at}` is for {' and '.join(TIMED)}, not for {self.metric}")
        sound = (None, "value", "lower" if self.wants_more else "upper")
        if self.margin is None and self.bound not in sound:
            raise ValueError(
                f"`bound: {self.bound}` for {self.metric} is the favorable bound: the fewer cases, the "
                "easier it would pass; leave it out, or write `bound: value`"
            )
        if self.margin is not None and (self.at or self.bound or self.severity == "invariant"):
            raise ValueError(
                f"the guardrail for {self.metric} takes only `margin` and `against`: its bound is that of "
                "the difference, and a proven loss aborts anyway"
            )
        return self

    @property
    def _way(self) -> str:
        return next(name for name in (*LIMITS, "margin") if getattr(self, name) is not None)

    @property
    def _holds_always(self) -> bool:
        """A limit at or beyond the end of what can be measured."""
        if self.metric not in FIGURES:
            return self.at_least == 0 or self.at_most == 1
        return (self._way == "at_least" and self.limit <= 0) or (self._way == "over" and self.limit < 0)

    @property
    def limit(self) -> float:
        limits = (self.over, self.under, self.at_least, self.at_most, self.margin)
        return next(value for value in limits if value is not None)

    @property
    def is_guardrail(self) -> bool:
        return self.margin is not None

    @property
    def wants_more(self) -> bool:
        """Whether larger figures satisfy the rule."""
        return self.over is not None or self.at_least is not None

    @property
    def held_bound(self) -> Bound:
        return self.bound or ("lower" if self.wants_more else "upper")

    @property
    def reference(self) -> Against:
        return self.against or "base"

    def clears(self, figure: float) -> bool:
        if self.at_least is not None or self.at_most is not None:
            return figure >= self.limit if self.wants_more else figure <= self.limit
        return figure > self.limit if self.wants_more else figure < self.limit


class Primary(Record):
    """The one metric on which the adapter must be better."""

    metric: str
    against: Against = "base"
    """The subject to beat."""

    @field_validator("metric")
    @classmethod
    def _is_known(cls, name: str) -> str:
        require_metric(name)
        if name in FIGURES:
            raise ValueError(f"{name} is a cost, not a quality: declare it as a `win`")
        return name


class Win(Record):
    """A saving that, declared beforehand, is reason enough to deploy what is not worse."""

    metric: str
    against: Against = "base"
    """The subject to compare costs with."""
    by: float = Field(default=0.0, ge=0, lt=1)
    """By at least this share of what it is now: 0.4 is two fifths less."""

    @field_validator("metric")
    @classmethod
    def _is_known(cls, name: str) -> str:
        require_metric(name)
        if name not in FIGURES:
            raise ValueError(
                f"{name} is a quality, not a cost: make it the `primary` metric, or use one of: "
                f"{', '.join(FIGURES)}"
            )
        return name


class Abort(Record):
    """Abort if the adapter is worse on all of these."""

    worse_on: tuple[str, ...] = Field(min_length=1)
    """Metrics; worse on only some of them asks for another try."""
    against: Against = "base"
    """The subject to compare with."""
    by: Evidence = "interval"
    """`interval`: each loss is proven. `value`: no metric shows a gain, proven or not."""

    @field_validator("worse_on")
    @classmethod
    def _are_known(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            require_metric(name)
        return tuple(dict.fromkeys(names))


class GateSettings(Record):
    """When an adapter may be served."""

    rules: tuple[GateRule, ...] = (
        GateRule(metric="json_valid", over=0.95),
        GateRule(metric="citation_coverage", over=0.85),
        GateRule(metric="refusal_correct", over=0.80),
    )
    """All of them must hold."""
    primary: str | Primary | None = None
    """A metric, named beforehand, on which the adapter must beat the base or another subject. Without it (and
    without a `win`) it is the first metric that separates right from wrong; `none` requires no gain."""
    win: str | Win | None = None
    """A saving (`cost_per_success`, `latency_seconds`) that replaces a better primary metric."""
    abort_when: Abort | None = None
    """What ends the attempt, besides a broken invariant; any proven loss on a rate with a rule without it."""
    session_margin: float = Field(default=0.05, gt=0, lt=1)
    """Between training sessions: how much worse a metric without a guardrail may be."""

    @field_validator("rules")
    @classmethod
    def _some_rules(cls, rules: tuple[GateRule, ...]) -> tuple[GateRule, ...]:
        if not rules:
            raise ValueError("a gate without rules would let anything through: add at least one")
        return rules

    @model_validator(mode="after")
    def _gains_are_sound(self) -> Self:
        if isinstance(self.primary, str) and self.primary != NO_PRIMARY:
            Primary(metric=self.primary)
        if isinstance(self.win, str):
            Win(metric=self.win)
        # What was not cut off may still be empty or wrong: that is not quality by itself.
        if self.win is not None and all(rule.metric in (*FIGURES, TRUNCATED) for rule in self.rules):
            raise ValueError(
                "a cost win needs a rule on the quality of the answers, or whatever is cheap would pass: "
                "add a guardrail, such as {metric: json_valid, against: base, margin: 0.02}"
            )
        return self

    @property
    def primary_rule(self) -> Primary | None:
        if self.primary == NO_PRIMARY:
            return None
        return Primary(metric=self.primary) if isinstance(self.primary, str) else self.primary

    @property
    def win_rule(self) -> Win | None:
        return Win(metric=self.win) if isinstance(self.win, str) else self.win

    def rules_hash(self) -> str:
        """Hash what the rules require, however they are written; an omitted setting equals its default."""
        settings = {
            "rules": list(self.rules),
            "primary": self.primary_rule,
            "win": self.win_rule,
            "abort_when": self.abort_when,
        }
        explicit = {
            name: [rule.model_dump(mode="json", exclude_defaults=True) for rule in value]
            if isinstance(value, list)
            else value.model_dump(mode="json", exclude_defaults=True)
            for name, value in settings.items()
            if value
        }
        return fingerprint(explicit)

    def subjects_needed(self) -> tuple[Against, ...]:
        """Subjects that the candidate is compared with, in the order of the rules."""
        subjects: list[Against] = [rule.reference for rule in self.rules if rule.is_guardrail]
        subjects += [rule.against for rule in (self.primary_rule, self.win_rule, self.abort_when) if rule]
        return tuple(dict.fromkeys(subjects))
