"""A checked request and the pieces of its answer, whatever API the client speaks.

Every API reads the fields of its JSON bodies with the functions here: what is wrong raises ApiError with the
name of the field.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import orjson

from graftwork.engines.protocol import CallData, PieceData, estimate_tokens
from graftwork.http.messages import ApiError
from graftwork.records.interaction import Message
from graftwork.serve.settings import ServeSettings
from graftwork.text.tool_calls import TextAndCalls, ToolCall, add_tools, write_calls

T = TypeVar("T")

MOST_CHOICES = 16
"""Answers that one request may ask for: `n` times its prompts."""
LONGEST_STOP = 512
"""Characters of a stop string. The end of the answer is compared with all of it at every token."""


_AS_SENT = (
    "messages", "tools", "tool_choice", "parallel_tool_calls", "response_format", "logprobs", "top_logprobs"
)  # fmt: skip
"""Fields that a server which takes chats gets as the client sent them."""


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Options that few requests use."""

    n: int = 1
    logprobs: int | None = None
    """How many alternatives each token lists; None for no log-probabilities."""
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"
    """`auto`, `required`, or the name of a tool as `=name`."""
    parallel_tool_calls: bool = True
    strict_tools: bool = False
    """Whether arguments must follow their schema even if the model is free to answer with text."""
    schema: dict[str, Any] | None = None
    """The JSON Schema that the answer must follow."""
    prompts: tuple[str, ...] = ()
    """Texts to continue, without a chat template; empty for a chat."""
    embed: dict[str, Any] | None = None
    """What to embed, instead of a chat: fields of a request for embeddings."""

    def encode_for_engine(self) -> dict[str, Any]:
        return {
            "logprobs": self.logprobs,
            "tools": self.tools,
            "tool_choice": self.tool_choice,
            "parallel_tool_calls": self.parallel_tool_calls,
            "strict_tools": self.strict_tools,
            "json_schema": self.schema,
            "prompt": self.prompts[0] if self.prompts else None,
            "embed": self.embed,
        }


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A checked request. `body` is a chat completion request, for captures and other servers."""

    body: dict[str, Any]
    model: str
    messages: list[dict[str, str]]
    """Role and content; tool calls are in the content, in tags."""
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: list[str]
    stream: bool
    include_usage: bool
    user: str | None
    options: GenerationOptions | None = None
    deadline: float | None = None
    """When the client stops waiting, on the clock of `time.monotonic`."""
    is_copy: bool = False
    """Shadow traffic: whether it succeeds says nothing about the replica, and it is not retried."""

    def encode_for_engine(self, engine_model: str) -> bytes:
        value = {
            "model": engine_model,
            "messages": self.messages,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": self.seed,
            "stop": self.stop,
            "stream": self.stream,
        }
        if self.options is not None:
            value |= self.options.encode_for_engine()
        if self.messages and (
            self.options is not None or any(turn.get("tool_calls") for turn in self.body["messages"])
        ):
            value["chat"] = {key: self.body[key] for key in _AS_SENT if self.body.get(key) is not None}
        if self.deadline is not None:
            value["timeout_seconds"] = max(self.deadline - time.monotonic(), 0.001)
        return orjson.dumps(value)

    @property
    def checked_messages(self) -> Sequence[Mapping[str, str]]:
        """The messages that checks of the answer see: with the tools, as evaluation has them."""
        if self.options is None or not self.options.tools:
            return self.messages
        messages = [Message.model_validate(message) for message in self.messages]
        return [message.model_dump() for message in add_tools(messages, self.options.tools)]

    @property
    def choices(self) -> int:
        options = self.options
        return 1 if options is None else options.n * max(len(options.prompts), 1)

    def estimate_prompt(self) -> int:
        """Estimate the tokens of everything that was sent, for an answer that broke off before stating its
        usage.
        """
        sent: list[Any] = [message["content"] for message in self.messages]
        if self.options is not None:
            inputs = (self.options.embed or {}).get("input", [])
            sent += [*self.options.prompts, *(inputs if isinstance(inputs, list) else [inputs])]
        numbers = sum(
            len(part) if isinstance(part, list) else 1 for part in sent if not isinstance(part, str)
        )
        return numbers + estimate_tokens(sum(len(part) for part in sent if isinstance(part, str)))

    def fan_out(self) -> "list[ChatCall]":
        """One call for each choice, in the order of their indices."""
        options = self.options
        if options is None or self.choices == 1:
            return [self]
        calls = []
        for prompt in options.prompts or (None,):
            single = replace(options, n=1, prompts=() if prompt is None else (prompt,))
            for number in range(options.n):
                # Kept within 64 bits.
                seed = None if self.seed is None else (self.seed + number + 2**63) % 2**64 - 2**63
                calls.append(replace(self, options=single, seed=seed))
        return calls


def describe_choice(choice: PieceData) -> str:
    """A whole answer in the form that captures store."""
    return describe_reply(choice["text"], choice.get("tool_calls") or [])


def describe_reply(text: str, calls: list[CallData]) -> str:
    """Text and calls in the form that captures store: calls in tags."""
    tool_calls = []
    for call in calls:
        arguments: Any = call["arguments"]
        with suppress(orjson.JSONDecodeError):  # another server's call that was cut off stays a text
            arguments = orjson.loads(arguments)
        tool_calls.append(ToolCall(call["name"], arguments))
    return write_calls(TextAndCalls(text, tuple(tool_calls))) if tool_calls else text


class TokenUsage(NamedTuple):
    prompt: int
    reply: int


NO_TOKENS = TokenUsage(0, 0)


def add_usage(*parts: TokenUsage) -> TokenUsage:
    return TokenUsage(sum(part.prompt for part in parts), sum(part.reply for part in parts))


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The fields that every part of one answer repeats. `unique` is the part of its id without a prefix."""

    unique: str
    created: int
    model: str
    release: str


