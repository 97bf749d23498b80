"""A reply read as a structured answer, and its text as words and claims.

Input: the text of a reply and the names of its fields. Output: a StructuredAnswer, or None if the text is not
JSON object; the numbered sources of a prompt; how much of a claim the sources contain. Does not know what a
correct answer is.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, NoReturn

from pydantic import field_validator

from graftwork.grading.matching import require_schema
from graftwork.records.base import Record
from graftwork.records.report import Case

_BRACKETED = re.compile(r"\[(\d{1,6})\]")
_NUMBER = re.compile(r"\[?(\d{1,6})\]?")
_SOURCE_START = re.compile(r"^[ \t]*\[(\d{1,6})\][:.]?", re.MULTILINE)
MISSING = object()
"""Returned by `look_up` if a key is missing; null is a value."""

REFUSALS = (
    "i cannot answer",
    "i can't answer",
    "i can not answer",
    "i don't know",
    "i do not know",
    "i'm unable to",
    "i am unable to",
    "not in the sources",
    "the sources do not",
    "the sources don't",
    "no information",
)


class AnswerFields(Record):
    """The meaning of the keys of a reply. Nested keys are written with dots: `answer.text`."""

    answer: str = "answer"
    """The answer in words."""
    citations: str = "citations"
    """The numbers of the sources: a list, or a text that holds them as `[1][2]`."""
    refused: str = "refused"
    """True if the sources do not say."""
    required: tuple[str, ...] = ()
    """Keys that a reply must have to count as valid JSON."""
    json_schema: dict[str, Any] | None = None
    """The JSON Schema that `schema_valid` holds every reply against."""
    form: Literal["json", "text"] = "json"
    """`text`: a reply is plain words that cite as `[1]`; it refuses if it contains one of `refusals`."""
    refusals: tuple[str, ...] = REFUSALS
    """Phrases that only a refusal contains, in any case."""

    @field_validator("json_schema")
    @classmethod
    def _schema_is_understood(cls, schema: dict[str, Any] | None) -> dict[str, Any] | None:
        if schema is not None:
            require_schema(schema)
        return schema

    def inner(self, text: str, path: str) -> str | None:
        """The value of a key of a JSON reply, as text; None if it is missing."""
        document = parse_object(text)
        value = MISSING if document is None else look_up(document, path)
        if value is MISSING:
            return None
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class StructuredAnswer(NamedTuple):
    """`refused` is None if the reply does not say; `citations` is None if they are malformed."""

    answer: str
    citations: frozenset[int] | None
    refused: bool | None
    complete: bool


def read_answer(text: str, *, fields: AnswerFields) -> StructuredAnswer | None:
    """The answer in the form that the fields name; None if the text does not have it."""
    if fields.form != "text":
        return read_document(text, fields=fields)
    if not text.strip():
        return None
    plain = text.casefold().replace("\u2019", "'")
    refused = any(phrase.casefold() in plain for phrase in fields.refusals)
    return StructuredAnswer(answer=text, citations=cited_numbers(text), refused=refused, complete=True)


def read_document(text: str, *, fields: AnswerFields) -> StructuredAnswer | None:
    """The answer as a JSON object, whatever form the fields name."""
    document = parse_object(text)
    if document is None:
        return None
    answer = look_up(document, fields.answer)
    refused = look_up(document, fields.refused)
    return StructuredAnswer(
        answer=answer if isinstance(answer, str) else "",
        citations=read_citations(look_up(document, fields.citations)),
        refused=refused if isinstance(refused, bool) else None,
        complete=all(look_up(document, key) is not MISSING for key in fields.required),
    )


def parse_object(text: str) -> dict[str, Any] | None:
    """Parse the whole text as a JSON object, or None. NaN and Infinity are not JSON."""
    parsed = parse_json(text)
    return parsed[0] if parsed and isinstance(parsed[0], dict) else None


def parse_json(text: str) -> tuple[Any, ...]:
    """Parse the whole text as one JSON value; empty if it is not one (null is a value)."""
    try:
        return (json.loads(text, parse_constant=_refuse_constant),)
    except (ValueError, RecursionError):
        # Model output may be anything at all; "no JSON" is the answer, not a failure.
        return ()


def numbered_sources(case: Case) -> frozenset[int]:
    """The sources `[n]` of the prompt; those of the system turn only where no other turn has any."""
    texts = [m.content for m in case.messages if m.role in ("user", "tool")]
    numbers = cited_numbers("\n".join(texts))
    return numbers or cited_numbers("\n".join(m.content for m in case.messages))


def source_texts(case: Case) -> dict[int, str]:
    """The sources of the prompt by number: what follows `[n]` at the start of a line, up to the next.

    The question after the last source is not part of it.
    """
    texts = [m.content for m in case.messages if m.role in ("user", "tool")]
    return _cut_sources(texts) or _cut_sources([m.content for m in case.messages])


def cited_numbers(text: str) -> frozenset[int]:
    """The sources that a text cites inline, as `[1]`."""
    return frozenset(int(number) for number in _BRACKETED.findall(text))


def _cut_sources(contents: list[str]) -> dict[int, str]:
    sources: dict[int, str] = {}
    for content in contents:
        starts = list(_SOURCE_START.finditer(content)) or list(_BRACKETED.finditer(content))
        for index, start in enumerate(starts):
            end = starts[index + 1].start() if index + 1 < len(starts) else len(content)
            body = content[start.end() : end]
            if index == len(starts) - 1:
                # The last paragraph is the question; without paragraphs, a last line that asks.
                before, gap, _ = body.strip().rpartition("\n\n")
                if not gap:
                    before, gap, last = body.strip().rpartition("\n")
                    before = before if gap and last.rstrip().endswith("?") else body
                body = before
            number = int(start[1])
            sources[number] = f"{sources[number]}\n{body}".strip() if number in sources else body.strip()
    return sources


def read_citations(value: Any) -> frozenset[int] | None:
    """The numbers of the sources in a list or a text; None if they are malformed."""
    if value is MISSING or value is None:
        return frozenset()
    if isinstance(value, str):
        return cited_numbers(value)
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


def look_up(document: dict[str, Any], path: str) -> Any:
    """The value of a key, nested keys joined by dots; MISSING if there is none."""
    value: Any = document
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return MISSING
        value = value[key]
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


_SENTENCE_END = re.compile(r"(?<=[.!?…。！？])[\"')\]]*\s+|\n+")
_ONLY_CITATIONS = re.compile(r"(?:\s*\[\d{1,6}\])+\s*[.;,]?\s*")
_CITATION = re.compile(r"\[\d{1,6}\]")

# Words that nearly every English text holds: sharing them supports nothing.
_COMMON = """
a an the is are was were be been being am do does did has have had of to in on at by for with from as and or
but not no nor so if then than that this these those it its he she they we you i his her their our your there
here which who whom what when where how can could will would shall should may might must also very just about
into over under out up down
"""
_EMPTY_WORDS = frozenset(_COMMON.split())


def words_of(text: str) -> list[str]:
    """The words without case, accents, punctuation and articles."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    plain = "".join(char for char in plain if not unicodedata.combining(char))
    return [word for word in re.findall(r"\w+", plain) if word not in ("a", "an", "the")]


