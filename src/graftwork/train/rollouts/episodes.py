"""Episodes on disk: what was sampled and what it was worth, written before any weight changes.

Input: answers and verdicts of a batch of rollouts. Output: the same after a crash. Answers are written as one
file once all of a batch are there; verdicts line by line. So no answer is graded twice, and half a batch is
never trained on.
"""

import json
from pathlib import Path
from typing import Literal

from graftwork.files.disk import Journal, make_folder, write_atomic
from graftwork.grading.rewards import AnswerVerdict
from graftwork.records.base import Record
from graftwork.records.run import AnswerExtremes, GradedAnswer

EPISODES = "episodes"


class EpisodeTurn(Record):
    """One turn of an episode: a reply of the model, or of the environment."""

    by: Literal["model", "environment"]
    text: str


class SampledAnswer(Record):
    """One answer to a prompt. `tokens` ends with the end of turn unless the answer was cut. The answer of an
    episode holds all its turns; its text is that of the last reply."""

    prompt: str
    answer: int
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    truncated: bool = False
    decoy: bool = False
    given: tuple[tuple[int, int], ...] = ()
    """Spans of `tokens` that the environment wrote: not trained, with log-probabilities of 0."""
    turns: tuple[EpisodeTurn, ...] = ()
    environment_reward: float | None = None
    failed: str = ""
    """Why the environment failed; the answer does not count then."""

    @property
    def key(self) -> str:
        return f"{self.prompt}/{self.answer}"

    @property
    def written(self) -> list[bool]:
        """For each token, whether the model wrote it."""
        by_environment = {index for start, end in self.given for index in range(start, end)}
        return [index not in by_environment for index in range(len(self.tokens))]


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


def read_extremes(folder: Path, *, most: int, batches: int) -> AnswerExtremes | None:
    """The best and the worst answers of the last batches of a run; None for a run without rewards."""
    journal = EpisodeJournal(folder)
    numbers = journal.batches()
    graded = []
    for batch in numbers[-batches:]:
        try:
            answers, verdicts = journal.answers(batch) or [], journal.verdicts(batch)
        except (OSError, ValueError, KeyError):
            continue  # a batch that is being written, or that another version wrote
        for answer in answers:
            verdict = verdicts.get(answer.key)
            if verdict is not None and verdict.reward is not None:
                graded.append(
                    GradedAnswer(
                        batch=batch,
                        prompt=answer.prompt,
                        text=answer.text,
                        reward=verdict.reward,
                        parts=verdict.parts,
                        audit=verdict.audit,
                        decoy=answer.decoy,
                    )
                )
    if not graded:
        return None
    ordered = sorted(graded, key=lambda answer: (-answer.reward, answer.batch, answer.prompt))
    return AnswerExtremes(
        batches=len(numbers), best=tuple(ordered[:most]), worst=tuple(reversed(ordered[-most:]))
    )
