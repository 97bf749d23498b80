"""Every metric that needs no parameters, by name, and what is measured besides.

To add one: write the function, name it in GRADERS (and in SCORED where it gives more than right or
wrong); graft.yaml can then name it.
"""

from graftwork.grading.citations import (
    grade_citation_correct,
    grade_citation_coverage,
    grade_citations_exist,
    grade_citations_support,
    grade_claims_cited,
    grade_grounded,
    grade_groundedness,
)
from graftwork.grading.code import CODE_COMPILES, CODE_PASSES, grade_code_compiles, grade_code_passes
from graftwork.grading.context import ContextGrader, GradeFunction
from graftwork.grading.refusals import (
    grade_answered_where_due,
    grade_refusal_correct,
    grade_refused_where_due,
)
from graftwork.grading.reviewers import grade_nearer_to_preferred, grade_reviewer_score
from graftwork.grading.similarity import grade_answer_match, grade_chrf, grade_edit_similarity, grade_token_f1
from graftwork.grading.structured import grade_json_valid, grade_schema_valid

METRICS: dict[str, GradeFunction] = {
    "json_valid": grade_json_valid,
    "citation_coverage": grade_citation_coverage,
    "refusal_correct": grade_refusal_correct,
    "citation_correct": grade_citation_correct,
    "answer_match": grade_answer_match,
}
"""What is graded where graft.yaml names nothing, and what training may look at. All right or wrong."""

GRADERS: dict[str, GradeFunction] = {
    **METRICS,
    "schema_valid": grade_schema_valid,
    "claims_cited": grade_claims_cited,
    "citations_exist": grade_citations_exist,
    "citations_support": grade_citations_support,
    "grounded": grade_grounded,
    "refused_where_due": grade_refused_where_due,
    "answered_where_due": grade_answered_where_due,
    "nearer_to_preferred": grade_nearer_to_preferred,
    "groundedness": grade_groundedness,
    "token_f1": grade_token_f1,
    "edit_similarity": grade_edit_similarity,
    "chrf": grade_chrf,
    "reviewer_score": grade_reviewer_score,
}
CONTEXT_GRADERS: dict[str, ContextGrader] = {
    CODE_COMPILES: grade_code_compiles,
    CODE_PASSES: grade_code_passes,
}
"""Those that need more than the fields: here the sandbox."""
SCORED = frozenset({"groundedness", "token_f1", "edit_similarity", "chrf", "reviewer_score"})
"""Of these the mean counts; the others are right or wrong."""

AGAINST_REFERENCE = frozenset(
    {
        "citation_correct",
        "refusal_correct",
        "refused_where_due",
        "answered_where_due",
        "answer_match",
        "nearer_to_preferred",
        "token_f1",
        "edit_similarity",
        "chrf",
    }
)
"""These hold an answer against the reference: of the reference itself they say nothing."""

TASK_SUCCESS = "task_success"
"""All checks of a case hold: those that it brings along, else those of graft.yaml that are about it."""
CHECKS_PASSED = "checks_passed"
"""The share of the same checks that hold."""
JUDGE_SCORE = "judge_score"
"""The mark of a judge, 1 to 5, as 0 to 1."""
JUDGE_PREFERENCE = "judge_preference"
"""Which of two answers a judge prefers, asked in both orders: a comparison, never a figure of one."""
WITH_CONTEXT = (*CONTEXT_GRADERS, TASK_SUCCESS, CHECKS_PASSED, JUDGE_SCORE)

TRUNCATED = "truncated"
LATENCY = "latency_seconds"
MEMORY = "peak_memory_gib"
ALWAYS_MEASURED = (TRUNCATED, LATENCY, MEMORY)
"""Measured with every evaluation, whether graft.yaml names them or not."""
FIRST_TOKEN = "first_token_seconds"
TOKENS_PER_SECOND = "tokens_per_second"
PERPLEXITY = "reference_perplexity"
"""How much the reply that the log holds surprises the model: e to the mean loss of its tokens."""
OPTIONAL_MEASURED = (FIRST_TOKEN, TOKENS_PER_SECOND, PERPLEXITY)
"""Measured where the subject lets itself be measured so: an endpoint tells no perplexity."""

OF_ANSWERS = (*METRICS, TRUNCATED)
"""What training may look at: told from one answer, right or wrong."""
RATES = frozenset({*GRADERS, *WITH_CONTEXT, TRUNCATED})
"""What lies between 0 and 1."""
LOWER_IS_BETTER = frozenset({TRUNCATED, LATENCY, MEMORY, FIRST_TOKEN, PERPLEXITY})
