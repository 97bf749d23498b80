"""Citations and grounds: each claim cited, each citation there, each claim borne out by its sources.

In: a case, an answer, the names of the fields. Out: grades. Support is by words in common: it sees an
invented figure or name, not a wrong inference. All apply only where the reference answers.
"""

from graftwork.grading.context import Grade
from graftwork.grading.fields import (
    AnswerFields,
    StructuredAnswer,
    cited_numbers,
    numbered_sources,
    read_answer,
    source_texts,
)
from graftwork.grading.words import split_claims, support
from graftwork.records.report import Case

SUPPORTED_FROM = 0.5
"""A claim is borne out when so much of its telling words stand in the sources."""


def answerable(case: Case, fields: AnswerFields) -> StructuredAnswer | None:
    """The reference, unless it refuses or cannot be read."""
    reference = read_answer(case.reference, fields=fields)
    return None if reference is None or reference.refused else reference


def grade_citation_coverage(case: Case, text: str, fields: AnswerFields) -> Grade:
    """Where the reference answers: the answer cites, and cites only sources that the prompt holds."""
    if answerable(case, fields) is None:
        return None
    answer = read_answer(text, fields=fields)
    if answer is None or answer.refused or not answer.citations:
        return 0.0
    return float(answer.citations <= numbered_sources(case))


def grade_citation_correct(case: Case, text: str, fields: AnswerFields) -> Grade:
    """Where the reference cites: the answer cites just the same sources."""
    reference = answerable(case, fields)
    if reference is None or not reference.citations:
        return None
    answer = read_answer(text, fields=fields)
    return float(answer is not None and not answer.refused and answer.citations == reference.citations)


def grade_claims_cited(case: Case, text: str, fields: AnswerFields) -> Grade:
    """Every sentence of the answer cites: inline, or by the list where the answer has no inline ones."""
    if not _has_sources(case, fields):
        return None
    answer = _read_answered(text, fields)
    if answer is None or not (claims := split_claims(answer.answer)):
        return 0.0
    inline = [cited_numbers(claim) for claim in claims]
    if any(inline):
        return float(all(inline))
    return float(bool(answer.citations))


def grade_citations_exist(case: Case, text: str, fields: AnswerFields) -> Grade:
    """Every source that the answer cites, inline or in its list, stands in the prompt; and it cites one."""
    if not _has_sources(case, fields):
        return None
    answer = _read_answered(text, fields)
    if answer is None or answer.citations is None:
        return 0.0
    cited = answer.citations | cited_numbers(answer.answer)
    return float(bool(cited) and cited <= numbered_sources(case))


def grade_citations_support(case: Case, text: str, fields: AnswerFields) -> Grade:
    """Every claim is borne out by the sources that it cites, and every source cited exists."""
    if not _has_sources(case, fields):
        return None
    answer = _read_answered(text, fields)
    if answer is None or answer.citations is None or not (claims := split_claims(answer.answer)):
        return 0.0
    sources = source_texts(case)
    whole = answer.citations or cited_numbers(answer.answer)
    for claim in claims:
        cited = cited_numbers(claim) or whole
        if not cited or not cited <= sources.keys():
            return 0.0
        if support(claim, [sources[number] for number in cited]) < SUPPORTED_FROM:
            return 0.0
    return 1.0


def grade_groundedness(case: Case, text: str, fields: AnswerFields) -> Grade:
    """The share of the answer's claims that the given sources bear out, cited or not."""
    if not _has_sources(case, fields):
        return None
    answer = _read_answered(text, fields)
    if answer is None or not (claims := split_claims(answer.answer)):
        return 0.0
    sources = list(source_texts(case).values())
    return sum(support(claim, sources) >= SUPPORTED_FROM for claim in claims) / len(claims)


def grade_grounded(case: Case, text: str, fields: AnswerFields) -> Grade:
    """Every claim of the answer is borne out by the given sources."""
    share = grade_groundedness(case, text, fields)
    return None if share is None else float(share == 1.0)


def _has_sources(case: Case, fields: AnswerFields) -> bool:
    return answerable(case, fields) is not None and bool(source_texts(case))


def _read_answered(text: str, fields: AnswerFields) -> StructuredAnswer | None:
    answer = read_answer(text, fields=fields)
    return None if answer is None or answer.refused else answer
