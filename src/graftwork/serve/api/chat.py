"""OpenAI's chat completions: requests checked and answers written, with tools and their calls.

Input: the bytes of a request, or pieces of an answer. Output: a ChatCall, or the bytes of a response. What we
cannot do is refused by name, never ignored. Requests without tools, choices or log-probabilities take a
shorter way: this is the hot path. Calls of tools are in turns in tags, the form that interactions keep.
"""

import re
from dataclasses import replace
from typing import Any, cast

import orjson

from graftwork.engines.protocol import CallData, PieceData
from graftwork.http.messages import ApiError, encode_error
from graftwork.records.interaction import Role
from graftwork.serve.api.call import (
    MOST_CHOICES,
    AnswerHead,
    ApiFormat,
    ChatCall,
    GenerationOptions,
    StreamEncoder,
    TokenUsage,
    is_nested_deeper,
    load_object,
    take,
    take_integer,
    take_number,
    take_stop,
    take_text,
    unsupported,
    wrong,
)
from graftwork.serve.settings import ServeSettings
from graftwork.text.tool_calls import TextAndCalls, ToolCall, define_tool, write_calls

FIELDS = frozenset(
    {"n", "logprobs", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "response_format"}
)
MOST_LOGPROBS = 20
_SMALLEST_TEMPERATURE = 1e-6
"""Below it only the likeliest token has a probability, and logits divided by it may overflow."""
_ANY_OBJECT = {"type": "object"}
MOST_TOOLS = 128
MOST_SCHEMA_BYTES = 64 * 1024
"""Size limit of the JSON Schema of `response_format`, and of all tools of a request."""
DEEPEST_SCHEMA = 48
"""Levels of nesting in a schema."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FUNCTION_KEYS = {"name", "description", "parameters", "strict"}


_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name for the same turn
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}

# Options that change nothing at these values; at any other value they are refused.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "logit_bias": ({},),
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
) | FIELDS  # fmt: skip


def parse_chat(data: bytes, limits: ServeSettings) -> ChatCall:
    """The request as a ChatCall. Raises ApiError with what is wrong."""
    return parse_chat_body(load_object(data), limits)


def parse_chat_body(raw: dict[str, Any], limits: ServeSettings) -> ChatCall:
    body = {key: value for key, value in raw.items() if value is not None}
    refuse_unsupported(body, _KNOWN, _NEUTRAL)
    return make_call(
        raw,
        body,
        messages=_parse_messages(body.get("messages")),
        limits=limits,
        options=None if FIELDS.isdisjoint(body) else parse_options(body, limits),
    )


def make_call(
    raw: dict[str, Any],
    body: dict[str, Any],
    *,
    messages: list[dict[str, str]],
    limits: ServeSettings,
    options: GenerationOptions | None,
) -> ChatCall:
    """The fields that chat and text completions have in common. `body` is `raw` without nulls."""
    if "metadata" in body and not all(
        isinstance(value, str) for value in take(body, "metadata", dict, {}).values()
    ):
        raise ApiError(400, "metadata must map names to strings", param="metadata")
    model = take(body, "model", str, limits.default_model)
    longest = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    default = min(limits.max_new_tokens, limits.max_new_tokens_limit)
    max_tokens = take_integer(body, longest, default=default, low=1, high=limits.max_new_tokens_limit)
    # What was evaluated is greedy, so what is served is greedy unless the caller asks otherwise.
    temperature = take_number(body, "temperature", default=0.0, low=0.0, high=2.0)
    return ChatCall(
        body=raw,
        model=model,
        messages=messages,
        max_tokens=cast("int", max_tokens),
        temperature=temperature if temperature >= _SMALLEST_TEMPERATURE else 0.0,
        top_p=take_number(body, "top_p", default=1.0, low=0.0, high=1.0),
        seed=take_integer(body, "seed", default=None, low=-(2**63), high=2**63 - 1),
        stop=take_stop(body, "stop"),
        stream=take(body, "stream", bool, False),
        include_usage="stream_options" in body and _wants_usage(body),
        user=take_text(body, "user"),
        options=options,
    )


def _wants_usage(body: dict[str, Any]) -> bool:
    options = take(body, "stream_options", dict, {})
    if options.keys() - {"include_usage", "include_obfuscation"}:
        raise ApiError(400, "only stream_options.include_usage is supported", param="stream_options")
    if not all(isinstance(value, bool) for value in options.values()):
        raise ApiError(400, "stream_options must map names to true or false", param="stream_options")
    return options.get("include_usage") is True


def refuse_unsupported(
    body: dict[str, Any], supported: frozenset[str], neutral: dict[str, tuple[Any, ...]]
) -> None:
    """`neutral` options change nothing at their listed values."""
    for key, value in body.items():
        if key in supported:
            continue
        if key not in neutral:
            message = f"the option {key!r} is not supported; leave it out"
            raise ApiError(400, message, param=key, code="unsupported_parameter")
        if not any(value == same and type(value) is type(same) for same in neutral[key]):
            message = f"{key} is not supported at this value; leave {key!r} out"
            raise ApiError(400, message, param=key, code="unsupported_parameter")


class Turns:
    """Checks tool calls and their results over the course of a conversation."""

    def __init__(self) -> None:
        self._open: set[str] = set()

    def write_calls(self, text: str, calls: Any, where: str) -> str:
        """An assistant's turn with its calls in tags."""
        if not isinstance(calls, list):
            raise wrong(where, "must be a list")
        tool_calls = [self._parse_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]
        return write_calls(TextAndCalls(text, tuple(tool_calls)))

    def _parse_call(self, call: Any, where: str) -> ToolCall:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise wrong(where, 'must be {"id": …, "type": "function", "function": {…}}')
        name, text = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise wrong(f"{where}.function.name", "must be 1 to 64 letters, digits, _ or -")
        try:
            # Some servers write nothing for a call without arguments, and clients send it back.
            arguments = orjson.loads(text or "{}") if isinstance(text, str) else None
        except orjson.JSONDecodeError:
            arguments = None
        if not isinstance(arguments, dict) or is_nested_deeper(arguments, DEEPEST_SCHEMA):
            raise wrong(f"{where}.function.arguments", "must be a JSON object as a string")
        if not isinstance(call.get("id"), str):
            raise wrong(f"{where}.id", "must be a string")
        self._open.add(call["id"])
        return ToolCall(name, arguments)

    def check_result(self, call_id: Any, where: str) -> None:
        if not isinstance(call_id, str) or call_id not in self._open:
            raise wrong(where, "must be the id of a tool call in an earlier message")


