"""Named checks: a metric, its parameters, and the cases that it applies to.

In: what graft.yaml or a case says. Out: checks that are known to make sense, and their grades. Written in
full `{name: short, metric: format, max_words: 80}` or in brief `{contains: "thanks"}`.
"""

from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Self

from pydantic import ConfigDict, Field, PrivateAttr, ValidationError, model_validator

from graftwork.grading.answers import AnswerFields
from graftwork.grading.call_environment import FilesOfCheck
from graftwork.grading.calls import PYTHON_CALLS, PythonCalls, grade_python_calls
from graftwork.grading.code import PYTHON_TESTS, PythonTests, grade_python_tests
from graftwork.grading.custom import grade_own, is_own, require_own_name
from graftwork.grading.interface import CannotGrade, CheckKind, Grade, GradeContext
from graftwork.grading.metrics import (
    CONTEXT_GRADERS,
    GRADERS,
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
    Normalised,
    Numeric,
    Regex,
    SetOf,
    grade_all_fields,
    grade_contains,
    grade_exact,
    grade_field,
    grade_format,
    grade_json_schema,
    grade_normalised,
    grade_numeric,
    grade_regex,
    grade_set,
)
from graftwork.records.base import Record
from graftwork.records.report import Case
from graftwork.text.validation import explain_error

NAME = r"^[a-z0-9][a-z0-9_.-]{0,63}$"


KINDS: dict[str, CheckKind] = {
    "exact": CheckKind(Exact, grade_exact, "value"),
    "normalised": CheckKind(Normalised, grade_normalised, "value"),
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
"""Rules that cannot."""
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
    """The log that the case comes of, as graft.yaml names it."""

    @model_validator(mode="before")
    @classmethod
    def _one_stands_for_several(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        for key in given:
            if key not in cls.model_fields:
                raise ValueError(f"where knows no {key}; {_hint(str(key), tuple(cls.model_fields))}")
        return {key: (value,) if isinstance(value, str) else value for key, value in given.items()}

    def holds(self, case: Case) -> bool:
        found = {
            "group": case.group,
            "role": case.group,
            "domain": case.domain,
            "session": case.session,
            "id": case.id,
            "file": case.origin.file,
        }
        return all(not (wanted := getattr(self, key)) or found[key] in wanted for key in found)


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
        description="The key of a JSON answer, nested keys with dots. Without a value it is "
        "compared with the same key of the reference.",
    )
    at_least: float | None = Field(
        None, gt=0, le=1, description="For a score: the answer counts as right from this value."
    )
    _parameters: Record | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _in_full(cls, given: Any) -> Any:
        return write_in_full(given) if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        given = self.model_extra or {}
        kind = KINDS.get(self.metric)
        named = kind is None and not is_own(self.metric) and find_grader(self.metric) is not None
        if self.field is not None and (
            self.metric in OF_WHOLE_ANSWERS or (named and self.metric not in OF_ONE_TEXT)
        ):
            raise ValueError(
                f"{self.metric} reads the whole answer: with `field: {self.field}` it would grade nothing; "
                "leave `field` out, or compare the field by exact, numeric, set or normalised"
            )
        if kind is not None:
            self._parameters = _read_parameters(self.metric, kind.parameters, given)
            return self
        if is_own(self.metric):
            require_own_name(self.metric)
            if given:
                self._parameters = _read_parameters(self.metric, FilesOfCheck, given)
            return self
        if not named:
            known = (*KINDS, *GRADERS, *CONTEXT_GRADERS)
            raise ValueError(f"there is no metric {self.metric}; {_hint(self.metric, known)}")
        if given:
            raise ValueError(f"{self.metric} takes no {next(iter(given))}")
        return self

    @property
    def rule(self) -> Record | None:
        """The parameters of its rule; None for a metric by name and for an own function."""
        return None if is_own(self.metric) else self._parameters

    @property
    def files(self) -> tuple[str, ...]:
        """What an own function runs calls with: then it needs a sandbox."""
        return self._parameters.files if isinstance(self._parameters, FilesOfCheck) else ()

    @property
    def scored(self) -> bool:
        """Whether its grades are scores from 0 to 1 instead of right or wrong."""
        return self.at_least is None and (is_own(self.metric) or is_scored(self.metric))

    @property
    def against_reference(self) -> bool:
        """Whether it holds an answer against the reference: by its metric, or for want of a value."""
        if isinstance(self._parameters, Exact | Numeric | Normalised | SetOf):
            return self._parameters.value is None
        return isinstance(self._parameters, AllFields) or compares_with_reference(self.metric)

    @property
    def decides_right(self) -> bool:
        """Whether it distinguishes right answers from wrong ones, not only well-formed ones."""
        exact = self.against_reference and not self.scored and self.metric not in ONLY_REFUSALS
        return exact or self.metric in (PYTHON_TESTS, PYTHON_CALLS, "code_passes") or is_own(self.metric)

    def grade(self, case: Case, text: str, context: GradeContext) -> Grade:
        """None where it is not about this case."""
        if not self.where.holds(case):
            return None
        grade = self._grade(case, text, context)
        return grade if grade is None or self.at_least is None else float(grade >= self.at_least)

    def _grade(self, case: Case, text: str, context: GradeContext) -> Grade:
        if self.field is not None and self.against_reference:
            # The field of the answer against the field of the reference, not against the whole of it.
            if self._parameters is not None:
                return grade_field(self.field, case, text, self._parameters)
            expected, given = (_WORDS_ALONE.inner(part, self.field) for part in (case.reference, text))
            if not expected:
                return None
            only = case.model_copy(update={"reference": expected})
            return GRADERS[self.metric](only, given or "", _WORDS_ALONE)
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


def write_in_full(given: dict[str, Any]) -> dict[str, Any]:
    """`{contains: x, ignore_case: false}` as `{metric: contains, value: x, ignore_case: false}`."""
    full = dict(given)
    if "metric" not in full:
        named = [key for key in full if key in KINDS or key == "function"]
        if len(named) != 1:
            unknown = next((key for key in full if key not in GradeCheck.model_fields), "")
            hint = _hint(str(unknown), tuple(KINDS)) if unknown else f"known: {', '.join(KINDS)}"
            raise ValueError(f"a check names one rule as its metric; {hint}")
        main = full.pop(named[0])
        if named[0] == "function":
            full["metric"] = main
        else:
            kind = full["metric"] = named[0]
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
    """The checks that a case brings along. CannotGrade where one makes no sense."""
    checks = []
    for place, given in enumerate(case.checks):
        try:
            checks.append(GradeCheck.model_validate(given))
        except ValidationError as error:
            raise CannotGrade(f"checks.{place} of the case: {say_first(error)}") from error
    return tuple(checks)


def say_first(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    message = explain_error(first)
    return f"{place}: {message}" if place else message


def _read_parameters(metric: str, parameters: type[Record], given: dict[str, Any]) -> Record:
    names = {field.alias or name for name, field in parameters.model_fields.items()}
    for key in given:
        if key not in names:
            raise ValueError(f"{metric} takes no {key}; {_hint(key, tuple(sorted(names)))}")
    try:
        return parameters.model_validate(given)
    except ValidationError as error:
        raise ValueError(f"{metric}: {say_first(error)}") from error


def _hint(name: str, known: tuple[str, ...]) -> str:
    near = get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(known)}"
