"""Answers by what was asked: a second evaluation of the same subject costs nothing.

In: a question as a subject gets it, and its answer. Out: the same answer, later, to whoever asks the same
subject the same with the same settings; nothing for a file that is torn or was changed. One small file an
answer, named by the hash of the question: any number of processes may write and read at once. Does not
know who answers.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from graftwork.evaluate.cases import insert_example
from graftwork.files.disk import write_atomic
from graftwork.records.base import fingerprint
from graftwork.records.report import Answer, Case, EvalJob


class KeptAnswers:
    """A folder of answers; without one, nothing is kept and nothing is found."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def get(self, key: str, *, case_id: str) -> Answer | None:
        """The answer, under the name that the case has here."""
        if self._folder is None:
            return None
        try:
            kept = json.loads(self._path(key).read_bytes())
            if kept["key"] != key or kept["hash"] != fingerprint(kept["answer"]):
                return None
            answer = Answer.model_validate(kept["answer"])
        except (OSError, ValueError, KeyError, TypeError):
            # Gone, torn by a power cut, or of another version: asking again mends it.
            return None
        return answer.model_copy(update={"case_id": case_id})

    def put(self, key: str, answer: Answer) -> None:
        """Keep the first answer; only one that cannot be read any more is replaced."""
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


def key_of(job: EvalJob, case: Case, *, repeat: int = 0) -> str:
    """The hash of all that decides an answer: who, what was asked, and how.

    The case's own name does not: the same question under another name has the same answer.
    """
    asked = insert_example(case.messages, example=job.worked_example)
    return fingerprint(
        {
            "subject": job.identity,
            "messages": [[message.role, message.content] for message in asked],
            "max_new_tokens": job.max_new_tokens,
            "reasoning": job.reasoning,
            "device": job.device.partition(":")[0],
            "sampling": [job.temperature, job.top_p, job.seed, repeat] if job.temperature > 0 else None,
            "weighed": case.reference if job.perplexity else None,
            # Two engines, or two precisions, differ in their last digits, and a word later in their answers.
            **({"answered_by": [job.engine, job.precision]} if job.endpoint is None else {}),
        }
    )


def repeats_of(job: EvalJob) -> int:
    """How often each case is asked: once where every answer would be the same."""
    return job.repeats if job.temperature > 0 else 1
