"""What those behind the first process read, and how the first gets a whole model back at the end.

The first process alone writes into the run's folder; the others read there what it wrote.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from graftwork.model.adapter_shape import AdapterShape
from graftwork.model.learn import make_trainable, trained_tensors
from graftwork.records.run import TrainJob
from graftwork.train.checkpoint import Checkpoint, latest_good
from graftwork.train.engine import TrainingEngine
from graftwork.train.files import CHECKPOINTS
from graftwork.train.settings import TrainSettings
from graftwork.train.vault import CheckpointStore


class ReadOnlyCheckpointStore(CheckpointStore):
    """Finds what the first process saved, and saves nothing itself."""

    def open(self) -> Checkpoint | None:
        return self._found(*latest_good(self._folder))

    def save(self, checkpoint: Checkpoint) -> None:
        del checkpoint


def open_read_only_store(folder: Path, settings: TrainSettings) -> ReadOnlyCheckpointStore:
    return ReadOnlyCheckpointStore(folder / CHECKPOINTS, keep=settings.keep_checkpoints)


@torch.no_grad()
def gather_model(
    job: TrainJob, engine: TrainingEngine, *, load: Callable[[TrainJob], Any], shape: AdapterShape
) -> Any:
    """The trained model; where it lies in parts, a fresh one in host memory with what was learned."""
    if not engine.crew.shards:
        return engine.model
    learned = engine.learned()
    if engine.crew.rank:
        return None
    fresh = load(job)
    make_trainable(fresh, shape, seed=0)
    for name, tensor in trained_tensors(fresh).items():
        tensor.copy_(learned[name])
    return fresh
