"""How a project is served: the `serve` section of graft.yaml."""

import ipaddress
import os
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from graftwork.engines.settings import EngineSettings
from graftwork.records.base import MIB, NotSecret, Record, SecretText
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
        default=None, description="The step whose answer is looked at. None: the last answer so far."
    )

    contains: Annotated[tuple[str, ...], NotSecret("words of answers")] = Field(
        default=(), description="The answer contains one of these texts, in any case."
    )

    lacks: Annotated[tuple[str, ...], NotSecret("words of answers")] = Field(
        default=(), description="The answer contains none of these texts, in any case."
    )

    fails: tuple[str, ...] = Field(
        default=(),
        description="The answer fails one of these metrics or checks of `evaluate`; those that compare with "
        "a reference are refused.",
    )

    @model_validator(mode="after")
    def _validate_condition(self) -> Self:
        if not (self.contains or self.lacks or self.fails):
            raise ValueError("the condition holds always: give it contains, lacks or fails, or leave it out")
        if any(not text for text in (*self.contains, *self.lacks)):
            raise ValueError("an empty text is contained in every answer")
        return self


class ChainStep(Record):
    """One model that is asked."""

    name: StepName = Field(description="Prompts of later steps use the answer as `{{name}}`.")

    model: str = Field(
        min_length=1,
        description="An alias, `base`, a release, the family, a name under `serve.failover.endpoints`, or "
        "another chain.",
    )

    prompt: Template | None = Field(
        default=None,
        min_length=1,
        description="What the model is asked, with `{{question}}`, `{{conversation}}`, `{{answer}}` (the "
        "last one so far) and answers of earlier steps by their names. None: the conversation as received.",
    )

    system: Template | None = Field(
        default=None, description="The system prompt of this step. None: that of the request."
    )

    when: ChainCondition | None = Field(
        default=None,
        description="Without it the step always runs. A step that does not run has the answer before it as "
        "its own.",
    )

    fallback: str | None = Field(
        default=None, min_length=1, description="The model that is asked if this one fails."
    )

    max_tokens: int | None = Field(
        default=None,
        ge=1,
        description="The longest answer of this step. None: as the request says.",
    )


class ChainSettings(Record):
    """Steps in their order; the answer of the last one that runs is sent."""

    steps: tuple[ChainStep, ...] = Field(min_length=1, description="Asked one after the other.")

    max_steps: int = Field(
        default=8, ge=1, le=64, description="Steps at most, those of chains within this one included."
    )

    max_seconds: float = Field(default=60.0, gt=0, description="How long all steps may take together.")

    max_tokens: int = Field(
        default=8192, ge=1, description="Tokens of all prompts and answers of one request together."
    )

    fallback: str | None = Field(
        default=None,
        min_length=1,
        description="The model that answers the request instead if a step fails or the tokens are used up. "
        "None: the request fails with the name of the step.",
    )

    @model_validator(mode="after")
    def _steps_are_sound(self) -> Self:
        before: list[str] = []
        for step in self.steps:
            if step.name in before:
                raise ValueError(f"two steps are called {step.name}")
            if step.name in GIVEN:
                raise ValueError(f"{step.name} is a placeholder of its own: give the step another name")
            if not before and step.when is not None:
                raise ValueError(
                    f"the first step, {step.name}, has no answer before it that `when` could test"
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
    """Models that one request may ask at most, fallbacks not counted."""
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
        description="The alias whose release gets a share of them. Where it is not loaded, the champion "
        "answers all.",
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
        description="A name that goes into the assignment of sessions: another one assigns every session "
        "again. So does another champion, challenger or share.",
    )

    @model_validator(mode="after")
    def _are_two(self) -> Self:
        if self.alias == self.challenger:
            raise ValueError(f"{self.alias} cannot be its own challenger")
        return self


