"""A JSON value held against a JSON Schema.

In: a parsed value and a schema that `json_schema_read` has let through. Out: what is wrong with the
value, place by place. Follows draft 2020-12, and the array form of `items` of draft 7.
"""

import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from graftwork.grading.json_schema_read import Schema, is_integer, is_number, require_schema, resolve, shown
from graftwork.grading.patterns import matches

__all__ = ["find_errors", "fits", "require_schema"]

DEEPEST = 100
"""A value nested deeper than this fits no schema that looks so deep."""


def find_errors(value: Any, schema: Schema) -> list[str]:
    """What is wrong, as "$.answer: …"; empty where the value fits the (already required) schema."""
    return list(_Walk(schema).errors(value, schema, "$", 0))


def fits(value: Any, schema: Schema) -> bool:
    return next(_Walk(schema).errors(value, schema, "$", 0), None) is None


class _Walk:
    """One value held against one schema."""

    def __init__(self, root: Schema) -> None:
        self._root = root

    def errors(self, value: Any, schema: Schema, at: str, depth: int) -> Iterator[str]:
        if isinstance(schema, bool):
            if not schema:
                yield f"{at}: nothing may stand here"
            return
        if depth > DEEPEST:
            yield f"{at}: nested deeper than {DEEPEST}"
            return
        if "$ref" in schema:
            yield from self.errors(value, resolve(schema["$ref"], self._root), at, depth + 1)
        yield from _plain_errors(value, schema, at)
        if isinstance(value, dict):
            yield from self._object_errors(value, schema, at, depth)
        if isinstance(value, list):
            yield from self._array_errors(value, schema, at, depth)
        yield from self._combined_errors(value, schema, at, depth)

    def _fits(self, value: Any, schema: Schema, depth: int) -> bool:
        return next(self.errors(value, schema, "$", depth + 1), None) is None

    def _object_errors(
        self, value: dict[str, Any], schema: dict[str, Any], at: str, depth: int
    ) -> Iterator[str]:
        properties, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        for key in schema.get("required", ()):
            if key not in value:
                yield f"{at}: the key {key} is missing"
        for key, needed in schema.get("dependentRequired", {}).items():
            if key in value and (missing := [one for one in needed if one not in value]):
                yield f"{at}: with {key} there must be {missing[0]}"
        for key, part in schema.get("dependentSchemas", {}).items():
            if key in value:
                yield from self.errors(value, part, at, depth + 1)
        for key, inner in value.items():
            place = f"{at}.{key}"
            if "propertyNames" in schema and not self._fits(key, schema["propertyNames"], depth):
                yield f"{at}: a key may not be called {key}"
            known = [patterns[one] for one in patterns if matches(one, key)]
            if key in properties:
                known.append(properties[key])
            if not known and "additionalProperties" in schema:
                if schema["additionalProperties"] is False:
                    yield f"{at}: the key {key} is not allowed"
                    continue
                known.append(schema["additionalProperties"])
            for part in known:
                yield from self.errors(inner, part, place, depth + 1)

    def _array_errors(self, value: list[Any], schema: dict[str, Any], at: str, depth: int) -> Iterator[str]:
        items = schema.get("items", True)
        first = items if isinstance(items, list) else schema.get("prefixItems", [])
        rest = schema.get("additionalItems", True) if isinstance(items, list) else items
        for place, inner in enumerate(value):
            part = first[place] if place < len(first) else rest
            yield from self.errors(inner, part, f"{at}[{place}]", depth + 1)
        if schema.get("uniqueItems") and len({_key(one) for one in value}) < len(value):
            yield f"{at}: an item stands twice"
        if "contains" in schema:
            found = sum(self._fits(inner, schema["contains"], depth) for inner in value)
            least, most = schema.get("minContains", 1), schema.get("maxContains", math.inf)
            if not least <= found <= most:
                yield f"{at}: {found} items are of the kind that it must contain"

    def _combined_errors(self, value: Any, schema: dict[str, Any], at: str, depth: int) -> Iterator[str]:
        for part in schema.get("allOf", ()):
            yield from self.errors(value, part, at, depth + 1)
        if "anyOf" in schema and not any(self._fits(value, part, depth) for part in schema["anyOf"]):
            yield f"{at}: none of the {len(schema['anyOf'])} alternatives fits"
        if "oneOf" in schema:
            fitting = sum(self._fits(value, part, depth) for part in schema["oneOf"])
            if fitting != 1:
                yield f"{at}: {fitting} of the alternatives fit, and just one must"
        if "not" in schema and self._fits(value, schema["not"], depth):
            yield f"{at}: it fits what it must not"
        if "if" in schema:
            branch = "then" if self._fits(value, schema["if"], depth) else "else"
            yield from self.errors(value, schema.get(branch, True), at, depth + 1)


def _plain_errors(value: Any, schema: dict[str, Any], at: str) -> Iterator[str]:
    """The keywords that look at the value alone, without going into it."""
    if "type" in schema:
        named = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not any(_IS[one](value) for one in named):
            yield f"{at}: {shown(value)} is no {' or '.join(named)}"
    if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
        yield f"{at}: {shown(value)} is none of the allowed values"
    if "const" in schema and not _same(value, schema["const"]):
        yield f"{at}: {shown(value)} is not {shown(schema['const'])}"
    if is_number(value):
        for key, holds in _LIMITS.items():
            if key in schema and not holds(value, schema[key]):
                yield f"{at}: {shown(value)} breaks {key} {schema[key]}"
    for kind, unit in ((str, "Length"), (list, "Items"), (dict, "Properties")):
        if isinstance(value, kind):
            if len(value) < schema.get(f"min{unit}", 0):
                yield f"{at}: {len(value)} is under min{unit} {schema[f'min{unit}']}"
            if len(value) > schema.get(f"max{unit}", math.inf):
                yield f"{at}: {len(value)} is over max{unit} {schema[f'max{unit}']}"
    if isinstance(value, str) and "pattern" in schema and not matches(schema["pattern"], value):
        yield f"{at}: {shown(value)} does not match {schema['pattern']}"


def _is_multiple(value: Any, limit: Any) -> bool:
    if isinstance(value, int) and isinstance(limit, int):
        return value % limit == 0
    try:
        ratio = value / limit
    except OverflowError:
        return False
    return math.isfinite(ratio) and abs(ratio - round(ratio)) <= 1e-9 * max(1.0, abs(ratio))


_IS: dict[str, Callable[[Any], bool]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "number": is_number,
    "integer": is_integer,
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
}
_LIMITS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": lambda value, limit: value >= limit,
    "maximum": lambda value, limit: value <= limit,
    "exclusiveMinimum": lambda value, limit: value > limit,
    "exclusiveMaximum": lambda value, limit: value < limit,
    "multipleOf": _is_multiple,
}


def _same(one: Any, two: Any) -> bool:
    return bool(_key(one) == _key(two))


def _key(value: Any) -> Hashable:
    """The same for values that are equal as JSON: 1 is 1.0, but true is not 1."""
    if isinstance(value, dict):
        return "object", frozenset((name, _key(inner)) for name, inner in value.items())
    if isinstance(value, list):
        return "array", tuple(map(_key, value))
    return type(value) is bool, value
