"""Rewards: graded parts of an answer put together, and one part graded for a worker that is kept apart.

In: the parts by name, their weights and gates. Out: one reward, from 0 to 1 unless a `trl:` part is beyond.
A gate that is not 1 makes the reward 0; parts that do not apply are left out; a failed part leaves the answer
without a reward.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graftwork.grading.custom import describe_error, is_own, load_own, name_line, plain_number
from graftwork.grading.grade import grade
from graftwork.grading.interface import CannotGrade, Grade, GradeContext
from graftwork.grading.taskset import TasksetSpec
from graftwork.records.base import Record
from graftwork.records.report import Case

TRL, RANK = "trl:", "rank:"
"""Functions with the signature of TRL's rewards, and functions that compare the answers to one prompt."""


class RewardPart(Record):
    metric: str
    weight: float = 1.0
    gate: bool = False

    @property
    def ranks(self) -> bool:
        return self.metric.startswith(RANK)


def function_of(metric: str) -> str:
    """The function that a reward names, without how it is called."""
    return metric.removeprefix(TRL).removeprefix(RANK)


class RewardSpec(Record):
    """All that a reward worker needs to grade: the parts, and where metrics find what they need."""

    parts: tuple[RewardPart, ...]
    folder: str
    """The project's folder."""
    fields: dict[str, Any] = {}
    checks: tuple[dict[str, Any], ...] = ()
    sandbox: dict[str, Any] = {}
    seconds: float = 5.0
    fail_truncated: bool = True
    """Answers that were cut at the limit get 0."""
    own: dict[str, str] = {}
    """The hashes of the files of own functions: with another one the run is another."""
    taskset: TasksetSpec | None = None


def combine_parts(parts: Sequence[RewardPart], grades: Mapping[str, Grade]) -> float | None:
    """The weighted mean of the parts that apply, 0 if a gate does not hold; None if no part applies.

    Parts may be negative (`trl:`). With a gate the mean is at least 0: an answer that passes is never worth
    less than one that does not.
    """
    known = [(part, value) for part in parts if (value := grades.get(part.metric)) is not None]
    if not known:
        return None
    if any(part.gate and value < 1.0 for part, value in known):
        return 0.0
    total = sum(abs(part.weight) for part, _ in known)
    mean = sum(part.weight * value for part, value in known) / total if total else 0.0
    return max(mean, 0.0) if any(part.gate for part, _ in known) else mean


def ordered_parts(parts: Sequence[RewardPart]) -> list[RewardPart]:
    """Gates first: where one fails, nothing else needs to be graded."""
    return sorted(parts, key=lambda part: not part.gate)


def grade_part(
    metric: str, case: Case, text: str, *, context: GradeContext, evidence: Mapping[str, Any]
) -> Grade:
    """One part of a reward; CannotGrade where it failed. Own functions may take `evidence` as well."""
    if metric.startswith(TRL):
        return _grade_by_trl(metric, case, text, context)
    if is_own(metric):
        assert context.folder is not None
        function: Any = load_own(metric, folder=context.folder)
        asked = [case, text, dict(evidence)]

        def call() -> Any:
            takes_evidence = len(inspect.signature(function).parameters) >= 3
            return function(*(asked if takes_evidence else asked[:2]))

        returned = _call(call, function)
        return None if returned is None else _number(returned, bounded=True)
    before = len(context.failed)
    given = grade(metric, case, text, context=context)
    if len(context.failed) > before:
        raise CannotGrade(context.failed[-1].reason)
    return given


def rank_answers(metric: str, case: Case, texts: Sequence[str], *, context: GradeContext) -> list[float]:
    """A number from 0 to 1 for each answer to one prompt, by a function `rank(case, texts)`."""
    assert context.folder is not None
    function: Any = load_own(function_of(metric), folder=context.folder)
    given = _call(lambda: list(function(case, list(texts))), function)
    if len(given) != len(texts):
        raise CannotGrade(f"it returned {len(given)} numbers for {len(texts)} answers")
    return [_number(value, bounded=True) for value in given]


def _grade_by_trl(metric: str, case: Case, text: str, context: GradeContext) -> Grade:
    """TRL's signature with one answer. Its numbers are not bound to 0 … 1."""
    assert context.folder is not None
    function: Any = load_own(function_of(metric), folder=context.folder)
    columns = {"reference": [case.reference], "case_id": [case.id], "checks": [list(case.checks)]}
    asked = [{"role": message.role, "content": message.content} for message in case.messages]

    def call() -> Any:
        given = function(
            prompts=[asked],
            completions=[[{"role": "assistant", "content": text}]],
            completion_ids=[[]],
            trainer_state=None,
            log_extra=lambda *_: None,
            log_metric=lambda *_: None,
            **columns,
        )
        return asyncio.run(given) if inspect.iscoroutine(given) else given

    given = _call(call, function)
    if not isinstance(given, list | tuple) or len(given) != 1:
        raise CannotGrade("it returned no list with one number for the answer")
    return None if given[0] is None else _number(given[0], bounded=False)


def _call(call: Callable[[], Any], function: Any) -> Any:
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise CannotGrade(f"{describe_error(error)}{name_line(error, function)}") from error


def _number(given: Any, *, bounded: bool) -> float:
    """What a function returned, as a number; CannotGrade where it is none."""
    given = plain_number(given)
    wanted = "a number from 0 to 1" if bounded else "a number"
    if not isinstance(given, bool | int | float):
        raise CannotGrade(f"it returned {type(given).__name__} instead of {wanted}")
    if not math.isfinite(given) or (bounded and not 0 <= given <= 1):
        raise CannotGrade(f"it returned {given} instead of {wanted}")
    return float(given)