class EscalateSettings(Record):
    """The small model answers first; where one of the checks fails, a large one answers instead."""

    to: str = Field(description="Who answers then: a name under `serve.failover.endpoints`, or an alias.")

    checks: tuple[str, ...] = Field(
        default=(),
        description="Metrics and checks of `evaluate` that the answer must pass. Those that compare with a "
        "reference are refused.",
    )

    min_logprob: Annotated[float, Field(le=0)] | Literal["auto"] | None = Field(
        default=None,
        description="The least mean log-probability of an answer's tokens. `auto`: the threshold that `graft "
        "eval escalation --logprob` chose on the validation cases. None: it does not count.",
    )

    stream: Literal["hold", "prefix"] = Field(
        default="hold",
        description="Requests that stream. `hold`: nothing is sent before all checks have passed. `prefix`: "
        "the answer is sent once its beginning has passed the checks that can judge one.",
    )

    prefix_tokens: int = Field(
        default=32,
        ge=1,
        le=1024,
        description="stream: prefix: most tokens that are held back. `min_logprob` is that of these tokens.",
    )

    prefix_seconds: float = Field(
        default=2.0,
        gt=0,
        le=600,
        description="stream: prefix: how long the first token is held back at most.",
    )

    models: tuple[str, ...] = Field(
        default=(),
        description="Names of models whose answers are checked; empty: all but `base` and release ids.",
    )

    per_minute: int | None = Field(
        default=60,
        ge=1,
        description="Escalations in a minute. Beyond it the small model's answer is sent. None: no limit.",
    )

    per_day: int | None = Field(
        default=1000,
        ge=1,
        description="Escalations in a UTC day. Beyond it the small model's answer is sent. None: no limit.",
    )

    @field_validator("per_minute", "per_day", mode="before")
    @classmethod
    def _validate_budget(cls, value: Any) -> Any:
        if value == 0 and not isinstance(value, bool):
            raise ValueError("a budget of 0 never escalates: leave `escalate` out, or give null for no limit")
        return value

    @model_validator(mode="after")
    def _can_decide(self) -> Self:
        if self.to in self.models:
            raise ValueError(f"{self.to} cannot be asked when its own answer fails: name another model")
        if not self.checks and self.min_logprob is None:
            raise ValueError("nothing decides when the large model answers: give `checks` or `min_logprob`")
        return self


class FallbackEndpoint(Record):
    """An OpenAI-compatible API that answers when nothing here can."""

    url: EndpointUrl = Field(description="Where it is, up to and including `/v1`.")

    model: str = Field(description="The model to ask for.")

    api_key_env: VariableName | None = Field(
        default=None,
        description="Name of the environment variable that holds its key.",
    )


class FailoverSettings(Record):
    """Health probes, circuit breakers, retries and fallbacks."""

    fallback: dict[str, tuple[str, ...]] = Field(
        default={},
        description="Who answers instead, by the model asked for: aliases, releases, `base` or names of "
        "`endpoints`, tried in this order before the first byte is sent. `*` holds for models that have no "
        "chain of their own.",
    )

    endpoints: Annotated[
        dict[Annotated[str, Field(pattern="^[a-z0-9_-]{1,40}$")], FallbackEndpoint],
        NotSecret("names of endpoints; their fields have marks of their own"),
    ] = Field(
        default={},
        description="Remote APIs for fallback chains, by name. They answer only as fallbacks, and get "
        "the prompts of the requests that they answer.",
    )

    retries: int = Field(
        default=1,
        ge=0,
        le=10,
        description="How often a failed request is asked again, on another replica if there is one.",
    )

    retry_budget: float = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Retries as a share of the requests, beyond a burst of `queue_limit`.",
    )

    attempt_timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        description="How long one attempt may take to its first byte before another replica or the fallback "
        "is asked. None: as long as the request may.",
    )

    breaker_failures: int = Field(
        default=5,
        ge=1,
        description="Failures in a row after which a replica gets no requests for `breaker_seconds`.",
    )

    breaker_seconds: float = Field(
        default=1.0,
        gt=0,
        description="How long it gets none. Then one request tries it; if that fails, the pause doubles.",
    )

    probe_seconds: float = Field(
        default=2.0,
        gt=0,
        description="Seconds between health probes of a replica.",
    )

    frozen_seconds: float = Field(
        default=5.0,
        gt=0,
        description="Silence after which a replica gets no requests, and those that wait for it are asked "
        "elsewhere.",
    )

    restart_seconds: float = Field(
        default=20.0,
        gt=0,
        description="Silence after which its process is killed and started again.",
    )

    start_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="How long an engine may take from its start to its first answer; then it is killed.",
    )

    @model_validator(mode="after")
    def _chains_are_sound(self) -> Self:
        for name, chain in self.fallback.items():
            if name in chain:
                raise ValueError(f"{name} cannot be its own fallback")
            if len(set(chain)) != len(chain):
                raise ValueError(f"the fallback of {name} names a model twice")
        if not self.probe_seconds <= self.frozen_seconds <= self.restart_seconds:
            raise ValueError("probe_seconds, frozen_seconds and restart_seconds must not decrease")
        return self


CertificatePath = Annotated[str, NotSecret("the path of a file")]
ChainName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]


class ShadowSettings(Record):
    """A challenger that answers copies of live requests. Users get neither its answers nor its delays."""

    to: str = Field(min_length=1, description="An alias, or a name under `serve.failover.endpoints`.")

    models: tuple[str, ...] = Field(
        default=("champion",), min_length=1, description="Requests for these names are copied."
    )

    share: float = Field(default=0.1, gt=0, le=1, description="The share of them that is copied.")

    max_running: int = Field(default=1, ge=1, le=64, description="Copies that are answered at once.")

    per_minute: int | None = Field(default=60, ge=1, description="Copies in a minute; others are dropped.")

    @model_validator(mode="after")
    def _is_another(self) -> Self:
        if self.to in self.models:
            raise ValueError(f"{self.to} cannot be its own shadow")
        return self


