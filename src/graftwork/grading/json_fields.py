"""Fields of a JSON answer held against the same fields of the reference.

In: two JSON values and a rule: exact, numeric, set or normalised. Out: whether they agree. One field by
itself (`{metric: exact, field: queue}`) or several together (`all_fields`). A field that the reference lacks
is not graded; one that only the answer lacks is wrong. Does not know the names of checks.
"""

import json
import math
import re
from collections.abc import Callable, Iterable
from typing import Any, Self

from pydantic import ValidationError, field_validator, model_validator

from graftwork.grading.context import Grade, GradeContext
from graftwork.grading.fields import MISSING, look_up, parse_json, parse_object
from graftwork.grading.rules import Exact, Numeric, numbers_in, plain_text, within_reach
from graftwork.grading.words import words_of
from graftwork.records.base import Record
from graftwork.records.report import Case

_BETWEEN_ITEMS = re.compile(r"[,;\n]")


class Normalised(Record):
    """The same words: case, punctuation and runs of spaces do not count."""

    value: str | None = None
    """What must be said; the reference where it is missing."""


class SetOf(Record):
    """The same items in any order: a JSON list, or text divided by commas, semicolons or lines."""

    value: tuple[str | float | bool, ...] | None = None
    """The items; those of the reference where it is missing."""
    ignore_case: bool = True


class AllFields(Record):
    """Every named field agrees with the reference; every key of both where none is named."""

    fields: tuple[str, ...] | dict[str, str | dict[str, Any]] | None = None
    """Names, compared exactly; or a name and its rule: `{total: {metric: numeric, tolerance: 1}}`."""

    @field_validator("fields")
    @classmethod
    def _named_or_left_out(cls, fields: Any) -> Any:
        if fields is not None and not fields:
            raise ValueError("name at least one field, or leave `fields` out to compare them all")
        return fields

    @model_validator(mode="after")
    def _rules_are_known(self) -> Self:
        for name, rule in self.rules():
            if rule is None:
                raise ValueError(f"fields.{name}: known rules are {', '.join(COMPARED)}")
        return self

    def rules(self) -> list[tuple[str, Record | None]]:
        """The rule of each named field; None stands for one that cannot be understood."""
        if self.fields is None:
            return []
        if not isinstance(self.fields, dict):
            return [(name, Exact()) for name in self.fields]
        return [(name, _read_rule(name, given)) for name, given in self.fields.items()]


def grade_field(path: str, case: Case, text: str, rule: Record) -> Grade:
    """One field of the answer against the same field of the reference."""
    reference = parse_object(case.reference)
    expected = MISSING if reference is None else look_up(reference, path)
    if expected is MISSING:
        return None
    answer = parse_object(text)
    return float(answer is not None and agree(expected, look_up(answer, path), rule))


def grade_all_fields(case: Case, text: str, context: GradeContext) -> Grade:
    """Right where all of them are: the answer as whoever uses it needs it."""
    asked: AllFields = context.parameters
    reference = parse_object(case.reference)
    if reference is None:
        return None
    answer = parse_object(text)
    if asked.fields is None:
        return float(answer is not None and same_value(reference, answer))
    pairs = [(look_up(reference, name), name, rule) for name, rule in asked.rules() if rule is not None]
    if all(expected is MISSING for expected, _, _ in pairs):
        return None
    if answer is None:
        return 0.0
    return float(all(_both(expected, look_up(answer, name), rule) for expected, name, rule in pairs))


def grade_normalised(case: Case, text: str, context: GradeContext) -> Grade:
    asked: Normalised = context.parameters
    expected = asked.value if asked.value is not None else case.reference
    return float(words_of(text) == words_of(expected)) if expected.strip() else None


def grade_set(case: Case, text: str, context: GradeContext) -> Grade:
    asked: SetOf = context.parameters
    expected = asked.value if asked.value is not None else _parsed(case.reference)
    return float(agree(expected, _parsed(text), asked)) if items_of(expected, asked) else None


def agree(expected: Any, given: Any, rule: Record) -> bool:
    """Whether a value that was given is the expected one by this rule."""
    return given is not MISSING and _AGREE[type(rule)](expected, given, rule)


def same_value(expected: Any, given: Any) -> bool:
    """Equal as JSON: 1 and 1.0 are, 1 and true are not, nor are 2 and "2"."""
    if isinstance(expected, bool) or isinstance(given, bool):
        return expected is given
    if isinstance(expected, dict) and isinstance(given, dict):
        return expected.keys() == given.keys() and all(same_value(expected[k], given[k]) for k in expected)
    if isinstance(expected, list) and isinstance(given, list):
        return len(expected) == len(given) and all(map(same_value, expected, given))
    if isinstance(expected, str) and isinstance(given, str):
        return expected.strip() == given.strip()
    return bool(expected == given)


def items_of(value: Any, rule: SetOf) -> frozenset[str]:
    """The items of a list or of a divided text, each in one form."""
    listed: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, str):
        listed = _BETWEEN_ITEMS.split(value)
    shown = (_show(item).strip() for item in listed if item is not None)
    return frozenset(item.casefold() if rule.ignore_case else item for item in shown if item)


def _both(expected: Any, given: Any, rule: Record) -> bool:
    """A field that the reference leaves out is right where the answer leaves it out too."""
    return given is MISSING if expected is MISSING else agree(expected, given, rule)


def _agree_exactly(expected: Any, given: Any, rule: Any) -> bool:
    if isinstance(expected, str) and isinstance(given, str):
        return plain_text(given, rule) == plain_text(expected, rule)
    return same_value(expected, given)


def _agree_in_number(expected: Any, given: Any, rule: Any) -> bool:
    wanted, numbers = _numbers(expected), _numbers(given)
    if not wanted:
        return same_value(expected, given)
    return len(numbers) == 1 and within_reach(numbers[0], wanted[-1], rule)


def _agree_in_items(expected: Any, given: Any, rule: Any) -> bool:
    return items_of(expected, rule) == items_of(given, rule)


def _agree_in_words(expected: Any, given: Any, _rule: Any) -> bool:
    if isinstance(expected, str) and isinstance(given, str):
        return words_of(expected) == words_of(given)
    return same_value(expected, given)


def _numbers(value: Any) -> list[float]:
    if isinstance(value, str):
        return numbers_in(value)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return [float(value)] if usable else []


def _parsed(text: str) -> Any:
    parsed = parse_json(text)
    return parsed[0] if parsed and isinstance(parsed[0], list) else text


def _show(item: Any) -> str:
    return item if isinstance(item, str) else json.dumps(item, sort_keys=True, ensure_ascii=False)


def _read_rule(name: str, given: str | dict[str, Any]) -> Record | None:
    """None where there is no such rule; ValueError where it is written wrongly."""
    written = {"metric": given} if isinstance(given, str) else dict(given)
    kind = COMPARED.get(str(written.pop("metric", "exact")))
    if kind is None:
        return None
    if "value" in written:
        raise ValueError(f"fields.{name}: all_fields takes no value: the reference is the value")
    try:
        return kind.model_validate(written)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise ValueError(f"fields.{name}: {place}: {first['msg']}") from error


COMPARED: dict[str, type[Record]] = {
    "exact": Exact,
    "numeric": Numeric,
    "set": SetOf,
    "normalised": Normalised,
}
"""The rules that a field can be compared by, as graft.yaml names them."""
_AGREE: dict[type[Record], Callable[[Any, Any, Any], bool]] = {
    Exact: _agree_exactly,
    Numeric: _agree_in_number,
    SetOf: _agree_in_items,
    Normalised: _agree_in_words,
}
