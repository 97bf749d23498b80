"""One answer graded by the name of a metric or check.

In: a name, a case, a text, what graders may need. Out: a grade, or None where the question does not
arise or the grader failed; a failure is added to `context.failed` and stops nothing.
"""

from collections.abc import Iterable, Sequence

from graftwork.grading.answers import AnswerFields, StructuredAnswer, parse_object, read_answer
from graftwork.grading.call_environment import find_files
from graftwork.grading.checks import GradeCheck, read_case_checks
from graftwork.grading.custom import is_own, load_own, require_named
from graftwork.grading.interface import CannotGrade, FailedGrade, Grade, GradeContext
from graftwork.grading.metrics import (
    CHECKS_PASSED,
    JUDGE_SCORE,
    TASK_SUCCESS,
    compares_with_reference,
    find_grader,
)
from graftwork.records.errors import UserMistake
from graftwork.records.report import Case

_PLAIN = GradeContext()


def grade(name: str, case: Case, text: str, *, context: GradeContext = _PLAIN) -> Grade:
    """1.0 right, 0.0 wrong, None where the question does not arise."""
    try:
        return _grade(name, case, text, context)
    except CannotGrade as error:
        if context is not _PLAIN:
            context.failed.append(FailedGrade(name, case.id, str(error)))
        return None


def against_reference(name: str, context: GradeContext) -> bool:
    """Whether this metric or check holds every answer against the reference."""
    check: GradeCheck | None = context.checks.get(name)
    return compares_with_reference(name) if check is None else check.against_reference


def require_gradable(context: GradeContext) -> None:
    """Load every own metric now: a mistake in one is reported before a model has answered for an hour."""
    for check in context.checks.values():
        if is_own(check.metric) and context.folder is not None:
            load_own(check.metric, folder=context.folder)
            find_files(check.files, folder=context.folder)


def explain_vacuous(name: str, cases: Sequence[Case], *, graded: int, context: GradeContext) -> str:
    """Why a metric's figure proves nothing on these cases, in a clause; empty where it proves something.

    `graded` says how many of them it grades. A log without a single refusal makes "refuses just where the
    reference does" true of every model that never refuses: such a figure is no evidence.
    """
    check: GradeCheck | None = context.checks.get(name)
    metric = check.metric if check is not None else name
    about = [case for case in cases if check is None or check.where.holds(case)]
    if metric == "refusal_correct" and graded:
        refused = [bool(answer and answer.refused) for answer in _references(about, context.fields)]
        return "no reference refuses" if not any(refused) else "every reference refuses" * all(refused)
    if graded:
        return ""
    if cases and not about:
        return "no case fits its `where`"
    if check is not None and (check.field is not None or metric == "all_fields"):
        if not any(parse_object(case.reference) for case in about):
            return "no reference is a JSON object"
        wanted = f"the field {check.field}" if check.field is not None else "any of its fields"
        return f"no reference has {wanted}"
    return _explain_kind(metric, about, context.fields)


_NO_CASE = {
    TASK_SUCCESS: "no check is about these cases; write what a right answer is under evaluate.checks",
    CHECKS_PASSED: "no check is about these cases; write what a right answer is under evaluate.checks",
    "refused_where_due": "no reference refuses",
    "tool_calls": "no reference calls a tool, and no prompt defines one",
    "tool_call_f1": "no reference calls a tool, and no prompt defines one",
    "tool_calls_valid": "no prompt defines a tool",
    "no_call_where_due": "no reference that is offered tools does without a call",
    "nearer_to_preferred": "the log holds no pair of a better and a worse reply",
    "reviewer_score": "no reviewer has marked these answers",
    "code_passes": "no case brings tests",
    "python_tests": "no case brings tests",
    "code_compiles": "no case asks for code",
}


def _explain_kind(metric: str, cases: Sequence[Case], fields: AnswerFields) -> str:
    """Why a metric grades not one of the cases."""
    if metric in _NO_CASE or is_own(metric):
        return _NO_CASE.get(metric, "the function gives None for every case")
    read = [answer for answer in _references(cases, fields) if answer is not None]
    if not read:
        return f"no reference can be read as {'JSON' if fields.form == 'json' else 'words'}"
    if all(answer.refused for answer in read):
        return "every reference refuses"
    if metric == "answer_match" and fields.form == "json":
        return f"no reference has an answer in words under the key `{fields.answer}`"
    if metric == "citation_correct":
        return "no reference cites a source"
    return "no case is of the kind that it grades"


def _references(cases: Sequence[Case], fields: AnswerFields) -> list[StructuredAnswer | None]:
    return [read_answer(case.reference, fields=fields) for case in cases]


def _grade(name: str, case: Case, text: str, context: GradeContext) -> Grade:
    if context.is_reference and against_reference(name, context):
        return None
    check: GradeCheck | None = context.checks.get(name)
    if check is not None:
        return check.grade(case, text, context)
    grader = find_grader(name)
    if grader is not None:
        return grader(case, text, context)
    if name in (TASK_SUCCESS, CHECKS_PASSED):
        share = _share_passed(case, text, context)
        return share if share is None or name == CHECKS_PASSED else float(share == 1.0)
    if name == JUDGE_SCORE:
        if context.judge is None:
            raise CannotGrade("there is no judge: name one under evaluate.judge")
        return context.judge.rate(case, text)
    raise UserMistake(f"there is no metric {name}", fix="name it under evaluate.metrics or evaluate.checks")


def _share_passed(case: Case, text: str, context: GradeContext) -> Grade:
    """Of the case's own checks; where it brings none, of those of graft.yaml that are about it."""
    checks = read_case_checks(case)
    for check in checks:
        require_named(check.metric, context)
    set_here = checks or right_or_wrong(context.checks.values())
    if context.is_reference and any(
        check.against_reference and check.where.holds(case) for check in set_here
    ):
        # Held against itself it would pass that one whatever it says.
        return None
    grades = [check.grade(case, text, context) for check in set_here]
    asked = [grade for grade in grades if grade is not None]
    return sum(grade >= 1.0 for grade in asked) / len(asked) if asked else None


def right_or_wrong(checks: Iterable[GradeCheck]) -> list[GradeCheck]:
    """Those that say when an answer is right. A mere measure, such as similarity, has no such point."""
    return [check for check in checks if not check.scored or is_own(check.metric)]
