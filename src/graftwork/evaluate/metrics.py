"""One answer graded: 1.0 right, 0.0 wrong, None where the question does not arise.

In: a case, the text of an answer, the names of the fields. Out: a grade. Whether a metric applies
depends on the case alone, never on the answer, so that two subjects are graded on the same cases.

To add one: write the function, name it in METRICS; graft.yaml can then name it.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Callable

from graftwork.evaluate.fields import AnswerFields, StructuredAnswer, numbered_sources, read_answer
from graftwork.records.report import Case

Grade = float | None
GradeFunction = Callable[[Case, str, AnswerFields], Grade]

SAME_WORDS_F1 = 0.6
"""Answers that share this much of their words count as the same answer."""


def grade_json_valid(case: Case, text: str, fields: AnswerFields) -> Grade:
    """The whole answer is one JSON object with the required keys."""
    answer = read_answer(text, fields=fields)
    return float(answer is not None and answer.complete)


def grade_citation_coverage(case: Case, text: str, fields: AnswerFields) -> Grade:
    """Where the reference answers: the answer cites, and cites only sources that the prompt holds."""
    if _answerable(case, fields) is None:
        return None
    answer = read_answer(text, fields=fields)
    if answer is None or answer.refused or not answer.citations:
        return 0.0
    return float(answer.citations <= numbered_sources(case))


def grade_citation_correct(case: Case, text: str, fields: AnswerFields) -> Grade:
    """Where the reference cites: the answer cites just the same sources."""
    reference = _answerable(case, fields)
    if reference is None or not reference.citations:
        return None
    answer = read_answer(text, fields=fields)
    return float(answer is not None and not answer.refused and answer.citations == reference.citations)


def grade_refusal_correct(case: Case, text: str, fields: AnswerFields) -> Grade:
    """The answer refuses just where the reference does; an answer that cannot be read is wrong."""
    reference = read_answer(case.reference, fields=fields)
    if reference is None:
        return None
    answer = read_answer(text, fields=fields)
    if answer is None:
        return 0.0
    if reference.refused is None:
        # A format that only writes the key when it refuses.
        return float(not answer.refused)
    return float(answer.refused is reference.refused)


def grade_answer_match(case: Case, text: str, fields: AnswerFields) -> Grade:
    """Where the reference answers: the answer holds its words, or shares most of them."""
    reference = _answerable(case, fields)
    if reference is None or not (expected := words_of(reference.answer)):
        return None
    answer = read_answer(text, fields=fields)
    if answer is None or answer.refused:
        return 0.0
    given = words_of(answer.answer)
    return float(_holds(given, expected) or shared_words(given, expected) >= SAME_WORDS_F1)


METRICS: dict[str, GradeFunction] = {
    "json_valid": grade_json_valid,
    "citation_coverage": grade_citation_coverage,
    "refusal_correct": grade_refusal_correct,
    "citation_correct": grade_citation_correct,
    "answer_match": grade_answer_match,
}

TRUNCATED = "truncated"
LATENCY = "latency_seconds"
MEMORY = "peak_memory_gib"
ALWAYS_MEASURED = (TRUNCATED, LATENCY, MEMORY)
"""Measured with every evaluation, whether graft.yaml names them or not."""

OF_ANSWERS = (*METRICS, TRUNCATED)
"""What can be told from an answer alone."""
RATES = frozenset(OF_ANSWERS)
LOWER_IS_BETTER = frozenset(ALWAYS_MEASURED)


def words_of(text: str) -> list[str]:
    """The words without case, accents, punctuation and articles."""
    plain = unicodedata.normalize("NFKD", text.casefold())
    plain = "".join(char for char in plain if not unicodedata.combining(char))
    return [word for word in re.findall(r"\w+", plain) if word not in ("a", "an", "the")]


def shared_words(given: list[str], expected: list[str]) -> float:
    """The F1 of two bags of words."""
    shared = sum((Counter(given) & Counter(expected)).values())
    return 2 * shared / (len(given) + len(expected)) if shared else 0.0


def _answerable(case: Case, fields: AnswerFields) -> StructuredAnswer | None:
    """The reference, unless it refuses or cannot be read."""
    reference = read_answer(case.reference, fields=fields)
    return None if reference is None or reference.refused else reference


def _holds(given: list[str], expected: list[str]) -> bool:
    width = len(expected)
    return any(given[i : i + width] == expected for i in range(len(given) - width + 1))
