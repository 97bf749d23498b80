"""Episodes on disk: what was sampled and what it was worth, written before any weight changes.

In: answers and verdicts of a batch of rollouts. Out: the same after a crash. Answers are written as one file
once all of a batch are there; verdicts line by line. So no answer is graded twice, and half a batch is never
trained on.
"""

import json
from pathlib import Path

from graftwork.files.disk import Journal, make_folder, write_atomic
from graftwork.records.base import Record

EPISODES = "episodes"


class SampledAnswer(Record):
    """One answer to a prompt. `tokens` ends with the end of turn unless the answer was cut."""

    prompt: str
    answer: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    truncated: bool = False
    canary: bool = False

    @property
    def key(self) -> str:
        return f"{self.prompt}/{self.answer}"


class AnswerVerdict(Record):
    """What an answer was worth. `reward` is None if a reward function failed: the answer does not count."""

    key: str
    reward: float | None
    parts: dict[str, float | None] = {}
    audit: float | None = None
    """The grade by the checks that never reward; None where there are none."""
    failed: dict[str, str] = {}
    """Why a part could not be graded, by its name."""
    seconds: float = 0.0


class EpisodeJournal:
    def __init__(self, folder: Path) -> None:
        self._folder = folder / EPISODES

    def answers(self, batch: int) -> list[SampledAnswer] | None:
        """The answers of a batch; None if they were not all sampled yet."""
        path = self._answers(batch)
        if not path.exists():
            return None
        return [SampledAnswer.model_validate(line) for line in json.loads(path.read_bytes())]

    def write_answers(self, batch: int, answers: list[SampledAnswer]) -> None:
        make_folder(self._folder)
        lines = [answer.model_dump(mode="json") for answer in answers]
        write_atomic(self._answers(batch), json.dumps(lines, ensure_ascii=False))

    def verdicts(self, batch: int) -> dict[str, AnswerVerdict]:
        lines = Journal(self._verdicts(batch)).read()
        return {line["key"]: AnswerVerdict.model_validate(line) for line in lines}

    def write_verdict(self, batch: int, verdict: AnswerVerdict, *, last: bool) -> None:
        """A killed process loses no verdict; with the last one all are on the disk, before any update."""
        Journal(self._verdicts(batch)).append(verdict.model_dump(mode="json"), durable=last)

    def batches(self) -> list[int]:
        """The batches whose answers are on disk."""
        return sorted(int(path.name.partition(".")[0]) for path in self._folder.glob("*.answers.json"))

    def _answers(self, batch: int) -> Path:
        return self._folder / f"{batch:06}.answers.json"

    def _verdicts(self, batch: int) -> Path:
        return self._folder / f"{batch:06}.verdicts.jsonl"
