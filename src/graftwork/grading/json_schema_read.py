"""A JSON Schema checked before it is used: every keyword known, every value of the right kind.

In: a schema. Out: nothing, or a ValueError that names the place and the nearest keyword. A keyword that
is not known here is refused, never skipped: a check that checks less than it says is worse than none.
"""

import re
from difflib import get_close_matches
from typing import Any
from urllib.parse import unquote

from graftwork.grading.patterns import require_pattern

TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_NOTES = {"title", "description", "default", "examples", "$id", "$comment", "deprecated"}
_SCHEMAS = {"not", "additionalProperties", "items", "additionalItems", "propertyNames", "contains", "if"}
_SCHEMAS |= {"then", "else"}
_LISTS_OF_SCHEMAS = {"anyOf", "oneOf", "allOf", "prefixItems"}
_MAPS_OF_SCHEMAS = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}
_COUNTS = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
_COUNTS |= {"minContains", "maxContains"}
_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_OTHERS = {"type", "required", "enum", "const", "pattern", "uniqueItems", "$ref", "$schema"}
_OTHERS |= {"dependentRequired"}
KEYWORDS = _NOTES | _SCHEMAS | _LISTS_OF_SCHEMAS | _MAPS_OF_SCHEMAS | _COUNTS | _NUMBERS | _OTHERS
_SAME_VALUE = ("not", "if", "then", "else")
_SAME_VALUE_LISTS = ("anyOf", "oneOf", "allOf")

Schema = dict[str, Any] | bool


def require_schema(schema: Any) -> None:
    """Refuse what is not understood: ValueError with the place and the nearest keyword."""
    _require(schema, "#", schema)


def _require(schema: Any, where: str, root: Any) -> None:
    if isinstance(schema, bool):
        return
    _demand(isinstance(schema, dict), where, "a schema, so a mapping or true or false", schema)
    for key, value in schema.items():
        if key not in KEYWORDS:
            near = get_close_matches(str(key), sorted(KEYWORDS), n=1)
            hint = f"did you mean {near[0]}?" if near else "it would not be checked: leave it out"
            raise ValueError(f"{where}: the JSON Schema keyword {key} is not known; {hint}")
        _require_value(str(key), value, f"{where}/{key}", root)
    if "$ref" in schema:
        _require_end(schema, where, root, ())


def _require_value(key: str, value: Any, where: str, root: Any) -> None:
    if key == "items" and isinstance(value, list):
        key = "prefixItems"
    if key in _SCHEMAS:
        _require(value, where, root)
    elif key in _LISTS_OF_SCHEMAS:
        _demand(isinstance(value, list) and bool(value), where, "a list of schemas", value)
        for place, inner in enumerate(value):
            _require(inner, f"{where}/{place}", root)
    elif key in _MAPS_OF_SCHEMAS:
        _demand(isinstance(value, dict), where, "a mapping of schemas", value)
        for name, inner in value.items():
            if key == "patternProperties":
                require_pattern(name)
            _require(inner, f"{where}/{name}", root)
    elif key in _COUNTS:
        _demand(is_integer(value) and value >= 0, where, "a whole number from 0", value)
    elif key in _NUMBERS:
        _demand(is_number(value) and (key != "multipleOf" or value > 0), where, "a number", value)
    else:
        _require_other(key, value, where, root)


def _require_other(key: str, value: Any, where: str, root: Any) -> None:
    if key == "type":
        named = value if isinstance(value, list) else [value]
        _demand(bool(named) and all(one in TYPES for one in named), where, f"of {', '.join(TYPES)}", value)
    elif key == "required":
        _demand(_is_texts(value), where, "a list of keys", value)
    elif key == "dependentRequired":
        fine = isinstance(value, dict) and all(map(_is_texts, value.values()))
        _demand(fine, where, "a mapping of lists of keys", value)
    elif key == "enum":
        _demand(isinstance(value, list), where, "a list of values", value)
    elif key == "uniqueItems":
        _demand(isinstance(value, bool), where, "true or false", value)
    elif key == "pattern":
        _demand(isinstance(value, str), where, "a regular expression", value)
        try:
            require_pattern(value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
    elif key == "$schema":
        known = isinstance(value, str) and re.match(r"https?://json-schema\.org/", value) is not None
        _demand(known, where, "a draft of json-schema.org", value)
    elif key == "$ref":
        _demand(isinstance(value, str), where, "a reference like #/$defs/name", value)
        resolve(value, root)


def resolve(reference: str, root: Any) -> Schema:
    """The part of this schema that a local reference names. Nothing is fetched from anywhere."""
    if not reference.startswith("#"):
        raise ValueError(f"$ref {reference}: only references within the schema (#/…) are followed")
    found: Any = root
    for part in reference[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and name.isdigit() and int(name) < len(found):
            found = found[int(name)]
        elif isinstance(found, dict) and name in found:
            found = found[name]
        else:
            raise ValueError(f"$ref {reference}: the schema has no such part")
    _demand(isinstance(found, dict | bool), f"$ref {reference}", "a schema", found)
    schema: Schema = found
    return schema


def _require_end(schema: Any, where: str, root: Any, above: tuple[int, ...]) -> None:
    """A `$ref` that leads back to itself without going deeper into the value would never end."""
    if not isinstance(schema, dict):
        return
    if id(schema) in above:
        raise ValueError(f"{where}: $ref leads back to itself")
    inner = [schema[key] for key in _SAME_VALUE if key in schema]
    inner += [one for key in _SAME_VALUE_LISTS for one in schema.get(key, ())]
    inner += schema.get("dependentSchemas", {}).values()
    if "$ref" in schema:
        inner.append(resolve(schema["$ref"], root))
    for one in inner:
        _require_end(one, where, root, (*above, id(schema)))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """1.0 is an integer in JSON."""
    return is_number(value) and (isinstance(value, int) or value.is_integer())


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _demand(fine: bool, where: str, wanted: str, found: Any) -> None:
    if not fine:
        raise ValueError(f"{where}: must be {wanted}, found {shown(found)}")
