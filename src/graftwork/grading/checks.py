"""Named checks, and an answer graded by the name of a check or metric.

Input: what graft.yaml or a case says, a case, a text, what graders may need. Output: checks that are known to
make sense, and grades: None if the question does not arise or the grader failed; a failure is added to
`context.failed` and stops nothing. A check is written in full `{name: short, metric: format, max_words: 80}`
or in brief `{contains: "thanks"}`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Self

from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from graftwork.grading.answers import AnswerFields, StructuredAnswer, parse_object, read_answer
from graftwork.grading.code import (
    PYTHON_CALLS,
    PYTHON_TESTS,
    PythonCalls,
    PythonTests,
    grade_python_calls,
    grade_python_tests,
)
from graftwork.grading.custom import (
    FilesOfCheck,
    find_files,
    grade_own,
    is_own,
    load_own,
    require_named,
    require_own_name,
)
from graftwork.grading.interface import CannotGrade, CheckKind, FailedGrade, Grade, GradeContext
from graftwork.grading.metrics import (
    CHECKS_PASSED,
    CONTEXT_GRADERS,
    GRADERS,
    JUDGE_SCORE,
    TASK_SUCCESS,
    Review,
    compares_with_reference,
    find_grader,
    grade_reviewed,
    is_scored,
)
from graftwork.grading.rules import (
    AllFields,
    BySchema,
    Contains,
    Exact,
    FormatRule,
    Normalized,
    Numeric,
    Regex,
    SetOf,
    grade_all_fields,
    grade_contains,
    grade_exact,
    grade_field,
    grade_format,
    grade_json_schema,
    grade_normalized,
    grade_numeric,
    grade_regex,
    grade_set,
)
from graftwork.records.base import Record
from graftwork.records.errors import UserError
from graftwork.records.report import Case
from graftwork.text.wording import explain_error

NAME = r"^[a-z0-9][a-z0-9_.-]{0,63}$"

KINDS: dict[str, CheckKind] = {
    "exact": CheckKind(Exact, grade_exact, "value"),
    "normalised": CheckKind(Normalized, grade_normalized, "value"),
    "set": CheckKind(SetOf, grade_set, "value"),
    "all_fields": CheckKind(AllFields, grade_all_fields, "fields"),
    "contains": CheckKind(Contains, grade_contains, "value"),
    "regex": CheckKind(Regex, grade_regex, "pattern"),
    "numeric": CheckKind(Numeric, grade_numeric, "value"),
    "json_schema": CheckKind(BySchema, grade_json_schema, "schema"),
    "format": CheckKind(FormatRule, grade_format),
    "reviewer_score": CheckKind(Review, grade_reviewed),
    PYTHON_TESTS: CheckKind(PythonTests, grade_python_tests, "tests"),
    PYTHON_CALLS: CheckKind(PythonCalls, grade_python_calls, "calls"),
}
"""To add one: its parameters as a Record, its grader, a line here."""

OF_ONE_TEXT = frozenset({"token_f1", "edit_similarity", "chrf"})
"""Metrics by name that can look at one field as well as at the whole answer."""
ONLY_REFUSALS = frozenset({"refusal_correct", "refused_where_due", "answered_where_due"})
OF_WHOLE_ANSWERS = frozenset({"all_fields", "reviewer_score"})
"""Rules that need the whole answer."""
_WORDS_ALONE = AnswerFields(form="text", refusals=())
"""How the text of one field is read: verbatim."""


class Where(Record):
    """Only cases that match all of these; one text or several."""

    group: tuple[str, ...] = ()
    role: tuple[str, ...] = ()
    """Another word for group."""
    domain: tuple[str, ...] = ()
    session: tuple[str, ...] = ()
    id: tuple[str, ...] = ()
    file: tuple[str, ...] = ()
    """The log that the case comes from, as graft.yaml names it."""

    @model_validator(mode="before")
    @classmethod
    def _one_stands_for_several(cls, document: Any) -> Any:
        if not isinstance(document, dict):
            return document
        for key in document:
            if key not in cls.model_fields:
                raise ValueError(f"where has no {key}; {_hint(str(key), tuple(cls.model_fields))}")
        return {key: (value,) if isinstance(value, str) else value for key, value in document.items()}

    def holds(self, case: Case) -> bool:
        values = {
            "group": case.group,
            "role": case.group,
            "domain": case.domain,
            "session": case.session,
            "id": case.id,
            "file": case.origin.file,
        }
        return all(not (allowed := getattr(self, key)) or values[key] in allowed for key in values)


class GradeCheck(Record):
    """One named check. The parameters of its metric are further keys."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(pattern=NAME, description="Name in the report and the gate.")
    metric: str = Field(
        description="A rule (exact, numeric, set, normalised, all_fields, contains, regex, json_schema, "
        "format), a metric, or your own function as path/file.py:function."
    )
    where: Where = Field(default_factory=Where, description="The cases to check. Default: all.")
    field: str | None = Field(
        None,
        description="Key of a JSON answer, nested keys with dots. Without a value, it is compared with the "
        "same key of the reference.",
    )
    at_least: float | None = Field(
        None, gt=0, le=1, description="For a score: the lowest value that counts as correct."
    )
    _parameters: Record | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, document: Any) -> Any:
        return write_in_full(document) if isinstance(document, dict) else document

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        extra = self.model_extra or {}
        kind = KINDS.get(self.metric)
        is_by_name = kind is None and not is_own(self.metric) and find_grader(self.metric) is not None
        if self.field is not None and (
            self.metric in OF_WHOLE_ANSWERS or (is_by_name and self.metric not in OF_ONE_TEXT)
        ):
            raise ValueError(
                f"{self.metric} reads the whole answer: with `field: {self.field}` it would grade nothing; "
                "leave `field` out, or compare the field by exact, numeric, set or normalised"
            )
        if kind is not None:
            self._parameters = _read_parameters(self.metric, kind.parameters, extra)
            return self
        if is_own(self.metric):
            require_own_name(self.metric)
            if extra:
                self._parameters = _read_parameters(self.metric, FilesOfCheck, extra)
            return self
        if not is_by_name:
            metrics = (*KINDS, *GRADERS, *CONTEXT_GRADERS)
            raise ValueError(f"there is no metric {self.metric}; {_hint(self.metric, metrics)}")
        if extra:
            raise ValueError(f"{self.metric} takes no {next(iter(extra))}")
        return self

    @property
    def rule(self) -> Record | None:
        """The parameters of its rule; None for a metric by name and for a custom function."""
        return None if is_own(self.metric) else self._parameters

    @property
    def files(self) -> tuple[str, ...]:
        """Files that a custom function runs calls with; they require a sandbox."""
        return self._parameters.files if isinstance(self._parameters, FilesOfCheck) else ()

    @property
    def scored(self) -> bool:
        """Whether its grades are scores from 0 to 1 instead of right or wrong."""
        return self.at_least is None and (is_own(self.metric) or is_scored(self.metric))

    @property
    def against_reference(self) -> bool:
        """Whether it compares an answer with the reference: by its metric, or for lack of a value."""
        if isinstance(self._parameters, Exact | Numeric | Normalized | SetOf):
            return self._parameters.value is None
        return isinstance(self._parameters, AllFields) or compares_with_reference(self.metric)

    @property
    def decides_right(self) -> bool:
        """Whether it distinguishes correct answers from wrong ones, not only well-formed ones."""
        exact = self.against_reference and not self.scored and self.metric not in ONLY_REFUSALS
        return exact or self.metric in (PYTHON_TESTS, PYTHON_CALLS, "code_passes") or is_own(self.metric)

    def grade(self, case: Case, text: str, context: GradeContext) -> Grade:
        """None if it does not apply to this case."""
        if not self.where.holds(case):
            return None
        grade = self._grade(case, text, context)
        return grade if grade is None or self.at_least is None else float(grade >= self.at_least)

    def _grade(self, case: Case, text: str, context: GradeContext) -> Grade:
        if self.field is not None and self.against_reference:
            # The field of the answer against the field of the reference, not against the whole of it.
            if self._parameters is not None:
                return grade_field(self.field, case, text, self._parameters)
            expected, answered = (_WORDS_ALONE.inner(part, self.field) for part in (case.reference, text))
            if not expected:
                return None
            only = case.model_copy(update={"reference": expected})
            return GRADERS[self.metric](only, answered or "", _WORDS_ALONE)
        if self.field is not None:
            # A key that is not there says nothing: the empty text, so that the rule is held against it.
            text = context.fields.inner(text, self.field) or ""
        kind = KINDS.get(self.metric)
        if kind is not None:
            return kind.grade(case, text, replace(context, parameters=self._parameters))
        if is_own(self.metric):
            return grade_own(self.metric, case, text, replace(context, parameters=self._parameters))
        grader = find_grader(self.metric)
        if grader is None:
            raise CannotGrade(f"there is no metric {self.metric}")
        return grader(case, text, context)


