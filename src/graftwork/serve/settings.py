"""How a project is served: the `serve` section of graft.yaml."""

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from graftwork.engines.settings import EngineSettings
from graftwork.records.base import NotSecret, Record, SecretText
from graftwork.records.errors import EnvironmentFailure
from graftwork.text.redact import EndpointUrl, VariableName

PLACEHOLDER = re.compile(r"\{\{\s*([A-Za-z_][A-Za-z0-9_]*)\s*\}\}")
QUESTION, CONVERSATION, ANSWER = "question", "conversation", "answer"
GIVEN = (QUESTION, CONVERSATION, ANSWER)
"""Placeholders that name no step: the user's last turn, the whole conversation, the last answer so far."""
StepName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
Template = Annotated[str, NotSecret("a prompt that the project declares")]


class ChainCondition(Record):
    """When a step runs, by an earlier answer. Every condition that is set must hold."""

    answer_of: StepName | None = Field(
        default=None, description="The step whose answer is tested. Unset: the latest answer."
    )

    contains: Annotated[tuple[str, ...], NotSecret("words of answers")] = Field(
        default=(), description="The answer contains one of these texts, ignoring case."
    )

    lacks: Annotated[tuple[str, ...], NotSecret("words of answers")] = Field(
        default=(), description="The answer contains none of these texts, ignoring case."
    )

    fails: tuple[str, ...] = Field(
        default=(),
        description="The answer fails one of these metrics or checks of `evaluate`; those that need a "
        "reference are rejected.",
    )

    @model_validator(mode="after")
    def _validate_condition(self) -> Self:
        if not (self.contains or self.lacks or self.fails):
            raise ValueError(
                "the condition is always true: give it contains, lacks or fails, or leave it out"
            )
        if any(not text for text in (*self.contains, *self.lacks)):
            raise ValueError("an empty text is contained in every answer")
        return self


class ChainStep(Record):
    """One call of a model."""

    name: StepName = Field(description="Prompts of later steps use the answer as `{{name}}`.")

    model: str = Field(
        min_length=1,
        description="An alias, `base`, a release, the family, a name under `serve.failover.endpoints`, or "
        "another chain.",
    )

    prompt: Template | None = Field(
        default=None,
        min_length=1,
        description="The prompt, with `{{question}}`, `{{conversation}}`, `{{answer}}` (the latest one) and "
        "answers of earlier steps by name. Unset: the conversation as received.",
    )

    system: Template | None = Field(
        default=None, description="System prompt of this step. Unset: that of the request."
    )

    when: ChainCondition | None = Field(
        default=None,
        description="Condition for the step; without it, the step always runs. A skipped step passes on the "
        "answer before it.",
    )

    fallback: str | None = Field(
        default=None, min_length=1, description="The model to use if this one fails."
    )

    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Maximum answer length of this step. Unset: as in the request.",
    )


class ChainSettings(Record):
    """Steps in order; the answer of the last one that runs is sent."""

    steps: tuple[ChainStep, ...] = Field(min_length=1, description="Steps, run one after the other.")

    max_steps: int = Field(
        default=8,
        ge=1,
        le=64,
        description="Maximum number of steps, including those of chains within this one.",
    )

    max_seconds: float = Field(default=60.0, gt=0, description="Time limit for all steps together.")

    max_tokens: int = Field(
        default=8192, ge=1, description="Token limit for all prompts and answers of one request."
    )

    fallback: str | None = Field(
        default=None,
        min_length=1,
        description="The model that answers instead if a step fails or the tokens are used up. Unset: the "
        "request fails with the name of the step.",
    )

    @model_validator(mode="after")
    def _steps_are_sound(self) -> Self:
        before: list[str] = []
        for step in self.steps:
            if step.name in before:
                raise ValueError(f"two steps are called {step.name}")
            if step.name in GIVEN:
                raise ValueError(f"{step.name} is a reserved placeholder: give the step another name")
            if not before and step.when is not None:
                raise ValueError(
                    f"the first step, {step.name}, has no previous answer that `when` could test"
                )
            if step.when is not None and step.when.answer_of not in (None, *before):
                raise ValueError(f"{step.name} looks at {step.when.answer_of}, which is not a step before it")
            placeholders = (QUESTION, CONVERSATION, *((ANSWER,) if before else ()), *before)
            for name in find_placeholders(step):
                if name not in placeholders:
                    listed = ", ".join(placeholders)
                    raise ValueError(
                        f"the prompt of {step.name} uses {{{{{name}}}}}, which is not known there: {listed}"
                    )
            before.append(step.name)
        return self


