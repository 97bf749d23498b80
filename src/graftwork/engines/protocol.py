"""The protocol of engine processes, and what answers in one.

An engine process speaks JSON over HTTP on a unix socket: `POST /generate` takes a GenerateRequest and answers
with one JSON line per piece if streamed, the last of which may be an error, else with one piece;
`POST /adapters` takes a LoadAdapter; `GET /state` returns the loaded models. `process.py` is the server side
of it, over any `EngineBackend`; `graft serve` is its client.
"""

import os
import sys
import threading
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, NotRequired, Protocol, TypedDict, runtime_checkable

from graftwork.engines.settings import EngineKind, EngineSettings
from graftwork.http.messages import ApiError
from graftwork.records.base import Record
from graftwork.records.interaction import Message

BASE = "base"
"""The engine's name for the model without an adapter."""

FAILURE = "failure"
"""The key of the line that ends a streamed answer with an error."""
_CHARACTERS_PER_TOKEN = 4


class EngineJob(Record):
    """What an engine process gets as a file: one base, its adapters, and a socket that only this user can
    open."""

    folder: str
    """The engine's own folder for its lock, heartbeat, log and error."""

    base_folder: str
    """Empty for an endpoint, whose server renders the prompts."""
    template_fingerprint: str | None = None
    """The template that the releases were trained with; the engine refuses any other."""

    reasoning: bool = True
    """Whether the template lets the model reason first, as in the training rows."""

    adapters: dict[str, str] = {}
    """Release id to the folder of its adapter."""

    socket: str | None = None
    """Path of the unix socket; None lets the gateway choose one."""

    batch_size: int = 8
    queue_limit: int = 128
    threads: int | None = None
    dtype: str = "float32"
    """vllm, sglang: the type of the weights."""
    probe_seconds: float = 2.0
    """How often the server behind the engine is asked whether it answers."""
    restart_seconds: float = 20.0
    """Silence after which a server that was started here is started again."""
    engine: EngineSettings = EngineSettings()


