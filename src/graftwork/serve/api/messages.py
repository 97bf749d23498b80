"""Anthropic's messages, translated to chat completions and back, streaming included."""

import json
from typing import Any

import orjson

from graftwork.engines.protocol import CallData, PieceData
from graftwork.http.messages import ApiError
from graftwork.serve.api.call import (
    AnswerHead,
    ApiFormat,
    ChatCall,
    TokenUsage,
    load_object,
    take,
    take_integer,
    take_objects,
    take_stop,
    take_text,
    unsupported,
    wrong,
)
from graftwork.serve.api.chat import call_id, parse_chat_body
from graftwork.serve.settings import ServeSettings

_KNOWN = {
    "model", "messages", "system", "max_tokens", "temperature", "top_p", "stream", "stop_sequences", "tools",
    "tool_choice", "metadata", "thinking", "service_tier",
}  # fmt: skip
_MOST_STOPS = 4
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
}
_KINDS |= {429: "rate_limit_error", 503: "overloaded_error", 504: "timeout_error"}


def parse_messages(data: bytes, limits: ServeSettings) -> ChatCall:
    body = {key: value for key, value in load_object(data).items() if value is not None}
    for key in body.keys() - _KNOWN:
        raise unsupported(key)
    if take(body, "thinking", dict, {"type": "disabled"}).get("type") != "disabled":
        raise unsupported("thinking", "is not supported; leave it out or disable it")
    if take_text(body, "service_tier") not in (None, "auto", "standard_only"):
        raise unsupported("service_tier")
    if "max_tokens" not in body:
        raise wrong("max_tokens", "is required")
    turns: list[dict[str, Any]] = []
    system = body.get("system")
    if system is not None and system != "":
        text = system if isinstance(system, str) else "\n\n".join(_texts(system, "system"))
        turns.append({"role": "system", "content": text})
    chat: dict[str, Any] = {
        "messages": [*turns, *_parse_turns(body)],
        # Clients of this API ask for more than small models give: what exceeds our limit is cut.
        "max_tokens": min(
            take_integer(body, "max_tokens", default=1, low=1, high=2**31) or 1, limits.max_new_tokens_limit
        ),
        "stop": take_stop(body, "stop_sequences", most=_MOST_STOPS) or None,
    }
    chat |= {key: body[key] for key in ("model", "temperature", "top_p", "stream") if key in body}
    metadata = take(body, "metadata", dict, {})
    chat["user"] = take_text(metadata, "user_id")
    if "tools" in body:
        chat["tools"] = [_parse_tool(tool, i) for i, tool in enumerate(take_objects(body, "tools", "tools"))]
    if "tool_choice" in body:
        chat |= _parse_choice(take(body, "tool_choice", dict, {}))
    return parse_chat_body({key: value for key, value in chat.items() if value is not None}, limits)


def _texts(blocks: Any, where: str) -> list[str]:
    """The texts of a list of text blocks."""
    if not isinstance(blocks, list):
        raise wrong(where, "must be a string or a list of blocks")
    texts = []
    for index, block in enumerate(blocks):
        text = block.get("text") if isinstance(block, dict) and block.get("type") == "text" else None
        if not isinstance(text, str):
            raise unsupported(f"{where}[{index}]", "is not supported: only text blocks are")
        texts.append(text)
    return texts


def _parse_turns(body: dict[str, Any]) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    for index, message in enumerate(take_objects(body, "messages", "messages")):
        where = f"messages[{index}]"
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant"):
            raise wrong(f"{where}.role", "must be user or assistant")
        for key in message.keys() - {"role", "content"}:
            raise unsupported(f"{where}.{key[:80]}")
        if isinstance(content, str):
            turns.append({"role": role, "content": content})
        elif not isinstance(content, list) or not content:
            raise wrong(f"{where}.content", "must be a string or a list of blocks")
        elif role == "assistant":
            turns.append(_parse_assistant(content, f"{where}.content"))
        else:
            turns += _parse_user(content, f"{where}.content")
    return turns


def _parse_assistant(blocks: list[Any], where: str) -> dict[str, Any]:
    calls: list[dict[str, Any]] = []
    text_blocks: list[Any] = []
    for index, block in enumerate(blocks):
        if isinstance(block, dict) and block.get("type") == "tool_use":
            if not isinstance(block.get("input"), dict):
                raise wrong(f"{where}[{index}].input", "must be an object")
            function = {
                "name": block.get("name"),
                "arguments": json.dumps(block["input"], ensure_ascii=False),
            }
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif calls:
            raise unsupported(f"{where}[{index}]", "is not supported: text must come before tool_use blocks")
        else:
            text_blocks.append(block)
    text = "".join(_texts(text_blocks, where))
    return {"role": "assistant", "content": text, **({"tool_calls": calls} if calls else {})}


def _parse_user(blocks: list[Any], where: str) -> list[dict[str, Any]]:
    """Tool results are separate turns, before the text."""
    results, text_blocks = [], []
    for index, block in enumerate(blocks):
        if isinstance(block, dict) and block.get("type") == "tool_result":
            content = block.get("content") or ""
            text = (
                content if isinstance(content, str) else "".join(_texts(content, f"{where}[{index}].content"))
            )
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            text_blocks.append(block)
    text = "".join(_texts(text_blocks, where))
    return [*results, {"role": "user", "content": text}] if text_blocks else results


