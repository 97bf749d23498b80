"""How an endpoint survives engines that fail: the `serve.failover` section of graft.yaml, and replicas."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from graftwork.records.base import NotSecret, Record
from graftwork.text.redact import EndpointUrl, VariableName


class ReplicaSettings(Record):
    """A server that holds the same models as the others of its engine."""

    url: EndpointUrl = Field(description="Where the server is, up to and including `/v1`.")

    weight: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="Its share of the requests, relative to the weights of the others.",
    )


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

    breaker_longest_seconds: float = Field(
        default=30.0,
        gt=0,
        description="The longest pause.",
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
