"""A run's folder: the names of its files, its journal of steps, what was done again after a crash."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from graftwork.files.disk import Journal, write_atomic
from graftwork.process.worker import ERROR_FILE
from graftwork.records.errors import EnvironmentFailure
from graftwork.records.run import TrainJob, TrainStep

ATTEMPTS = "attempts.jsonl"
MESSAGES = "messages.jsonl"
STEPS = "steps.jsonl"
CHECKPOINTS = "checkpoints"
OUTCOME = "outcome.json"
REHEARSED = "rehearsed"
ADAPTER = "adapter"
EVALUATIONS = "evaluations.jsonl"
TRACKED = "tracked"
PAGE = "training.html"
SAVED = "saved.jsonl"
REPLANNED = "replanned.json"


COPIED_FILES = (EVALUATIONS, TRACKED)


class StepLog:
    """The journal as the loop writes it. If the disk is full, lines wait for the next write."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder / STEPS)
        self._waiting: list[TrainStep] = []
        self._full = False

    def add(self, step: TrainStep) -> None:
        """Queue a line, which `flush` writes."""
        self._waiting.append(step)

    def flush(self) -> str | None:
        """Write the queued lines; returns a message if that failed."""
        try:
            while self._waiting:
                self._journal.append(self._waiting[0].model_dump())
                self._waiting.pop(0)
        except EnvironmentFailure as error:
            # One message each time that it begins, not one per step.
            first, self._full = not self._full, True
            return f"the journal takes no lines: {error.what}; they are written later" if first else None
        self._full = False
        return None

    def copy(self) -> bytes:
        """The current journal as text, stored in a checkpoint."""
        return self._journal.path.read_bytes() if self._journal.path.exists() else b""

    def restore(self, copied: bytes) -> None:
        """Restore the journal if it was lost, at a new place that has only the checkpoint."""
        if not self._journal.path.exists() and copied:
            write_atomic(self._journal.path, copied)


def read_journal(folder: Path) -> list[TrainStep]:
    """Every step as it was executed, including those repeated after a crash."""
    return [TrainStep.model_validate(line) for line in Journal(folder / STEPS).read()]


def read_steps(folder: Path) -> list[TrainStep]:
    """The last record of each step, in order."""
    steps = {step.step: step for step in read_journal(folder)}
    return [steps[number] for number in sorted(steps)]


def mean_measures(steps: Sequence[TrainStep]) -> dict[str, float]:
    """The mean of each metric over the steps that have it."""
    values: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.measures.items():
            values.setdefault(name, []).append(value)
    return {name: sum(series) / len(series) for name, series in values.items()}


def find_replay(journal: Iterable[TrainStep]) -> tuple[int, bool] | None:
    """How many steps were repeated because of a crash, over all attempts, and whether each repetition gave
    the same result; None if nothing was. Loss and gradient are compared bit by bit every time, the weights if
    both have a digest.
    """
    times: dict[int, list[TrainStep]] = defaultdict(list)
    for step in journal:
        times[step.step].append(step)
    repeated = [same for same in times.values() if len(same) > 1]
    if not repeated:
        return None
    # Not a number is not equal to itself, but written twice it is the same outcome.
    outcomes = [{(repr(step.loss), repr(step.gradient_norm)) for step in same} for same in repeated]
    weights = [{step.weights for step in same if step.weights} for same in repeated]
    identical = max(map(len, outcomes)) == 1 and max(map(len, weights)) <= 1
    return sum(len(same) - 1 for same in repeated), identical


def is_settled(job: TrainJob) -> bool:
    folder = Path(job.folder)
    return (folder / OUTCOME).exists() or (folder / ERROR_FILE).exists()


def failure_of(job: TrainJob) -> dict[str, object] | None:
    """The reason of the failure; None if it is done, or still open."""
    path = Path(job.folder) / ERROR_FILE
    if (Path(job.folder) / OUTCOME).exists() or not path.exists():
        return None
    failure: dict[str, object] = json.loads(path.read_text())
    return failure
