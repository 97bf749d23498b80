"""OpenAI's responses, translated to chat completions and back, streaming included.

Nothing is stored: a request that continues an earlier response by its id is refused.
"""

from typing import Any

import orjson

from graftwork.engines.protocol import PieceData
from graftwork.http.messages import ApiError, encode_error
from graftwork.serve.api.call import (
    AnswerHead,
    ApiFormat,
    ChatCall,
    TokenUsage,
    load_object,
    take,
    take_objects,
    take_text,
    unsupported,
    wrong,
)
from graftwork.serve.api.chat import call_id, parse_chat_body, refuse_unsupported
from graftwork.serve.settings import ServeSettings

_KNOWN = frozenset(
    {
        "model", "input", "instructions", "max_output_tokens", "temperature", "top_p", "stream", "tools",
        "tool_choice", "parallel_tool_calls", "text", "metadata", "user", "safety_identifier",
        "prompt_cache_key",
    }
)  # fmt: skip
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "background": (False,),
    "include": ([],),
    "reasoning": ({},),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "stream_options": ({}, {"include_obfuscation": False}),
}
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text")


def parse_response(data: bytes, limits: ServeSettings) -> ChatCall:
    body = {key: value for key, value in load_object(data).items() if value is not None}
    refuse_unsupported(body, _KNOWN, _NEUTRAL)
    instructions = take_text(body, "instructions")
    turns = [{"role": "system", "content": instructions}] if instructions else []
    chat: dict[str, Any] = {"messages": [*turns, *_parse_input(body.get("input"))]}
    same = ("model", "temperature", "top_p", "stream", "metadata", "parallel_tool_calls")
    chat |= {key: body[key] for key in same if key in body}
    user = take_text(body, "user") or take_text(body, "safety_identifier")
    if user is not None:
        chat["user"] = user
    if "max_output_tokens" in body:
        chat["max_tokens"] = body["max_output_tokens"]
    if "tools" in body:
        chat["tools"] = [_parse_tool(tool, i) for i, tool in enumerate(take_objects(body, "tools", "tools"))]
    if "tool_choice" in body:
        choice = body["tool_choice"]
        if isinstance(choice, dict) and choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = choice
    response_format = _parse_format(take(body, "text", dict, {}))
    if response_format is not None:
        chat["response_format"] = response_format
    try:
        return parse_chat_body(chat, limits)
    except ApiError as error:
        # The field has another name here.
        if error.param == "max_tokens":
            message = error.message.replace("max_tokens", "max_output_tokens")
            raise ApiError(error.status, message, param="max_output_tokens", code=error.code) from error
        raise


