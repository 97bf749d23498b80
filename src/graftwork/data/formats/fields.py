"""Taking typed values out of parsed JSON, with errors that name the key and the type found."""

import json
import math
import re
from typing import Any, cast

import orjson

_NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
_LARGEST_COUNT = 1 << 53


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
    """A number or nothing; text that is a number is one, since tables know only text."""
    if value is None:
        return None
    if isinstance(value, str) and len(value) < 40 and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRow(f"`{key}` must be a number, and is {name_type(value)}")
    number = float(value)
    if not math.isfinite(number):
        raise BadRow(f"`{key}` is too large")
    return number


def take_optional_count(value: Any, key: str) -> int | None:
    number = take_optional_number(value, key)
    if number is None:
        return None
    if abs(number) > _LARGEST_COUNT:
        raise BadRow(f"`{key}` is too large")
    return int(number)


def take_object(value: Any, key: str) -> dict[str, Any]:
    """An object; a missing one is empty."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise BadRow(f"`{key}` must be an object, and is {name_type(value)}")
    return cast("dict[str, Any]", value)


def take_list(value: Any, key: str) -> list[Any]:
    """A list; a missing one is empty."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRow(f"`{key}` must be a list, and is {name_type(value)}")
    return value


def open_json(value: Any) -> Any:
    """What JSON inside of text holds, where a log wrote an object as text; else the value itself."""
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError:
            return value
    return value


def write_json(value: Any, key: str) -> str:
    """JSON as the templates of models write it: keys in their order, a space behind each mark."""
    try:
        return json.dumps(value, ensure_ascii=False)
    except (RecursionError, ValueError):
        raise BadRow(f"`{key}` is nested too deeply") from None


def first_of(row: dict[str, Any], *keys: str) -> Any:
    """The value of the first of these keys that the row states."""
    for key in keys:
        value = row.get(key)
        if value is not None:
            return value
    return None


def name_type(value: Any) -> str:
    if value is None:
        return "missing"
    if isinstance(value, list | dict) and not value:
        return "empty"
    names = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "an object")


def _take_part(part: Any, key: str) -> str:
    if isinstance(part, str):
        return take_text(part, key)
    if isinstance(part, dict) and part.get("type", "text") in (
        "text",
        "input_text",
        "output_text",
        "refusal",
    ):
        return take_text(first_of(part, "text", "content", "refusal"), f"{key}.text")
    raise BadRow(f"`{key}` is no text, and only text is read")
