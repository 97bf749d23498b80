"""Cases asked through an engine or an endpoint, every answer kept as soon as it is there.

Input: a job, its cases, an engine or the endpoint that the job names. Output: answers in a journal, then the
time of single requests; progress with an estimate of the time left. A worker that was killed resumes after
the last whole batch: batches are cut the same way every time, so that what is asked again comes out the same.
A busy endpoint is asked again; one that stays broken ends the job, and its answers stay.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from graftwork.engines.endpoint import EndpointEngine, EndpointPolicy
from graftwork.engines.interface import (
    DecodingSettings,
    EngineReply,
    EngineUnavailable,
    MeasuringEngine,
    RenderedPrompt,
    Timing,
)
from graftwork.engines.local import ADAPTER
from graftwork.evaluate.ask.answers import (
    AnswerBook,
    CaseBatch,
    read_answers,
    repeats_of,
)
from graftwork.evaluate.cases import asked_messages, cases_to_time
from graftwork.process.asking import ask_many
from graftwork.process.http_client import FIRST_PAUSE
from graftwork.records.base import fingerprint
from graftwork.records.errors import EnvironmentFailure, GracefulStop
from graftwork.records.interaction import Message
from graftwork.records.report import Answer, Case, EvalJob, Generation
from graftwork.text.wording import plural

FIRST_WAIT = FIRST_PAUSE

BEAT_SECONDS = 1.0
"""Seconds between two reports about a batch that is being generated."""


class Pace:
    """Speed of the work. `left` counts the remaining answers, including those of the open batch."""

    def __init__(self, *, left: int, longest: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._left, self._longest, self._clock = left, longest, clock
        self._done, self._spent = 0, 0.0
        self._rows, self._began, self._first, self._reported = 0, 0.0, 0.0, 0.0
        self._tokens: dict[int, int] = {}

    def begin(self, rows: int) -> None:
        self._rows, self._began = rows, self._clock()
        self._reported, self._tokens = self._began, {}

    def hear(self, row: int) -> bool:
        """Count one more token of this row; returns whether it is time to report progress."""
        if not self._rows:
            return False
        now = self._clock()
        if not self._tokens:
            self._first = now
        self._tokens[row] = self._tokens.get(row, 0) + 1
        due = now - self._reported >= BEAT_SECONDS
        self._reported = now if due else self._reported
        return due

    def end(self) -> None:
        self._spent += self._clock() - self._began
        self._done += self._rows
        self._left -= self._rows
        self._rows = 0

    @property
    def tokens(self) -> int:
        """Tokens of the open batch so far."""
        return sum(self._tokens.values())

    def tokens_per_second(self) -> float:
        """Token rate of the open batch, including prompts."""
        elapsed = self._clock() - self._began
        return self.tokens / elapsed if elapsed > 0 else 0.0

    def seconds_left(self) -> float | None:
        """None if nothing is known yet."""
        elapsed = self._clock() - self._began if self._rows else 0.0
        # A torn batch is asked whole: it may have more rows than there are answers to come.
        rows_after = max(self._left - self._rows, 0)
        whole = self._whole_batch()
        if self._done:
            seconds_per_answer = self._spent / self._done
            # A batch with longer prompts or answers takes longer than those before, up to the limit.
            expected = (
                seconds_per_answer * self._rows if seconds_per_answer * self._rows > elapsed else whole or 0.0
            )
            return max(expected - elapsed, 0.0) + seconds_per_answer * rows_after
        if whole is None:
            return None
        return max(whole - elapsed, 0.0) + whole / self._rows * rows_after

    def _whole_batch(self) -> float | None:
        """Seconds of the open batch if its longest row reaches the limit."""
        steps = max(self._tokens.values(), default=0) - 1
        if not self._rows or steps < 1:
            return None
        seconds_per_step = (self._clock() - self._first) / steps
        return self._first - self._began + seconds_per_step * (self._longest - 1)


class Progress(Protocol):
    def beat(
        self,
        phase: str,
        done: float,
        total: float,
        *,
        seconds_left: float | None = None,
        **detail: float | str,
    ) -> None: ...


def time_in_turn(
    prompts: Mapping[str, Sequence[RenderedPrompt]],
    *,
    time_one: Callable[[str, RenderedPrompt], Timing],
    after_round: Callable[[int], None] = lambda _round: None,
) -> dict[str, tuple[Timing, ...]]:
    """Time every subject's requests case by case, each case with all subjects before the next. Changing load
    then affects all subjects equally. The first subject changes from case to case.
    """
    names = list(prompts)
    timings: dict[str, list[Timing]] = {name: [] for name in names}
    for number, turn in enumerate(zip(*prompts.values(), strict=True)):
        by_name = dict(zip(names, turn, strict=True))
        first = number % len(names)
        for name in names[first:] + names[:first]:
            timings[name].append(time_one(name, by_name[name]))
        after_round(number + 1)
    return {name: tuple(seconds) for name, seconds in timings.items()}


class CaseRunner:
    """Asks all cases of one job with one engine, which holds the job's adapter under the name `adapter`.

    `details` goes into the report besides the engine's own.
    """

    def __init__(
        self,
        job: EvalJob,
        *,
        engine: MeasuringEngine,
        progress: Progress,
        stop_asked: Callable[[], bool],
        details: Mapping[str, Any] | None = None,
        adapter: str = ADAPTER,
    ) -> None:
        self._job, self._engine, self._progress = job, engine, progress
        self._stop_asked = stop_asked
        self._details = dict(details or {})
        self._adapter = adapter if job.adapter_folder is not None else None
        self._greedy = DecodingSettings(job.max_new_tokens, top_p=job.top_p)
        self._as_asked = DecodingSettings(job.max_new_tokens, job.temperature, job.top_p, job.seed)
        self._peaks: list[float] = []
        self._warm = False
        self._pace: Pace | None = None
        self._book: AnswerBook | None = None

    def ask_all(self, cases: Sequence[Case]) -> None:
        """Answer every case that has no answer yet."""
        prompts = {case.id: self._render(case) for case in cases}
        by_id = {case.id: case for case in cases}
        book = AnswerBook(self._job, cases)
        planned = book.plan({case_id: len(prompt.tokens) for case_id, prompt in prompts.items()})
        pace = Pace(left=book.total - book.answered, longest=self._job.max_new_tokens)
        self._pace, self._book = pace, book
        self._report("answering", book.answered, book.total)
        for batch in book.open_batches(planned):
            self._stop_if_asked(f"{book.answered} of {book.total} cases are answered")
            pace.begin(len(batch.cases))
            for answer in self._ask(batch, [by_id[case_id] for case_id in batch.cases], prompts):
                book.write(answer)
            book.close_batch(batch, peak_memory_gib=self._engine.peak_memory_gib())
            pace.end()
            self._report("answering", book.answered, book.total, left=pace.seconds_left())
        self._peaks = book.peaks()

    def _on_token(self, row: int, _token: int) -> bool:
        """Report progress periodically while a batch is generated."""
        if self._pace is not None and self._book is not None and self._pace.hear(row):
            self._progress.beat(
                "answering",
                self._book.answered,
                self._book.total,
                seconds_left=self._pace.seconds_left(),
                subject=self._job.subject,
                tokens_per_second=self._pace.tokens_per_second(),
            )
        return True

    def time_requests(self, cases: Sequence[Case]) -> tuple[Timing, ...]:
        """One request at a time, as a user experiences it: of as many sessions as possible."""
        timings: list[Timing] = []
        to_time = [self._render(case) for case in cases_to_time(cases, most=self._job.latency_cases)]
        if to_time:
            self._report("timing single requests", 0, len(to_time))
        if to_time and not self._warm:
            # The first pass of a process pays for lazy initialization; no user's request does.
            self._engine.answer([to_time[0]], self._greedy, adapter=self._adapter)
        for prompt in to_time:
            self._stop_if_asked("all cases are answered, single requests are being timed")
            timings.append(self._engine.time_one(prompt, self._as_asked, adapter=self._adapter))
            mean = sum(timing.total for timing in timings) / len(timings)
            seconds_left = mean * (len(to_time) - len(timings))
            self._report("timing single requests", len(timings), len(to_time), left=seconds_left)
        return tuple(timings)

    def summarise(
        self,
        *,
        single_latency_seconds: tuple[float, ...],
        first_token_seconds: tuple[float, ...] = (),
    ) -> Generation:
        return summarise(
            self._job,
            single_latency_seconds=single_latency_seconds,
            first_token_seconds=first_token_seconds,
            peak_memory_gib=max([*self._peaks, self._engine.peak_memory_gib()]),
            details={**self._engine.facts.details, **self._details},
        )

    def _ask(
        self, batch: CaseBatch, cases: Sequence[Case], prompts: Mapping[str, RenderedPrompt]
    ) -> list[Answer]:
        batch_prompts = [prompts[case_id] for case_id in batch.cases]
        decoding = self._greedy
        if self._job.temperature > 0:
            decoding = self._as_asked._replace(seed=seed_of(self._job.seed, batch))
        began = time.perf_counter()
        replies = self._engine.answer(batch_prompts, decoding, adapter=self._adapter, on_token=self._on_token)
        share = (time.perf_counter() - began) / len(batch_prompts)
        self._warm = True
        losses: Sequence[float | None] = [None] * len(batch_prompts)
        if self._job.perplexity:
            conversations = [(self._messages(case), case.reference) for case in cases]
            losses = self._engine.reply_losses(conversations, adapter=self._adapter)
        return [
            Answer(
                case_id=case.id,
                text=reply.text,
                tokens=reply.tokens,
                prompt_tokens=reply.prompt_tokens,
                finish_reason=reply.finish_reason,
                seconds=share,
                repeat=batch.repeat,
                reference_loss=loss,
            )
            for case, reply, loss in zip(cases, replies, losses, strict=True)
        ]

    def _messages(self, case: Case) -> tuple[Message, ...]:
        return asked_messages(self._job, case)

    def _render(self, case: Case) -> RenderedPrompt:
        return self._engine.render(self._messages(case))

    def _report(self, phase: str, done: int, total: int, *, left: float | None = None) -> None:
        self._progress.beat(phase, done, total, seconds_left=left, subject=self._job.subject)

    def _stop_if_asked(self, reached: str) -> None:
        if self._stop_asked():
            raise stopped(self._job, reached)


def stopped(job: EvalJob, reached: str) -> GracefulStop:
    return GracefulStop(
        f"the evaluation of {job.subject} was stopped: {reached}",
        fix="run `graft eval` again to resume",
        where=job.folder,
    )


def summarise(
    job: EvalJob,
    *,
    single_latency_seconds: tuple[float, ...],
    first_token_seconds: tuple[float, ...],
    peak_memory_gib: float,
    details: Mapping[str, Any],
) -> Generation:
    """Summarize how the answers in the job's folder were made, with everything that decided them."""
    answers = read_answers(Path(job.folder))
    seconds = sum(answer.seconds for answer in answers)
    greedy = job.temperature <= 0
    sampling = {} if greedy else {"temperature": job.temperature, "top_p": job.top_p, "seed": job.seed}
    # What of the prompt is not the case's own, where it is more than one worked example.
    prompt: dict[str, Any] = {}
    examples = sum(turn.role == "assistant" for turn in job.worked_example)
    if examples > 1:
        prompt["worked_examples"] = examples
    if job.instruction is not None:
        prompt["instruction"] = fingerprint(job.instruction)[:12]
    if job.logged_system:
        prompt["logged_system_prompt"] = True
    return Generation(
        subject=job.subject,
        answers=len(answers),
        seconds=seconds,
        tokens_per_second=sum(a.tokens for a in answers) / seconds if seconds else 0.0,
        single_latency_seconds=single_latency_seconds,
        first_token_seconds=first_token_seconds,
        peak_memory_gib=peak_memory_gib,
        settings={
            "decoding": "greedy" if greedy else "sampled",
            **sampling,
            "repeats": repeats_of(job),
            "max_new_tokens": job.max_new_tokens,
            "batch_size": job.batch_size,
            "threads": job.threads,
            "worked_example": bool(job.worked_example),
            **prompt,
            **details,
        },
    )


