"""Which engine answers and how: the `serve.engine` section of graft.yaml."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from graftwork.records.base import Record
from graftwork.records.release import GgufPrecision
from graftwork.text.redact import EndpointUrl, VariableName

EngineKind = Literal["embedded", "llamacpp", "vllm", "sglang", "endpoint"]


class ReplicaSettings(Record):
    """A server that holds the same models as the others of its engine."""

    url: EndpointUrl = Field(description="Where the server is, up to and including `/v1`.")

    weight: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="Its share of the requests, relative to the weights of the others.",
    )


class EngineSettings(Record):
    """What computes the answers."""

    kind: EngineKind = Field(
        default="embedded",
        description="`embedded`: the weights as they were evaluated, with torch. `llamacpp`: the fastest on "
        "a CPU. `vllm`, `sglang`: a server of that kind, started here or at `url`. `endpoint`: any "
        "OpenAI-compatible API; it serves `base` only.",
    )

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="embedded: where the model computes. `auto`: on the first GPU where there is one, in 16 "
        "bits, as evaluation does; else on the CPU. `cpu` leaves the GPU to others.",
    )

    precision: GgufPrecision = Field(
        default="q8_0",
        description="llamacpp: the type of the base's matrices. Each one is an engine of its own for "
        "the gate.",
    )

    context: int = Field(
        default=8192,
        ge=128,
        description="llamacpp: tokens of keys and values that all running requests share.",
    )

    url: EndpointUrl | None = Field(
        default=None,
        description="vllm, sglang, endpoint: where the server is, up to and including `/v1`. None starts one "
        "here.",
    )

    replicas: Annotated[int, Field(ge=1, le=64)] | tuple[ReplicaSettings, ...] = Field(
        default=1,
        description="How many processes of the engine answer, or, instead of `url`, the servers that do: "
        "`[{url: …, weight: 2}, {url: …}]`.",
    )

    model: str | None = Field(
        default=None,
        description="endpoint: the model to ask for. vllm, sglang: the name of the base there; None asks the "
        "server.",
    )

    api_key_env: VariableName | None = Field(
        default=None,
        description="Name of the environment variable that holds the server's key.",
    )

    arguments: tuple[str, ...] = Field(
        default=(),
        description="vllm, sglang: further arguments of the command that starts the server here.",
    )

    max_adapters: int = Field(
        default=4,
        ge=1,
        description="vllm, sglang: adapters that the server holds at once.",
    )

    @model_validator(mode="after")
    def _is_complete(self) -> Self:
        listed = not isinstance(self.replicas, int)
        if listed and (self.url is not None or not self.replicas):
            raise ValueError("give either `url` or a list of `replicas`")
        if listed and self.kind in ("embedded", "llamacpp"):
            raise ValueError(f"{self.kind} runs here: `replicas` is a number of processes")
        if self.url is not None and self.replicas != 1:
            raise ValueError("one `url` is one replica: give `replicas` as a list of servers")
        if self.device != "auto" and self.kind != "embedded":
            raise ValueError("`device` is a setting of the embedded engine")
        if self.kind == "endpoint" and ((self.url is None and not listed) or self.model is None):
            raise ValueError("an endpoint needs `url` and `model`")
        return self

    def split_replicas(self) -> "list[tuple[EngineSettings, float]]":
        """The settings of each replica, and its weight."""
        if isinstance(self.replicas, int):
            return [(self.model_copy(update={"replicas": 1}), 1.0)] * self.replicas
        return [
            (self.model_copy(update={"url": replica.url, "replicas": 1}), replica.weight)
            for replica in self.replicas
        ]