def _parse_input(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise wrong("input", "must be a string or a non-empty list of items")
    turns: list[dict[str, Any]] = []
    for index, item in enumerate(value):
        where = f"input[{index}]"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            if item.get("role") not in _ROLES:
                raise wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
            content = _join_parts(item.get("content"), f"{where}.content")
            turns.append({"role": item["role"], "content": content})
        elif kind == "function_call":
            _add_call(turns, item, where)
        elif kind == "function_call_output":
            output = _join_parts(item.get("output"), f"{where}.output")
            turns.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            raise unsupported(where, "is not supported: only messages, function calls and their outputs are")
    return turns


def _join_parts(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise wrong(where, "must be a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") in _TEXT_PARTS else None
        if not isinstance(text, str):
            raise unsupported(f"{where}[{index}]", "is not supported: only text parts are")
        texts.append(text)
    return "".join(texts)


def _add_call(turns: list[dict[str, Any]], item: dict[str, Any], where: str) -> None:
    """Calls that follow each other, or a message of the assistant, are one turn."""
    for key in ("call_id", "name", "arguments"):
        if not isinstance(item.get(key), str):
            raise wrong(f"{where}.{key}", "must be a string")
    function = {"name": item["name"], "arguments": item["arguments"]}
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": "", "tool_calls": []})
    turns[-1].setdefault("tool_calls", []).append(
        {"id": item["call_id"], "type": "function", "function": function}
    )


def _parse_tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise unsupported(f"tools[{index}].type", "is not supported: only functions are")
    for key in tool.keys() - {"type", "name", "description", "parameters", "strict"}:
        raise unsupported(f"tools[{index}].{key[:80]}")
    function = {key: value for key, value in tool.items() if key != "type" and value is not None}
    return {"type": "function", "function": function}


def _parse_format(text: dict[str, Any]) -> dict[str, Any] | None:
    for key in text.keys() - {"format", "verbosity"}:
        raise unsupported(f"text.{key[:80]}")
    if text.get("verbosity") not in (None, "medium"):
        raise unsupported("text.verbosity")
    text_format = text.get("format")
    if text_format is None:
        return None
    if not isinstance(text_format, dict):
        raise wrong("text.format", "must be an object")
    if text_format.get("type") != "json_schema":
        return text_format
    json_schema = {key: value for key, value in text_format.items() if key != "type" and value is not None}
    return {"type": "json_schema", "json_schema": json_schema}


# -- answers -----------------------------------------------------------------------------------


def encode_response(head: AnswerHead, call: ChatCall, choices: list[PieceData], usage: TokenUsage) -> bytes:
    (piece,) = choices
    items = [_message_item(head, piece["text"], "completed")] if piece["text"] else []
    items += _call_items(head, piece)
    return orjson.dumps(_response(head, call, items, _status(piece), usage))


def _status(piece: PieceData) -> str:
    return "incomplete" if piece.get("finish_reason") == "length" else "completed"


def _message_item(head: AnswerHead, text: str | None, status: str) -> dict[str, Any]:
    content = [] if text is None else [_text_part(text)]
    item_id = f"msg_{head.unique}"
    return {"id": item_id, "type": "message", "role": "assistant", "status": status, "content": content}


def _text_part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _call_items(head: AnswerHead, piece: PieceData) -> list[dict[str, Any]]:
    return [
        {
            "id": f"fc_{head.unique}_{index}",
            "type": "function_call",
            "call_id": call_id(head.unique, 0, index),
            "name": call["name"],
            "arguments": call["arguments"],
            "status": "completed",
        }
        for index, call in enumerate(piece.get("tool_calls") or [])
    ]


def _response(
    head: AnswerHead, call: ChatCall, items: list[dict[str, Any]], status: str, usage: TokenUsage | None
) -> dict[str, Any]:
    body, choice = call.body, call.body.get("tool_choice", "auto")
    cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return {
        "id": f"resp_{head.unique}",
        "object": "response",
        "created_at": head.created,
        "status": status,
        "error": None,
        "incomplete_details": cut,
        "instructions": None,
        "max_output_tokens": call.max_tokens,
        "model": head.model,
        "output": items,
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "store": False,
        "temperature": call.temperature,
        "top_p": call.top_p,
        "tool_choice": {"type": "function", **choice["function"]} if isinstance(choice, dict) else choice,
        "tools": [{"type": "function", "strict": None, **tool["function"]} for tool in body.get("tools", [])],
        "truncation": "disabled",
        "metadata": body.get("metadata", {}),
        "usage": None if usage is None else _usage(usage),
    }


def _usage(usage: TokenUsage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage.reply,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.reply,
    }


class ResponseStream:
    """Server-sent events of one response, numbered."""

    def __init__(self, head: AnswerHead, call: ChatCall) -> None:
        self._head, self._call = head, call
        self._number = 0
        self._text: str | None = None
        self._items: list[dict[str, Any]] = []
        self._status = "completed"

    def opening(self) -> bytes:
        response = _response(self._head, self._call, [], "in_progress", None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def piece(self, piece: PieceData) -> bytes:
        out = b""
        if piece["text"]:
            out += self._add_text(piece["text"])
        if piece.get("finish_reason") is None:
            return out
        self._status = _status(piece)
        out += self._end_text()
        for item in _call_items(self._head, piece):
            out += self._add_call(item)
        return out

    def closing(self, usage: TokenUsage) -> bytes:
        whole = _response(self._head, self._call, self._items, self._status, usage)
        return self._event(f"response.{self._status}", response=whole)

    def error(self, error: ApiError) -> bytes:
        return self._event("error", code=error.code, message=error.message, param=error.param)

    def _add_text(self, text: str) -> bytes:
        out = b""
        position = {"output_index": 0, "content_index": 0, "item_id": f"msg_{self._head.unique}"}
        if self._text is None:
            self._text = ""
            item = _message_item(self._head, None, "in_progress")
            out += self._event("response.output_item.added", output_index=0, item=item)
            out += self._event("response.content_part.added", **position, part=_text_part(""))
        self._text += text
        return out + self._event("response.output_text.delta", **position, delta=text, logprobs=[])

    def _end_text(self) -> bytes:
        if self._text is None:
            return b""
        position = {"output_index": 0, "content_index": 0, "item_id": f"msg_{self._head.unique}"}
        item = _message_item(self._head, self._text, self._status)
        self._items.append(item)
        out = self._event("response.output_text.done", **position, text=self._text, logprobs=[])
        out += self._event("response.content_part.done", **position, part=_text_part(self._text))
        return out + self._event("response.output_item.done", output_index=0, item=item)

    def _add_call(self, item: dict[str, Any]) -> bytes:
        position = {"output_index": len(self._items)}
        self._items.append(item)
        started = {**item, "arguments": "", "status": "in_progress"}
        out = self._event("response.output_item.added", **position, item=started)
        item_position = {**position, "item_id": item["id"]}
        arguments = item["arguments"]
        out += self._event("response.function_call_arguments.delta", **item_position, delta=arguments)
        done = {**item_position, "name": item["name"], "arguments": arguments}
        out += self._event("response.function_call_arguments.done", **done)
        return out + self._event("response.output_item.done", **position, item=item)

    def _event(self, kind: str, **value: Any) -> bytes:
        data = orjson.dumps({"type": kind, "sequence_number": self._number, **value})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


RESPONSES = ApiFormat(parse_response, encode_response, ResponseStream, encode_error)