def _parse_messages(value: Any) -> list[dict[str, str]]:
    if not isinstance(value, list) or not value:
        raise ApiError(400, "messages must be a list with at least one message", param="messages")
    turns = Turns()
    return [
        _parse_plain(message) or _parse_message(message, f"messages[{i}]", turns)
        for i, message in enumerate(value)
    ]


def _parse_plain(message: Any) -> dict[str, str] | None:
    """A message with only role and text, the usual case; None for any other."""
    if type(message) is dict and len(message) == 2:
        role, content = message.get("role"), message.get("content")
        if type(role) is str and type(content) is str and role in _ROLES:
            return {"role": _ROLES[role], "content": content}
    return None


def _parse_message(message: Any, where: str, turns: Turns) -> dict[str, str]:
    if not isinstance(message, dict):
        raise ApiError(400, f"{where} must be an object with role and content", param=where)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(400, f"{where}.role must be one of {', '.join(_ROLES)}", param=f"{where}.role")
    plain = True
    for key, value in message.items():
        if key not in ("role", "content") and value is not None and value != []:
            plain = False
            if key not in _TURN_FIELDS.get(role, ()):
                text = f"{where}.{key} is not supported: only role and content reach the model"
                raise ApiError(400, text, param=f"{where}.{key}", code="unsupported_parameter")
    if plain:
        return {"role": _ROLES[role], "content": _parse_content(message.get("content"), f"{where}.content")}
    if role == "tool":
        if message.get("tool_call_id") is not None:
            turns.check_result(message["tool_call_id"], f"{where}.tool_call_id")
        return {"role": "tool", "content": _parse_content(message.get("content"), f"{where}.content")}
    content = message.get("content")
    text = "" if content is None else _parse_content(content, f"{where}.content")
    return {
        "role": "assistant",
        "content": turns.write_calls(text, message["tool_calls"], f"{where}.tool_calls"),
    }