def _parse_tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    where = f"tools[{index}]"
    if tool.get("type", "custom") != "custom":
        raise unsupported(f"{where}.type", "is not supported: only tools with an input_schema are")
    for key in tool.keys() - {"type", "name", "description", "input_schema", "cache_control", "strict"}:
        raise unsupported(f"{where}.{key[:80]}")
    if not isinstance(tool.get("input_schema"), dict):
        raise wrong(f"{where}.input_schema", "must be a JSON Schema object")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _parse_choice(choice: dict[str, Any]) -> dict[str, Any]:
    kind = choice.get("type")
    fields: dict[str, Any] = {}
    if take(choice, "disable_parallel_tool_use", bool, False):
        fields["parallel_tool_calls"] = False
    if kind == "tool":
        return {**fields, "tool_choice": {"type": "function", "function": {"name": choice.get("name")}}}
    names = {"auto": "auto", "none": "none", "any": "required"}
    if not isinstance(kind, str) or kind not in names:
        raise wrong("tool_choice.type", "must be auto, any, tool or none")
    return {**fields, "tool_choice": names[kind]}


# -- answers -----------------------------------------------------------------------------------


def encode_message(head: AnswerHead, call: ChatCall, choices: list[PieceData], usage: TokenUsage) -> bytes:
    (piece,) = choices
    content: list[dict[str, Any]] = [{"type": "text", "text": piece["text"]}] if piece["text"] else []
    for index, tool_call in enumerate(piece.get("tool_calls") or []):
        content.append({**_tool_block(head, index, tool_call), "input": _read_input(tool_call, piece)})
    message = {**_message(head), "content": content, **_ending(piece)}
    return orjson.dumps({**message, "usage": _usage(usage)})


def _message(head: AnswerHead) -> dict[str, Any]:
    return {
        "id": f"msg_{head.unique}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
    }


def _tool_block(head: AnswerHead, index: int, call: CallData) -> dict[str, Any]:
    return {"type": "tool_use", "id": call_id(head.unique, 0, index), "name": call["name"], "input": {}}


def _read_input(call: CallData, piece: PieceData) -> Any:
    """The arguments of a call as an object, which another server's may not be."""
    try:
        arguments = orjson.loads(call["arguments"] or b"{}")
    except orjson.JSONDecodeError:
        arguments = None
    if isinstance(arguments, dict):
        return arguments
    if piece.get("finish_reason") == "length":
        return {}  # cut off: the message ends with `max_tokens`, so nobody acts upon it
    message = f"the engine's server called {call['name'][:80]!r} with arguments that are no JSON object"
    raise ApiError(502, message, code="engine_error")


def _ending(piece: PieceData) -> dict[str, Any]:
    reason, stop = piece.get("finish_reason") or "stop", piece.get("stop")
    if stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    if piece.get("tool_calls") and reason == "stop":
        reason = "tool_calls"
    return {"stop_reason": _REASONS.get(reason, reason), "stop_sequence": None}


def _usage(usage: TokenUsage) -> dict[str, int]:
    return {"input_tokens": usage.prompt, "output_tokens": usage.reply}


def encode_message_error(error: ApiError) -> bytes:
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    inner = {"type": kind, "message": error.message}
    if error.param is not None:
        inner["param"] = error.param
    return orjson.dumps({"type": "error", "error": inner})


class MessageStream:
    """Server-sent events of one message: text in the first block, each tool call in a block of its own."""

    def __init__(self, head: AnswerHead, call: ChatCall) -> None:
        self._head = head
        self._blocks = 0
        self._in_text = False
        self._ending: dict[str, Any] = {}

    def opening(self) -> bytes:
        # The engine counts the tokens of the prompt with its last piece: `message_delta` has them.
        message = {**_message(self._head), "usage": _usage(TokenUsage(0, 0))}
        return _event("message_start", {"message": message})

    def piece(self, piece: PieceData) -> bytes:
        out = b""
        if piece["text"]:
            if not self._in_text:
                self._in_text = True
                out += self._start({"type": "text", "text": ""})
            out += self._delta({"type": "text_delta", "text": piece["text"]})
        if piece.get("finish_reason") is None:
            return out
        if self._in_text:
            self._in_text = False
            out += self._stop()
        for index, call in enumerate(piece.get("tool_calls") or []):
            out += self._start(_tool_block(self._head, index, call))
            out += self._delta({"type": "input_json_delta", "partial_json": call["arguments"]})
            out += self._stop()
        self._ending = _ending(piece)
        return out

    def closing(self, usage: TokenUsage) -> bytes:
        delta = _event("message_delta", {"delta": self._ending, "usage": _usage(usage)})
        return delta + _event("message_stop", {})

    def error(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + encode_message_error(error) + b"\n\n"

    def _start(self, block: dict[str, Any]) -> bytes:
        return _event("content_block_start", {"index": self._blocks, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._blocks, "delta": delta})

    def _stop(self) -> bytes:
        self._blocks += 1
        return _event("content_block_stop", {"index": self._blocks - 1})


def _event(kind: str, value: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **value}))


MESSAGES = ApiFormat(parse_messages, encode_message, MessageStream, encode_message_error)
