"""Rules with parameters: exact, contains, regex, numeric, json_schema, fields of a JSON answer, format.

Input: a case, the text of an answer (or the field of it that the check names), the parameters. Output: 1.0 or
0.0. Where a rule names no value, the reference is the value; without either it does not apply. A field that
the reference lacks is not graded; one that only the answer lacks is wrong.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator

from graftwork.grading.answers import MISSING, look_up, parse_json, parse_object, same_value, words_of
from graftwork.grading.interface import CannotGrade, Grade, GradeContext
from graftwork.grading.matching import SECONDS, PatternTooSlow, matches, require_pattern, require_schema
from graftwork.grading.metrics import expected_text, grade_by_schema
from graftwork.records.base import Record
from graftwork.records.report import Case

_NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?(?!\w|\.\d)"
)


class Exact(Record):
    """The text is the value. Spaces around it do not count."""

    value: str | None = None
    """What the answer must contain; the reference if unset."""
    ignore_case: bool = False
    ignore_space: bool = False
    """Runs of spaces and line breaks count as one space."""


class Contains(Record):
    """The text holds the value, or all (or any) of several."""

    value: str | tuple[str, ...]
    need: Literal["all", "any", "none"] = "all"
    """`none`: it must contain none of them."""
    ignore_case: bool = True

    @field_validator("value")
    @classmethod
    def _something(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value or (isinstance(value, tuple) and not all(value)):
            raise ValueError("every text contains the empty text: specify a text to look for")
        return value


class Regex(Record):
    """The pattern is found in the text. Python's syntax; flags such as `(?i)` at its start."""

    pattern: str
    whole: bool = False
    """The pattern must be all of the text, not only found in it."""
    seconds: float = Field(default=SECONDS, gt=0, le=60)
    """Time limit of one match; a pattern that takes longer is reported, and the case is not graded."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        require_pattern(pattern)
        return pattern


class Numeric(Record):
    """A number of the text is the value, within a tolerance."""

    value: float | None = None
    """Expected value; the last number of the reference if unset."""
    tolerance: float = Field(default=0.0, ge=0)
    """Allowed absolute difference."""
    relative: float = Field(default=0.0, ge=0)
    """Allowed difference as a share of the value; the larger of the two applies."""
    which: Literal["last", "first", "only", "any"] = "last"
    """Which number of the text is meant."""

    @model_validator(mode="after")
    def _finite(self) -> Self:
        if self.value is not None and not math.isfinite(self.value):
            raise ValueError("value must be a finite number")
        return self


class BySchema(Record):
    """The text is JSON that fits a schema."""

    model_config = ConfigDict(populate_by_name=True)
    document: dict[str, Any] = Field(alias="schema")

    @field_validator("document")
    @classmethod
    def _understood(cls, schema: dict[str, Any]) -> dict[str, Any]:
        require_schema(schema)
        return schema


def grade_exact(case: Case, text: str, context: GradeContext) -> Grade:
    rule: Exact = context.parameters
    expected = rule.value if rule.value is not None else expected_text(case, context.fields)
    if expected is None:
        return None
    return float(plain_text(text, rule) == plain_text(expected, rule))


def grade_contains(case: Case, text: str, context: GradeContext) -> Grade:
    rule: Contains = context.parameters
    values = (rule.value,) if isinstance(rule.value, str) else rule.value
    searched = text.casefold() if rule.ignore_case else text
    present = [(value.casefold() if rule.ignore_case else value) in searched for value in values]
    if rule.need == "none":
        return float(not any(present))
    return float(all(present) if rule.need == "all" else any(present))


def grade_regex(case: Case, text: str, context: GradeContext) -> Grade:
    rule: Regex = context.parameters
    try:
        return float(matches(rule.pattern, text, whole=rule.whole, seconds=rule.seconds))
    except PatternTooSlow as error:
        raise CannotGrade(f"{rule.pattern}: {error}") from error


def grade_numeric(case: Case, text: str, context: GradeContext) -> Grade:
    rule: Numeric = context.parameters
    expected = rule.value
    if expected is None:
        reference = expected_text(case, context.fields)
        reference_numbers = numbers_in(reference) if reference is not None else []
        if not reference_numbers:
            return None
        expected = reference_numbers[-1]
    answered = numbers_in(text)
    if not answered or (rule.which == "only" and len(answered) != 1):
        return 0.0
    meant = {"first": answered[:1], "last": answered[-1:], "only": answered, "any": answered}[rule.which]
    return float(any(within_reach(number, expected, rule) for number in meant))


def within_reach(number: float, expected: float, rule: Numeric) -> bool:
    """Whether a number is the expected one, as far as the tolerance goes."""
    # A hair more than asked, because 0.1 + 0.2 is not 0.3.
    reach = max(rule.tolerance, rule.relative * abs(expected)) + 1e-12 * max(1.0, abs(expected))
    return abs(number - expected) <= reach


def grade_json_schema(case: Case, text: str, context: GradeContext) -> Grade:
    rule: BySchema = context.parameters
    return grade_by_schema(text, rule.document)


def numbers_in(text: str) -> list[float]:
    """Return the numbers of a text in order: 1,234.5 and 1e-3 are one each; those within words are none. A
    citation such as [1] is not a number of the answer, nor is the "1." of a list.
    """
    text = re.sub(r"\[\d{1,6}\]", " ", text)
    text = re.sub(r"(?m)^\s*\d{1,3}[.)]\s", " ", text)
    numbers = []
    for match in _NUMBER.finditer(text):
        number = float(match[0].replace(",", "").replace("\u2212", "-"))
        if math.isfinite(number):
            numbers.append(number)
    return numbers


def plain_text(text: str, rule: Exact) -> str:
    """Return the text without what the rule ignores."""
    text = text.casefold() if rule.ignore_case else text
    return " ".join(text.split()) if rule.ignore_space else text.strip()


_BETWEEN_ITEMS = re.compile(r"[,;\n]")


class Normalized(Record):
    """The same words: case, punctuation and runs of spaces do not count."""

    value: str | None = None
    """What the answer must contain; the reference if unset."""


class SetOf(Record):
    """The same items in any order: a JSON list, or text divided by commas, semicolons or lines."""

    value: tuple[str | float | bool, ...] | None = None
    """The items; those of the reference if unset."""
    ignore_case: bool = True


class AllFields(Record):
    """Every named field agrees with the reference; every key of both if none is named."""

    fields: tuple[str, ...] | dict[str, str | dict[str, Any]] | None = None
    """Names, compared exactly; or a name and its rule: `{total: {metric: numeric, tolerance: 1}}`."""

    @field_validator("fields")
    @classmethod
    def _named_or_left_out(cls, fields: Any) -> Any:
        if fields is not None and not fields:
            raise ValueError("specify at least one field, or leave `fields` out to compare them all")
        return fields

    @model_validator(mode="after")
    def _rules_are_known(self) -> Self:
        for name, rule in self.rules():
            if rule is None:
                raise ValueError(f"fields.{name}: known rules are {', '.join(COMPARED)}")
        return self

    def rules(self) -> list[tuple[str, Record | None]]:
        """The rule of each named field; None for one that cannot be parsed."""
        if self.fields is None:
            return []
        if not isinstance(self.fields, dict):
            return [(name, Exact()) for name in self.fields]
        rules: list[tuple[str, Record | None]] = []
        for name, comparison in self.fields.items():
            parameters = {"metric": comparison} if isinstance(comparison, str) else dict(comparison)
            kind = COMPARED.get(str(parameters.pop("metric", "exact")))
            if "value" in parameters and kind is not None:
                raise ValueError(f"fields.{name}: all_fields takes no value: the reference is the value")
            try:
                rules.append((name, None if kind is None else kind.model_validate(parameters)))
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                path = ".".join(str(part) for part in first["loc"])
                raise ValueError(f"fields.{name}: {path}: {first['msg']}") from error
        return rules


def grade_field(path: str, case: Case, text: str, rule: Record) -> Grade:
    """One field of the answer against the same field of the reference."""
    reference = parse_object(case.reference)
    expected = MISSING if reference is None else look_up(reference, path)
    if expected is MISSING:
        return None
    answer = parse_object(text)
    return float(answer is not None and agree(expected, look_up(answer, path), rule))


def grade_all_fields(case: Case, text: str, context: GradeContext) -> Grade:
    """Right if all of them are."""
    parameters: AllFields = context.parameters
    reference = parse_object(case.reference)
    if reference is None:
        return None
    answer = parse_object(text)
    if parameters.fields is None:
        return float(answer is not None and same_value(reference, answer))
    rules = [(name, rule) for name, rule in parameters.rules() if rule is not None]
    if all(look_up(reference, name) is MISSING for name, _ in rules):
        return None
    if answer is None:
        return 0.0
    for name, rule in rules:
        expected = look_up(reference, name)
        if expected is MISSING:
            # Right where the answer leaves it out too, in the same way.
            right = same_value(_end_of(reference, name), _end_of(answer, name))
        else:
            right = agree(expected, look_up(answer, name), rule)
        if not right:
            return 0.0
    return 1.0


def grade_normalized(case: Case, text: str, context: GradeContext) -> Grade:
    rule: Normalized = context.parameters
    expected = rule.value if rule.value is not None else case.reference
    return float(words_of(text) == words_of(expected)) if expected.strip() else None


def grade_set(case: Case, text: str, context: GradeContext) -> Grade:
    rule: SetOf = context.parameters
    expected = rule.value if rule.value is not None else _parsed(case.reference)
    return float(agree(expected, _parsed(text), rule)) if items_of(expected, rule) else None


def agree(expected: Any, answered: Any, rule: Record) -> bool:
    """Return whether a value is the expected one by this rule."""
    if answered is MISSING:
        return False
    texts = isinstance(expected, str) and isinstance(answered, str)
    if isinstance(rule, SetOf):
        return items_of(expected, rule) == items_of(answered, rule)
    if isinstance(rule, Numeric) and (expected_numbers := _numbers(expected)):
        numbers = _numbers(answered)
        return len(numbers) == 1 and within_reach(numbers[0], expected_numbers[-1], rule)
    if isinstance(rule, Normalized) and texts:
        return words_of(expected) == words_of(answered)
    if isinstance(rule, Exact) and texts:
        return plain_text(answered, rule) == plain_text(expected, rule)
    return same_value(expected, answered)


def items_of(value: Any, rule: SetOf) -> frozenset[str]:
    """The items of a list or of a divided text, each in one form."""
    listed: Iterable[Any] = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, str):
        listed = _BETWEEN_ITEMS.split(value)
    texts = (
        item if isinstance(item, str) else json.dumps(item, sort_keys=True, ensure_ascii=False)
        for item in listed
        if item is not None
    )
    return frozenset(text.casefold() if rule.ignore_case else text for text in map(str.strip, texts) if text)


def _end_of(document: dict[str, Any], path: str) -> Any:
    """The value at which a path ends, such as null in place of an object; MISSING if a key is missing."""
    value: Any = document
    for key in path.split("."):
        if not isinstance(value, dict):
            break
        value = value.get(key, MISSING)
    return value


def _numbers(value: Any) -> list[float]:
    if isinstance(value, str):
        return numbers_in(value)
    usable = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return [float(value)] if usable else []


def _parsed(text: str) -> Any:
    parsed = parse_json(text)
    return parsed[0] if parsed and isinstance(parsed[0], list) else text


COMPARED: dict[str, type[Record]] = {
    "exact": Exact,
    "numeric": Numeric,
    "set": SetOf,
    "normalised": Normalized,
}
"""The rules that a field can be compared by, as graft.yaml names them."""

BLANK = re.compile(r"\{[A-Za-z_][\w ]*\}")
_HEADING_MARKS = re.compile(r"^[\s#>*_\d.)-]+|[\s*_:#]+$")


class FormatRule(Record):
    """Required form of a text. All given conditions must hold."""

    template: str | None = None
    """Fixed text with blanks: `Answer: {answer}\\nSources: {sources}`. A blank contains at least a letter."""
    sections: tuple[str, ...] = ()
    """Headings that must each open a line, in this order; marks like `##` and `:` do not count."""
    pattern: str | None = None
    """A regular expression that must be all of the text."""
    starts_with: str | None = None
    ends_with: str | None = None
    without: tuple[str, ...] = ()
    """Texts that must not occur, in any case."""
    min_words: int | None = Field(default=None, ge=0)
    max_words: int | None = Field(default=None, ge=0)
    min_characters: int | None = Field(default=None, ge=0)
    max_characters: int | None = Field(default=None, ge=0)
    min_lines: int | None = Field(default=None, ge=0)
    max_lines: int | None = Field(default=None, ge=0)

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            require_pattern(pattern)
        return pattern

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError(f"format needs at least one of: {', '.join(type(self).model_fields)}")
        for unit in ("words", "characters", "lines"):
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if least is not None and most is not None and least > most:
                raise ValueError(f"min_{unit} {least} is over max_{unit} {most}: no text can satisfy both")
        return self


def grade_format(case: Case, text: str, context: GradeContext) -> Grade:
    return float(find_fault(text, context.parameters) is None)


def find_fault(text: str, layout: FormatRule) -> str | None:
    """Describe the first condition that fails."""
    return next(_faults(text.strip(), layout), None)


def _faults(text: str, layout: FormatRule) -> Iterator[str]:
    if layout.template is not None and not follows_template(text, layout.template.strip()):
        yield "it does not follow the template"
    if (missing := _missing_section(text, layout.sections)) is not None:
        yield f"the section {missing} is missing or out of order"
    if layout.starts_with is not None and not text.startswith(layout.starts_with):
        yield f"it does not start with {layout.starts_with}"
    if layout.ends_with is not None and not text.endswith(layout.ends_with):
        yield f"it does not end with {layout.ends_with}"
    for unwanted in layout.without:
        if unwanted.casefold() in text.casefold():
            yield f"it holds {unwanted}"
    sizes = {"words": len(text.split()), "characters": len(text), "lines": len(text.splitlines())}
    for unit, size in sizes.items():
        least, most = getattr(layout, f"min_{unit}"), getattr(layout, f"max_{unit}")
        if least is not None and size < least:
            yield f"{size} {unit} are under {least}"
        if most is not None and size > most:
            yield f"{size} {unit} are over {most}"
    # Last, because only it takes time.
    try:
        if layout.pattern is not None and not matches(layout.pattern, text, whole=True):
            yield "it does not match the pattern"
    except PatternTooSlow as error:
        raise CannotGrade(f"{layout.pattern}: {error}") from error


def _missing_section(text: str, sections: tuple[str, ...]) -> str | None:
    lines = iter([_heading(line) for line in text.splitlines()])
    for section in sections:
        heading = _heading(section)
        marked = (f"{heading}:", f"{heading}**", f"{heading} ")
        if not any(line == heading or line.startswith(marked) for line in lines):
            return section
    return None


def follows_template(text: str, template: str) -> bool:
    """The fixed pieces in order, the first at the start, the last at the end, something in each blank.

    Each piece is taken where it first occurs after a filled blank: no backtracking, so no text is slow.
    """
    pieces = BLANK.split(template)
    if len(pieces) == 1:
        return text == template
    first, last = pieces[0], pieces[-1]
    if not text.startswith(first) or not text.endswith(last):
        return False
    position, end = len(first), len(text) - len(last)
    for piece in pieces[1:-1]:
        next_position = text.find(piece, position + 1, end)
        if next_position < 0 or not text[position:next_position].strip():
            return False
        position = next_position + len(piece)
    return position < end and bool(text[position:end].strip())


def _heading(line: str) -> str:
    return _HEADING_MARKS.sub("", line).casefold()
