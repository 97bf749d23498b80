"""Reads fields of a JSON body. What is wrong raises ApiError with the name of the field."""

import math
from typing import Any, TypeVar, cast

import orjson

from graftwork.http.messages import ApiError

T = TypeVar("T")

LONGEST_STOP = 512
"""Characters of a stop string. The end of the answer is compared with all of it at every token."""


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
    """Whether lists and objects are nested in more than so many levels."""
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
