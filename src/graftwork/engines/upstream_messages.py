"""What vLLM, SGLang and OpenAI-compatible endpoints are sent, and how their streamed answers are read.

vLLM and SGLang take the prompt as tokens and adapters at run time: vLLM by name, SGLang as
`base:adapter`. Both refuse run-time loading unless they were started for it. An endpoint gets what the client
sent. Texts, tool calls, log-probabilities and counts come in two forms: those of chats and those of
completions. Pure but for the reply that is read.
"""

import math
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

from graftwork.engines.constrained import CallForm, choose_functions, write_call_schema
from graftwork.engines.process import ReplyText, describe_token
from graftwork.engines.protocol import (
    AlternativeData,
    CallData,
    CallDelta,
    GenerateRequest,
    LogprobData,
    ReplyPiece,
    estimate_tokens,
)
from graftwork.engines.settings import EngineKind
from graftwork.http.client import ClientReply
from graftwork.http.messages import ApiError
from graftwork.records.base import MIB
from graftwork.text.redact import hide

_ANY_OBJECT = {"type": "object"}


class Dialect(NamedTuple):
    """`load_path` is None if no adapters can be loaded."""

    takes_tokens: bool
    load_path: str | None = None
    unload_path: str | None = None
    loads_at_root: bool = False
    """Whether adapters are loaded at the server's root instead of below /v1."""
    joins_names: bool = False
    names_tokens: bool = False
    """Whether log-probabilities can name tokens by their ids."""

    def path(self, request: GenerateRequest) -> str:
        chats = not self.takes_tokens and request.prompt is None
        return "/chat/completions" if chats else "/completions"

    def name_model(self, base: str, adapter: str | None) -> str:
        if adapter is None:
            return base
        return f"{base}:{adapter}" if self.joins_names else adapter

    def encode(
        self,
        request: GenerateRequest,
        *,
        model: str,
        prompt: list[int] | None = None,
        end: int = 0,
        response_format: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The body of a streamed request. `prompt` is None for servers that take messages; `end` is the token
        that ends a turn, and `response_format` what the answer to a prompt of tokens must follow.
        """
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"top_p": request.top_p} if request.temperature > 0 else {}),
            **({"seed": request.seed} if request.seed is not None else {}),
            **({"stop": list(request.stop)} if request.stop else {}),
        }
        if prompt is None and request.prompt is None:
            return body | _as_sent(request)
        if request.logprobs is not None:
            body["logprobs"] = request.logprobs
        if prompt is None:
            return body | {"prompt": request.prompt}
        if request.logprobs is not None and self.names_tokens:
            body["return_tokens_as_token_ids"] = True
        if response_format is not None:
            body["response_format"] = response_format
        return body | {"prompt": prompt, "stop_token_ids": [end], "skip_special_tokens": True}


class RequestForm:
    """How one endpoint takes the fields that we send with every request. Newer models of OpenAI, for example,
    refuse `max_tokens` and a temperature of 0. Other values, which a client chose, are never left out.
    """

    def __init__(self) -> None:
        self._limit = _LIMIT
        self._left_out: frozenset[str] = frozenset()

    def apply(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            self._limit if key == _LIMIT else key: value
            for key, value in body.items()
            if key not in self._left_out or not _is_ours(key, value)
        }

    def adapt(self, sent: dict[str, Any], refusal: ApiError) -> None:
        """Learn from the refusal of this body."""
        if _LIMIT in sent and _names(refusal, _LIMIT) and _NEWER_LIMIT in refusal.message:
            self._limit = _NEWER_LIMIT
            return
        for key in _OWN_VALUES:
            if key in sent and _is_ours(key, sent[key]) and _names(refusal, key):
                self._left_out |= {key}


_LIMIT, _NEWER_LIMIT = "max_tokens", "max_completion_tokens"
_OWN_VALUES: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "stream_options": {"include_usage": True}}
"""Fields that an endpoint gets with these values although no client asked for them."""


def _is_ours(key: str, value: Any) -> bool:
    return bool(_OWN_VALUES[key] == value)


def _names(refusal: ApiError, key: str) -> bool:
    """Whether the refusal is about this field. Without a field, its message says so."""
    return refusal.param == key if refusal.param is not None else key in refusal.message


def _as_sent(request: GenerateRequest) -> dict[str, Any]:
    """Messages, tools and formats for a server that takes chats."""
    if request.chat is None:
        return {"messages": [{"role": turn.role, "content": turn.content} for turn in request.messages]}
    messages = [
        {
            **{key: value for key, value in turn.items() if value is not None and value != []},
            "role": "system" if turn["role"] == "developer" else turn["role"],
        }
        for turn in request.chat["messages"]
    ]
    logprobs: dict[str, Any] = {}
    if request.logprobs is not None:  # not only where the client asked: a check of the answer may need them
        logprobs = {"logprobs": True, **({"top_logprobs": request.logprobs} if request.logprobs else {})}
    return {**request.chat, "messages": messages, **logprobs}


def write_format(request: GenerateRequest, form: CallForm | None) -> tuple[dict[str, Any] | None, str]:
    """`response_format` of a request to vLLM or SGLang, and the text that its prompt must end with.

    A forced call begins in the prompt, so that the rest is JSON of a schema, which both servers enforce.
    """
    if request.json_schema is not None and request.tools and request.tool_choice == "auto":
        message = "response_format is not supported together with tools by this engine"
        raise ApiError(400, message, param="response_format", code="unsupported_parameter")
    if request.json_schema is not None and not request.tools:
        return _json_format(request.json_schema), ""
    if not request.tools or form is None:
        return None, ""
    if request.tool_choice != "auto":
        schema = write_call_schema(choose_functions(request.tools, request.tool_choice), form.key)
        return _json_format(schema), form.before
    return (_tagged_format(request, form) if request.strict_tools else None), ""


def _json_format(schema: dict[str, Any]) -> dict[str, Any]:
    if schema == _ANY_OBJECT:
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def _tagged_format(request: GenerateRequest, form: CallForm) -> dict[str, Any]:
    """Text is free; text that begins as a call must continue as one of the functions."""
    structures = [
        {
            "begin": f'{form.before}{{"name": "{function["name"]}", "{form.key}": ',
            "schema": function["parameters"],
            "end": f"}}{form.after}",
        }
        for function in choose_functions(request.tools, "auto")
    ]
    trigger = form.before.rstrip() or '{"name": "'
    return {"type": "structural_tag", "structures": structures, "triggers": [trigger]}


DIALECTS: dict[EngineKind, Dialect] = {
    "vllm": Dialect(
        True, "/v1/load_lora_adapter", "/v1/unload_lora_adapter", loads_at_root=True, names_tokens=True
    ),
    "sglang": Dialect(
        True, "/load_lora_adapter", "/unload_lora_adapter", loads_at_root=True, joins_names=True
    ),
    "endpoint": Dialect(False),
}


_TOKEN_ID = "token_id:"
_LONGEST_EVENT = 16 * MIB
_TOKEN_BYTES = 8 * 1024
"""Limit on bytes of events per token; one with twenty log-probabilities takes about two thousand."""

TokenBytes = Callable[[int], bytes]


async def read_events(
    reply: ClientReply, secrets: Collection[str] = (), *, max_tokens: int
) -> AsyncGenerator[dict[str, Any], None]:
    """The server-sent events of a reply; of a server that does not stream, its one answer. Raises ApiError
    for what is not an event, an error, or more than this many tokens can take."""
    other_lines = bytearray()
    bytes_left = _LONGEST_EVENT + _TOKEN_BYTES * max_tokens
    while (lines := await reply.next_lines()) is not None:
        bytes_left -= sum(len(line) + 1 for line in lines)
        if bytes_left < 0:
            raise ApiError(502, "the engine's server does not end its answer", code="engine_error")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                other_lines += line + b"\n"
            elif data != b"[DONE]":
                yield _load(data, secrets)
        if len(other_lines) + len(reply.rest) > _LONGEST_EVENT:
            raise _no_events()
    answer = bytes(other_lines + reply.rest).strip()
    if answer.startswith(b"{"):
        yield _load(answer, secrets)


def _load(data: bytes, secrets: Collection[str]) -> dict[str, Any]:
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        event = None
    if not isinstance(event, dict):
        raise _no_events()
    if event.get("error") is not None:  # some servers write null into every event
        raise explain_refusal(502, data, secrets)
    return event


def _no_events() -> ApiError:
    return ApiError(502, "the engine's server sent something other than events", code="engine_error")


def read_embeddings(body: bytes) -> ReplyPiece:
    try:
        response = orjson.loads(body)
        tokens = (response.get("usage") or {}).get("prompt_tokens") or 0
        return ReplyPiece("", "stop", prompt_tokens=int(tokens), embeddings=tuple(response["data"]))
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as error:
        message = "the engine's server sent something other than embeddings"
        raise ApiError(502, message, code="engine_error") from error


class UpstreamReply:
    """One answer as it arrives. `token_bytes` reads tokens that the server names by their ids; `secrets` are
    kept out of errors."""

    def __init__(
        self,
        request: GenerateRequest,
        text: ReplyText,
        token_bytes: TokenBytes | None = None,
        *,
        secrets: Collection[str] = (),
    ) -> None:
        self._request, self._flow, self._token_bytes = request, text, token_bytes
        self._secrets = secrets
        self._text = self._unsent = self._finish = ""
        self._stop: str | None = None
        self._usage: dict[str, Any] = {}
        self._pieces = 0
        self._calls: dict[int, CallData] = {}
        self._deltas: list[CallDelta] = []
        self._logprobs: list[LogprobData] = []

    async def read(self, reply: ClientReply, *, prompt_tokens: int) -> AsyncGenerator[ReplyPiece, None]:
        async for event in read_events(reply, self._secrets, max_tokens=self._request.max_tokens):
            try:
                self._usage = event.get("usage") or self._usage
                for choice in event.get("choices") or ():
                    self._take(choice)
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                raise _unreadable() from error
            self._unsent += self._flow.push(self._text)
            if self._flow.stopped is not None:
                self._finish = "stop"
                break
            if self._request.stream and (self._unsent or self._deltas):
                deltas = tuple(self._deltas)
                yield ReplyPiece(self._unsent, call_deltas=deltas, logprobs=self._take_logprobs())
                self._unsent, self._deltas = "", []
        if not self._finish:
            raise ApiError(502, "the engine's server ended its answer too early", code="engine_error")
        try:
            last = self._last_piece(prompt_tokens)
        except (AttributeError, TypeError, ValueError) as error:
            raise _unreadable() from error
        yield last

    def _take(self, choice: dict[str, Any]) -> None:
        delta = choice.get("delta") or choice.get("message") or {}
        new = choice.get("text") or delta.get("content") or ""
        self._text += new
        self._pieces += bool(new)
        for index, part in enumerate(delta.get("tool_calls") or ()):
            # The calls of a whole message have no index.
            self._take_call(part, index if "message" in choice else 0)
        if self._request.logprobs is not None and choice.get("logprobs"):
            self._logprobs += self._read_logprobs(choice["logprobs"], self._request.logprobs)
        self._finish = choice.get("finish_reason") or self._finish
        # vLLM and SGLang name the stop string or the number of the token that ended the answer.
        reason = choice.get("stop_reason", choice.get("matched_stop"))
        self._stop = reason if reason in self._request.stop else self._stop

    def _take_call(self, part: dict[str, Any], default: int) -> None:
        index, function = int(part.get("index") or default), part.get("function") or {}
        new = str(function.get("arguments") or "")
        delta: CallDelta = {"index": index, "arguments": new}
        if index not in self._calls:
            self._calls[index] = {"name": str(function.get("name") or ""), "arguments": ""}
            delta["name"] = self._calls[index]["name"]
        self._calls[index]["arguments"] += new
        self._deltas.append(delta)

    def _last_piece(self, prompt_tokens: int) -> ReplyPiece:
        text, calls = self._flow.finish(self._unsent)
        calls = calls or tuple(self._calls[index] for index in sorted(self._calls))
        # For a server that states no usage: a piece of a stream is about a token, or holds several.
        estimate = max(self._pieces, estimate_tokens(len(self._text)))
        stated_prompt = _read_count(self._usage.get("prompt_tokens"))
        stated_reply = _read_count(self._usage.get("completion_tokens"))
        return ReplyPiece(
            text=text,
            finish_reason="length" if self._finish == "length" else "stop",
            prompt_tokens=stated_prompt or prompt_tokens,
            reply_tokens=estimate if stated_reply is None else stated_reply,
            cached_tokens=_read_count((self._usage.get("prompt_tokens_details") or {}).get("cached_tokens")),
            cost=_read_dollars(self._usage.get("cost")),
            estimated=not stated_prompt or stated_reply is None,
            tool_calls=calls,
            call_deltas=tuple(self._deltas),
            logprobs=self._take_logprobs(),
            stop=self._flow.stopped or self._stop,
        )

    def _take_logprobs(self) -> tuple[LogprobData, ...] | None:
        if self._request.logprobs is None:
            return None
        logprobs, self._logprobs = tuple(self._logprobs), []
        return logprobs

    def _read_logprobs(self, listed: dict[str, Any], most: int) -> list[LogprobData]:
        if "content" in listed:
            return [
                {
                    **_alternative(token),
                    "top_logprobs": [_alternative(top) for top in token.get("top_logprobs") or ()][:most],
                }
                for token in listed["content"] or ()
            ]
        tops = listed.get("top_logprobs") or [None] * len(listed["tokens"])
        logprobs: list[LogprobData] = []
        for token, value, top in zip(listed["tokens"], listed["token_logprobs"], tops, strict=True):
            best = sorted((top or {}).items(), key=lambda item: -item[1])[:most]
            alternatives = [self._describe(alternative, logprob) for alternative, logprob in best]
            logprobs.append({**self._describe(token, value), "top_logprobs": alternatives})
        return logprobs

    def _describe(self, token: str, value: float | None) -> AlternativeData:
        number = token.removeprefix(_TOKEN_ID)
        read, is_id = self._token_bytes, number != token and number.isdigit()
        data = read(int(number)) if read is not None and is_id else token.encode()
        return describe_token(data, 0.0 if value is None else value)


def _read_count(value: Any) -> int | None:
    """A number of tokens; None where none is stated. Raises ValueError or TypeError if it is not a number."""
    count = None if value is None else int(value)
    return None if count is None or count < 0 else count


def _read_dollars(value: Any) -> float | None:
    """What the server charges for the answer; None where it does not say."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number and value >= 0 else None


def _unreadable() -> ApiError:
    return ApiError(502, "the engine's server sent an answer that cannot be read", code="engine_error")


def _alternative(token: dict[str, Any]) -> AlternativeData:
    text = str(token["token"])
    data = token.get("bytes")
    listed = list(text.encode()) if data is None else [int(byte) for byte in data]
    return {"token": text, "logprob": float(token["logprob"]), "bytes": listed}


def explain_refusal(status: int, body: bytes, secrets: Collection[str] = ()) -> ApiError:
    """Format a server's refusal for the client: its message and field, without our key or address. Some
    servers quote the key that they refuse, which is the operator's and not the client's.
    """
    message, param = f"the engine's server answered with status {status}", None
    with suppress(orjson.JSONDecodeError, AttributeError, TypeError):
        payload = orjson.loads(body)
        error = payload.get("error", payload)
        if isinstance(error, str):
            message = error
        elif isinstance(detail := error.get("detail"), list) and detail:
            # The form of FastAPI: a list of fields with what is wrong with each.
            param = ".".join(str(part) for part in detail[0].get("loc", ()) if part != "body")
            message = f"{param} {detail[0].get('msg', '')}".strip()
        else:
            message = str(error.get("message") or detail or error)
            param = error.get("param")
    passed_on = _PASSED_ON.get(status, 502)
    field = hide(str(param), secrets)[:200] if param and passed_on == 400 else None
    # Cut last: a key that is cut in the middle would no longer be found.
    return ApiError(passed_on, hide(message, secrets)[:500], param=field, code="engine_error")


_PASSED_ON = {400: 400, 404: 404, 413: 413, 422: 400, 429: 429, 503: 503}
"""Statuses that the client can act upon; everything else is an error of the server or of ours."""
