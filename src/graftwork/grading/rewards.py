"""Rewards: graded parts of an answer put together, graded in child processes with a time limit.

Input: the parts by name, their weights and gates; cases and texts. Output: one reward, from 0 to 1 unless a
`trl:` part is beyond, and why a part has none. A gate that is not 1 makes the reward 0; parts that do not
apply are left out. A function that hangs, crashes or returns nonsense costs its one answer: the child
(`reward_worker`) is ended and another one started.
"""

import asyncio
import inspect
import math
import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from graftwork.grading.checks import grade
from graftwork.grading.custom import describe_error, is_own, load_own, name_line, plain_number
from graftwork.grading.interface import CannotGrade, Grade, GradeContext
from graftwork.grading.settings import RANK, TRL, RewardSettings
from graftwork.grading.taskset import TasksetGrader, TasksetSpec
from graftwork.process.machine import count_cores
from graftwork.process.stdio import LineProcess
from graftwork.records.base import Record
from graftwork.records.report import Case
from graftwork.records.run import ENVIRONMENT, TASKSET


def function_of(metric: str) -> str:
    """Return the function that a reward names, without its prefix."""
    return metric.removeprefix(TRL).removeprefix(RANK)


class RewardSpec(Record):
    """Everything a reward worker needs to grade: the parts, and the inputs of metrics."""

    parts: tuple[RewardSettings, ...]
    folder: str
    """The project's folder."""
    fields: dict[str, Any] = {}
    checks: tuple[dict[str, Any], ...] = ()
    sandbox: dict[str, Any] = {}
    seconds: float = 5.0
    fail_truncated: bool = True
    """Answers that were cut off at the limit get 0."""
    own: dict[str, str] = {}
    """The hashes of the files of custom functions, which are part of the run's identity."""
    taskset: TasksetSpec | None = None


class RewardQuestion(NamedTuple):
    key: str
    case: Case
    text: str
    truncated: bool = False
    evidence: Mapping[str, Any] = {}
    """Facts about the answer besides its text: the turns of an episode, the environment's reward."""


class AnswerVerdict(Record):
    """The grade of an answer. `reward` is None if a reward function failed: the answer does not count."""

    key: str
    reward: float | None
    parts: dict[str, Grade] = {}
    audit: float | None = None
    """The grade by the checks that never reward; None if there are none."""
    failed: dict[str, str] = {}
    """Why a part could not be graded, by its name."""
    seconds: float = 0.0
    part_seconds: dict[str, float] = {}


