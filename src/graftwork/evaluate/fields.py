"""A reply read as a structured answer: what it says, what it cites, whether it refuses.

In: the text of a reply and the names of its fields. Out: a StructuredAnswer, or None where the text
is no JSON object. Does not know what a right answer is.
"""

import json
import re
from typing import Any, NamedTuple, NoReturn

from graftwork.records.base import Record
from graftwork.records.report import Case

_BRACKETED = re.compile(r"\[(\d{1,6})\]")
_NUMBER = re.compile(r"\[?(\d{1,6})\]?")
_MISSING = object()


class AnswerFields(Record):
    """Which keys of the reply mean what. A dot leads inwards: `answer.text`."""

    answer: str = "answer"
    """The answer in words."""
    citations: str = "citations"
    """The numbers of the sources: a list, or a text that holds them as `[1][2]`."""
    refused: str = "refused"
    """True where the sources do not say."""
    required: tuple[str, ...] = ()
    """Keys that a reply must have to count as valid JSON."""


class StructuredAnswer(NamedTuple):
    """`refused` is None where the reply does not say; `citations` is None where they are malformed."""

    answer: str
    citations: frozenset[int] | None
    refused: bool | None
    complete: bool


def read_answer(text: str, *, fields: AnswerFields) -> StructuredAnswer | None:
    document = parse_object(text)
    if document is None:
        return None
    answer = _look_up(document, fields.answer)
    refused = _look_up(document, fields.refused)
    return StructuredAnswer(
        answer=answer if isinstance(answer, str) else "",
        citations=_read_citations(_look_up(document, fields.citations)),
        refused=refused if isinstance(refused, bool) else None,
        complete=all(_look_up(document, key) is not _MISSING for key in fields.required),
    )


def parse_object(text: str) -> dict[str, Any] | None:
    """The JSON object that the whole text is, or None. NaN and Infinity are no JSON."""
    try:
        document = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        # Model output may be anything at all; "no JSON" is the answer, not a failure.
        return None
    return document if isinstance(document, dict) else None


def numbered_sources(case: Case) -> frozenset[int]:
    """The sources `[n]` of the prompt; those of the system turn only where no other turn has any."""
    asked = [m.content for m in case.messages if m.role in ("user", "tool")]
    numbers = _bracketed("\n".join(asked))
    return numbers or _bracketed("\n".join(m.content for m in case.messages))


def _read_citations(value: Any) -> frozenset[int] | None:
    if value is _MISSING or value is None:
        return frozenset()
    if isinstance(value, str):
        return _bracketed(value)
    if not isinstance(value, list):
        return None
    numbers: set[int] = set()
    for item in value:
        match = _NUMBER.fullmatch(item.strip()) if isinstance(item, str) else None
        if isinstance(item, int) and not isinstance(item, bool):
            numbers.add(item)
        elif match:
            numbers.add(int(match[1]))
        else:
            return None
    return frozenset(numbers)


def _bracketed(text: str) -> frozenset[int]:
    return frozenset(int(number) for number in _BRACKETED.findall(text))


def _look_up(document: dict[str, Any], path: str) -> Any:
    value: Any = document
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return _MISSING
        value = value[key]
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
