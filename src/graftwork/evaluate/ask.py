"""Cases asked in batches, every answer kept as soon as it is there.

In: cases, a way to turn messages into tokens and one to generate. Out: answers in a journal, then the
time of single requests. A worker that was killed goes on behind the last whole batch: batches are cut
the same way every time, so that what is asked again comes out the same. Knows neither torch nor HTTP.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, Protocol

from graftwork.evaluate.cases import insert_example
from graftwork.files.journal import Journal
from graftwork.records.errors import StoppedInOrder
from graftwork.records.interaction import Message
from graftwork.records.report import Answer, Case, EvalJob, Generation

ANSWERS_FILE = "answers.jsonl"
BATCHES_FILE = "batches.jsonl"


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


Generate = Callable[[list[list[int]]], Sequence[Said]]


class Asker:
    """Asks all cases of one job with one model."""

    def __init__(
        self,
        job: EvalJob,
        *,
        turns: Turns,
        generate: Generate,
        progress: Progress,
        peak_memory_gib: Callable[[], float],
        stop_asked: Callable[[], bool],
    ) -> None:
        self._job = job
        self._turns = turns
        self._generate = generate
        self._progress = progress
        self._peak_memory_gib = peak_memory_gib
        self._stop_asked = stop_asked
        self._answers = Journal(Path(job.folder) / ANSWERS_FILE)
        self._batches = Journal(Path(job.folder) / BATCHES_FILE)
        self._warm = False

    def ask_all(self, cases: Sequence[Case]) -> None:
        """Answer every case that has no answer yet."""
        prompts = {case.id: self._prompt(case) for case in cases}
        answered = {answer.case_id for answer in read_answers(Path(self._job.folder))}
        began, asked_before = time.monotonic(), len(answered)
        self._tell("answering", len(answered), len(cases))
        for batch in cut_batches(prompts, size=self._job.batch_size):
            if answered.issuperset(batch):
                continue
            self._stop_if_asked(f"{len(answered)} of {len(cases)} cases are answered")
            for answer in self._ask([(case_id, prompts[case_id]) for case_id in batch]):
                if answer.case_id not in answered:
                    self._answers.append(answer.model_dump(mode="json"))
                    answered.add(answer.case_id)
            self._batches.append({"rows": len(batch), "peak_memory_gib": self._peak_memory_gib()})
            pace = (time.monotonic() - began) / (len(answered) - asked_before)
            self._tell("answering", len(answered), len(cases), left=pace * (len(cases) - len(answered)))

    def time_single(self, cases: Sequence[Case]) -> tuple[float, ...]:
        """Seconds of one request at a time, as a user would wait for it."""
        seconds: list[float] = []
        chosen = [self._prompt(case) for case in cases[: self._job.latency_cases]]
        if chosen and not self._warm:
            # The first pass of a process pays for lazy initialisation; no user's request does.
            self._generate([chosen[0]])
        for prompt in chosen:
            self._stop_if_asked("all cases are answered, single requests are being timed")
            began = time.perf_counter()
            self._generate([prompt])
            seconds.append(time.perf_counter() - began)
            self._tell("timing single requests", len(seconds), len(chosen))
        return tuple(seconds)

    def summarise(self, *, single_latency_seconds: tuple[float, ...]) -> Generation:
        answers = read_answers(Path(self._job.folder))
        seconds = sum(answer.seconds for answer in answers)
        peaks = [float(batch["peak_memory_gib"]) for batch in self._batches.read()]
        return Generation(
            subject=self._job.subject,
            answers=len(answers),
            seconds=seconds,
            tokens_per_second=sum(a.tokens for a in answers) / seconds if seconds else 0.0,
            single_latency_seconds=single_latency_seconds,
            peak_memory_gib=max([*peaks, self._peak_memory_gib()]),
            settings={
                "decoding": "greedy",
                "max_new_tokens": self._job.max_new_tokens,
                "batch_size": self._job.batch_size,
                "threads": self._job.threads,
                "worked_example": bool(self._job.worked_example),
            },
        )

    def _ask(self, batch: Sequence[tuple[str, list[int]]]) -> list[Answer]:
        began = time.perf_counter()
        said = self._generate([prompt for _, prompt in batch])
        share = (time.perf_counter() - began) / len(batch)
        self._warm = True
        return [
            Answer(
                case_id=case_id,
                text=self._turns.decode(list(reply.tokens)),
                tokens=len(reply.tokens),
                prompt_tokens=len(prompt),
                finish_reason=reply.finish_reason,
                seconds=share,
            )
            for (case_id, prompt), reply in zip(batch, said, strict=True)
        ]

    def _prompt(self, case: Case) -> list[int]:
        return self._turns.prompt(insert_example(case.messages, example=self._job.worked_example))

    def _tell(self, phase: str, done: int, total: int, *, left: float | None = None) -> None:
        self._progress.beat(phase, done, total, seconds_left=left, subject=self._job.subject)

    def _stop_if_asked(self, reached: str) -> None:
        if self._stop_asked():
            raise StoppedInOrder(
                f"the evaluation of {self._job.subject} was stopped: {reached}",
                fix="run `graft eval` again: it goes on from there",
                where=self._job.folder,
            )


def cut_batches(prompts: dict[str, list[int]], *, size: int) -> list[tuple[str, ...]]:
    """Case ids in batches of like length: little padding, and the same batches every time."""
    ordered = sorted(prompts, key=lambda case_id: (len(prompts[case_id]), case_id))
    return [tuple(ordered[i : i + size]) for i in range(0, len(ordered), size)]


def read_answers(folder: Path) -> list[Answer]:
    """The answers so far; the first one where a case has two."""
    answers: dict[str, Answer] = {}
    for value in Journal(folder / ANSWERS_FILE).read():
        answer = Answer.model_validate(value)
        answers.setdefault(answer.case_id, answer)
    return list(answers.values())
