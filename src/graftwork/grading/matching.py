"""Regular expressions that cannot hang the evaluation.

In: a pattern and a text. Out: whether it is found, or PatternTooSlow. Matching runs in one small child
process that stays for the next question and is killed when it takes too long: `re` can be stopped from
the main thread only, and a pattern like (a+)+$ would take longer than the universe has.
"""

import atexit
import json
import math
import re
import selectors
import subprocess
import sys
import threading
from collections.abc import Callable, Hashable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import unquote

SECONDS = 1.0
"""What one match may take, wall-clock: thousands of times what a sound pattern needs."""
_CHILD = Path(__file__).with_name("patterns_child.py")
_SIMPLE = re.compile(r"\^?(?:[\w \-:,;/#@=<>\"'!%&]|\\[.dws\-]|\[[\w\-]+\])*\$?")
"""No repetition, no alternatives: such a pattern is matched here, in time linear in the text."""


class PatternTooSlow(Exception):
    """The pattern ran out of its time on this text."""


def require_pattern(pattern: str) -> None:
    """ValueError with the reason where the pattern is none."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error


def matches(pattern: str, text: str, *, whole: bool = False, seconds: float = SECONDS) -> bool:
    """Whether the pattern is found in the text; with `whole`, whether it is all of it."""
    if _SIMPLE.fullmatch(pattern):
        found = re.fullmatch(pattern, text) if whole else re.search(pattern, text)
        return found is not None
    return _child.ask(pattern, text, whole=whole, seconds=seconds)


class _Child:
    """The process that matches. One question at a time; started anew after it was killed."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def ask(self, pattern: str, text: str, *, whole: bool, seconds: float) -> bool:
        question = json.dumps([pattern, text, whole]).encode() + b"\n"
        with self._lock:
            for last_try in (False, True):
                process = self._started()
                try:
                    return self._exchange(process, question, seconds)
                except (BrokenPipeError, EOFError):
                    # Somebody else ended the child between two questions; once is no reason to give up.
                    self.close()
                    if last_try:
                        raise
        raise AssertionError("unreachable")

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    try:
                        pipe.close()
                    except OSError:
                        continue

    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self.close()
            self._process = subprocess.Popen(
                # Isolated and without site-packages: it starts in 15 ms and can load nothing of ours.
                [sys.executable, "-I", "-S", str(_CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            assert self._process.stdout is not None
            if not self._process.stdout.readline():
                raise EOFError("the process that matches patterns did not start")
        return self._process

    def _exchange(self, process: subprocess.Popen[bytes], question: bytes, seconds: float) -> bool:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(question)
        process.stdin.flush()
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout=seconds):
                self.close()
                raise PatternTooSlow(f"the pattern took over {seconds:g} s on a text of this kind")
        reply = process.stdout.readline()
        if not reply:
            raise EOFError("the process that matches patterns ended")
        return reply == b"1\n"


_child = _Child()
atexit.register(_child.close)


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