_TURN_FIELDS = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}


def _parse_content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise ApiError(400, f"{where} must be a string or a list of text parts", param=where)
    texts: list[str] = []
    for i, part in enumerate(content):
        is_text = isinstance(part, dict) and part.get("type") == "text" and part.keys() == {"type", "text"}
        text = part["text"] if is_text else None
        if not isinstance(text, str):
            message = f'{where}[{i}] is not supported: only parts {{"type": "text", "text": …}} are'
            raise ApiError(400, message, param=f"{where}[{i}]", code="unsupported_parameter")
        texts.append(text)
    return "".join(texts)


# -- answers -----------------------------------------------------------------------------------


def encode_completion(head: AnswerHead, call: ChatCall, choices: list[PieceData], usage: TokenUsage) -> bytes:
    return orjson.dumps(
        {
            "id": f"chatcmpl-{head.unique}",
            "object": "chat.completion",
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.release,
            "choices": [_encode_choice(head, index, piece) for index, piece in enumerate(choices)],
            "usage": encode_usage(usage),
        }
    )


def _encode_choice(head: AnswerHead, index: int, piece: PieceData) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": piece["text"], "refusal": None}
    reason = piece.get("finish_reason") or "stop"
    if calls := piece.get("tool_calls"):
        message["content"] = piece["text"] or None
        message["tool_calls"] = [
            encode_call(call, call_id(head.unique, index, number)) for number, call in enumerate(calls)
        ]
        reason = "tool_calls" if reason == "stop" else reason
    listed = piece.get("logprobs")
    logprobs = None if listed is None else {"content": listed, "refusal": None}
    return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}


def encode_usage(usage: TokenUsage) -> dict[str, int]:
    total = usage.prompt + usage.reply
    return {"prompt_tokens": usage.prompt, "completion_tokens": usage.reply, "total_tokens": total}


DONE_EVENT = b"data: [DONE]\n\n"


class ChunkEncoder:
    """Server-sent events of one plain answer. What repeats is encoded once: this is the hot path."""

    def __init__(self, head: AnswerHead, call: ChatCall) -> None:
        common = orjson.dumps(
            {
                "id": f"chatcmpl-{head.unique}",
                "object": "chat.completion.chunk",
                "created": head.created,
                "model": head.model,
                "system_fingerprint": head.release,
            }
        )
        self._include_usage = call.include_usage
        self._common = b"data: " + common[:-1]
        self._before = self._common + b',"choices":[{"index":0,"delta":{"content":'

    def opening(self) -> bytes:
        return self._choice(b'{"role":"assistant","content":""}', None)

    def piece(self, piece: PieceData) -> bytes:
        text, reason = piece["text"], piece.get("finish_reason")
        out = self._before + orjson.dumps(text) + b'},"finish_reason":null}]}\n\n' if text else b""
        return out if reason is None else out + self._choice(b"{}", reason)

    def closing(self, usage: TokenUsage) -> bytes:
        if not self._include_usage:
            return DONE_EVENT
        counts = orjson.dumps(encode_usage(usage))
        return self._common + b',"choices":[],"usage":' + counts + b"}\n\n" + DONE_EVENT

    def error(self, error: ApiError) -> bytes:
        """An error in a stream whose headers have already been sent."""
        return b"data: " + encode_error(error) + b"\n\n"

    def _choice(self, delta: bytes, finish_reason: str | None) -> bytes:
        reason = orjson.dumps(finish_reason)
        return self._common + b',"choices":[{"index":0,"delta":%b,"finish_reason":%b}]}\n\n' % (delta, reason)


