"""Answers kept: those of one job, and those of earlier evaluations of the same subject.

Input: a job and its cases. Output: batches of what is missing, cut once and the same after every restart; a
journal of the answers. An answer is kept in a small file named by the hash of the question, so that any
number of processes may read and write; a file that is torn or was changed is ignored. Does not know who
answers.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from graftwork.engines.local import answered_by
from graftwork.evaluate.cases import asked_messages
from graftwork.files.disk import Journal, write_atomic
from graftwork.records.base import fingerprint
from graftwork.records.report import Answer, Case, EvalJob


class KeptAnswers:
    """A folder of answers; without one, nothing is stored and lookups find nothing."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, key: str, *, case_id: str) -> Answer | None:
        """Return the answer, under the name that the case has here."""
        if self._folder is None:
            return None
        try:
            record = json.loads(self._path(key).read_bytes())
            if record["key"] != key or record["hash"] != fingerprint(record["answer"]):
                return None
            answer = Answer.model_validate(record["answer"])
        except (OSError, ValueError, KeyError, TypeError):
            # Gone, torn by a power cut, or of another version: asking again replaces it.
            return None
        return answer.model_copy(update={"case_id": case_id})

    def put(self, key: str, answer: Answer) -> None:
        """Store the first answer; only an unreadable one is replaced."""
        if self._folder is None or self.get(key, case_id=answer.case_id) is not None:
            return
        body = answer.model_dump(mode="json")
        content = json.dumps({"key": key, "hash": fingerprint(body), "answer": body}, ensure_ascii=False)
        # Not waited for: what a power cut takes is found to be torn, and asked again.
        write_atomic(self._path(key), content, durable=False)

    def forget(self, keys: Sequence[str]) -> None:
        if self._folder is not None:
            for key in keys:
                self._path(key).unlink(missing_ok=True)

    def _path(self, key: str) -> Path:
        assert self._folder is not None
        return self._folder / key[:2] / f"{key}.json"


def answer_key(job: EvalJob, case: Case, *, repeat: int = 0) -> str:
    """Hash everything that decides an answer: the subject, the question and the settings. The case's name
    does not count: the same question under another name has the same answer.
    """
    messages = asked_messages(job, case)
    return fingerprint(
        {
            "subject": job.identity,
            "messages": [[message.role, message.content] for message in messages],
            "max_new_tokens": job.max_new_tokens,
            "reasoning": job.reasoning,
            "device": job.device.partition(":")[0],
            "sampling": [job.temperature, job.top_p, job.seed, repeat] if job.temperature > 0 else None,
            "weighed": case.reference if job.perplexity else None,
            # Two engines, or two precisions, differ in their last digits, and a word later in their answers.
            **({"answered_by": answerer} if (answerer := answered_by(job)) is not None else {}),
        }
    )


def repeats_of(job: EvalJob) -> int:
    """Return how often each case is asked: once if every answer would be the same."""
    return job.repeats if job.temperature > 0 else 1


ANSWERS_FILE = "answers.jsonl"
BATCHES_FILE = "batches.jsonl"
PLAN_FILE = "plan.json"
ROUNDS = 4
"""Rounds of a GPU per batch: fewer batch ends mean less time with few rows."""


class CaseBatch(NamedTuple):
    """Cases that are asked together, and which of their repeats this is."""

    repeat: int
    cases: tuple[str, ...]


