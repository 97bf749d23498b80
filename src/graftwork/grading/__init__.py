"""One answer graded: 1.0 right, 0.0 wrong, None where the question does not arise.

In: a case, the text of an answer, the names of the fields. Out: a grade. Whether a metric applies
depends on the case alone, never on the answer, so that two subjects are graded on the same cases
(but for `reviewer_score`: nobody has read an answer that was never given before).

`table` names every metric, `checks` every rule with parameters, `grading` grades by name; one file a
kind besides.
"""

from graftwork.grading.answers import shared_words, words_of
from graftwork.grading.checks import KINDS, Check, Where, read_case_checks
from graftwork.grading.grade import (
    against_reference,
    explain_vacuous,
    grade,
    require_gradable,
    right_or_wrong,
)
from graftwork.grading.interface import (
    CannotGrade,
    CheckKind,
    FailedGrade,
    Grade,
    GradeContext,
    GradeFunction,
    Rater,
)
from graftwork.grading.metrics import (
    AGAINST_REFERENCE,
    ALWAYS_MEASURED,
    CHECKS_PASSED,
    CONTEXT_GRADERS,
    FIRST_TOKEN,
    GRADERS,
    JUDGE_PREFERENCE,
    JUDGE_SCORE,
    LATENCY,
    LOWER_IS_BETTER,
    MEMORY,
    METRICS,
    OF_ANSWERS,
    OPTIONAL_MEASURED,
    PERPLEXITY,
    RATES,
    SCORED,
    TASK_SUCCESS,
    TOKENS_PER_SECOND,
    TRUNCATED,
    WITH_CONTEXT,
)

__all__ = [
    "AGAINST_REFERENCE",
    "ALWAYS_MEASURED",
    "CHECKS_PASSED",
    "CONTEXT_GRADERS",
    "FIRST_TOKEN",
    "GRADERS",
    "JUDGE_PREFERENCE",
    "JUDGE_SCORE",
    "KINDS",
    "LATENCY",
    "LOWER_IS_BETTER",
    "MEMORY",
    "METRICS",
    "OF_ANSWERS",
    "OPTIONAL_MEASURED",
    "PERPLEXITY",
    "RATES",
    "SCORED",
    "TASK_SUCCESS",
    "TOKENS_PER_SECOND",
    "TRUNCATED",
    "WITH_CONTEXT",
    "CannotGrade",
    "Check",
    "CheckKind",
    "FailedGrade",
    "Grade",
    "GradeContext",
    "GradeFunction",
    "Rater",
    "Where",
    "against_reference",
    "explain_vacuous",
    "grade",
    "read_case_checks",
    "require_gradable",
    "right_or_wrong",
    "shared_words",
    "words_of",
]