class OptionChunkEncoder(ChunkEncoder):
    """The same with several choices, tool calls and log-probabilities."""

    def __init__(self, head: AnswerHead, call: ChatCall) -> None:
        super().__init__(head, call)
        self._unique = head.unique
        self._choices = call.options.n if call.options is not None else 1
        self._begun: set[tuple[int, int]] = set()
        """Choice and index of the calls that were sent in parts."""

    def opening(self) -> bytes:
        opened = {"role": "assistant", "content": ""}
        return b"".join([self._encode(index, opened) for index in range(self._choices)])

    def piece(self, piece: PieceData) -> bytes:
        choice, out = piece.get("index", 0), b""
        if piece["text"] or piece.get("logprobs"):
            out = self._encode(choice, {"content": piece["text"]}, logprobs=piece.get("logprobs"))
        for delta in piece.get("call_deltas") or []:
            out += self._call_part(choice, delta["index"], delta.get("name"), delta["arguments"])
        calls = piece.get("tool_calls") or []
        for number, call in enumerate(calls):
            if (choice, number) not in self._begun:
                out += self._call_part(choice, number, call["name"], "")
                out += self._call_part(choice, number, None, call["arguments"])
        reason = piece.get("finish_reason")
        if reason is not None:
            out += self._encode(choice, {}, reason="tool_calls" if calls and reason == "stop" else reason)
        return out

    def _call_part(self, choice: int, number: int, name: str | None, arguments: str) -> bytes:
        part: dict[str, Any] = {"index": number, "function": {"arguments": arguments}}
        if name is not None:
            self._begun.add((choice, number))
            encoded = encode_call(
                {"name": name, "arguments": arguments}, call_id(self._unique, choice, number)
            )
            part = {"index": number, **encoded}
        return self._encode(choice, {"tool_calls": [part]})

    def _encode(
        self, choice: int, delta: dict[str, Any], *, reason: str | None = None, logprobs: Any = None
    ) -> bytes:
        body: dict[str, Any] = {"index": choice, "delta": delta, "finish_reason": reason}
        if logprobs:
            body["logprobs"] = {"content": logprobs, "refusal": None}
        return self._common + b',"choices":[' + orjson.dumps(body) + b"]}\n\n"


def open_chunks(head: AnswerHead, call: ChatCall) -> StreamEncoder:
    return ChunkEncoder(head, call) if call.options is None else OptionChunkEncoder(head, call)


def encode_models(names: dict[str, str]) -> bytes:
    """`names` maps each name that can be asked for to the release that answers it."""
    data = [describe_model(name, release) for name, release in names.items()]
    return orjson.dumps({"object": "list", "data": data})


def describe_model(name: str, release: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "graftwork", "root": release}


CHAT = ApiFormat(parse_chat, encode_completion, open_chunks, encode_error)


def parse_options(body: dict[str, Any], limits: ServeSettings) -> GenerationOptions | None:
    """The options of a chat request; None if it has none that change the answer."""
    options = parse_tools(body)
    n = take_integer(body, "n", default=1, low=1, high=MOST_CHOICES) or 1
    wants_logprobs = take(body, "logprobs", bool, False)
    most_logprobs = take_integer(body, "top_logprobs", default=0, low=0, high=MOST_LOGPROBS) or 0
    if most_logprobs and not wants_logprobs:
        raise wrong("top_logprobs", "needs logprobs: true")
    options = replace(
        options,
        n=n,
        logprobs=most_logprobs if wants_logprobs else None,
        schema=_parse_format(body, limits),
    )
    return None if options == GenerationOptions() else options


def _parse_format(body: dict[str, Any], limits: ServeSettings) -> dict[str, Any] | None:
    response_format = take(body, "response_format", dict, {"type": "text"})
    kind = response_format.get("type")
    if kind == "text" and response_format.keys() == {"type"}:
        return None
    if kind == "json_object" and response_format.keys() == {"type"}:
        return _ANY_OBJECT
    if kind != "json_schema" or response_format.keys() != {"type", "json_schema"}:
        raise wrong("response_format", "must have the type text, json_object or json_schema")
    return check_schema(response_format["json_schema"], "response_format.json_schema", limits)


