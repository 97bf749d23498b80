"""Content parts under the names of chat APIs, from those of other APIs and libraries.

In: parts or a message of Gemini, Bedrock, OpenTelemetry, Vercel's AI SDK, pydantic-ai, or an item of the
Responses API. Out: parts of the types `text`, `reasoning`, `tool_use` and `tool_result`, and messages with
role and content. What has no other name here stays as it is. Does not write turns.
"""

from typing import Any

from graftwork.data.ingest.fields import first_of, open_json

_KINDS = {
    **dict.fromkeys(("tool_call", "tool_use", "toolUse", "functionCall", "function_call"), "tool_use"),
    **dict.fromkeys(
        (
            *("tool_call_response", "tool_response", "tool_return", "tool_result", "retry_prompt"),
            *("toolResult", "functionResponse", "function_response"),
        ),
        "tool_result",
    ),
    **dict.fromkeys(("thinking", "reasoningContent"), "reasoning"),
}


def open_parts(content: list[Any]) -> list[Any]:
    """Return the parts of a message under the names that chat APIs give them."""
    return [part for part in map(_open_part, content) if part is not None]


def _open_part(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    stated = first_of(part, "type", "part_kind")
    held: Any = part
    if stated == "compaction":
        text = first_of(part, "content", "text")
        return None if text is None else {"type": "text", "text": text}
    if isinstance(stated, str):
        kind = _KINDS.get(stated.replace("-", "_"))
    elif part.get("thought") is True:
        kind = "reasoning"
    else:  # Gemini and Bedrock name the kind of a part by a key
        key = next((key for key in _KINDS if isinstance(part.get(key), dict)), "")
        kind, held = _KINDS.get(key), part.get(key)
    if kind == "tool_use":
        name = first_of(held, "name", "toolName", "tool_name")
        return {"type": kind, "name": name, "input": first_of(held, "input", "arguments", "args")}
    if kind == "tool_result":
        result = first_of(held, "content", "response", "result", "output")
        return {"type": kind, "content": _open_result(result)}
    if kind == "reasoning" and "type" not in part:
        inner = held.get("reasoningText")
        text = first_of(inner if isinstance(inner, dict) else held, "text", "content")
        return {"type": kind, "text": text or ""}
    return part


def _open_result(result: Any) -> Any:
    """Return the result of a tool without the object or list of one that states its type."""
    if isinstance(result, list) and len(result) == 1 and isinstance(result[0], dict):
        keys = tuple(result[0])
        return result[0][keys[0]] if keys in (("json",), ("text",)) else result
    if isinstance(result, dict) and result.keys() == {"type", "value"}:
        return result["value"]
    return result


def open_message(value: dict[str, Any]) -> list[dict[str, Any]] | None:
    """Return a message or item without a role as messages with one; None if it is of no known kind."""
    kind, author = value.get("type"), value.get("kind")
    parts = open_json(value.get("parts"))
    if kind in ("function_call", "custom_tool_call"):
        given = value.get("arguments") if kind == "function_call" else {"input": value.get("input")}
        return [_reply([{"type": "tool_use", "name": value.get("name"), "input": given}])]
    if kind in ("function_call_output", "custom_tool_call_output"):
        return [{"role": "tool", "content": value.get("output")}]
    if kind == "reasoning":
        return [_reply([value])]
    if isinstance(parts, list) and author in ("request", "response"):
        return [_reply(parts)] if author == "response" else [_open_request(part) for part in parts]
    # Gemini does not require the role of a user.
    return [{"role": "user", "parts": parts}] if isinstance(parts, list) and author is None else None


def is_item(value: Any) -> bool:
    """Whether this is an item of the Responses API that belongs to what the model wrote at once."""
    return isinstance(value, dict) and "role" not in value and value.get("type") in _ITEMS


_ITEMS = ("function_call", "custom_tool_call", "reasoning", "function_call_output", "custom_tool_call_output")


def _reply(parts: list[Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": parts}


_REQUEST_ROLES = {"system-prompt": "system", "user-prompt": "user", "tool-return": "tool"}


def _open_request(part: Any) -> dict[str, Any]:
    """Return the message of one part of a pydantic-ai request: each part has its own role."""
    held = part if isinstance(part, dict) else {}
    kind = held.get("part_kind")
    if kind == "retry-prompt":
        kind = "tool-return" if held.get("tool_name") else "user-prompt"
    return {"role": _REQUEST_ROLES.get(str(kind)), "content": held.get("content")}
