"""Which engine answers and how: the `serve.engine` section of graft.yaml."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from graftwork.records.base import Record
from graftwork.records.release import GgufPrecision
from graftwork.text.redact import EndpointUrl, VariableName

EngineKind = Literal["embedded", "llamacpp", "vllm", "sglang", "endpoint"]


class ReplicaSettings(Record):
    """A server with the same models as the others of its engine."""

    url: EndpointUrl = Field(description="URL of the server, up to and including `/v1`.")

    weight: float = Field(
        default=1.0,
        gt=0,
        le=1000,
        description="Its share of the requests, relative to the other weights.",
    )


class EngineSettings(Record):
    """The engine that computes the answers."""

    kind: EngineKind = Field(
        default="embedded",
        description="`embedded`: torch, with the weights as they were evaluated. `llamacpp`: fastest on a "
        "CPU. `vllm`, `sglang`: a server of that kind, started here or at `url`. `endpoint`: any "
        "OpenAI-compatible API; serves `base` only.",
    )

    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto",
        description="embedded: device of the model. `auto`: the first GPU if there is one, in 16 bits, as in "
        "evaluation; otherwise the CPU. `cpu` leaves the GPU to other processes.",
    )

    precision: GgufPrecision = Field(
        default="q8_0",
        description="llamacpp: type of the base's matrices. The gate treats each type as a separate engine.",
    )

    context: int = Field(
        default=8192,
        ge=128,
        description="llamacpp: size of the KV cache in tokens, shared by all running requests.",
    )

    url: EndpointUrl | None = Field(
        default=None,
        description="vllm, sglang, endpoint: URL of the server, up to and including `/v1`. Unset: start one "
        "here.",
    )

    replicas: Annotated[int, Field(ge=1, le=64)] | tuple[ReplicaSettings, ...] = Field(
        default=1,
        description="Number of engine processes, or, instead of `url`, a list of servers: "
        "`[{url: …, weight: 2}, {url: …}]`.",
    )

    model: str | None = Field(
        default=None,
        description="endpoint: the model to request. vllm, sglang: the name of the base on the server; "
        "unset: ask the server.",
    )

    api_key_env: VariableName | None = Field(
        default=None,
        description="Environment variable that contains the server's key.",
    )

    arguments: tuple[str, ...] = Field(
        default=(),
        description="vllm, sglang: extra arguments for the command that starts the server.",
    )

    max_adapters: int = Field(
        default=4,
        ge=1,
        description="vllm, sglang: maximum number of loaded adapters.",
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
