"""All cases put to an endpoint, some at a time, every answer kept as soon as it is there.

In: a job that names an endpoint, and its cases. Out: answers in the job's folder, and the times of the
first of them, which are asked one at a time. A busy endpoint is asked again; one that stays broken ends the
job, and its answers stay.
"""

import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

from graftwork.engines.endpoint import (
    EndpointEngine,
    EndpointPolicy,
)
from graftwork.engines.interface import DecodingSettings, EngineReply, EngineUnavailable
from graftwork.evaluate.ask.answers import AnswerBook, read_answers, repeats_of
from graftwork.evaluate.ask.runner import Progress, stopped
from graftwork.evaluate.cases import asked_messages, cases_to_time
from graftwork.process.http_client import FIRST_PAUSE
from graftwork.records.errors import EnvironmentLacks
from graftwork.records.report import Answer, Case, EvalJob
from graftwork.text.wording import plural

FIRST_WAIT = FIRST_PAUSE
POLL_SECONDS = 0.2


class AskedEndpoint(NamedTuple):
    single_latency_seconds: tuple[float, ...]
    first_token_seconds: tuple[float, ...]
    details: Mapping[str, Any]


class _Question(NamedTuple):
    case: Case
    repeat: int


def ask_endpoint(
    job: EvalJob, cases: Sequence[Case], *, progress: Progress, stop_asked: threading.Event
) -> AskedEndpoint:
    assert job.endpoint is not None
    book = AnswerBook(job, cases)
    planned = book.plan({case.id: 0 for case in cases})
    by_id = {case.id: case for case in cases}
    open_ = {(case_id, batch.repeat) for batch in planned for case_id in batch.cases}
    there = {(answer.case_id, answer.repeat) for answer in read_answers(Path(job.folder))}
    waiting = [
        _Question(case, repeat)
        for repeat in range(repeats_of(job))
        for case in by_id.values()
        if (case.id, repeat) in open_ - there
    ]
    timed = {case.id for case in cases_to_time(cases, most=job.latency_cases)}
    alone = [question for question in waiting if question.repeat == 0 and question.case.id in timed]
    rest = [question for question in waiting if question not in alone]
    desk = _Desk(job, book, progress, stop_asked)
    desk.ask(alone, together=1)
    desk.ask(rest, together=job.endpoint.concurrency)
    return _sum_up(job, cases, desk)


class _Desk:
    """Puts questions, some at a time. Answers are written by the thread that called, and by no other."""

    def __init__(
        self, job: EvalJob, book: AnswerBook, progress: Progress, stop_asked: threading.Event
    ) -> None:
        assert job.endpoint is not None
        self._job, self._book, self._progress, self._stop = job, book, progress, stop_asked
        self._began, self._before = time.monotonic(), book.answered
        self._given_up = threading.Event()
        policy = EndpointPolicy(wait=self._given_up.wait, first_pause=FIRST_WAIT)
        self.engine = EndpointEngine(job.endpoint, policy)

    def ask(self, questions: Sequence[_Question], *, together: int) -> None:
        self._report()
        left = list(reversed(questions))
        running: dict[Future[EngineReply], _Question] = {}
        with ThreadPoolExecutor(max_workers=together) as pool:
            try:
                while left or running:
                    while left and len(running) < together:
                        question = left.pop()
                        running[pool.submit(self._ask_one, question)] = question
                    done, _ = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
                    for future in done:
                        self._write(running.pop(future), future.result())
                    self._report()
                    if self._stop.is_set():
                        answered, asked = self._book.answered, plural(self._book.total, "case")
                        raise stopped(
                            self._job, f"{answered} of {asked} {'is' if answered == 1 else 'are'} answered"
                        )
            finally:
                self._given_up.set()
                for future, question in running.items():
                    # What is on its way is paid for: it is kept where it arrives.
                    if not future.cancel() and future.exception() is None:
                        self._write(question, future.result())
                self._given_up.clear()

    def _ask_one(self, question: _Question) -> EngineReply:
        job = self._job
        messages = asked_messages(job, question.case)
        decoding = DecodingSettings(
            job.max_new_tokens, job.temperature, job.top_p, seed=job.seed + question.repeat
        )
        try:
            (reply,) = self.engine.answer([self.engine.render(messages)], decoding)
        except EngineUnavailable as trouble:
            raise self._no_answer(question, trouble) from trouble
        return reply

    def _write(self, question: _Question, reply: EngineReply) -> None:
        self._book.write(
            Answer(
                case_id=question.case.id,
                text=reply.text,
                tokens=reply.tokens,
                prompt_tokens=reply.prompt_tokens,
                finish_reason=reply.finish_reason,
                seconds=reply.seconds or 0.0,
                repeat=question.repeat,
                first_token_seconds=reply.first_token_seconds,
            )
        )

    def _report(self) -> None:
        done, total = self._book.answered, self._book.total
        new = done - self._before
        pace = (time.monotonic() - self._began) / new if new else None
        self._progress.beat(
            "answering",
            done,
            total,
            seconds_left=pace * (total - done) if pace is not None else None,
            subject=self._job.subject,
        )

    def _no_answer(self, question: _Question, trouble: EngineUnavailable) -> EnvironmentLacks:
        asked = plural(trouble.attempts, "attempt")
        return EnvironmentLacks(
            f"the endpoint did not answer case {question.case.id} in {asked}: {trouble}",
            why="a rate over the answered cases alone would flatter it",
            fix="run `graft eval` again when it is well: what was answered is kept",
            where=self._job.subject,
        )


def _sum_up(job: EvalJob, cases: Sequence[Case], desk: _Desk) -> AskedEndpoint:
    first = {answer.case_id: answer for answer in read_answers(Path(job.folder)) if answer.repeat == 0}
    timed = [first[case.id] for case in cases_to_time(cases, most=job.latency_cases)]
    firsts = [a.first_token_seconds for a in timed if a.first_token_seconds is not None]
    return AskedEndpoint(
        single_latency_seconds=tuple(answer.seconds for answer in timed),
        first_token_seconds=tuple(firsts) if len(firsts) == len(timed) else (),
        details=desk.engine.facts.details,
    )
