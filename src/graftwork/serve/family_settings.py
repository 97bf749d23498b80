"""One name for all models of a project: the `serve.family` section of graft.yaml."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from graftwork.records.base import NotSecret, Record, SecretText


class RouteRule(Record):
    """Requests that go to one model. Every condition that is set must hold."""

    to: str = Field(description="A model under `models:`.")

    role: tuple[str, ...] = Field(
        default=(),
        description="The role that the request states, in the header `x-graft-role` or in `metadata.role`.",
    )

    headers: dict[str, SecretText] = Field(
        default={}, description="Headers of the request with their values."
    )

    schema_names: tuple[str, ...] = Field(
        default=(), description="Names of the JSON Schema in `response_format`."
    )

    keywords: Annotated[tuple[str, ...], NotSecret("words that users write")] = Field(
        default=(), description="Words of which the user's last turn must contain one, in any case."
    )

    @model_validator(mode="after")
    def _has_a_condition(self) -> Self:
        if not (self.role or self.headers or self.schema_names or self.keywords):
            raise ValueError(
                f"the rule for {self.to} matches every request: give it role, headers, schema_names or "
                "keywords; requests that no rule matches go to the router, then to the main model"
            )
        named = {"keyword": self.keywords, "role": self.role, "schema name": self.schema_names}
        for name, values in named.items():
            if any(not value.strip() for value in values):
                raise ValueError(f"the rule for {self.to} has an empty {name}, which matches nothing")
        return self


class FamilyGateSettings(Record):
    """What `graft gate --family` requires of all members together."""

    cases: str | None = Field(
        default=None,
        description="JSONL file of cases; `group` is the role that each is for. None: the held-out cases of "
        "all models.",
    )

    max_cases: int = Field(
        default=120, ge=1, description="Cases that are asked, the same share of each route."
    )

    metric: str | None = Field(
        default=None, description="What answers are graded by. None: the gate's primary metric."
    )

    margin: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="How much worse the answers of one route may get, in points of 1.",
    )

    router_margin: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="How far the router's accuracy may fall below that of its card.",
    )

    max_memory_gib: float | None = Field(
        default=None, gt=0, description="Memory that all engine processes may take together."
    )

    max_p95_seconds: float | None = Field(
        default=None, gt=0, description="The 95th percentile of the time of an answer."
    )


class FamilySettings(Record):
    """The project's models behind one name."""

    name: str = Field(
        default="auto",
        min_length=1,
        description="Requests for this model are routed. Other names are served as they are.",
    )

    rules: tuple[RouteRule, ...] = Field(default=(), description="Tried in this order, before the router.")

    remote: dict[str, str] = Field(
        default={},
        description="Members that another server answers for: a model under `models:` with a name under "
        "`serve.failover.endpoints`. While that server fails, the main model answers.",
    )

    router: bool = Field(
        default=True,
        description="Use the learned router (`graft train --router 0.95`) where no rule matches. Where it is "
        "unsure, the main model answers.",
    )

    gate: FamilyGateSettings = Field(
        default=FamilyGateSettings(), description="The gate for the family as a whole: `graft gate --family`."
    )

    @model_validator(mode="after")
    def _every_rule_can_match(self) -> Self:
        for place, rule in enumerate(self.rules):
            for earlier, first in enumerate(self.rules[:place]):
                if matches_all_of(first, rule):
                    raise ValueError(
                        f"rule {place + 1} (to {rule.to}) never matches: rule {earlier + 1} matches all that "
                        "it does; put it before that one, or remove it"
                    )
        return self


def matches_all_of(first: RouteRule, second: RouteRule) -> bool:
    """Whether every request that `second` matches is matched by `first`."""
    listed = ((first.role, second.role), (first.schema_names, second.schema_names))
    if not all(_is_wider(ours, theirs) for ours, theirs in listed):
        return False
    if not _is_wider(_fold(first.keywords), _fold(second.keywords)):
        return False
    theirs = {name.lower(): value for name, value in second.headers.items()}
    return all(theirs.get(name.lower()) == value for name, value in first.headers.items())


def _is_wider(ours: tuple[str, ...], theirs: tuple[str, ...]) -> bool:
    return not ours or (bool(theirs) and set(theirs) <= set(ours))


def _fold(words: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word.casefold() for word in words)