def seed_of(seed: int, batch: CaseBatch) -> int:
    """Return the seed of a batch, the same whichever process asks it."""
    return int(fingerprint([seed, batch.repeat, batch.cases])[:8], 16)


def ask_endpoint(
    job: EvalJob, cases: Sequence[Case], *, progress: Progress, stop_asked: threading.Event
) -> Generation:
    assert job.endpoint is not None
    book = AnswerBook(job, cases)
    planned = book.plan({case.id: 0 for case in cases})
    began, answered_before = time.monotonic(), book.answered
    stopping = threading.Event()
    engine = EndpointEngine(job.endpoint, EndpointPolicy(wait=stopping.wait, first_pause=FIRST_WAIT))

    def ask(question: tuple[Case, int]) -> EngineReply:
        case, repeat = question
        decoding = DecodingSettings(job.max_new_tokens, job.temperature, job.top_p, seed=job.seed + repeat)
        try:
            return engine.ask(asked_messages(job, case), decoding)
        except EngineUnavailable as trouble:
            attempts = plural(trouble.attempts, "attempt")
            raise EnvironmentFailure(
                f"the endpoint did not answer case {case.id} in {attempts}: {trouble}",
                why="a rate over only the answered cases would be too optimistic",
                fix="run `graft eval` again once the endpoint is healthy; existing answers are kept",
                where=job.subject,
            ) from trouble

    def keep(question: tuple[Case, int], reply: EngineReply) -> None:
        case, repeat = question
        book.write(
            Answer(
                case_id=case.id,
                text=reply.text,
                tokens=reply.tokens,
                prompt_tokens=reply.prompt_tokens,
                finish_reason=reply.finish_reason,
                seconds=reply.seconds or 0.0,
                repeat=repeat,
                first_token_seconds=reply.first_token_seconds,
            )
        )

    def report() -> None:
        done, total = book.answered, book.total
        new = done - answered_before
        seconds_left = (time.monotonic() - began) / new * (total - done) if new else None
        progress.beat("answering", done, total, seconds_left=seconds_left, subject=job.subject)
        if stop_asked.is_set():
            verb = "is" if done == 1 else "are"
            raise stopped(job, f"{done} of {plural(total, 'case')} {verb} answered")

    missing = {(case_id, batch.repeat) for batch in planned for case_id in batch.cases}
    missing -= {(answer.case_id, answer.repeat) for answer in read_answers(Path(job.folder))}
    questions = [
        (case, repeat) for repeat in range(repeats_of(job)) for case in cases if (case.id, repeat) in missing
    ]
    timed_cases = cases_to_time(cases, most=job.latency_cases)
    timed_ids = {case.id for case in timed_cases}
    timed_questions = [(case, repeat) for case, repeat in questions if repeat == 0 and case.id in timed_ids]
    batched_questions = [question for question in questions if question not in timed_questions]
    for group, at_once in ((timed_questions, 1), (batched_questions, job.endpoint.concurrency)):
        ask_many(group, ask, together=at_once, on_reply=keep, on_poll=report, give_up=stopping.set)

    first = {answer.case_id: answer for answer in read_answers(Path(job.folder)) if answer.repeat == 0}
    timed = [first[case.id] for case in timed_cases]
    first_tokens = [a.first_token_seconds for a in timed if a.first_token_seconds is not None]
    return summarise(
        job,
        single_latency_seconds=tuple(answer.seconds for answer in timed),
        first_token_seconds=tuple(first_tokens) if len(first_tokens) == len(timed) else (),
        peak_memory_gib=0.0,
        details=engine.facts.details,
    )
