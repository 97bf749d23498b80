"""The process that trains several runs: `python -m graftwork.pipeline.training_batch BATCH_FILE`.

In: a TrainBatch. Out: what each run's own process would leave, its looks at generated answers included.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graftwork.pipeline.training_process import make_examiner
from graftwork.process.worker import run_worker
from graftwork.records.run import TrainBatch, TrainJob
from graftwork.text.redact import hide_in_tracebacks
from graftwork.train.many import train_many
from graftwork.train.worker import train


def _train(job: TrainJob, load: Callable[[TrainJob], Any], crew: Any) -> None:
    train(job, load=load, examiner=make_examiner(job), crew=crew)


def work(batch: TrainBatch) -> None:
    train_many(batch, _train)


if __name__ == "__main__":
    hide_in_tracebacks()
    sys.exit(run_worker(TrainBatch, lambda batch: Path(batch.folder), work))