def find_placeholders(step: ChainStep) -> Iterator[str]:
    for text in (step.prompt, step.system):
        yield from PLACEHOLDER.findall(text or "")


def require_sound_chains(chains: Mapping[str, ChainSettings]) -> None:
    """Refuse chains that lead back to themselves, or have more steps than they allow. Raises ValueError."""
    for name, chain in chains.items():
        _require_no_cycle(chains, name, ())
        for fallback in (chain.fallback, *(step.fallback for step in chain.steps)):
            if fallback in chains:
                raise ValueError(f"the fallback {fallback} of the chain {name} is a chain: name a model")
    for name, chain in chains.items():
        steps = count_steps(chains, name)
        if steps > chain.max_steps:
            raise ValueError(
                f"the chain {name} may take {steps} steps with those of the chains in it; raise its "
                f"max_steps ({chain.max_steps})"
            )


def count_steps(chains: Mapping[str, ChainSettings], name: str) -> int:
    """Maximum number of models that one request may ask, fallbacks not counted."""
    return sum(count_steps(chains, step.model) if step.model in chains else 1 for step in chains[name].steps)


def _require_no_cycle(chains: Mapping[str, ChainSettings], name: str, path: tuple[str, ...]) -> None:
    if name in path:
        cycle = " → ".join((*path[path.index(name) :], name))
        raise ValueError(f"the chain {name} leads back to itself: {cycle}")
    for step in chains[name].steps:
        if step.model in chains:
            _require_no_cycle(chains, step.model, (*path, name))


class RouteRule(Record):
    """Requests that go to one model. Every condition that is set must hold."""

    to: str = Field(description="A model under `models:`.")

    role: tuple[str, ...] = Field(
        default=(),
        description="Role stated by the request, in the header `x-graft-role` or in `metadata.role`.",
    )

    headers: dict[str, SecretText] = Field(default={}, description="Request headers and their values.")

    schema_names: tuple[str, ...] = Field(
        default=(), description="Names of the JSON Schema in `response_format`."
    )

    keywords: Annotated[tuple[str, ...], NotSecret("words that users write")] = Field(
        default=(), description="Words, ignoring case; the user's last turn must contain at least one."
    )

    @model_validator(mode="after")
    def _require_condition(self) -> Self:
        if not (self.role or self.headers or self.schema_names or self.keywords):
            raise ValueError(
                f"the rule for {self.to} matches every request: give it role, headers, schema_names or "
                "keywords; requests that no rule matches go to the router, then to the main model"
            )
        conditions = {"keyword": self.keywords, "role": self.role, "schema name": self.schema_names}
        for name, values in conditions.items():
            if any(not value.strip() for value in values):
                raise ValueError(f"the rule for {self.to} has an empty {name}, which matches nothing")
        return self


class FamilyGateSettings(Record):
    """What `graft gate --family` requires of all members together."""

    cases: str | None = Field(
        default=None,
        description="JSONL file of cases; `group` is the role of each. Unset: the held-out cases of all "
        "models.",
    )

    max_cases: int = Field(default=120, ge=1, description="Number of cases, the same share for each route.")

    metric: str | None = Field(
        default=None, description="Metric that grades answers. Unset: the gate's primary metric."
    )

    margin: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="How much worse the answers of a route may get, as a fraction.",
    )

    router_margin: float = Field(
        default=0.05,
        gt=0,
        lt=1,
        description="How far the router's accuracy may fall below that of its card.",
    )

    max_memory_gib: float | None = Field(
        default=None, gt=0, description="Maximum memory of all engine processes together."
    )

    max_p95_seconds: float | None = Field(
        default=None, gt=0, description="Limit for the 95th percentile of the answer time."
    )


