"""What reviewers said in the data: a mark for the logged reply, and which of two replies won.

In: a case with a reward or a rejected reply. Out: grades. A mark belongs to the text that was read: an
answer that nobody reviewed has none, so for other subjects than the log it is mostly None.
"""

from pydantic import Field

from graftwork.grading.context import CannotGrade, Grade, GradeContext
from graftwork.grading.fields import AnswerFields
from graftwork.grading.similarity import chrf
from graftwork.records.base import Record
from graftwork.records.report import Case


class Review(Record):
    """The scale of the reviewers' marks."""

    least: float = 0.0
    """The worst mark."""
    most: float = Field(default=1.0)
    """The best mark."""


def grade_reviewer_score(case: Case, text: str, fields: AnswerFields) -> Grade:
    """The reviewers' mark for this very text, on a scale from 0 to 1."""
    return _mark(case, text, Review())


def grade_reviewed(case: Case, text: str, context: GradeContext) -> Grade:
    return _mark(case, text, context.parameters)


def grade_nearer_to_preferred(case: Case, text: str, fields: AnswerFields) -> Grade:
    """Where the log holds a pair: the answer is nearer (by chrF) to the reply that won than to the other."""
    if case.rejected is None or case.rejected.strip() == case.reference.strip():
        return None
    return float(chrf(text, case.reference) > chrf(text, case.rejected))


def _mark(case: Case, text: str, scale: Review) -> Grade:
    if case.reward is None or text.strip() != case.reference.strip():
        return None
    if not scale.least <= case.reward <= scale.most:
        raise CannotGrade(
            f"the mark {case.reward:g} is outside the scale {scale.least:g} to {scale.most:g}: "
            "name a check with the metric reviewer_score and its `least` and `most`"
        )
    return (case.reward - scale.least) / (scale.most - scale.least) if scale.most > scale.least else 1.0
