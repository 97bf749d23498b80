"""Every metric that needs no parameters: citations, refusals, similarity, reviews, valid JSON.

Input: a case, the text of an answer, the names of the fields. Output: a grade.

To add a metric: write the function here and name it in GRADERS (in SCORED too where the mean of its grades
counts), with its title in NAMES. An installed package adds one under the entry point group
`graftwork.metrics`: an object like `interface.MetricExtension`. A rule with parameters is added in `rules`
and named in `checks.KINDS`.
"""

import re
from collections import Counter
from functools import lru_cache
from typing import Any

from pydantic import Field

from graftwork.grading.answers import (
    MISSING,
    AnswerFields,
    StructuredAnswer,
    cited_numbers,
    look_up,
    numbered_sources,
    parse_json,
    parse_object,
    read_answer,
    read_document,
    shared_words,
    source_texts,
    split_claims,
    support,
    words_of,
)
from graftwork.grading.code import CODE_COMPILES, CODE_PASSES, grade_code_compiles, grade_code_passes
from graftwork.grading.interface import (
    CannotGrade,
    ContextGrader,
    Grade,
    GradeContext,
    GradeFunction,
    MetricExtension,
)
from graftwork.grading.matching import PatternTooSlow, fits
from graftwork.grading.tool_calls import (
    grade_no_call_where_due,
    grade_tool_call_f1,
    grade_tool_calls,
    grade_tool_calls_valid,
)
from graftwork.process.extensions import extension_names, load_extension
from graftwork.records.base import Record
from graftwork.records.report import Case

NOT_REFUSED = "not_refused"
"""Needs no reference, so a live request can be checked by it."""
SUPPORTED_FROM = 0.5
"""A claim is supported if the sources contain this share of its content words."""


def answerable(case: Case, fields: AnswerFields) -> StructuredAnswer | None:
    """The reference, unless it refuses or cannot be read."""
    reference = read_answer(case.reference, fields=fields)
    return None if reference is None or reference.refused else reference


def grade_citation_coverage(case: Case, text: str, fields: AnswerFields) -> Grade:
    """If the reference answers: the answer cites, and only sources in the prompt."""
    if answerable(case, fields) is None:
        return None
    answer = read_answer(text, fields=fields)
    if answer is None or answer.refused or not answer.citations:
        return 0.0
    return float(answer.citations <= numbered_sources(case))


def grade_citation_correct(case: Case, text: str, fields: AnswerFields) -> Grade:
    """If the reference cites: the answer cites exactly the same sources."""
    reference = answerable(case, fields)
    if reference is None or not reference.citations:
        return None
    answer = read_answer(text, fields=fields)
    return float(answer is not None and not answer.refused and answer.citations == reference.citations)


def grade_claims_cited(case: Case, text: str, fields: AnswerFields) -> Grade:
    """Every sentence of the answer cites: inline, or through the list if the answer has no inline
    citations.
    """
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
    """Every source that the answer cites, inline or in its list, is in the prompt; and it cites at least
    one.
    """
    if not _has_sources(case, fields):
        return None
    answer = _read_answered(text, fields)
    if answer is None or answer.citations is None:
        return 0.0
    cited = answer.citations | cited_numbers(answer.answer)
    return float(bool(cited) and cited <= numbered_sources(case))


def grade_citations_support(case: Case, text: str, fields: AnswerFields) -> Grade:
    """Every claim is supported by the sources that it cites, and every source cited exists."""
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
    """The share of the answer's claims that the given sources support, cited or not."""
    if not _has_sources(case, fields):
        return None
    answer = _read_answered(text, fields)
    if answer is None or not (claims := split_claims(answer.answer)):
        return 0.0
    sources = list(source_texts(case).values())
    return sum(support(claim, sources) >= SUPPORTED_FROM for claim in claims) / len(claims)


def grade_grounded(case: Case, text: str, fields: AnswerFields) -> Grade:
    """Every claim of the answer is supported by the given sources."""
    share = grade_groundedness(case, text, fields)
    return None if share is None else float(share == 1.0)


