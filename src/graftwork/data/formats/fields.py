"""Taking typed values out of parsed JSON, with errors that name the key and the type found."""

import math
from typing import Any, cast

from graftwork.records.interaction import Message, Role

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
}


class BadRow(ValueError):
    """A row of a known shape whose content is wrong. The message names keys, never contents."""


def take_text(value: Any, key: str) -> str:
    """Text, or the text parts of a list of content parts."""
    if isinstance(value, str):
        if "\0" in value:
            raise BadRow(f"`{key}` holds a NUL character")
        return value
    if isinstance(value, list):
        return "".join(_take_part(part, f"{key}[{place}]") for place, part in enumerate(value))
    raise BadRow(f"`{key}` must be text, and is {name_type(value)}")


def take_optional_text(value: Any, key: str) -> str | None:
    """Text or nothing; a bare number is taken as its digits, since logs write ids both ways."""
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return take_text(value, key)


def take_optional_number(value: Any, key: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow(f"`{key}` must be a number, and is {name_type(value)}")
    number = float(value)
    if not math.isfinite(number):
        raise BadRow(f"`{key}` is too large")
    return number


def take_optional_count(value: Any, key: str) -> int | None:
    number = take_optional_number(value, key)
    return None if number is None else int(number)


def take_object(value: Any, key: str) -> dict[str, Any]:
    """An object; a missing one is empty."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRow(f"`{key}` must be an object, and is {name_type(value)}")
    return cast("dict[str, Any]", value)


def take_messages(value: Any, key: str) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise BadRow(f"`{key}` must be a list of messages, and is {name_type(value)}")
    return tuple(_take_message(item, f"{key}[{place}]") for place, item in enumerate(value))


def name_type(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, list | dict) and not value:
        return "empty"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "an object")


def _take_message(value: Any, key: str) -> Message:
    if not isinstance(value, dict):
        raise BadRow(f"`{key}` must be an object with role and content, and is {name_type(value)}")
    role = value.get("role")
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise BadRow(f"`{key}.role` must be one of system, user, assistant, tool")
    if value.get("tool_calls") or value.get("function_call"):
        raise BadRow(f"`{key}` calls a tool, and tool calls are not read")
    return Message(role=_ROLES[role.lower()], content=take_text(value.get("content"), f"{key}.content"))


def _take_part(part: Any, key: str) -> str:
    if isinstance(part, str):
        return take_text(part, key)
    if isinstance(part, dict) and part.get("type", "text") in ("text", "input_text", "output_text"):
        return take_text(part.get("text"), f"{key}.text")
    raise BadRow(f"`{key}` is no text, and only text is read")