class GenerateRequest(Record):
    model: str
    messages: tuple[Message, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    logprobs: int | None = None
    """How many alternatives each token lists; None for no log-probabilities."""
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    """`auto`, `required`, or the name of a tool as `=name`."""
    parallel_tool_calls: bool = True
    strict_tools: bool = False
    json_schema: dict[str, Any] | None = None
    """The JSON Schema that the answer must follow."""
    prompt: str | None = None
    """A text to continue without a template, instead of messages."""
    embed: dict[str, Any] | None = None
    """What to embed, instead of messages: fields of a request for embeddings."""
    chat: dict[str, Any] | None = None
    """Messages, tools and formats as the client sent them, if there are tools or formats: for servers that
    take them as they are."""
    timeout_seconds: float | None = None
    """How long the client will wait: for the whole answer, or for the first piece of a streamed one."""


class LoadAdapter(Record):
    name: str
    folder: str
    keep: tuple[str, ...] = ()
    """Adapters that aliases point at. An engine with limited room may unload others once they are idle."""


class CallData(TypedDict):
    """A tool call. `arguments` is JSON."""

    name: str
    arguments: str


class CallDelta(TypedDict):
    """New parts of a call. `name` comes with its first part."""

    index: int
    name: NotRequired[str]
    arguments: str


class AlternativeData(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class LogprobData(AlternativeData):
    """A token of the reply with its log-probability and the likeliest tokens in its place."""

    top_logprobs: list[AlternativeData]


class PieceData(TypedDict):
    """A piece of a reply as parsed JSON. The last one has a finish reason and the token counts."""

    text: str
    finish_reason: NotRequired[str | None]
    prompt_tokens: NotRequired[int]
    reply_tokens: NotRequired[int]
    cached_tokens: NotRequired[int]
    """Of the prompt's tokens; stated by the servers of endpoints."""
    cost: NotRequired[float]
    """US dollars, where the server states them."""
    estimated: NotRequired[bool]
    """Whether the server states no tokens, so that the counts are estimates."""
    tool_calls: NotRequired[list[CallData]]
    call_deltas: NotRequired[list[CallDelta]]
    """New parts of calls; formats without partial calls take `tool_calls` of the last piece."""
    logprobs: NotRequired[list[LogprobData]]
    stop: NotRequired[str | None]
    """The stop string that ended the reply."""
    queue_ms: NotRequired[float]
    """Milliseconds that the request waited in the engine."""
    embeddings: NotRequired[list[dict[str, Any]]]
    index: NotRequired[int]
    """Index among several choices."""
    replica: NotRequired[str]
    """The replica that answered, if there are several."""


@dataclass(frozen=True, slots=True)
class ReplyPiece:
    """A piece of a reply on the engine's side. The last one has a finish reason and the token counts."""

    text: str
    finish_reason: str | None = None
    prompt_tokens: int = 0
    reply_tokens: int = 0
    tool_calls: tuple[CallData, ...] = ()
    call_deltas: tuple[CallDelta, ...] = ()
    """New parts of calls that are still being written. The last piece has all calls in full."""
    logprobs: tuple[LogprobData, ...] | None = None
    stop: str | None = None
    """The stop string that ended the reply."""
    queue_ms: float | None = None
    """Milliseconds that the request waited before it was started; on the last piece."""
    embeddings: tuple[dict[str, Any], ...] = ()
    cached_tokens: int | None = None
    cost: float | None = None
    """US dollars, where the server states them."""
    estimated: bool = False
    """Whether the token counts are estimates."""

    def to_data(self) -> PieceData:
        """Return the piece without empty fields."""
        data: PieceData = {"text": self.text}
        if self.logprobs is not None:
            data["logprobs"] = list(self.logprobs)
        if self.call_deltas:
            data["call_deltas"] = list(self.call_deltas)
        if self.finish_reason is not None:
            data["finish_reason"] = self.finish_reason
            data["prompt_tokens"], data["reply_tokens"] = self.prompt_tokens, self.reply_tokens
            if self.cached_tokens is not None:
                data["cached_tokens"] = self.cached_tokens
            if self.cost is not None:
                data["cost"] = self.cost
            if self.estimated:
                data["estimated"] = True
            if self.tool_calls:
                data["tool_calls"] = list(self.tool_calls)
            if self.stop is not None:
                data["stop"] = self.stop
            if self.queue_ms is not None:
                data["queue_ms"] = self.queue_ms
            if self.embeddings:
                data["embeddings"] = list(self.embeddings)
        return data


class EngineBackend(Protocol):
    """The backend of an engine process: one of the engines, or the stub. It knows the base and weights."""

    def state(self) -> dict[str, Any]: ...

    def generate(self, request: GenerateRequest) -> AsyncGenerator[ReplyPiece, None]:
        """Pieces of the reply. Closing the generator early cancels the work. Raises ApiError."""
        ...

    async def load_adapter(self, request: LoadAdapter) -> None: ...

    async def close(self) -> None: ...


@runtime_checkable
class EmbeddingBackend(Protocol):
    """A backend that computes embeddings, or passes them on."""

    async def embed(self, request: GenerateRequest) -> ReplyPiece: ...


ENGINE_MODULES: dict[EngineKind, str] = {
    "embedded": "graftwork.engines.embedded_process",
    "llamacpp": "graftwork.engines.llamacpp_process",
    "vllm": "graftwork.engines.upstream",
    "sglang": "graftwork.engines.upstream",
    "endpoint": "graftwork.engines.upstream",
}
"""The module that runs as the process of each engine."""


def read_failure(line: dict[str, Any]) -> ApiError | None:
    """The error that ends a stream, if this line is one."""
    what = line.get(FAILURE)
    if what is None:
        return None
    return ApiError(what["status"], what["message"], param=what["param"], code=what["code"])


def estimate_tokens(characters: int) -> int:
    """Estimate the number of tokens of a text, for an answer that was cut off before it reported it."""
    return -(-characters // _CHARACTERS_PER_TOKEN)


def end_with_parent() -> None:
    """End this process when its standard input ends.

    Standard input is a pipe that only the parent holds open; the kernel closes it with the parent, even after
    kill -9.
    """

    def wait_for_end() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        # Not sys.exit: a thread in a long computation must not keep the process alive.
        os._exit(1)

    threading.Thread(target=wait_for_end, name="end-with-parent", daemon=True).start()