def _has_sources(case: Case, fields: AnswerFields) -> bool:
    return answerable(case, fields) is not None and bool(source_texts(case))


def _read_answered(text: str, fields: AnswerFields) -> StructuredAnswer | None:
    answer = read_answer(text, fields=fields)
    return None if answer is None or answer.refused else answer


def grade_refusal_correct(case: Case, text: str, fields: AnswerFields) -> Grade:
    """The answer refuses exactly where the reference does; an answer that cannot be read is wrong."""
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


def grade_not_refused(case: Case, text: str, fields: AnswerFields) -> Grade:
    """The answer does not refuse. One that cannot be read does not refuse."""
    answer = read_answer(text, fields=fields)
    return float(answer is None or not answer.refused)


def grade_refused_where_due(case: Case, text: str, fields: AnswerFields) -> Grade:
    """If the reference refuses: so does the answer."""
    reference = read_answer(case.reference, fields=fields)
    if reference is None or not reference.refused:
        return None
    return grade_refusal_correct(case, text, fields)


def grade_answered_where_due(case: Case, text: str, fields: AnswerFields) -> Grade:
    """If the reference answers: so does the answer, rightly or not."""
    reference = read_answer(case.reference, fields=fields)
    if reference is None or reference.refused:
        return None
    return grade_refusal_correct(case, text, fields)


SAME_WORDS_F1 = 0.6
"""Answers that share this much of their words count as the same answer."""
CHRF_LONGEST = 6
CHRF_BETA = 2.0
"""chrF as its authors advise: runs of one to six letters, recall twice as weighty as precision."""


def grade_answer_match(case: Case, text: str, fields: AnswerFields) -> Grade:
    """If the reference answers: the answer contains its words, or shares most of them."""
    reference = answerable(case, fields)
    if reference is None or not (expected := words_of(reference.answer)):
        return None
    answer = read_answer(text, fields=fields)
    if answer is None or answer.refused:
        return 0.0
    answered = words_of(answer.answer)
    width = len(expected)
    holds = any(answered[i : i + width] == expected for i in range(len(answered) - width + 1))
    return float(holds or shared_words(answered, expected) >= SAME_WORDS_F1)


def grade_token_f1(case: Case, text: str, fields: AnswerFields) -> Grade:
    """The F1 of the words that answer and reference share."""
    expected = expected_text(case, fields)
    if expected is None or not (expected_words := words_of(expected)):
        return None
    return shared_words(words_of(given_text(case, text, fields)), expected_words)


def grade_edit_similarity(case: Case, text: str, fields: AnswerFields) -> Grade:
    """1 less the edits from one text to the other, over the length of the longer one."""
    expected = expected_text(case, fields)
    return None if expected is None else edit_similarity(given_text(case, text, fields), expected)


def grade_chrf(case: Case, text: str, fields: AnswerFields) -> Grade:
    """chrF: character n-grams in common, up to six letters; lenient with inflected and compound words."""
    expected = expected_text(case, fields)
    return None if expected is None else chrf(given_text(case, text, fields), expected)


def expected_text(case: Case, fields: AnswerFields) -> str | None:
    """Return the words of the reference; all of it if it is not a structured answer."""
    reference = None if _is_bare(case, fields) else read_answer(case.reference, fields=fields)
    if reference is None:
        return case.reference if case.reference.strip() else None
    return reference.answer if not reference.refused and reference.answer.strip() else None


def given_text(case: Case, text: str, fields: AnswerFields) -> str:
    """Return the words of the answer, read like the reference; nothing if it refuses or cannot be read."""
    if _is_bare(case, fields) or read_answer(case.reference, fields=fields) is None:
        return text
    answer = read_answer(text, fields=fields)
    return "" if answer is None or answer.refused else answer.answer


def _is_bare(case: Case, fields: AnswerFields) -> bool:
    """Whether the reference is JSON without an answer in words, such as a label: then all of it counts."""
    document = parse_object(case.reference) if fields.form == "json" else None
    if document is None or look_up(document, fields.refused) is True:
        return False
    return look_up(document, fields.answer) is MISSING