class FamilySettings(Record):
    """The project's models behind one name."""

    name: str = Field(
        default="auto",
        min_length=1,
        description="Requests for this model are routed. Other names are served directly.",
    )

    rules: tuple[RouteRule, ...] = Field(default=(), description="Tried in this order, before the router.")

    remote: dict[str, str] = Field(
        default={},
        description="Members that another server answers for: a model under `models:` with a name under "
        "`serve.failover.endpoints`. If that server fails, the main model answers.",
    )

    router: bool = Field(
        default=True,
        description="Use the learned router (`graft train --router 0.95`) if no rule matches. If it is "
        "unsure, the main model answers.",
    )

    gate: FamilyGateSettings = Field(
        default=FamilyGateSettings(), description="The gate for the family as a whole: `graft gate --family`."
    )

    @model_validator(mode="after")
    def _every_rule_can_match(self) -> Self:
        for index, rule in enumerate(self.rules):
            for earlier, first in enumerate(self.rules[:index]):
                if matches_all_of(first, rule):
                    raise ValueError(
                        f"rule {index + 1} (to {rule.to}) never matches: rule {earlier + 1} matches all that "
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


class SplitSettings(Record):
    """Two releases behind one alias, assigned at random per session: what `graft release ab` compares."""

    alias: str = Field(
        default="champion",
        description="Requests for this alias take part; those that name another model never do.",
    )

    challenger: str = Field(
        default="challenger",
        description="Alias of the challenger. While its release is not loaded, the champion answers "
        "everything.",
    )

    share: float = Field(
        default=0.1,
        gt=0,
        lt=1,
        description="The share of sessions that the challenger answers.",
    )

    experiment: str = Field(
        default="",
        max_length=200,
        description="Name of the experiment, used to assign sessions: a new name assigns every session "
        "again. So does another champion, challenger or share.",
    )

    @model_validator(mode="after")
    def _are_two(self) -> Self:
        if self.alias == self.challenger:
            raise ValueError(f"{self.alias} cannot be its own challenger")
        return self


class EscalateSettings(Record):
    """The small model answers first; if a check fails, a large one answers instead."""

    to: str = Field(
        description="The model that answers if a check fails: a name under `serve.failover.endpoints`, or an "
        "alias."
    )

    checks: tuple[str, ...] = Field(
        default=(),
        description="Metrics and checks of `evaluate` that the answer must pass. Those that need a reference "
        "are rejected.",
    )

    min_logprob: Annotated[float, Field(le=0)] | Literal["auto"] | None = Field(
        default=None,
        description="Minimum mean log-probability of an answer's tokens. `auto`: the threshold that `graft "
        "eval escalation --logprob` chose on the validation cases. Unset: not checked.",
    )

    stream: Literal["hold", "prefix"] = Field(
        default="hold",
        description="Streaming requests. `hold`: send nothing until all checks have passed. `prefix`: send "
        "the answer once its start has passed the checks that can judge one.",
    )

    prefix_tokens: int = Field(
        default=32,
        ge=1,
        le=1024,
        description="stream: prefix: maximum number of tokens to hold back. `min_logprob` refers to these "
        "tokens.",
    )

    models: tuple[str, ...] = Field(
        default=(),
        description="Names of models whose answers are checked; empty: all but `base` and release ids.",
    )

    per_minute: int | None = Field(
        default=60,
        ge=1,
        description="Maximum escalations per minute. Above it, the small model's answer is sent. Unset: no "
        "limit.",
    )

    per_day: int | None = Field(
        default=1000,
        ge=1,
        description="Maximum escalations per UTC day. Above it, the small model's answer is sent. Unset: no "
        "limit.",
    )

    @field_validator("per_minute", "per_day", mode="before")
    @classmethod
    def _validate_budget(cls, value: Any) -> Any:
        if value == 0 and not isinstance(value, bool):
            raise ValueError("a budget of 0 never escalates: leave `escalate` out, or set null for no limit")
        return value

    @model_validator(mode="after")
    def _can_decide(self) -> Self:
        if self.to in self.models:
            raise ValueError(f"{self.to} cannot escalate to itself: specify another model")
        if not self.checks and self.min_logprob is None:
            raise ValueError("nothing decides when the large model answers: set `checks` or `min_logprob`")
        return self


class FallbackEndpoint(Record):
    """An OpenAI-compatible API that answers when no local engine can."""

    url: EndpointUrl = Field(description="URL of the API, up to and including `/v1`.")

    model: str = Field(description="The model to request.")

    own: bool = Field(
        default=False,
        description="Whether you trained its model. Its replies, like those of releases, are then not "
        "references for tests.",
    )

    api_key_env: VariableName | None = Field(
        default=None,
        description="Environment variable that contains its key.",
    )


class ServedModel(Record):
    """A model name of clients, and who answers it."""

    to: str = Field(
        min_length=1,
        description="The model that answers: a name under `serve.failover.endpoints`, or an alias, "
        "`base` or a release.",
    )

    small: str | None = Field(
        default=None,
        min_length=1,
        description="Alias of a release that answers a share of the sessions. While it is not loaded, `to` "
        "answers everything.",
    )

    share: float | None = Field(
        default=None, gt=0, lt=1, description="The share of sessions that `small` answers."
    )

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        if (self.small is None) != (self.share is None):
            raise ValueError("`small` and `share` go together: who answers a share, and how large it is")
        if self.small == self.to:
            raise ValueError(f"{self.to} cannot take a share of itself")
        return self


class FailoverSettings(Record):
    """Health probes, circuit breakers, retries and fallbacks."""

    fallback: dict[str, tuple[str, ...]] = Field(
        default={},
        description="Fallbacks by requested model: aliases, releases, `base` or names of `endpoints`, tried "
        "in this order before the first byte is sent. `*` applies to models without a chain of "
        "their own.",
    )

    endpoints: Annotated[
        dict[Annotated[str, Field(pattern="^[a-z0-9_-]{1,40}$")], FallbackEndpoint],
        NotSecret("names of endpoints; their fields have marks of their own"),
    ] = Field(
        default={},
        description="Remote APIs by name, for `serve.models`, fallback chains, `escalate` and `shadow`. They "
        "receive the prompts of the requests that they answer.",
    )

    retries: int = Field(
        default=1,
        ge=0,
        le=10,
        description="Retries of a failed request, on another replica if there is one.",
    )

    attempt_timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        description="Time limit to the first byte of one attempt before another replica or the fallback is "
        "tried. Unset: that of the request.",
    )

    breaker_failures: int = Field(
        default=5,
        ge=1,
        description="Failures in a row after which a replica gets no requests for `breaker_seconds`.",
    )

    breaker_seconds: float = Field(
        default=1.0,
        gt=0,
        description="How long it gets no requests. Then one request probes it; if that fails, the pause "
        "doubles.",
    )

    frozen_seconds: float = Field(
        default=5.0,
        gt=0,
        description="Silence after which a replica gets no requests, and its waiting requests are moved to "
        "others. After four times this long, its process is killed and restarted.",
    )

    start_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="Time limit from an engine's start to its first answer; then it is killed.",
    )

    @model_validator(mode="after")
    def _chains_are_sound(self) -> Self:
        for name, chain in self.fallback.items():
            if name in chain:
                raise ValueError(f"{name} cannot be its own fallback")
            if len(set(chain)) != len(chain):
                raise ValueError(f"the fallback of {name} names a model twice")
        return self

    @property
    def probe_seconds(self) -> float:
        """Seconds between health probes of a replica."""
        return min(2.0, self.frozen_seconds / 2)

    @property
    def restart_seconds(self) -> float:
        """Silence after which the process of a replica is killed."""
        return 4 * self.frozen_seconds


