"""Format compliance: a template, sections, a pattern, beginnings and ends, limits of length.

In: a case, a text, the parameters. Out: 1.0 where everything that is asked for holds. Does not know
what the text says.
"""

import re
from collections.abc import Iterator
from typing import Self

from pydantic import Field, field_validator, model_validator

from graftwork.grading.context import CannotGrade, Grade, GradeContext
from graftwork.grading.patterns import PatternTooSlow, matches, require_pattern
from graftwork.records.base import Record
from graftwork.records.report import Case

_BLANK = re.compile(r"\{[A-Za-z_][\w ]*\}")
_HEADING_MARKS = re.compile(r"^[\s#>*_\d.)-]+|[\s*_:#]+$")


class Layout(Record):
    """What a text must look like. All that is given must hold."""

    template: str | None = None
    """Fixed text with blanks: `Answer: {answer}\\nSources: {sources}`. A blank holds at least a letter."""
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
            raise ValueError(f"format needs something to hold: {', '.join(type(self).model_fields)}")
        for unit in ("words", "characters", "lines"):
            least, most = getattr(self, f"min_{unit}"), getattr(self, f"max_{unit}")
            if least is not None and most is not None and least > most:
                raise ValueError(f"min_{unit} {least} is over max_{unit} {most}: no text can be so")
        return self


def grade_format(case: Case, text: str, context: GradeContext) -> Grade:
    return float(find_fault(text, context.parameters) is None)


def find_fault(text: str, layout: Layout) -> str | None:
    """The first thing that does not hold, in words."""
    return next(_faults(text.strip(), layout), None)


def _faults(text: str, layout: Layout) -> Iterator[str]:
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
    # Last, because it alone takes time.
    try:
        if layout.pattern is not None and not matches(layout.pattern, text, whole=True):
            yield "it does not match the pattern"
    except PatternTooSlow as error:
        raise CannotGrade(f"{layout.pattern}: {error}") from error


def follows_template(text: str, template: str) -> bool:
    """The fixed pieces in order, the first at the start, the last at the end, something in each blank.

    Each piece is taken where it first occurs behind a filled blank: no backtracking, so no text is slow.
    """
    pieces = _BLANK.split(template)
    if len(pieces) == 1:
        return text == template
    first, last = pieces[0], pieces[-1]
    if not text.startswith(first) or not text.endswith(last):
        return False
    at, end = len(first), len(text) - len(last)
    for piece in pieces[1:-1]:
        found = text.find(piece, at + 1, end)
        if found < 0 or not text[at:found].strip():
            return False
        at = found + len(piece)
    return at < end and bool(text[at:end].strip())


def _missing_section(text: str, sections: tuple[str, ...]) -> str | None:
    lines = [_heading(line) for line in text.splitlines()]
    at = 0
    for section in sections:
        wanted = _heading(section)
        found = next((n for n in range(at, len(lines)) if _opens(lines[n], wanted)), None)
        if found is None:
            return section
        at = found + 1
    return None


def _heading(line: str) -> str:
    return _HEADING_MARKS.sub("", line).casefold()


def _opens(line: str, heading: str) -> bool:
    return line == heading or line.startswith((f"{heading}:", f"{heading}**", f"{heading} "))
