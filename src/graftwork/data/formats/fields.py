"""Taking typed values out of parsed JSON.

What a row must hold is taken with errors that name the key and the type found. What it may say
besides (a `fact`, a `figure`) is None where it cannot be used: no row is lost over its model's name.
"""

import json
import math
import re
from typing import Any, cast

import orjson

from graftwork.text.json_size import has_too_many_values

_NUMBER = re.compile(r"\s*[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
_LARGEST_COUNT = 1 << 53
_DURATION = re.compile(
    r"\s*(\d{1,15}(?:\.\d{0,15})?)\s*(ms|s|m|min|[a-z]{3,12})\.?\s*", re.ASCII | re.IGNORECASE
)
_MILLISECONDS = {
    **dict.fromkeys(("ms", "msec", "msecs", "millis", "millisecond", "milliseconds"), 1.0),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1e3),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 6e4),
}
_NAMES_OF_OBJECTS = ("name", "id", "role", "value", "code")


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


def take_fact(value: Any) -> str | None:
    """What a log says in a word: text, the digits of a number, the name that an object has; else None."""
    if isinstance(value, dict):
        value = first_of(value, *_NAMES_OF_OBJECTS)
    if isinstance(value, str):
        return value if value and "\0" not in value else None
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None


def take_figure(value: Any) -> float | None:
    """A number, also as text, since tables know only text; None for anything else."""
    if isinstance(value, str) and len(value) < 40 and _NUMBER.fullmatch(value):
        value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def take_duration(value: Any) -> float | None:
    """Milliseconds; text may name its unit, as in `12.5ms` or `3 s`."""
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        return take_figure(value)
    unit = _MILLISECONDS.get(match[2].lower())
    return None if unit is None else float(match[1]) * unit


def take_count(value: Any) -> int | None:
    number = take_figure(value)
    return None if number is None or abs(number) > _LARGEST_COUNT else int(number)


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
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "[") and not has_too_many_values(value):
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