def write_in_full(document: dict[str, Any]) -> dict[str, Any]:
    """`{contains: x, ignore_case: false}` as `{metric: contains, value: x, ignore_case: false}`."""
    full = dict(document)
    if "metric" not in full:
        kinds = [key for key in full if key in KINDS or key == "function"]
        if len(kinds) != 1:
            unknown = next((key for key in full if key not in GradeCheck.model_fields), "")
            hint = _hint(str(unknown), tuple(KINDS)) if unknown else f"known: {', '.join(KINDS)}"
            raise ValueError(f"a check names one rule as its metric; {hint}")
        main = full.pop(kinds[0])
        if kinds[0] == "function":
            full["metric"] = main
        else:
            kind = full["metric"] = kinds[0]
            parameter = KINDS[kind].main
            if parameter is not None:
                full |= {} if main is None or main is True else {parameter: main}
            elif isinstance(main, dict):
                full |= main
            else:
                raise ValueError(f"{kind} takes keys and values, not {main!r}")
    metric = str(full["metric"])
    full.setdefault("name", metric.rpartition(":")[2].lower() if is_own(metric) else metric)
    return full


def read_case_checks(case: Case) -> tuple[GradeCheck, ...]:
    """Read the checks of a case. Raises CannotGrade if one is not valid."""
    checks = []
    for index, declared in enumerate(case.checks):
        try:
            checks.append(GradeCheck.model_validate(declared))
        except ValidationError as error:
            raise CannotGrade(f"checks.{index} of the case: {say_first(error)}") from error
    return tuple(checks)