def edit_similarity(answered: str, expected: str) -> float:
    longest = max(len(answered), len(expected))
    return 1 - edit_distance(answered, expected) / longest if longest else 1.0


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's distance, a column at a time in the bits of one integer (Myers 1999, Hyyrö 2001)."""
    if not a:
        return len(b)
    positions: dict[str, int] = {}
    for index, char in enumerate(a):
        positions[char] = positions.get(char, 0) | 1 << index
    full, last = (1 << len(a)) - 1, 1 << len(a) - 1
    up, down, distance = full, 0, len(a)
    for char in b:
        matches = positions.get(char, 0)
        vertical = matches | down
        diagonal = (((matches & up) + up) ^ up) | matches
        right = down | (~(diagonal | up) & full)
        leftward = up & diagonal
        if right & last:
            distance += 1
        elif leftward & last:
            distance -= 1
        right = (right << 1 | 1) & full
        leftward = (leftward << 1) & full
        up = leftward | (~(vertical | right) & full)
        down = right & vertical
    return distance


def chrf(answered: str, expected: str) -> float:
    """F score of mean precision and mean recall over the n-gram orders that both texts are long enough
    for.
    """
    answer_text, reference_text = re.sub(r"\s+", "", answered), re.sub(r"\s+", "", expected)
    precisions, recalls = [], []
    for length in range(1, CHRF_LONGEST + 1):
        ours, theirs = _runs(answer_text, length), _runs(reference_text, length)
        if not ours or not theirs:
            break
        shared = sum((ours & theirs).values())
        precisions.append(shared / ours.total())
        recalls.append(shared / theirs.total())
    precision, recall = sum(precisions), sum(recalls)
    if not precision or not recall:
        return 0.0
    orders, weight = len(precisions), CHRF_BETA**2
    precision, recall = precision / orders, recall / orders
    return min(1.0, (1 + weight) * precision * recall / (weight * precision + recall))


def _runs(text: str, length: int) -> Counter[str]:
    return Counter(text[i : i + length] for i in range(len(text) - length + 1))


class Review(Record):
    """The scale of the reviewers' scores."""

    least: float = 0.0
    """The worst mark."""
    most: float = Field(default=1.0)
    """The best mark."""


def grade_reviewer_score(case: Case, text: str, fields: AnswerFields) -> Grade:
    """The reviewers' score for this exact text, on a scale from 0 to 1."""
    return _mark(case, text, Review())


def grade_reviewed(case: Case, text: str, context: GradeContext) -> Grade:
    return _mark(case, text, context.parameters)


def grade_nearer_to_preferred(case: Case, text: str, fields: AnswerFields) -> Grade:
    """If the log has a preference pair: the answer is nearer (by chrF) to the chosen reply than to the
    other.
    """
    if case.rejected is None or case.rejected.strip() == case.reference.strip():
        return None
    return float(chrf(text, case.reference) > chrf(text, case.rejected))


def _mark(case: Case, text: str, scale: Review) -> Grade:
    if case.reward is None or text.strip() != case.reference.strip():
        return None
    if not scale.least <= case.reward <= scale.most:
        raise CannotGrade(
            f"the score {case.reward:g} is outside the scale {scale.least:g} to {scale.most:g}: "
            "add a check with the metric reviewer_score and its `least` and `most`"
        )
    return (case.reward - scale.least) / (scale.most - scale.least) if scale.most > scale.least else 1.0


def grade_json_valid(case: Case, text: str, fields: AnswerFields) -> Grade:
    """The whole answer is one JSON object with the required keys."""
    document = read_document(text, fields=fields)
    return float(document is not None and document.complete)


def grade_schema_valid(case: Case, text: str, fields: AnswerFields) -> Grade:
    """If `evaluate.fields.json_schema` is set: the whole answer is JSON that fits it."""
    return None if fields.json_schema is None else grade_by_schema(text, fields.json_schema)


