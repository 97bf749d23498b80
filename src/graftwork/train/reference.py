"""Log-probabilities by the model that training starts from, computed once and kept in the run's folder.

In: samples, an engine before its first step. Out: the samples with their reference. A resumed run reads the
file and computes what is missing: its checkpoint is restored later.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graftwork.files.disk import Journal
from graftwork.train.objectives.kto import JudgedOrder
from graftwork.train.objectives.samples import TrainingSample
from graftwork.train.settings import TrainSettings

if TYPE_CHECKING:
    from graftwork.train.engine import TrainingEngine

REFERENCE = "reference.jsonl"
ROWS_TOGETHER = 16


def add_reference(
    samples: Sequence[TrainingSample],
    engine: "TrainingEngine",
    *,
    folder: Path,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> list[TrainingSample]:
    journal = Journal(folder / REFERENCE)
    known = {line["row"]: tuple(line["values"]) for line in journal.read()}
    rows = list({key_of(sample): sample for sample in samples}.items())
    for at in range(0, len(rows), ROWS_TOGETHER):
        # The rows that share a pass can change the last bit: a resumed run has the same ones together.
        some = rows[at : at + ROWS_TOGETHER]
        if all(key in known for key, _ in some):
            continue
        progress(at, len(rows))
        for (key, _), values in zip(some, engine.log_probabilities([row for _, row in some]), strict=True):
            if key in known:
                # Computed next to other rows before: a resumed run must find the same bits.
                continue
            known[key] = tuple(values.float().tolist())
            journal.append({"row": key, "values": list(known[key])})
    return [sample.model_copy(update={"reference": known[key_of(sample)]}) for sample in samples]


def open_judged(
    samples: Sequence[TrainingSample],
    engine: "TrainingEngine",
    settings: TrainSettings,
    *,
    folder: Path,
    progress: Callable[..., None],
) -> JudgedOrder:
    """The batch source of KTO: replies, and prompts with the replies of others, by the model of the start."""

    def add(rows: Sequence[TrainingSample]) -> list[TrainingSample]:
        return add_reference(rows, engine, folder=folder, progress=lambda _done, _all: progress("reference"))

    def now(rows: Sequence[TrainingSample]) -> list[float]:
        found = []
        for at in range(0, len(rows), ROWS_TOGETHER):
            values = engine.log_probabilities(rows[at : at + ROWS_TOGETHER])
            found += [float(value.float().sum()) for value in values]
        return found

    def start(rows: Sequence[TrainingSample]) -> list[float]:
        return [sum(known[key_of(row)]) for row in rows]

    judged = add(samples)
    order = JudgedOrder(judged, settings=settings, now=now, start=start)
    crossed = [row for step in range(1, order.steps + 1) for row in order.mismatched(step)]
    known = {key_of(row): row.reference or () for row in add(crossed)}
    return order


class StartWeights:
    """The trained tensors as they are before the first step; log-probabilities by them at any later time.

    Values are exchanged in place: the tensors keep their addresses, and no second model is held.
    """

    def __init__(self, engine: "TrainingEngine") -> None:
        self._engine = engine
        self._start = {name: tensor.detach().clone() for name, tensor in engine.learned().items()}

    def log_probabilities(self, rows: Sequence[TrainingSample]) -> list[tuple[float, ...]]:
        import torch

        learned = self._engine.learned()
        kept = {name: tensor.detach().clone() for name, tensor in learned.items()}
        with torch.no_grad():
            try:
                for name, tensor in learned.items():
                    tensor.copy_(self._start[name])
                found = self._engine.log_probabilities(rows)
            finally:
                for name, tensor in learned.items():
                    tensor.copy_(kept[name])
        return [tuple(values.float().tolist()) for values in found]


def key_of(sample: TrainingSample) -> str:
    return hashlib.sha256(repr((sample.tokens, sample.trained_from)).encode()).hexdigest()[:24]