class StreamEncoder(Protocol):
    """Server-sent events of one answer."""

    def opening(self) -> bytes: ...

    def piece(self, piece: PieceData) -> bytes: ...

    def closing(self, usage: TokenUsage) -> bytes: ...

    def error(self, error: ApiError) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ApiFormat:
    """One API: how its requests are read and its answers written."""

    parse: Callable[[bytes, ServeSettings], ChatCall]
    encode: Callable[[AnswerHead, ChatCall, list[PieceData], TokenUsage], bytes]
    """The whole answer; one piece for each choice."""
    open_stream: Callable[[AnswerHead, ChatCall], StreamEncoder]
    encode_error: Callable[[ApiError], bytes]
    is_captured: bool = True
    """Whether exchanges become captures: what is not a conversation cannot become data for training."""


# -- fields of a body --------------------------------------------------------------------------


def load_object(data: bytes) -> dict[str, Any]:
    """The body as an object. Fields that are null are kept."""
    try:
        raw = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(raw, dict):
        raise ApiError(400, "the body must be a JSON object")
    return raw


def wrong(param: str, message: str) -> ApiError:
    """An error about one field. `message` continues its name."""
    return ApiError(400, f"{param} {message}", param=param)


def unsupported(param: str, message: str = "is not supported; leave it out") -> ApiError:
    return ApiError(400, f"{param} {message}", param=param, code="unsupported_parameter")


def take(body: dict[str, Any], key: str, kind: type[T], default: T) -> T:
    value = body.get(key, default)
    if not isinstance(value, kind):
        names: dict[type, str] = {
            str: "a string", bool: "true or false", dict: "an object", list: "a list"
        }  # fmt: skip
        raise wrong(key, f"must be {names[kind]}")
    return value


def take_number(body: dict[str, Any], key: str, *, default: float, low: float, high: float) -> float:
    value = body.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise wrong(key, "must be a number")
    if not low <= value <= high:
        raise wrong(key, f"must be between {low:g} and {high:g}, not {value:g}")
    return float(value)


def take_integer(body: dict[str, Any], key: str, *, default: int | None, low: int, high: int) -> int | None:
    value = body.get(key, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong(key, "must be a whole number")
    if not low <= value <= high:
        raise wrong(key, f"must be between {low} and {high}, not {value}")
    return value


def take_text(body: dict[str, Any], key: str) -> str | None:
    value = body.get(key)
    if value is not None and not isinstance(value, str):
        raise wrong(key, "must be a string")
    return value


def take_stop(body: dict[str, Any], key: str, *, most: int = 4) -> list[str]:
    value = body.get(key)
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > most or not all(isinstance(s, str) and s for s in stops):
        raise wrong(key, f"must be a string or a list of up to {most} non-empty strings")
    if any(len(stop) > LONGEST_STOP for stop in stops):
        raise wrong(key, f"must hold strings of at most {LONGEST_STOP} characters")
    return cast("list[str]", stops)


def take_objects(body: dict[str, Any], key: str, where: str) -> list[dict[str, Any]]:
    """A list of objects; `where` names the field in errors."""
    value = body.get(key)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise wrong(where, "must be a list of objects")
    return value


def is_nested_deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested in more than this many levels."""
    level = [value]
    for _ in range(levels + 1):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True