def check_schema(json_schema: Any, where: str, limits: ServeSettings) -> dict[str, Any]:
    """The schema of `{"name": …, "schema": {…}}`."""
    if not isinstance(json_schema, dict) or not isinstance(json_schema.get("schema"), dict):
        raise wrong(f"{where}.schema", "must be a JSON Schema object")
    for key in json_schema.keys() - {"name", "schema", "strict", "description", "type"}:
        raise unsupported(f"{where}.{key[:80]}")
    schema: dict[str, Any] = json_schema["schema"]
    require_small(schema, f"{where}.schema")
    return schema


# -- tools -------------------------------------------------------------------------------------


def parse_tools(body: dict[str, Any]) -> GenerationOptions:
    """The tools of a chat request; none of them if `tool_choice` is `none`."""
    parallel = take(body, "parallel_tool_calls", bool, True)
    listed = take(body, "tools", list, [])
    if len(listed) > MOST_TOOLS:
        raise wrong("tools", f"has {len(listed)} tools; the limit is {MOST_TOOLS}")
    tools = [_parse_tool(tool, f"tools[{index}]") for index, tool in enumerate(listed)]
    require_small(listed, "tools")
    names = [tool["function"]["name"] for tool in tools]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise wrong(f"tools[{index}].function.name", f"repeats {name!r}")
    choice = _parse_choice(body.get("tool_choice", "auto"), names)
    if choice == "none" or not tools:
        return GenerationOptions()
    strict = any(tool["function"].get("strict") is True for tool in listed)
    return GenerationOptions(
        tools=tuple(tools), tool_choice=choice, parallel_tool_calls=parallel, strict_tools=strict
    )


def require_small(value: Any, param: str) -> None:
    """Refuse schemas that are large or deeply nested: they are compiled and rendered for each request."""
    if is_nested_deeper(value, DEEPEST_SCHEMA):
        raise wrong(param, f"is nested deeper than {DEEPEST_SCHEMA} levels")
    size = len(orjson.dumps(value))
    if size > MOST_SCHEMA_BYTES:
        raise wrong(param, f"has {size} bytes; the limit is {MOST_SCHEMA_BYTES}")


def _parse_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise wrong(where, 'must be {"type": "function", "function": {…}}')
    if tool["type"] != "function":
        raise unsupported(f"{where}.type", f"{tool['type'][:80]!r} is not supported: only functions are")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{where}.function", "must be an object with a name")
    for key in (*(tool.keys() - {"type", "function"}), *(function.keys() - _FUNCTION_KEYS)):
        raise unsupported(f"{where}.{key[:80]}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(f"{where}.function.name", "must be 1 to 64 letters, digits, _ or -")
    if not isinstance(function.get("description", ""), str | None):
        raise wrong(f"{where}.function.description", "must be a string")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong(f"{where}.function.parameters", "must be a JSON Schema object")
    if not isinstance(function.get("strict", False), bool | None):
        raise wrong(f"{where}.function.strict", "must be true or false")
    return define_tool(tool)


def _parse_choice(choice: Any, names: list[str]) -> str:
    if isinstance(choice, str) and choice in ("none", "auto"):
        return choice
    if choice == "required":
        if not names:
            raise wrong("tool_choice", "is required, but there are no tools")
        return "required"
    if (
        isinstance(choice, dict)
        and choice.get("type") == "function"
        and choice.keys() <= {"type", "function"}
    ):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in names:
            raise wrong(
                "tool_choice.function.name", f"must be one of the tools: {', '.join(names) or 'none'}"
            )
        return f"={name}"
    if isinstance(choice, dict):
        raise unsupported("tool_choice.type", "is not supported: only `function` is")
    raise wrong("tool_choice", "must be none, auto, required or a function")


def encode_call(call: CallData, call_id: str) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call_id, "type": "function", "function": function}


def call_id(unique: str, choice: int, index: int) -> str:
    """The id of a call, the same in a stream and in a whole answer."""
    return f"call_{unique[:20]}{choice:02d}{index:02d}"
