"""OpenAI's chat completions as values: bodies in and out, checked and translated.

In: the bytes of a request, or pieces of an answer. Out: a ChatCall, or the bytes of a response.
What we cannot do is refused by name, never ignored. Pure: no clock, no network, no model.
"""

import math
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import orjson

from graftwork.records.interaction import Role
from graftwork.serve.http_messages import ApiError

T = TypeVar("T")

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name for the same turn
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

# Options that change nothing at these values; at any other value they are refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}

_KNOWN = frozenset(
    {
        "model", "messages", "stream", "stream_options", "max_tokens", "max_completion_tokens",
        "temperature", "top_p", "seed", "stop", "user", "metadata",
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ChatLimits:
    default_model: str = "champion"
    max_tokens: int = 256
    max_tokens_limit: int = 1024


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A checked request. `body` is what the caller sent, for the capture."""

    body: dict[str, Any]
    model: str
    messages: list[dict[str, str]]
    max_tokens: int
    temperature: float
    top_p: float
    seed: int | None
    stop: list[str]
    stream: bool
    include_usage: bool
    user: str | None

    def encode_for_engine(self, engine_model: str) -> bytes:
        return orjson.dumps(
            {
                "model": engine_model,
                "messages": self.messages,
                "max_tokens": self.max_tokens,
                "temperature": self.temperature,
                "top_p": self.top_p,
                "seed": self.seed,
                "stop": self.stop,
                "stream": self.stream,
            }
        )


def parse_chat(data: bytes, limits: ChatLimits) -> ChatCall:
    """The request as a ChatCall. Raises ApiError with what is wrong."""
    try:
        raw = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(raw, dict):
        raise ApiError(400, "the body must be a JSON object")
    body = {key: value for key, value in raw.items() if value is not None}
    _refuse_unsupported(body)
    options = _take(body, "stream_options", dict, {})
    if options.keys() - {"include_usage", "include_obfuscation"}:
        raise ApiError(400, "only stream_options.include_usage is supported", param="stream_options")
    if not all(isinstance(value, bool) for value in options.values()):
        raise ApiError(400, "stream_options must map names to true or false", param="stream_options")
    metadata = _take(body, "metadata", dict, {})
    if not all(isinstance(value, str) for value in metadata.values()):
        raise ApiError(400, "metadata must map names to strings", param="metadata")
    user = body.get("user")
    if user is not None and not isinstance(user, str):
        raise ApiError(400, "user must be a string", param="user")
    return ChatCall(
        body=raw,
        model=_take(body, "model", str, limits.default_model),
        messages=_parse_messages(body.get("messages")),
        max_tokens=_parse_max_tokens(body, limits),
        # What was evaluated is greedy, so what is served is greedy unless the caller asks otherwise.
        temperature=_take_number(body, "temperature", default=0.0, low=0.0, high=2.0),
        top_p=_take_number(body, "top_p", default=1.0, low=0.0, high=1.0),
        seed=_take_integer(body, "seed", default=None, low=-(2**63), high=2**63 - 1),
        stop=_parse_stop(body.get("stop")),
        stream=_take(body, "stream", bool, False),
        include_usage=options.get("include_usage") is True,
        user=user,
    )


def _refuse_unsupported(body: dict[str, Any]) -> None:
    for key, value in body.items():
        if key in _KNOWN:
            continue
        if key not in _NEUTRAL:
            message = f"the option {key!r} is not supported; leave it out"
            raise ApiError(400, message, param=key, code="unsupported_parameter")
        if not any(value == neutral and type(value) is type(neutral) for neutral in _NEUTRAL[key]):
            message = f"{key}={orjson.dumps(value).decode()[:80]} is not supported; leave {key!r} out"
            raise ApiError(400, message, param=key, code="unsupported_parameter")


def _parse_messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    return [_parse_message(message, f"messages[{i}]") for i, message in enumerate(value)]


def _parse_message(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ApiError(400, f"{where} must be an object with role and content", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(400, f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    for key, value in message.items():
        if key not in ("role", "content") and value is not None and value != []:
            text = f"{where}.{key} is not supported: only role and content reach the model"
            raise ApiError(400, text, param=f"{where}.{key}", code="unsupported_parameter")
    return {"role": _ROLES[role], "content": _parse_content(message.get("content"), f"{where}.content")}


def _parse_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ApiError(400, f"{where} must be a string or a list of text parts", param=where)
    texts: list[str] = []
    for i, part in enumerate(content):
        known = isinstance(part, dict) and part.get("type") == "text" and part.keys() == {"type", "text"}
        text = part["text"] if known else None
        if not isinstance(text, str):
            message = f'{where}[{i}] is not supported: only parts {{"type": "text", "text": …}} are'
            raise ApiError(400, message, param=f"{where}[{i}]", code="unsupported_parameter")
        texts.append(text)
    return "".join(texts)


def _parse_max_tokens(body: dict[str, Any], limits: ChatLimits) -> int:
    key = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    default = min(limits.max_tokens, limits.max_tokens_limit)
    return cast(int, _take_integer(body, key, default=default, low=1, high=limits.max_tokens_limit))


def _parse_stop(value: Any) -> list[str]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > 4 or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(400, "stop must be a string or a list of up to 4 non-empty strings", param="stop")
    return stops


def _take(body: dict[str, Any], key: str, kind: type[T], default: T) -> T:
    value = body.get(key, default)
    if not isinstance(value, kind):
        names: dict[type, str] = {str: "a string", bool: "true or false", dict: "an object"}
        raise ApiError(400, f"{key} must be {names[kind]}", param=key)
    return value


def _take_number(body: dict[str, Any], key: str, *, default: float, low: float, high: float) -> float:
    value = body.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ApiError(400, f"{key} must be a number", param=key)
    if not low <= value <= high:
        raise ApiError(400, f"{key} must be between {low:g} and {high:g}, not {value:g}", param=key)
    return float(value)


def _take_integer(body: dict[str, Any], key: str, *, default: int | None, low: int, high: int) -> int | None:
    value = body.get(key, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ApiError(400, f"{key} must be a whole number", param=key)
    if not low <= value <= high:
        raise ApiError(400, f"{key} must be between {low} and {high}, not {value}", param=key)
    return value


# -- answers -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every part of one answer repeats."""

    id: str
    created: int
    model: str
    release: str


def encode_completion(
    head: AnswerHead, *, text: str, finish_reason: str, prompt_tokens: int, reply_tokens: int
) -> bytes:
    message = {"role": "assistant", "content": text, "refusal": None}
    return orjson.dumps(
        {
            "id": head.id,
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.release,
            "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}],
            "usage": _usage(prompt_tokens, reply_tokens),
        }
    )


class ChunkEncoder:
    """Server-sent events of one answer. What repeats is encoded once: this is the hot path."""

    def __init__(self, head: AnswerHead) -> None:
        common = orjson.dumps(
            {
                "id": head.id,
                "object": "chat.completion.chunk",
                "created": head.created,
                "model": head.model,
                "system_fingerprint": head.release,
            }
        )
        self._common = b"data: " + common[:-1]
        self._before = self._common + b',"choices":[{"index":0,"delta":{"content":'

    def opening(self) -> bytes:
        return self._choice(b'{"role":"assistant","content":""}', None)

    def text(self, text: str) -> bytes:
        return self._before + orjson.dumps(text) + b'},"finish_reason":null}]}\n\n'

    def ending(self, finish_reason: str) -> bytes:
        return self._choice(b"{}", finish_reason)

    def usage(self, prompt_tokens: int, reply_tokens: int) -> bytes:
        usage = orjson.dumps(_usage(prompt_tokens, reply_tokens))
        return self._common + b',"choices":[],"usage":' + usage + b"}\n\n"

    def _choice(self, delta: bytes, finish_reason: str | None) -> bytes:
        reason = orjson.dumps(finish_reason)
        return self._common + b',"choices":[{"index":0,"delta":%b,"finish_reason":%b}]}\n\n' % (delta, reason)


DONE_EVENT = b"data: [DONE]\n\n"


def encode_error_event(body: bytes) -> bytes:
    """An error inside a stream whose head is out already."""
    return b"data: " + body + b"\n\n"


def encode_models(names: dict[str, str]) -> bytes:
    """`names` maps each name that can be asked for to the release that answers it."""
    data = [
        {"id": name, "object": "model", "created": 0, "owned_by": "graftwork", "root": release}
        for name, release in names.items()
    ]
    return orjson.dumps({"object": "list", "data": data})


def _usage(prompt_tokens: int, reply_tokens: int) -> dict[str, int]:
    total = prompt_tokens + reply_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": reply_tokens, "total_tokens": total}
