"""The interface of grading: what a grader gets, what it returns, and how it reports that it failed.

A grade is 1.0 for right, 0.0 for wrong, something between for a score, None if the question does not arise.
Evaluation uses it; training rewards can. Knows no metric.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from graftwork.grading.answers import AnswerFields
from graftwork.records.base import Record
from graftwork.records.report import Case

Grade = float | None
GradeFunction = Callable[[Case, str, AnswerFields], Grade]


class CannotGrade(Exception):
    """The grader itself failed: nothing is known about the answer, and the report notes it."""


class FailedGrade(NamedTuple):
    """A grade that could not be computed, and why."""

    metric: str
    case_id: str
    reason: str


class Rater(Protocol):
    """A judge that rates one answer from 0 to 1; raises CannotGrade if it has no rating."""

    def rate(self, case: Case, text: str) -> float: ...


@dataclass(frozen=True)
class GradeContext:
    """Everything here is optional: most metrics only need the fields."""

    fields: AnswerFields = field(default_factory=AnswerFields)
    checks: Mapping[str, Any] = field(default_factory=dict)
    """The checks of graft.yaml by name."""
    parameters: Any = None
    """The parameters of the check that is being graded: a Record of its kind."""
    folder: Path | None = None
    """The project's folder: the only place that custom metrics are loaded from."""
    sandbox: Any = None
    """What generated code runs in; without one, such checks cannot be graded."""
    judge: Rater | None = None
    is_reference: bool = False
    """Whether the answers are the references themselves, such as the log's: then comparing shows nothing."""
    failed: list[FailedGrade] = field(default_factory=list)
    """Collects the grades that could not be computed; the evaluation continues."""


ContextGrader = Callable[[Case, str, GradeContext], Grade]


class MetricExtension(Protocol):
    """A metric that an installed package adds under the entry point group `graftwork.metrics`."""

    scored: bool
    """Whether grades are scores from 0 to 1, so that their mean counts; else each is right or wrong."""
    against_reference: bool
    """Whether it compares an answer with the reference: then it is meaningless for the reference itself."""

    def grade(self, case: Case, answer: str, context: GradeContext) -> Grade:
        """1.0 right, 0.0 wrong, None if it does not apply; raise CannotGrade on a failure."""
        ...


class CheckKind(NamedTuple):
    """`main` is the parameter that the short form `{kind: value}` sets."""

    parameters: type[Record]
    grade: ContextGrader
    main: str | None = None