def grade_by_schema(text: str, schema: dict[str, Any]) -> float:
    """The whole text is JSON, of any kind, that fits the schema."""
    parsed = parse_json(text)
    if not parsed:
        return 0.0
    try:
        return float(fits(parsed[0], schema))
    except PatternTooSlow as error:
        raise CannotGrade(str(error)) from error


METRICS: dict[str, GradeFunction] = {
    "json_valid": grade_json_valid,
    "citation_coverage": grade_citation_coverage,
    "refusal_correct": grade_refusal_correct,
    "citation_correct": grade_citation_correct,
    "answer_match": grade_answer_match,
}
"""Metrics used if graft.yaml lists none, and available to training. Each answer is right or wrong."""

TOOL_CALLS_VALID = "tool_calls_valid"
"""The endpoint checks this for every answer that may escalate."""

GRADERS: dict[str, GradeFunction] = {
    **METRICS,
    "schema_valid": grade_schema_valid,
    TOOL_CALLS_VALID: grade_tool_calls_valid,
    "tool_calls": grade_tool_calls,
    "tool_call_f1": grade_tool_call_f1,
    "no_call_where_due": grade_no_call_where_due,
    "claims_cited": grade_claims_cited,
    "citations_exist": grade_citations_exist,
    "citations_support": grade_citations_support,
    "grounded": grade_grounded,
    NOT_REFUSED: grade_not_refused,
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
"""Metrics that need more than the fields, here the sandbox."""
SCORED = frozenset({"groundedness", "token_f1", "tool_call_f1", "edit_similarity", "chrf", "reviewer_score"})
"""Metrics that are reported as a mean; the others are right or wrong."""

AGAINST_REFERENCE = frozenset(
    {
        "citation_correct",
        "refusal_correct",
        "refused_where_due",
        "answered_where_due",
        "answer_match",
        "tool_calls",
        "tool_call_f1",
        "no_call_where_due",
        "nearer_to_preferred",
        "token_f1",
        "edit_similarity",
        "chrf",
    }
)
"""Metrics that compare an answer with the reference: they are meaningless for the reference itself."""

TASK_SUCCESS = "task_success"
"""All checks of a case pass: its own, or else those of graft.yaml that apply to it."""
CHECKS_PASSED = "checks_passed"
"""Share of the same checks that pass."""
JUDGE_SCORE = "judge_score"
"""The score of a judge, 1 to 5, as 0 to 1."""
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
"""How much the logged reply surprises the model: exp of the mean loss of its tokens."""
LATENCY_P95 = "latency_p95_seconds"
"""The 95th percentile of the latency of single requests."""
TOKENS_PER_TASK = "tokens_per_task"
"""Tokens per case, input and output together."""
COST_PER_SUCCESS = "cost_per_success"
"""US dollars of all answers over the number of right ones."""
COSTS = (LATENCY_P95, TOKENS_PER_TASK, COST_PER_SUCCESS)
OPTIONAL_MEASURED = (FIRST_TOKEN, TOKENS_PER_SECOND, PERPLEXITY, *COSTS)
"""Measured if the subject allows it: an endpoint reports no perplexity, a log perhaps no tokens."""

OF_ANSWERS = (*METRICS, TRUNCATED)
"""Metrics available to training: graded from one answer, right or wrong."""
RATES = frozenset({*GRADERS, *WITH_CONTEXT, TRUNCATED})
"""Values between 0 and 1."""
LOWER_IS_BETTER = frozenset({TRUNCATED, LATENCY, MEMORY, FIRST_TOKEN, PERPLEXITY, *COSTS})


NAMES = {
    "json_valid": "JSON-valid rate",
    "schema_valid": "Schema-valid rate",
    TOOL_CALLS_VALID: "Tool calls valid",
    "tool_calls": "Tool calls right",
    "tool_call_f1": "Tool call F1",
    "no_call_where_due": "No call where none is due",
    "citation_coverage": "Citation coverage",
    "refusal_correct": "Refusal correctness",
    "citation_correct": "Citation correctness",
    "claims_cited": "Claims cited",
    "citations_exist": "Citations that exist",
    "citations_support": "Citations that support",
    "grounded": "Grounded answers",
    "groundedness": "Groundedness",
    NOT_REFUSED: "Answered, not refused",
    "refused_where_due": "Refused where due",
    "answered_where_due": "Answered where due",
    "answer_match": "Answer match",
    "nearer_to_preferred": "Nearer to the preferred reply",
    "token_f1": "Shared words (F1)",
    "edit_similarity": "Edit similarity",
    "chrf": "Shared letters (chrF)",
    "reviewer_score": "Reviewers' score",
    "task_success": "Task success",
    "checks_passed": "Checks passed",
    "judge_score": "Judge's score",
    "judge_preference": "Judge's preference",
    "truncated": "Truncated answers",
    LATENCY: "Latency",
    LATENCY_P95: "Latency p95",
    TOKENS_PER_TASK: "Tokens per task",
    COST_PER_SUCCESS: "Cost per success",
    FIRST_TOKEN: "First token",
    TOKENS_PER_SECOND: "Speed",
    MEMORY: "Peak memory",
    PERPLEXITY: "Perplexity of the recorded reply",
}
DOLLARS = "$"
UNITS = {
    LATENCY: "s",
    LATENCY_P95: "s",
    FIRST_TOKEN: "s",
    MEMORY: "GiB",
    TOKENS_PER_SECOND: "tokens/s",
    TOKENS_PER_TASK: "tokens",
    COST_PER_SUCCESS: DOLLARS,
    PERPLEXITY: "",
}


def name_of(metric: str) -> str:
    return NAMES.get(metric, metric)


def is_share(metric: str) -> bool:
    """Whether the metric is a grade from 0 to 1, as all are but those that measure cost."""
    return metric not in UNITS


def show(metric: str, value: float) -> str:
    """95.8 %, 1.25 s, 2 GiB."""
    if is_share(metric):
        return f"{100 * value:.1f} %".replace(".0 %", " %")
    if UNITS[metric] == DOLLARS:
        return show_dollars(value)
    return f"{value:.2f}".rstrip("0").rstrip(".") + f" {UNITS[metric]}".rstrip()


def show_dollars(amount: float) -> str:
    """$1,234, $12.30 or $0.00042: cents if there are any, else two significant digits."""
    if amount < 0:
        return f"−{show_dollars(-amount)}"
    if abs(amount) >= 100:
        return f"${amount:,.0f}"
    return f"${amount:.2f}" if abs(amount) >= 0.1 or amount == 0 else f"${amount:.2g}"


def show_points(difference: float) -> str:
    return f"{100 * difference:+.1f} points"


def show_p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


@lru_cache(maxsize=64)
def find_extension(name: str) -> MetricExtension | None:
    """The metric of this name that an installed package adds; None if none does. Built-in names win."""
    if name in RATES or name not in extension_names("graftwork.metrics"):
        return None
    required = ("grade", "scored", "against_reference")
    extension: MetricExtension = load_extension("graftwork.metrics", name, attributes=required)
    return extension


def find_grader(name: str) -> ContextGrader | None:
    """The function that grades by a metric's name: built-in, or of an installed package."""
    if (plain := GRADERS.get(name)) is not None:
        return lambda case, answer, context: plain(case, answer, context.fields)
    if name in CONTEXT_GRADERS:
        return CONTEXT_GRADERS[name]
    extension = find_extension(name)
    return extension.grade if extension is not None else None


def is_scored(name: str) -> bool:
    """Whether the mean of a metric's grades counts, instead of how many are right."""
    extension = find_extension(name)
    return extension.scored if extension is not None else name in (*SCORED, CHECKS_PASSED, JUDGE_SCORE)


def compares_with_reference(name: str) -> bool:
    extension = find_extension(name)
    return extension.against_reference if extension is not None else name in AGAINST_REFERENCE