class AnswerBook:
    """Use one at a time per folder; the worker's lock ensures that."""

    def __init__(self, job: EvalJob, cases: Sequence[Case]) -> None:
        self._job = job
        self._cases = {case.id: case for case in cases}
        self._folder = Path(job.folder)
        self._journal = Journal(self._folder / ANSWERS_FILE)
        self._batches = Journal(self._folder / BATCHES_FILE)
        self._kept = open_kept(job)
        self._there = {(answer.case_id, answer.repeat) for answer in read_answers(self._folder)}

    @property
    def answered(self) -> int:
        return len(self._there)

    @property
    def total(self) -> int:
        if self._job.batches is not None:
            return sum(len(cases) for _, cases in self._job.batches)
        return len(self._cases) * repeats_of(self._job)

    def plan(self, lengths: Mapping[str, int]) -> list[CaseBatch]:
        """Return the batches of this job, as they were cut when it first began."""
        if self._job.batches is not None:
            return [CaseBatch(repeat, cases) for repeat, cases in self._job.batches]
        path = self._folder / PLAN_FILE
        if not path.exists():
            job = self._job
            self._take_over()
            # Several times as many as run at once on a GPU, where ended rows are replaced by the next of the
            # batch. A CPU takes as long for a row alone as for a row among others, and resumes after
            # each batch.
            rounds = ROUNDS if job.device.startswith("cuda") and job.shards == 1 else 1
            size = job.batch_size * rounds
            planned = cut_missing(lengths, self._there, size=size, repeats=repeats_of(job))
            write_atomic(path, json.dumps(planned))
        return [CaseBatch(repeat, tuple(cases)) for repeat, cases in json.loads(path.read_bytes())]

    def open_batches(self, planned: Iterable[CaseBatch]) -> list[CaseBatch]:
        """Return the unfinished batches; a torn one is asked as a whole."""
        return [b for b in planned if not self._there.issuperset((case, b.repeat) for case in b.cases)]

    def write(self, answer: Answer) -> None:
        """Store an answer; the first one counts."""
        key = (answer.case_id, answer.repeat)
        if key in self._there:
            return
        self._journal.append(answer.model_dump(mode="json"))
        self._there.add(key)
        self._kept.put(answer_key(self._job, self._cases[answer.case_id], repeat=answer.repeat), answer)

    def close_batch(self, batch: CaseBatch, *, peak_memory_gib: float) -> None:
        self._batches.append({"rows": len(batch.cases), "peak_memory_gib": peak_memory_gib})

    def peaks(self) -> list[float]:
        return [float(batch["peak_memory_gib"]) for batch in self._batches.read()]

    def copy_from(self, folders: Iterable[Path]) -> None:
        """Copy what other processes answered for this job."""
        for folder in folders:
            for answer in read_answers(folder):
                self.write(answer)
            for batch in Journal(folder / BATCHES_FILE).read():
                self._batches.append(batch)

    def _take_over(self) -> None:
        for case in self._cases.values():
            for repeat in range(repeats_of(self._job)):
                if (case.id, repeat) in self._there:
                    continue
                answer = self._kept.get(answer_key(self._job, case, repeat=repeat), case_id=case.id)
                if answer is not None:
                    self._journal.append(answer.model_copy(update={"repeat": repeat}).model_dump(mode="json"))
                    self._there.add((case.id, repeat))


def open_kept(job: EvalJob) -> KeptAnswers:
    """Open the stored answers of the job's subject; none for one without an identity."""
    return KeptAnswers(Path(job.answers_folder) if job.answers_folder and job.identity else None)


def cut_missing(
    lengths: Mapping[str, int], answered: set[tuple[str, int]], *, size: int, repeats: int
) -> list[CaseBatch]:
    """Batch the missing cases by similar length: little padding, and the same batches every time."""
    batches = []
    for repeat in range(repeats):
        missing = [case for case in lengths if (case, repeat) not in answered]
        ordered = sorted(missing, key=lambda case: (lengths[case], case))
        batches += [CaseBatch(repeat, tuple(ordered[i : i + size])) for i in range(0, len(ordered), size)]
    return batches


def read_answers(folder: Path) -> list[Answer]:
    """Return the answers so far; the first one if a case was answered twice."""
    answers: dict[tuple[str, int], Answer] = {}
    for value in Journal(folder / ANSWERS_FILE).read():
        answer = Answer.model_validate(value)
        answers.setdefault((answer.case_id, answer.repeat), answer)
    return list(answers.values())


def forget_answers(job: EvalJob, cases: Sequence[Case]) -> None:
    """Delete all answers to these cases for this job, here and in the store."""
    for name in (ANSWERS_FILE, BATCHES_FILE, PLAN_FILE):
        (Path(job.folder) / name).unlink(missing_ok=True)
    open_kept(job).forget([answer_key(job, case, repeat=r) for case in cases for r in range(repeats_of(job))])
