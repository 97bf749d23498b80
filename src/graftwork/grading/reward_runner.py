"""Rewards graded in child processes with a time limit, several answers at a time.

In: a RewardSpec, cases and texts. Out: grades by part, and why a part has none. A function that hangs,
crashes or returns nonsense costs its one answer: the child is ended and another one started.
"""

import json
import os
import queue
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

from graftwork.grading.interface import Grade
from graftwork.grading.rewards import RewardSpec, combine_parts, ordered_parts
from graftwork.process.pool import count_cores
from graftwork.process.worker import PARENT_VARIABLE
from graftwork.records.errors import EnvironmentLacks
from graftwork.records.report import Case

START_SECONDS = 120.0


class RewardQuestion(NamedTuple):
    key: str
    case: Case
    text: str
    truncated: bool = False


class GradedParts(NamedTuple):
    key: str
    reward: float | None
    parts: dict[str, Grade]
    failed: dict[str, str]
    seconds: float


class RewardRunner:
    """Use as a context manager: leaving it ends the children."""

    def __init__(self, spec: RewardSpec, *, processes: int | None = None) -> None:
        self._spec = spec
        self._count = processes or count_cores()
        self._idle: queue.SimpleQueue[_RewardChild] = queue.SimpleQueue()
        self._children = [_RewardChild(spec) for _ in range(self._count)]
        for child in self._children:
            self._idle.put(child)
        # One pool for all: a child ends with the thread that started it.
        self._pool = ThreadPoolExecutor(self._count, thread_name_prefix="reward")

    def __enter__(self) -> "RewardRunner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        for child in self._children:
            child.end()

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
        try:
            grades, failed = self._grade_parts(child, question)
        finally:
            self._idle.put(child)
        reward = None if failed else combine_parts(self._spec.parts, grades)
        if question.truncated and self._spec.fail_truncated and reward is not None:
            reward = 0.0
        return GradedParts(question.key, reward, grades, failed, time.perf_counter() - begun)

    def _grade_parts(
        self, child: "_RewardChild", question: RewardQuestion
    ) -> tuple[dict[str, Grade], dict[str, str]]:
        grades: dict[str, Grade] = {}
        failed: dict[str, str] = {}
        for part in ordered_parts(self._spec.parts):
            evidence = {"grades": grades, "truncated": question.truncated}
            given = child.ask(
                {
                    "metric": part.metric,
                    "case": question.case.model_dump(mode="json"),
                    "text": question.text,
                    "evidence": evidence,
                }
            )
            if "failed" in given:
                failed[part.metric] = given["failed"]
                break
            grades[part.metric] = given["grade"]
            if part.gate and given["grade"] is not None and given["grade"] < 1.0:
                break
        return grades, failed


class _RewardChild:
    """One worker process; started when it is first asked, and again after it was ended."""

    def __init__(self, spec: RewardSpec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._buffer = b""

    def ask(self, question: dict[str, Any]) -> dict[str, Any]:
        process = self._start() if self._process is None else self._process
        try:
            self._send(process, question)
            reply = self._read(process, self._spec.seconds)
        except BrokenPipeError:
            reply = None
        if reply is not None:
            return reply
        code = process.poll()
        self.end()
        if code is None:
            return {"failed": f"it took longer than {self._spec.seconds:g} s"}
        return {"failed": f"its process ended with exit code {code}"}

    def end(self) -> None:
        process, self._process, self._buffer = self._process, None, b""
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()

    def _start(self) -> "subprocess.Popen[bytes]":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "graftwork.grading.reward_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, PARENT_VARIABLE: str(os.getpid()), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        self._send(self._process, json.loads(self._spec.to_json()))
        if self._read(self._process, START_SECONDS) is None:
            self.end()
            raise EnvironmentLacks(
                "the process that grades answers does not start",
                why="rewards run apart from the training process",
                fix="run `graft reward check`, which shows what the process prints",
            )
        return self._process

    def _send(self, process: "subprocess.Popen[bytes]", value: Any) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(value).encode() + b"\n")
        process.stdin.flush()

    def _read(self, process: "subprocess.Popen[bytes]", seconds: float) -> dict[str, Any] | None:
        """The next line; None if the process ended or took too long."""
        assert process.stdout is not None
        until = time.monotonic() + seconds
        while b"\n" not in self._buffer:
            left = until - time.monotonic()
            ready, _, _ = select.select([process.stdout], [], [], max(left, 0))
            if not ready:
                return None
            piece = os.read(process.stdout.fileno(), 65536)
            if not piece:
                process.wait()
                return None
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found
