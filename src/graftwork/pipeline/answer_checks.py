"""The project's checks of a live answer: what decides whether a large model must answer.

In: an open project and the names of metrics or checks. Out: the first one that an answer fails. Uses the
graders of the evaluation, without a reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from graftwork.grading.grade import against_reference, grade, require_gradable
from graftwork.grading.interface import CannotGrade, GradeContext
from graftwork.grading.metrics import find_grader
from graftwork.pipeline.open_project import OpenProject
from graftwork.records.errors import UserMistake
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case

ORIGIN = Origin(file="request", line=1)


def grade_context(work: OpenProject) -> GradeContext:
    """What graders need that run neither code nor a judge."""
    settings = work.settings.evaluate
    checks = {check.name: check for check in settings.checks}
    return GradeContext(fields=settings.fields, checks=checks, folder=work.project.root)


def require_live_check(name: str, context: GradeContext, *, where: str) -> None:
    """Refuse what is no check of the project, and what a live request cannot decide."""
    if name not in context.checks and find_grader(name) is None:
        raise UserMistake(
            f"there is no check {name}",
            why="it is neither a metric nor a check under evaluate.checks",
            fix="name a metric such as json_valid, or add the check to evaluate.checks",
            where=where,
        )
    if against_reference(name, context):
        raise UserMistake(
            f"{name} needs the reference answer",
            why="a live request has none, so the check could not decide there",
            fix="use checks of the answer itself, such as json_valid or a JSON Schema",
            where=where,
        )


class LiveChecks:
    """Grades answers to live requests."""

    def __init__(self, work: OpenProject, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._context = grade_context(work)
        for name in names:
            require_live_check(name, self._context, where="serve.escalate.checks")
        require_gradable(self._context)

    def find_failing(self, messages: Sequence[Mapping[str, str]], text: str) -> str | None:
        asked = tuple(Message.model_validate(message) for message in messages)
        case = Case(id="request", origin=ORIGIN, messages=asked, reference="")
        # Requests are checked in several threads at once: each has its own list of failures.
        context = replace(self._context, failed=[])
        for name in self._names:
            found = grade(name, case, text, context=context)
            if context.failed:
                raise CannotGrade(context.failed[0].reason)
            if found is not None and found < 1:
                return name
        return None
