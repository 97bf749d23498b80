"""Cases asked in batches, every answer kept as soon as it is there.

In: cases, a way to turn messages into tokens and one to generate. Out: answers in a journal, then the
time of single requests. A worker that was killed goes on behind the last whole batch: batches are cut
the same way every time, so that what is asked again comes out the same. Knows neither torch nor HTTP.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from graftwork.evaluate.cases import cases_to_time, insert_example
from graftwork.evaluate.pace import Pace
from graftwork.evaluate.subjects.book import (
    ANSWERS_FILE,
    BATCHES_FILE,
    AnswerBook,
    Batch,
    cut_missing,
    read_answers,
)
from graftwork.evaluate.subjects.kept import repeats_of
from graftwork.records.base import fingerprint
from graftwork.records.errors import StoppedInOrder
from graftwork.records.interaction import Message
from graftwork.records.report import Answer, Case, EvalJob, Generation

__all__ = [
    "ANSWERS_FILE",
    "BATCHES_FILE",
    "Asker",
    "Timing",
    "cut_batches",
    "read_answers",
    "summarise",
    "time_in_turn",
]


class Turns(Protocol):
    """Messages to tokens, and tokens back to text."""

    def prompt(self, messages: tuple[Message, ...]) -> list[int]: ...
    def decode(self, tokens: list[int]) -> str: ...


class Said(Protocol):
    """What a model answered to one prompt."""

    @property
    def tokens(self) -> list[int]: ...
    @property
    def finish_reason(self) -> Literal["stop", "length"]: ...


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


class Timing(NamedTuple):
    """One request alone: seconds to the first token, where that is known, and to the last."""

    first_token: float | None
    total: float


def time_in_turn(
    prompts: Mapping[str, Sequence[list[int]]],
    *,
    time_one: Callable[[str, list[int]], Timing],
    after_round: Callable[[int], None] = lambda _round: None,
) -> dict[str, tuple[Timing, ...]]:
    """Every subject's requests, one case after the other, each case put to all subjects before the next.

    Load that comes and goes then falls on all subjects alike. Who is first changes from case to case.
    """
    names = list(prompts)
    timings: dict[str, list[Timing]] = {name: [] for name in names}
    for number, asked in enumerate(zip(*prompts.values(), strict=True)):
        by_name = dict(zip(names, asked, strict=True))
        first = number % len(names)
        for name in names[first:] + names[:first]:
            timings[name].append(time_one(name, by_name[name]))
        after_round(number + 1)
    return {name: tuple(found) for name, found in timings.items()}


Generate = Callable[[list[list[int]]], Sequence[Said]]
GenerateSeeded = Callable[[list[list[int]], int], Sequence[Said]]
Weigh = Callable[[list[tuple[tuple[Message, ...], str]]], Sequence[float | None]]
"""Conversations with the reply that the log holds; the mean loss of a token of each reply."""


class Asker:
    """Asks all cases of one job with one model. `sample` is needed where the job is not greedy."""

    def __init__(
        self,
        job: EvalJob,
        *,
        turns: Turns,
        generate: Generate,
        progress: Progress,
        peak_memory_gib: Callable[[], float],
        stop_asked: Callable[[], bool],
        sample: GenerateSeeded | None = None,
        time_one: Callable[[list[int]], Timing] | None = None,
        weigh: Weigh | None = None,
        described: dict[str, Any] | None = None,
    ) -> None:
        self._job = job
        self._turns = turns
        self._generate = generate
        self._sample = sample
        self._time_one = time_one or self._time_whole
        self._weigh = weigh
        self._progress = progress
        self._peak_memory_gib = peak_memory_gib
        self._stop_asked = stop_asked
        self._described = described or {}
        self._peaks: list[float] = []
        self._warm = False
        self._pace: Pace | None = None
        self._book: AnswerBook | None = None

    def ask_all(self, cases: Sequence[Case]) -> None:
        """Answer every case that has no answer yet."""
        prompts = {case.id: self._prompt(case) for case in cases}
        by_id = {case.id: case for case in cases}
        book = AnswerBook(self._job, cases)
        planned = book.plan({case_id: len(prompt) for case_id, prompt in prompts.items()})
        pace = Pace(left=book.total - book.answered, longest=self._job.max_new_tokens)
        self._pace, self._book = pace, book
        self._tell("answering", book.answered, book.total)
        for batch in book.open_batches(planned):
            self._stop_if_asked(f"{book.answered} of {book.total} cases are answered")
            pace.begin(len(batch.cases))
            for answer in self._ask(batch, [by_id[case_id] for case_id in batch.cases], prompts):
                book.write(answer)
            book.close_batch(batch, peak_memory_gib=self._peak_memory_gib())
            pace.end()
            self._tell("answering", book.answered, book.total, left=pace.seconds_left())
        self._peaks = book.peaks()

    def hear(self, row: int, _token: int) -> bool:
        """A token of the batch that is being written: tells now and then how it goes, and lets it go on."""
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
        """One request at a time, as a user would wait for it: of as many sessions as there are."""
        timings: list[Timing] = []
        chosen = [self._prompt(case) for case in cases_to_time(cases, most=self._job.latency_cases)]
        if chosen:
            self._tell("timing single requests", 0, len(chosen))
        if chosen and not self._warm:
            # The first pass of a process pays for lazy initialisation; no user's request does.
            self._generate([chosen[0]])
        for prompt in chosen:
            self._stop_if_asked("all cases are answered, single requests are being timed")
            timings.append(self._time_one(prompt))
            mean = sum(timing.total for timing in timings) / len(timings)
            left = mean * (len(chosen) - len(timings))
            self._tell("timing single requests", len(timings), len(chosen), left=left)
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
            peak_memory_gib=max([*self._peaks, self._peak_memory_gib()]),
            described=self._described,
        )

    def _ask(self, batch: Batch, cases: Sequence[Case], prompts: dict[str, list[int]]) -> list[Answer]:
        asked = [prompts[case_id] for case_id in batch.cases]
        began = time.perf_counter()
        if self._job.temperature > 0 and self._sample is not None:
            said = self._sample(asked, seed_of(self._job.seed, batch))
        else:
            said = self._generate(asked)
        share = (time.perf_counter() - began) / len(asked)
        self._warm = True
        losses: Sequence[float | None] = [None] * len(asked)
        if self._job.perplexity and self._weigh is not None:
            losses = self._weigh([(self._messages(case), case.reference) for case in cases])
        return [
            Answer(
                case_id=case.id,
                text=self._turns.decode(list(reply.tokens)),
                tokens=len(reply.tokens),
                prompt_tokens=len(prompt),
                finish_reason=reply.finish_reason,
                seconds=share,
                repeat=batch.repeat,
                reference_loss=loss,
            )
            for case, prompt, reply, loss in zip(cases, asked, said, losses, strict=True)
        ]

    def _time_whole(self, prompt: list[int]) -> Timing:
        began = time.perf_counter()
        self._generate([prompt])
        return Timing(None, time.perf_counter() - began)

    def _messages(self, case: Case) -> tuple[Message, ...]:
        return insert_example(case.messages, example=self._job.worked_example)

    def _prompt(self, case: Case) -> list[int]:
        return self._turns.prompt(self._messages(case))

    def _tell(self, phase: str, done: int, total: int, *, left: float | None = None) -> None:
        self._progress.beat(phase, done, total, seconds_left=left, subject=self._job.subject)

    def _stop_if_asked(self, reached: str) -> None:
        if self._stop_asked():
            raise stopped(self._job, reached)


def stopped(job: EvalJob, reached: str) -> StoppedInOrder:
    return StoppedInOrder(
        f"the evaluation of {job.subject} was stopped: {reached}",
        fix="run `graft eval` again: it goes on from there",
        where=job.folder,
    )


def summarise(
    job: EvalJob,
    *,
    single_latency_seconds: tuple[float, ...],
    first_token_seconds: tuple[float, ...],
    peak_memory_gib: float,
    described: dict[str, Any],
) -> Generation:
    """How the answers in the job's folder were made. Everything that decided them is named."""
    answers = read_answers(Path(job.folder))
    seconds = sum(answer.seconds for answer in answers)
    greedy = job.temperature <= 0
    sampling = {} if greedy else {"temperature": job.temperature, "top_p": job.top_p, "seed": job.seed}
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
            **described,
        },
    )


def seed_of(seed: int, batch: Batch) -> int:
    """A seed of its own for each batch, the same whichever process asks it."""
    return int(fingerprint([seed, batch.repeat, batch.cases])[:8], 16)


def cut_batches(prompts: dict[str, list[int]], *, size: int) -> list[tuple[str, ...]]:
    """Case ids in batches of like length: little padding, and the same batches every time."""
    lengths = {case_id: len(prompt) for case_id, prompt in prompts.items()}
    return [batch.cases for batch in cut_missing(lengths, set(), size=size, repeats=1)]
