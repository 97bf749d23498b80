"""Regular expressions and JSON Schema that cannot hang or crash an evaluation.

Input: a pattern and a text, or a schema and a JSON value. Output: whether they match; PatternTooSlow where a
pattern runs out of time. Patterns have Python's syntax and are matched by `regex`, which has a time limit;
schemas follow draft 2020-12 and are validated by `jsonschema-rs`. An unknown schema keyword is refused, never
skipped: a check that checks less than it says is worse than none. See docs/decisions/0022.
"""

import json
import re
import threading
from difflib import get_close_matches
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from graftwork.text.wording import truncate

if TYPE_CHECKING:
    import jsonschema_rs
    import regex

SECONDS = 1.0
"""CPU time limit of one match: thousands of times what a sound pattern needs."""
_LITERAL_BRACE = re.compile(r"(\\.)|\{(?!(?:\d+(?:,\d*)?|,\d*)\})", re.DOTALL)


class PatternTooSlow(Exception):
    """The pattern timed out on this text."""


def require_pattern(pattern: str) -> None:
    """Raise ValueError with the reason if the pattern is not a Python regular expression."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error


def matches(
    pattern: str, text: str, *, whole: bool = False, seconds: float = SECONDS, partial: bool = False
) -> bool:
    """Return whether the pattern is found in the text; with `whole`, whether it matches all of it. `partial`:
    or in one of the text's continuations; see `can_match`.
    """
    compiled = _compile(pattern)
    match = compiled.fullmatch if whole else compiled.search
    try:
        # `concurrent` releases the interpreter lock: other threads continue while a slow pattern runs.
        return match(text, timeout=seconds, concurrent=True, partial=partial) is not None
    except TimeoutError as error:
        raise PatternTooSlow(f"the pattern took over {seconds:g} s on a text of this kind") from error


_AT_THE_END = re.compile(r"\\[bB]|\(\?!.*(?:\$|\\[zZ]|\(\?)", re.DOTALL)
"""Assertions about the end of a text, whose result may change when it continues."""


def can_match(pattern: str) -> bool:
    """Return whether the start of a text can be matched: the pattern does not depend on where the text
    ends.
    """
    return _AT_THE_END.search(pattern) is None


@lru_cache(maxsize=256)
def _compile(pattern: str) -> "regex.Pattern[str]":
    import regex

    # `regex` reads {e}, {i<=2} and the like as fuzzy matching; to Python such a brace is a literal.
    return regex.compile(_LITERAL_BRACE.sub(lambda found: found[1] or r"\{", pattern))


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
    """Raise ValueError with the location and the nearest keyword if something is not understood."""
    _require(schema, "#", schema)
    _require_end(schema, schema, done=set(), above=set())
    try:
        _validator(json.dumps(schema))
    except (ValueError, TypeError) as error:
        raise ValueError(f"the JSON Schema cannot be used: {error}") from error


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


def _require_value(key: str, value: Any, where: str, root: Any) -> None:
    if key == "items" and isinstance(value, list):
        key = "prefixItems"
    if key in _SCHEMAS:
        _require(value, where, root)
    elif key in _LISTS_OF_SCHEMAS:
        _demand(isinstance(value, list) and bool(value), where, "a list of schemas", value)
        for index, inner in enumerate(value):
            _require(inner, f"{where}/{index}", root)
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
    """Check the keywords that are neither schemas, counts nor numbers."""
    if key == "type":
        kinds = value if isinstance(value, list) else [value]
        _demand(bool(kinds) and all(kind in TYPES for kind in kinds), where, f"of {', '.join(TYPES)}", value)
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
        is_draft = isinstance(value, str) and re.match(r"https?://json-schema\.org/", value) is not None
        _demand(is_draft, where, "a draft of json-schema.org", value)
    elif key == "$ref":
        _demand(isinstance(value, str), where, "a reference like #/$defs/name", value)
        resolve(value, root)


def resolve(reference: str, root: Any) -> Schema:
    """Return the part of this schema that a local reference names. Nothing is fetched."""
    if not reference.startswith("#"):
        raise ValueError(f"$ref {reference}: only references within the schema (#/…) are followed")
    target: Any = root
    for part in reference[1:].split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(target, list) and name.isdigit() and int(name) < len(target):
            target = target[int(name)]
        elif isinstance(target, dict) and name in target:
            target = target[name]
        else:
            raise ValueError(f"$ref {reference}: the schema has no such part")
    _demand(isinstance(target, dict | bool), f"$ref {reference}", "a schema", target)
    schema: Schema = target
    return schema


def _require_end(schema: Any, root: Any, *, done: set[int], above: set[int]) -> None:
    """Refuse a `$ref` that leads back to itself without going deeper into the value: it checks nothing."""
    if not isinstance(schema, dict) or id(schema) in done:
        return
    if id(schema) in above:
        raise ValueError(f"$ref {schema.get('$ref', '')}: $ref leads back to itself")
    same_value = [schema[key] for key in _SAME_VALUE if key in schema]
    same_value += [part for key in _SAME_VALUE_LISTS for part in schema.get(key, ())]
    same_value += schema.get("dependentSchemas", {}).values()
    if "$ref" in schema:
        same_value.append(resolve(schema["$ref"], root))
    for part in same_value:
        _require_end(part, root, done=done, above={*above, id(schema)})
    done.add(id(schema))
    inside = [schema[key] for key in _SCHEMAS if key in schema]
    inside += [part for key in _LISTS_OF_SCHEMAS for part in schema.get(key, ())]
    inside += [part for key in _MAPS_OF_SCHEMAS for part in schema.get(key, {}).values()]
    for parts in inside:
        for part in parts if isinstance(parts, list) else [parts]:
            _require_end(part, root, done=done, above=set())


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_integer(value: Any) -> bool:
    """1.0 is an integer in JSON."""
    return is_number(value) and (isinstance(value, int) or value.is_integer())


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _demand(fine: bool, where: str, allowed: str, value: Any) -> None:
    if not fine:
        raise ValueError(f"{where}: must be {allowed}, found {truncate(repr(value), 40)}")


def fits(value: Any, schema: Schema) -> bool:
    """Return whether a JSON value fits a schema that `require_schema` accepted."""
    _slow.reason = ""
    fitting: bool = _validator(json.dumps(schema)).is_valid(value)
    if _slow.reason:
        raise PatternTooSlow(_slow.reason)
    return fitting


def find_misfit(value: Any, schema: Schema) -> str | None:
    """Return where a JSON value does not fit the schema, and the failed keyword; None if it fits."""
    if fits(value, schema):
        return None
    error = next(_validator(json.dumps(schema)).iter_errors(value))
    where = ".".join(map(str, error.instance_path))
    keyword = str(error.schema_path[-1]) if error.schema_path else "false"
    if keyword == "required":
        keyword = f"{error.kind.as_dict()['property']} is missing"
    return f"{where}: {keyword}" if where else keyword


def keep_known(schema: Any) -> Any:
    """Return a schema without unknown keywords, for tools as logs define them."""
    if not isinstance(schema, dict):
        return schema
    kept_schema: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            kept_schema[key] = {name: keep_known(part) for name, part in value.items()}
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            kept_schema[key] = [keep_known(part) for part in value]
        elif key in KEYWORDS:
            kept_schema[key] = keep_known(value) if key in _SCHEMAS else value
    return kept_schema


class _Slow(threading.local):
    """Set if the last validation in this thread timed out; the validator swallows what a keyword raises."""

    reason = ""


_slow = _Slow()


class _TimedPattern:
    """The keyword `pattern`, with Python's syntax and a time limit."""

    def __init__(self, _schema: Any, pattern: str, _path: Any) -> None:
        self._pattern = pattern

    def validate(self, value: Any) -> None:
        try:
            is_match = not isinstance(value, str) or matches(self._pattern, value)
        except PatternTooSlow as error:
            _slow.reason = str(error)
            raise ValueError("too slow") from error
        if not is_match:
            raise ValueError(f"does not match {self._pattern}")


@lru_cache(maxsize=64)
def _validator(schema: str) -> "jsonschema_rs.Draft202012Validator":
    import jsonschema_rs

    return jsonschema_rs.Draft202012Validator(
        _as_2020_12(json.loads(schema)), keywords={"pattern": _TimedPattern}
    )


def _as_2020_12(schema: Any) -> Any:
    """The schema without its name and address, and with the array form of `items` of draft 7 rewritten."""
    if isinstance(schema, list):
        return [_as_2020_12(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    converted: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS_OF_SCHEMAS:
            converted[key] = {name: _as_2020_12(part) for name, part in value.items()}
        elif key == "items" and isinstance(value, list):
            converted["prefixItems"] = _as_2020_12(value)
            converted["items"] = _as_2020_12(schema.get("additionalItems", True))
        elif key in _SCHEMAS | _LISTS_OF_SCHEMAS:
            if key != "additionalItems":
                converted[key] = _as_2020_12(value)
        elif key not in _NOTES and key != "$schema":
            converted[key] = value
    return converted
