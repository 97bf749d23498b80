"""Task success by a rule: exact, contains, regex, numeric, json_schema.

In: a case, the text of an answer (or the field of it that the check names), the parameters. Out: 1.0 or
0.0. Where a rule names no value, the reference is the value; without either the rule does not apply.
"""

import math
import re
from typing import Any, Literal, Self

from pydantic import ConfigDict, Field, field_validator, model_validator

from graftwork.grading.context import CannotGrade, Grade, GradeContext
from graftwork.grading.json_schema import require_schema
from graftwork.grading.patterns import SECONDS, PatternTooSlow, matches, require_pattern
from graftwork.grading.similarity import expected_text
from graftwork.grading.structured import grade_by_schema
from graftwork.records.base import Record
from graftwork.records.report import Case

_NUMBER = re.compile(
    r"(?<![\w.])[-+\u2212]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d{1,3})?(?!\w|\.\d)"
)


class Exact(Record):
    """The text is the value. Spaces around it do not count."""

    value: str | None = None
    """What must be said; the reference where it is missing."""
    ignore_case: bool = False
    ignore_space: bool = False
    """Runs of spaces and line breaks count as one space."""


class Contains(Record):
    """The text holds the value, or all (or any) of several."""

    value: str | tuple[str, ...]
    need: Literal["all", "any", "none"] = "all"
    """`none`: it must hold not one of them."""
    ignore_case: bool = True

    @field_validator("value")
    @classmethod
    def _something(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if not value or (isinstance(value, tuple) and not all(value)):
            raise ValueError("every text holds the empty text: give something to look for")
        return value


class Regex(Record):
    """The pattern is found in the text. Python's syntax; `(?i)` and the like at its start."""

    pattern: str
    whole: bool = False
    """The pattern must be all of the text, not only found in it."""
    seconds: float = Field(default=SECONDS, gt=0, le=60)
    """What one match may take; a pattern that takes longer is reported, and the case is not graded."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        require_pattern(pattern)
        return pattern


class Numeric(Record):
    """A number of the text is the value, within a tolerance."""

    value: float | None = None
    """What it must be; the last number of the reference where it is missing."""
    tolerance: float = Field(default=0.0, ge=0)
    """How far off it may be."""
    relative: float = Field(default=0.0, ge=0)
    """How far off it may be, as a share of the value; the wider of both counts."""
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
    asked: Exact = context.parameters
    expected = asked.value if asked.value is not None else expected_text(case, context.fields)
    if expected is None:
        return None
    return float(plain_text(text, asked) == plain_text(expected, asked))


def grade_contains(case: Case, text: str, context: GradeContext) -> Grade:
    asked: Contains = context.parameters
    values = (asked.value,) if isinstance(asked.value, str) else asked.value
    searched = text.casefold() if asked.ignore_case else text
    found = [(value.casefold() if asked.ignore_case else value) in searched for value in values]
    if asked.need == "none":
        return float(not any(found))
    return float(all(found) if asked.need == "all" else any(found))


def grade_regex(case: Case, text: str, context: GradeContext) -> Grade:
    asked: Regex = context.parameters
    try:
        return float(matches(asked.pattern, text, whole=asked.whole, seconds=asked.seconds))
    except PatternTooSlow as error:
        raise CannotGrade(f"{asked.pattern}: {error}") from error


def grade_numeric(case: Case, text: str, context: GradeContext) -> Grade:
    asked: Numeric = context.parameters
    expected = asked.value
    if expected is None:
        reference = expected_text(case, context.fields)
        known = numbers_in(reference) if reference is not None else []
        if not known:
            return None
        expected = known[-1]
    given = numbers_in(text)
    if not given or (asked.which == "only" and len(given) != 1):
        return 0.0
    meant = {"first": given[:1], "last": given[-1:], "only": given, "any": given}[asked.which]
    return float(any(within_reach(number, expected, asked) for number in meant))


def within_reach(number: float, expected: float, asked: Numeric) -> bool:
    """Whether a number is the expected one, as far as the tolerance goes."""
    # A hair more than asked, because 0.1 + 0.2 is not 0.3.
    reach = max(asked.tolerance, asked.relative * abs(expected)) + 1e-12 * max(1.0, abs(expected))
    return abs(number - expected) <= reach


def grade_json_schema(case: Case, text: str, context: GradeContext) -> Grade:
    asked: BySchema = context.parameters
    return grade_by_schema(text, asked.document)


def numbers_in(text: str) -> list[float]:
    """The numbers of a text in order: 1,234.5 and 1e-3 are one each; those within words are none.

    A citation like [1] is no number of the answer, nor is the "1." of a list.
    """
    text = re.sub(r"\[\d{1,6}\]", " ", text)
    text = re.sub(r"(?m)^\s*\d{1,3}[.)]\s", " ", text)
    numbers = []
    for found in _NUMBER.finditer(text):
        number = float(found[0].replace(",", "").replace("\u2212", "-"))
        if math.isfinite(number):
            numbers.append(number)
    return numbers


def plain_text(text: str, asked: Exact) -> str:
    """The text without what the rule says does not count."""
    text = text.casefold() if asked.ignore_case else text
    return " ".join(text.split()) if asked.ignore_space else text.strip()
