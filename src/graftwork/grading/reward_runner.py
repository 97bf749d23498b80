"""Rewards graded in child processes with a time limit, several answers at a time.

In: a RewardSpec, cases and texts. Out: grades by part, and why a part has none. A function that hangs,
crashes or returns nonsense costs its one answer: the child is ended and another one started.
"""

import queue
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from graftwork.grading.interface import Grade
from graftwork.grading.rewards import RewardSpec, combine_parts, ordered_parts
from graftwork.grading.taskset import TasksetGrader
from graftwork.process.line_process import LineProcess
from graftwork.process.pool import count_cores
from graftwork.records.report import Case
from graftwork.records.run import ENVIRONMENT, TASKSET


class RewardQuestion(NamedTuple):
    key: str
    case: Case
    text: str
    truncated: bool = False
    evidence: Mapping[str, Any] = {}
    """What is known of the answer besides its text: the turns of an episode, the environment's reward."""


class GradedParts(NamedTuple):
    key: str
    reward: float | None
    parts: dict[str, Grade]
    failed: dict[str, str]
    seconds: float
    part_seconds: Mapping[str, float] = {}


class RankedGroup(NamedTuple):
    """Numbers from 0 to 1 for the answers to one prompt; None, and why, if the function failed."""

    grades: list[float] | None
    failed: str = ""


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
    ) -> Iterator[GradedParts]:
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

    def grade(self, question: RewardQuestion) -> GradedParts:
        begun = time.perf_counter()
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
        return GradedParts(question.key, reward, grades, failed, time.perf_counter() - begun, took)

    def rank(self, metric: str, case: Case, texts: Sequence[str]) -> RankedGroup:
        """Compare the answers to one prompt, in a child process too."""
        child = self._idle.get()
        try:
            given = child.ask({"metric": metric, "case": case.model_dump(mode="json"), "texts": list(texts)})
        finally:
            self._idle.put(child)
        return RankedGroup(given.get("grades"), given.get("failed", ""))

    def _grade_parts(
        self, child: LineProcess, question: RewardQuestion, took: dict[str, float]
    ) -> tuple[dict[str, Grade], dict[str, str]]:
        grades: dict[str, Grade] = {}
        episode = question.evidence.get(ENVIRONMENT, {})
        if episode.get("failed"):
            return grades, {ENVIRONMENT: episode["failed"]}
        failed: dict[str, str] = {}
        for part in ordered_parts([part for part in self._spec.parts if not part.ranks]):
            begun = time.perf_counter()
            if part.metric == ENVIRONMENT:
                given = {"grade": episode.get("reward")}
            elif part.metric == TASKSET:
                assert self._taskset is not None
                given = self._taskset.grade(question.case, question.text, truncated=question.truncated)
                grades |= {f"{TASKSET}/{name}": score for name, score in given.get("scores", {}).items()}
            else:
                evidence = {**question.evidence, "grades": grades, "truncated": question.truncated}
                asked = {"case": question.case.model_dump(mode="json"), "text": question.text}
                given = child.ask({"metric": part.metric, **asked, "evidence": evidence})
            took[part.metric] = time.perf_counter() - begun
            if "failed" in given:
                failed[part.metric] = given["failed"]
                break
            grades[part.metric] = given["grade"]
            if part.gate and given["grade"] is not None and given["grade"] < 1.0:
                break
        return grades, failed