def say_first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    path = ".".join(str(part) for part in first["loc"])
    message = explain_error(first)
    return f"{path}: {message}" if path else message


_PLAIN = GradeContext()


def grade(name: str, case: Case, text: str, *, context: GradeContext = _PLAIN) -> Grade:
    """1.0 right, 0.0 wrong, None if it does not apply."""
    try:
        return _grade(name, case, text, context)
    except CannotGrade as error:
        if context is not _PLAIN:
            context.failed.append(FailedGrade(name, case.id, str(error)))
        return None


def against_reference(name: str, context: GradeContext) -> bool:
    """Return whether this metric or check compares every answer with the reference."""
    check: GradeCheck | None = context.checks.get(name)
    return compares_with_reference(name) if check is None else check.against_reference


def require_gradable(context: GradeContext) -> None:
    """Load every custom metric now: a mistake in one is reported before a model has answered for an hour."""
    for check in context.checks.values():
        if is_own(check.metric) and context.folder is not None:
            load_own(check.metric, folder=context.folder)
            find_files(check.files, folder=context.folder)


def explain_vacuous(name: str, cases: Sequence[Case], *, graded: int, context: GradeContext) -> str:
    """Explain why a metric's figure proves nothing on these cases, in a clause; empty if it proves something.
    `graded` says how many of them it grades. A log without a single refusal makes "refuses just where the
    reference does" true of every model that never refuses: such a figure is not evidence.
    """
    check: GradeCheck | None = context.checks.get(name)
    metric = check.metric if check is not None else name
    relevant_cases = [case for case in cases if check is None or check.where.holds(case)]
    if metric == "refusal_correct" and graded:
        refused = [bool(answer and answer.refused) for answer in _references(relevant_cases, context.fields)]
        return "no reference refuses" if not any(refused) else "every reference refuses" * all(refused)
    if graded:
        return ""
    if cases and not relevant_cases:
        return "no case fits its `where`"
    if check is not None and (check.field is not None or metric == "all_fields"):
        if not any(parse_object(case.reference) for case in relevant_cases):
            return "no reference is a JSON object"
        missing_field = f"the field {check.field}" if check.field is not None else "any of its fields"
        return f"no reference has {missing_field}"
    return _explain_kind(metric, relevant_cases, context.fields)


def right_or_wrong(checks: Iterable[GradeCheck]) -> list[GradeCheck]:
    """Checks that decide whether an answer is correct. A score such as similarity does not."""
    return [check for check in checks if not check.scored or is_own(check.metric)]


_NO_CASE = {
    TASK_SUCCESS: "no check is about these cases; write what a right answer is under evaluate.checks",
    CHECKS_PASSED: "no check is about these cases; write what a right answer is under evaluate.checks",
    "refused_where_due": "no reference refuses",
    "tool_calls": "no reference calls a tool, and no prompt defines one",
    "tool_call_f1": "no reference calls a tool, and no prompt defines one",
    "tool_calls_valid": "no prompt defines a tool",
    "no_call_where_due": "no reference that is offered tools does without a call",
    "nearer_to_preferred": "the log contains no pair of a better and a worse reply",
    "reviewer_score": "no reviewer has marked these answers",
    "code_passes": "no case brings tests",
    "python_tests": "no case brings tests",
    "code_compiles": "no case asks for code",
}


def _explain_kind(metric: str, cases: Sequence[Case], fields: AnswerFields) -> str:
    """Explain why a metric grades none of the cases."""
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
            raise CannotGrade("there is no judge: specify one under evaluate.judge")
        return context.judge.rate(case, text)
    raise UserError(f"there is no metric {name}", fix="add it under evaluate.metrics or evaluate.checks")


def _share_passed(case: Case, text: str, context: GradeContext) -> Grade:
    """Return the share of checks that passed: those of the case or, if it has none, those of graft.yaml that
    apply to it.
    """
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
    applicable = [grade for grade in grades if grade is not None]
    return sum(grade >= 1.0 for grade in applicable) / len(applicable) if applicable else None


def _read_parameters(metric: str, parameters: type[Record], document: dict[str, Any]) -> Record:
    names = {field.alias or name for name, field in parameters.model_fields.items()}
    for key in document:
        if key not in names:
            raise ValueError(f"{metric} takes no {key}; {_hint(key, tuple(sorted(names)))}")
    try:
        return parameters.model_validate(document)
    except ValidationError as error:
        raise ValueError(f"{metric}: {say_first(error)}") from error


def _hint(name: str, names: tuple[str, ...]) -> str:
    near = get_close_matches(name, names, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