def shared_words(answered: list[str], expected: list[str]) -> float:
    """The F1 of two bags of words."""
    shared = sum((Counter(answered) & Counter(expected)).values())
    return 2 * shared / (len(answered) + len(expected)) if shared else 0.0


def split_claims(text: str) -> list[str]:
    """The sentences, each with the citations that follow its full stop.

    Headings and list marks without a word of substance are not claims.
    """
    claims: list[str] = []
    for piece in _SENTENCE_END.split(text):
        leading = _ONLY_CITATIONS.match(piece) if claims else None
        if leading:
            claims[-1] += " " + leading[0].strip()
        claim = piece[leading.end() :] if leading else piece
        if content_words(claim) and not claim.strip().endswith(":"):
            claims.append(claim.strip())
    return claims


def content_words(text: str) -> set[str]:
    """The words that carry meaning: numbers and all but the most common; citations left out."""
    return {word for word in words_of(_CITATION.sub(" ", text)) if word not in _EMPTY_WORDS}


def support(claim: str, sources: Iterable[str]) -> float:
    """The share of the claim's content words that the sources contain. Without any such word: 1.

    A number of the claim that no source holds refutes it: 0, however many words agree.
    """
    claimed = content_words(claim)
    if not claimed:
        return 1.0
    source_words: set[str] = set()
    for source in sources:
        source_words |= content_words(source)
    if any(word.isdigit() and word not in source_words for word in claimed):
        return 0.0
    return len(claimed & source_words) / len(claimed)


def same_value(expected: Any, answered: Any, same_text: Callable[[str, str], bool] | None = None) -> bool:
    """Equal as JSON: 1 and 1.0 are, 1 and true are not, nor are 2 and "2"."""
    if isinstance(expected, bool) or isinstance(answered, bool):
        return expected is answered
    if isinstance(expected, dict) and isinstance(answered, dict):
        return expected.keys() == answered.keys() and all(
            same_value(expected[key], answered[key], same_text) for key in expected
        )
    if isinstance(expected, list) and isinstance(answered, list):
        pairs = zip(expected, answered, strict=False)
        return len(expected) == len(answered) and all(
            same_value(first, second, same_text) for first, second in pairs
        )
    if isinstance(expected, str) and isinstance(answered, str):
        return (
            same_text(expected, answered) if same_text is not None else expected.strip() == answered.strip()
        )
    return bool(expected == answered)