CertificatePath = Annotated[str, NotSecret("the path of a file")]
ChainName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]


class ShadowSettings(Record):
    """A challenger that answers copies of live requests. Users get neither its answers nor its delays."""

    to: str = Field(min_length=1, description="An alias, or a name under `serve.failover.endpoints`.")

    models: tuple[str, ...] = Field(
        default=("champion",), min_length=1, description="Requests for these names are copied."
    )

    share: float = Field(default=0.1, gt=0, le=1, description="Share of these requests to copy.")

    per_minute: int | None = Field(
        default=60, ge=1, description="Maximum copies per minute; others are dropped."
    )

    @model_validator(mode="after")
    def _is_another(self) -> Self:
        if self.to in self.models:
            raise ValueError(f"{self.to} cannot be its own shadow")
        return self


class OperationSettings(Record):
    """What an operator sets; `ServeSettings` has these too."""

    admin_host: str | None = Field(
        default=None,
        description="Address of the admin listener. Unset: 127.0.0.1. Any address other than this machine "
        "requires keys, as for `host`.",
    )

    admin_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of a separate listener for /metrics and the details of /health, which are then no "
        "longer on `port`. Unset: no such listener.",
    )

    tls_certificate: CertificatePath | None = Field(
        default=None,
        description="PEM file with the certificate chain; enables HTTPS.",
    )

    tls_key: CertificatePath | None = Field(
        default=None,
        description="PEM file with the key of the certificate, without a passphrase.",
    )

    cors_origins: tuple[str, ...] = Field(
        default=(),
        description="Origins whose web pages may call the endpoint, such as https://app.example.org.",
    )

    access_log: bool = Field(
        default=False,
        description="Log each request to standard error, without prompts, answers and queries.",
    )

    log_format: Literal["text", "json"] = Field(
        default="text",
        description="Format of log lines on standard error.",
    )

    capture_keep_days: float | None = Field(
        default=None,
        gt=0,
        description="Delete captures older than this, with their feedback. Unset: keep all.",
    )

    capture_keep_mib: float | None = Field(
        default=None,
        gt=0,
        description="Delete the oldest captures, with their feedback, when all together exceed this. Unset: "
        "no limit.",
    )

    @model_validator(mode="after")
    def _has_both_files(self) -> Self:
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("TLS needs both `tls_certificate` and `tls_key`")
        return self