class RewardRunner:
    """Use as a context manager: leaving it ends the children."""

    def __init__(self, spec: RewardSpec, *, processes: int | None = None) -> None:
        self._spec = spec
        self._count = processes or count_cores()
        self._idle: queue.SimpleQueue[LineProcess] = queue.SimpleQueue()
        self._children = [
            LineProcess(
                [sys.executable, "-m", "graftwork.grading.reward_worker"],
                hello=spec.model_dump(mode="json"),
                seconds=spec.seconds,
                environment={"OMP_NUM_THREADS": "1"},
            )
            for _ in range(self._count)
        ]
        for child in self._children:
            self._idle.put(child)
        # One pool for all: a child ends with the thread that started it.
        self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="reward")
        self._taskset = None
        if spec.taskset is not None:
            self._taskset = TasksetGrader(
                spec.taskset, folder=spec.folder, seconds=spec.seconds, most=self._count, pool=self._pool
            )

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for child in self._children:
            child.end()
        if self._taskset is not None:
            self._taskset.close()

    def grade_all(
        self,
        questions: Iterable[RewardQuestion],
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[AnswerVerdict]:
        """In the order of the questions; some are graded at the same time."""
        waiting = [self._pool.submit(self.grade, question) for question in questions]
        try:
            for future in waiting:
                yield future.result()
                if stopped():
                    return
        finally:
            for future in waiting:
                future.cancel()

    def grade(self, question: RewardQuestion) -> AnswerVerdict:
        started = time.perf_counter()
        child = self._idle.get()
        took: dict[str, float] = {}
        try:
            grades, failed = self._grade_parts(child, question, took)
        finally:
            self._idle.put(child)
        reward = None if failed else combine_parts(self._spec.parts, grades)
        if question.truncated and self._spec.fail_truncated and not failed:
            # Not better than a wrong answer, where rewards may be negative.
            reward = min(reward or 0.0, 0.0)
        return AnswerVerdict(
            key=question.key,
            reward=reward,
            parts=grades,
            failed=failed,
            seconds=time.perf_counter() - started,
            part_seconds=took,
        )

    def rank(self, metric: str, case: Case, texts: Sequence[str]) -> tuple[list[float] | None, str]:
        """Numbers from 0 to 1 for the answers to one prompt; None, and why, if the function failed."""
        child = self._idle.get()
        try:
            reply = child.ask({"metric": metric, "case": case.model_dump(mode="json"), "texts": list(texts)})
        finally:
            self._idle.put(child)
        return reply.get("grades"), reply.get("failed", "")

    def _grade_parts(
        self, child: LineProcess, question: RewardQuestion, took: dict[str, float]
    ) -> tuple[dict[str, Grade], dict[str, str]]:
        grades: dict[str, Grade] = {}
        episode = question.evidence.get(ENVIRONMENT, {})
        if episode.get("failed"):
            return grades, {ENVIRONMENT: episode["failed"]}
        failed: dict[str, str] = {}
        for part in ordered_parts([part for part in self._spec.parts if not part.ranks]):
            started = time.perf_counter()
            if part.metric == ENVIRONMENT:
                reply = {"grade": episode.get("reward")}
            elif part.metric == TASKSET:
                assert self._taskset is not None
                reply = self._taskset.grade(question.case, question.text, truncated=question.truncated)
                grades |= {f"{TASKSET}/{name}": score for name, score in reply.get("scores", {}).items()}
            else:
                evidence = {**question.evidence, "grades": grades, "truncated": question.truncated}
                question_fields = {"case": question.case.model_dump(mode="json"), "text": question.text}
                reply = child.ask({"metric": part.metric, **question_fields, "evidence": evidence})
            took[part.metric] = time.perf_counter() - started
            if "failed" in reply:
                failed[part.metric] = reply["failed"]
                break
            grades[part.metric] = reply["grade"]
            if part.gate and reply["grade"] is not None and reply["grade"] < 1.0:
                break
        return grades, failed


def combine_parts(parts: Sequence[RewardSettings], grades: Mapping[str, Grade]) -> float | None:
    """Weighted mean of the parts that apply, 0 if a gate fails; None if no part applies. Parts may be
    negative (`trl:`). With a gate the mean is at least 0: an answer that passes is never worth less than one
    that does not.
    """
    applicable = [(part, value) for part in parts if (value := grades.get(part.metric)) is not None]
    if not applicable:
        return None
    if any(part.gate and value < 1.0 for part, value in applicable):
        return 0.0
    total = sum(abs(part.weight) for part, _ in applicable)
    mean = sum(part.weight * value for part, value in applicable) / total if total else 0.0
    return max(mean, 0.0) if any(part.gate for part, _ in applicable) else mean


def ordered_parts(parts: Sequence[RewardSettings]) -> list[RewardSettings]:
    """Gates first: if one fails, nothing else needs to be graded."""
    return sorted(parts, key=lambda part: not part.gate)


def grade_part(
    metric: str, case: Case, text: str, *, context: GradeContext, evidence: Mapping[str, Any]
) -> Grade:
    """Grade one part of a reward; CannotGrade if it failed. Custom functions may take `evidence` as well."""
    if metric.startswith(TRL):
        return _grade_by_trl(metric, case, text, context)
    if is_own(metric):
        assert context.folder is not None
        function: Any = load_own(metric, folder=context.folder)
        arguments = [case, text, dict(evidence)]

        def call() -> Any:
            takes_evidence = len(inspect.signature(function).parameters) >= 3
            return function(*(arguments if takes_evidence else arguments[:2]))

        returned = _call(call, function)
        return None if returned is None else _number(returned, bounded=True)
    before = len(context.failed)
    graded = grade(metric, case, text, context=context)
    if len(context.failed) > before:
        raise CannotGrade(context.failed[-1].reason)
    return graded


def rank_answers(metric: str, case: Case, texts: Sequence[str], *, context: GradeContext) -> list[float]:
    """A number from 0 to 1 for each answer to one prompt, by a function `rank(case, texts)`."""
    assert context.folder is not None
    function: Any = load_own(function_of(metric), folder=context.folder)
    numbers = _call(lambda: list(function(case, list(texts))), function)
    if len(numbers) != len(texts):
        raise CannotGrade(f"it returned {len(numbers)} numbers for {len(texts)} answers")
    return [_number(value, bounded=True) for value in numbers]


def _grade_by_trl(metric: str, case: Case, text: str, context: GradeContext) -> Grade:
    """TRL's signature with one answer. Its numbers are not limited to 0 … 1."""
    assert context.folder is not None
    function: Any = load_own(function_of(metric), folder=context.folder)
    columns = {"reference": [case.reference], "case_id": [case.id], "checks": [list(case.checks)]}
    prompt = [{"role": message.role, "content": message.content} for message in case.messages]

    def call() -> Any:
        returned = function(
            prompts=[prompt],
            completions=[[{"role": "assistant", "content": text}]],
            completion_ids=[[]],
            trainer_state=None,
            log_extra=lambda *_: None,
            log_metric=lambda *_: None,
            **columns,
        )
        return asyncio.run(returned) if inspect.iscoroutine(returned) else returned

    returned = _call(call, function)
    if not isinstance(returned, list | tuple) or len(returned) != 1:
        raise CannotGrade("it returned no list with one number for the answer")
    return None if returned[0] is None else _number(returned[0], bounded=False)


def _call(call: Callable[[], Any], function: Any) -> Any:
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise CannotGrade(f"{describe_error(error)}{name_line(error, function)}") from error


def _number(returned: Any, *, bounded: bool) -> float:
    """What a function returned, as a number; CannotGrade if it is not one."""
    returned = plain_number(returned)
    expected = "a number from 0 to 1" if bounded else "a number"
    if not isinstance(returned, bool | int | float):
        raise CannotGrade(f"it returned {type(returned).__name__} instead of {expected}")
    if not math.isfinite(returned) or (bounded and not 0 <= returned <= 1):
        raise CannotGrade(f"it returned {returned} instead of {expected}")
    return float(returned)