class OperationSettings(Record):
    """What an operator sets; `ServeSettings` has these too."""

    admin_host: str | None = Field(
        default=None,
        description="Address of the admin listener. None: 127.0.0.1. Anything but this machine itself needs "
        "keys, as for `host`.",
    )

    admin_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Port of a separate listener for /metrics and the details of /health, which `port` "
        "then no longer shows. None: no such listener.",
    )

    tls_certificate: CertificatePath | None = Field(
        default=None,
        description="PEM file with the certificate and its chain: the endpoint speaks HTTPS.",
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
        description="Write a line for each request to standard error, without prompts, answers and queries.",
    )

    log_format: Literal["text", "json"] = Field(
        default="text",
        description="The form of log lines on standard error.",
    )

    capture_keep_days: float | None = Field(
        default=None,
        gt=0,
        description="Captures that are older are deleted, with their feedback. None keeps all.",
    )

    capture_keep_mib: float | None = Field(
        default=None,
        gt=0,
        description="The oldest captures are deleted, with their feedback, when all take more. None: no "
        "limit.",
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
        description="Address to listen on. Anything but this machine itself needs keys (`graft serve keys "
        "create`) or `api_key_env`.",
    )

    port: int = Field(
        default=8080,
        ge=0,
        le=65535,
        description="Port to listen on; 0 takes any free one.",
    )

    default_model: str = Field(
        default="champion",
        description="The model that answers a request which names none: an alias, `base` or a release.",
    )

    engine: EngineSettings = Field(
        default=EngineSettings(),
        description="The engine, by its kind alone (`engine: llamacpp`) or with its settings.",
    )

    require_gate_for_engine: bool = Field(
        default=True,
        description="Serve a release with another engine than the embedded one only if the gate has passed "
        "for the release on that engine: `graft gate --engine llamacpp`.",
    )

    failover: FailoverSettings = Field(
        default=FailoverSettings(),
        description="What happens when an engine fails: retries, fallbacks, circuit breakers, health probes.",
    )

    capture: bool = Field(
        default=True,
        description="Keep each exchange, redacted, so that it can become data again.",
    )

    traces: bool = Field(
        default=True,
        description="Take traces over OTLP/HTTP at /v1/traces and keep their calls of models as captures.",
    )

    max_connections: int = Field(
        default=1024,
        ge=8,
        description="Connections that may be open at once. Beyond it the one that has waited longest without "
        "a request is closed to make room; where every connection has a request, a new one is "
        "refused with 503.",
    )

    max_body_bytes: int = Field(
        default=4 * MIB,
        ge=1024,
        description="A larger request is refused with 413.",
    )

    request_timeout_seconds: float = Field(
        default=120.0,
        gt=0,
        description="How long an answer, or the next piece of a streamed one, may take.",
    )

    drain_seconds: float = Field(
        default=20.0,
        ge=0,
        description="How long running answers may take to finish when the server is asked to stop.",
    )

    queue_limit: int = Field(
        default=128,
        ge=1,
        description="Requests that may be under way at once; beyond it a request is refused with 429.",
    )

    batch_size: int = Field(
        default=8,
        ge=1,
        description="Requests that are answered at once; others wait until one of them ends.",
    )

    api_key_env: VariableName | None = Field(
        default=None,
        description="Name of the environment variable that holds the key clients must present as bearer "
        "token. It may do everything, along with the keys of `graft serve keys`.",
    )

    max_new_tokens: int = Field(
        default=256,
        ge=1,
        description="Maximum length of an answer if the request does not set one.",
    )

    max_new_tokens_limit: int = Field(
        default=1024,
        ge=1,
        description="The longest answer that a request may ask for.",
    )

    alias_refresh_seconds: float = Field(
        default=1.0,
        gt=0,
        description="Seconds until a moved alias takes effect.",
    )

    threads: int | None = Field(
        default=None,
        ge=1,
        description="Threads of the engine. None takes all cores that this process may use; llamacpp leaves "
        "one of them to others.",
    )

    family: FamilySettings | None = Field(
        default=None,
        description="One name for all models of the project: rules and a learned router choose the member. "
        "None: requests name their model.",
    )

    escalate: EscalateSettings | None = Field(
        default=None,
        description="Small first, large when needed. `graft eval escalation` predicts what it does. None: "
        "every answer is sent as it is.",
    )

    chains: dict[ChainName, ChainSettings] = Field(
        default={},
        description="Models that answer together, by the name that requests ask for: each step's answer is "
        "the input of the next.",
    )

    shadow: ShadowSettings | None = Field(
        default=None,
        description="A challenger that answers copies of live requests, for `graft release ab --traffic "
        "shadow`. None: none does.",
    )

    split: SplitSettings | None = Field(
        default=None,
        description="An experiment on live traffic: a share of the sessions goes to a challenger. None: no "
        "experiment.",
    )

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
    """Fail before anything starts where the key of an engine or a fallback is not in the environment."""
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