class ServeSettings(OperationSettings):
    """The endpoint, its limits, and what it keeps of what it serves."""

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on. Any address other than this machine requires keys (`graft serve "
        "keys create`) or `api_key_env`.",
    )

    port: int = Field(
        default=8080,
        ge=0,
        le=65535,
        description="Port to listen on; 0 for any free port.",
    )

    default_model: str = Field(
        default="champion",
        description="The model for requests that do not name one: an alias, `base`, a release or a name "
        "under `models`. Unset: `champion`, or the first name under `models`.",
    )

    models: Annotated[
        dict[Annotated[str, Field(pattern=r"^[\w./:@-]{1,128}$")], ServedModel],
        NotSecret("model names of clients; their fields have marks of their own"),
    ] = Field(
        default={},
        description="Model names that clients use already, by name, and who answers each: "
        "`gpt-4o: {to: large}` passes them on to an endpoint of `failover`, and `small` with `share` lets a "
        "release answer a share of the sessions. If all of them go to endpoints and there is no release yet, "
        "no base model is loaded.",
    )

    engine: EngineSettings = Field(
        default=EngineSettings(),
        description="The engine: only its kind (`engine: llamacpp`), or with settings.",
    )

    require_gate_for_engine: bool = Field(
        default=True,
        description="Serve a release with an engine other than the embedded one only if the release passed "
        "the gate on that engine: `graft gate --engine llamacpp`.",
    )

    failover: FailoverSettings = Field(
        default=FailoverSettings(),
        description="What happens when an engine fails: retries, fallbacks, circuit breakers, health probes.",
    )

    capture: bool = Field(
        default=True,
        description="Store each exchange, redacted, so that it can become training data.",
    )

    traces: bool = Field(
        default=True,
        description="Accept traces over OTLP/HTTP at /v1/traces and store their model calls as captures.",
    )

    request_timeout_seconds: float = Field(
        default=120.0,
        gt=0,
        description="Time limit for an answer, or for the next piece of a streamed one.",
    )

    queue_limit: int = Field(
        default=128,
        ge=1,
        description="Maximum requests in flight; above it, requests are rejected with 429.",
    )

    batch_size: int = Field(
        default=8,
        ge=1,
        description="Concurrent requests; others wait until one of them ends.",
    )

    api_key_env: VariableName | None = Field(
        default=None,
        description="Environment variable with the key that clients must send as a bearer token. It has all "
        "permissions, in addition to the keys of `graft serve keys`.",
    )

    max_new_tokens: int = Field(
        default=256,
        ge=1,
        description="Maximum length of an answer if the request does not set one.",
    )

    max_new_tokens_limit: int = Field(
        default=1024,
        ge=1,
        description="Maximum answer length that a request may ask for.",
    )

    threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads of the engine. Unset: all cores available to this process; llamacpp leaves one "
        "of them free.",
    )

    family: FamilySettings | None = Field(
        default=None,
        description="One name for all models of the project: rules and a learned router choose the member. "
        "Unset: requests name their model.",
    )

    escalate: EscalateSettings | None = Field(
        default=None,
        description="Small model first, the large one when needed. `graft eval escalation` predicts the "
        "effect. Unset: every answer is sent unchecked.",
    )

    chains: dict[ChainName, ChainSettings] = Field(
        default={},
        description="Models that answer together, by the name that requests use: each step's answer is the "
        "input of the next.",
    )

    shadow: ShadowSettings | None = Field(
        default=None,
        description="A challenger that answers copies of live requests, for `graft release ab --traffic "
        "shadow`. Unset: none.",
    )

    split: SplitSettings | None = Field(
        default=None,
        description="An experiment on live traffic: a share of the sessions goes to a challenger. Unset: no "
        "experiment.",
    )

    @model_validator(mode="before")
    @classmethod
    def _default_to_first_model(cls, data: Any) -> Any:
        if isinstance(data, dict) and "default_model" not in data and isinstance(data.get("models"), dict):
            return {**data, **({"default_model": name} if (name := next(iter(data["models"]), "")) else {})}
        return data

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Self:
        own = {"base", *self.chains} | ({self.family.name} if self.family is not None else set())
        for name, model in self.models.items():
            if name in own:
                raise ValueError(f"models: {name} is the name of another model of the endpoint")
            if model.to in self.models or model.to in self.chains:
                raise ValueError(
                    f"models: {name} goes to {model.to}, which is not a model: specify one that answers"
                )
        return self

    @property
    def uses_endpoints_only(self) -> bool:
        """Whether everyone who answers is a remote API, as long as there is no release."""
        if self.engine.kind == "endpoint" or self.family is not None or self.chains or not self.models:
            return False
        return all(model.to in self.failover.endpoints for model in self.models.values())

    @model_validator(mode="after")
    def _chains_are_sound(self) -> Self:
        require_sound_chains(self.chains)
        reserved = {"base", self.family.name if self.family is not None else "base", *self.failover.endpoints}
        for name in self.chains:
            if name in reserved:
                raise ValueError(f"the chain {name} has the name of another model")
        return self

    @model_validator(mode="after")
    def _remote_members_have_endpoints(self) -> Self:
        for model, endpoint in (self.family.remote if self.family is not None else {}).items():
            if endpoint not in self.failover.endpoints:
                endpoints = ", ".join(self.failover.endpoints) or "none"
                raise ValueError(
                    f"family.remote: {model} is at {endpoint}, which is not an endpoint of failover; known: "
                    f"{endpoints}"
                )
        return self

    @field_validator("engine", mode="before")
    @classmethod
    def _by_kind_alone(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def require_upstream_keys(settings: ServeSettings) -> None:
    """Fail before anything starts if the key of an engine or a fallback is not in the environment."""
    variables = {"serve.engine.api_key_env": settings.engine.api_key_env}
    for name, endpoint in settings.failover.endpoints.items():
        variables[f"serve.failover.endpoints.{name}.api_key_env"] = endpoint.api_key_env
    for where, variable in variables.items():
        if variable and not os.environ.get(variable, "").strip():
            raise EnvironmentFailure(
                f"the environment variable {variable} is empty or not set",
                why="it should hold the key of the server that is asked",
                fix=f"export {variable}=… before `graft serve`",
                where=where,
            )
