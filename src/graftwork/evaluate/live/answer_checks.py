"""The project's checks of a live answer: what decides whether a large model must answer.

Input: an open project and the names of metrics or checks. Output: the first one that an answer fails. Uses
the graders of the evaluation, without a reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from graftwork.grading.checks import against_reference, grade, require_gradable
from graftwork.grading.custom import is_own
from graftwork.grading.interface import CannotGrade, GradeContext
from graftwork.grading.metrics import CONTEXT_GRADERS, TOOL_CALLS_VALID, find_grader
from graftwork.grading.prefix import find_prefix_judge
from graftwork.project.open_project import OpenProject
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case
from graftwork.serve.escalation import PrefixVerdict

ORIGIN = Origin(file="request", line=1)


def live_context(work: OpenProject) -> GradeContext:
    """Context for graders that run neither code nor a judge."""
    settings = work.settings.evaluate
    checks = {check.name: check for check in settings.checks}
    return GradeContext(fields=settings.fields, checks=checks, folder=work.project.root)


def require_live_check(name: str, context: GradeContext, *, where: str) -> None:
    """Refuse anything that is not a check of the project, and checks that a live request cannot decide."""
    if name not in context.checks and find_grader(name) is None:
        raise UserError(
            f"there is no check {name}",
            why="it is neither a metric nor a check under evaluate.checks",
            fix="specify a metric such as json_valid, or add the check to evaluate.checks",
            where=where,
        )
    if against_reference(name, context):
        raise UserError(
            f"{name} needs the reference answer",
            why="a live request has none, so the check could not decide there",
            fix="use checks of the answer itself, such as json_valid or a JSON Schema",
            where=where,
        )
    if _runs_calls(name, context):
        raise UserError(
            f"{name} runs calls in the sandbox",
            why="nothing is run for a live request, so the check could not decide there",
            fix="use checks without `files`",
            where=where,
        )


def _runs_calls(name: str, context: GradeContext) -> bool:
    return name in context.checks and bool(context.checks[name].files)


def find_live_checks(work: OpenProject) -> tuple[str, ...]:
    """The graded metrics and checks of the project that a live answer can be judged by."""
    context = live_context(work)
    return tuple(
        name
        for name in work.settings.evaluate.graded
        if (name in context.checks or find_grader(name) is not None)
        and not against_reference(name, context)
        and name not in CONTEXT_GRADERS
        and not _runs_calls(name, context)
    )


def with_call_check(names: Sequence[str]) -> tuple[str, ...]:
    """Add the check of tool calls: a call that cannot be run fails, whatever else is checked."""
    return tuple(dict.fromkeys((TOOL_CALLS_VALID, *names)))


class LiveChecks:
    """Grades answers to live requests."""

    def __init__(
        self, work: OpenProject, names: Sequence[str], *, where: str = "serve.escalate.checks"
    ) -> None:
        self._names = tuple(names)
        self._context = live_context(work)
        for name in names:
            require_live_check(name, self._context, where=where)
        require_gradable(self._context)
        judges = {name: find_prefix_judge(name, self._context) for name in names}
        self._judges = {name: judge for name, judge in judges.items() if judge is not None}

    @property
    def of_prefixes(self) -> tuple[str, ...]:
        """The checks that can judge the start of an answer."""
        return tuple(self._judges)

    @property
    def of_whole_answers(self) -> tuple[str, ...]:
        return tuple(name for name in self._names if name not in self._judges)

    def find_failing(self, messages: Sequence[Mapping[str, str]], text: str) -> str | None:
        for name in self._names:
            mark = self.grade(name, messages, text)
            if mark is not None and mark < 1:
                return name
        return None

    def grade(self, name: str, messages: Sequence[Mapping[str, str]], text: str) -> float | None:
        """None if the check does not apply to this answer. Raises CannotGrade."""
        # Requests are checked in several threads at once: each has its own list of failures.
        context = replace(self._context, failed=[])
        mark = grade(name, self._case(name, messages, text), text, context=context)
        if context.failed:
            raise CannotGrade(context.failed[0].reason)
        return mark

    def judge_prefix(self, messages: Sequence[Mapping[str, str]], text: str) -> PrefixVerdict:
        """The first check that no continuation of the text passes, and whether any is still undecided."""
        is_open = False
        for name, judge in self._judges.items():
            verdict = judge(self._case(name, messages, text), text, self._context)
            if verdict == "fails":
                return PrefixVerdict(name, is_open=False)
            is_open = is_open or verdict is None
        return PrefixVerdict(None, is_open=is_open)

    def _case(self, name: str, messages: Sequence[Mapping[str, str]], text: str) -> Case:
        """The request as a case. Metrics that ask whether there was something to answer see the answer."""
        check = self._context.checks.get(name)
        is_own_function = check is not None and is_own(check.metric)
        turns = tuple(Message.model_validate(message) for message in messages)
        return Case(id="request", origin=ORIGIN, messages=turns, reference="" if is_own_function else text)
