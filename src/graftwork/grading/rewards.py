"""Rewards: graded parts of an answer put together, and one part graded for a worker that is kept apart.

In: the parts by name, their weights and gates. Out: one reward from 0 to 1. A gate that is not 1 makes the
reward 0; parts that do not apply are left out; a failed part leaves the answer without a reward.
"""

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from graftwork.grading.custom import is_own, load_own
from graftwork.grading.grade import grade
from graftwork.grading.interface import CannotGrade, Grade, GradeContext
from graftwork.records.base import Record
from graftwork.records.report import Case


class RewardPart(Record):
    metric: str
    weight: float = 1.0
    gate: bool = False


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


def combine_parts(parts: Sequence[RewardPart], grades: Mapping[str, Grade]) -> float | None:
    """The weighted mean of the parts that apply, 0 if a gate does not hold; None if no part applies."""
    known = [(part, value) for part in parts if (value := grades.get(part.metric)) is not None]
    if not known:
        return None
    if any(part.gate and value < 1.0 for part, value in known):
        return 0.0
    total = sum(abs(part.weight) for part, _ in known)
    return sum(part.weight * value for part, value in known) / total if total else 0.0


def ordered_parts(parts: Sequence[RewardPart]) -> list[RewardPart]:
    """Gates first: where one fails, nothing else needs to be graded."""
    return sorted(parts, key=lambda part: not part.gate)


def grade_part(
    metric: str, case: Case, text: str, *, context: GradeContext, evidence: Mapping[str, Any]
) -> Grade:
    """One part of a reward; CannotGrade where it failed. Own functions may take `evidence` as well."""
    if is_own(metric):
        return _grade_function(metric, case, text, context, evidence)
    before = len(context.failed)
    given = grade(metric, case, text, context=context)
    if len(context.failed) > before:
        raise CannotGrade(context.failed[-1].reason)
    return given


def _grade_function(
    metric: str, case: Case, text: str, context: GradeContext, evidence: Mapping[str, Any]
) -> Grade:
    assert context.folder is not None
    function: Any = load_own(metric, folder=context.folder)
    try:
        asked = len(inspect.signature(function).parameters)
        given = function(case, text, dict(evidence)) if asked >= 3 else function(case, text)
    except (Exception, SystemExit) as error:
        raise CannotGrade(f"{type(error).__name__}: {error}"[:200]) from error
    if given is None:
        return None
    if getattr(given, "shape", None) == () and hasattr(given, "item"):
        given = given.item()
    if not isinstance(given, bool | int | float):
        raise CannotGrade(f"it returned {type(given).__name__} instead of a number from 0 to 1")
    if math.isnan(given) or not 0 <= given <= 1:
        raise CannotGrade(f"it returned {given} instead of a number from 0 to 1")
    return float(given)
