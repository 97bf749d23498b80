"""Whether a run is settled: done, or failed for a reason that is written down.

In: a job. Out: what its folder says. For whoever trains several runs and whoever watches them; loads
nothing heavy.
"""

import json
from pathlib import Path

from graftwork.process.worker import ERROR_FILE
from graftwork.records.run import TrainJob
from graftwork.train.files import OUTCOME


def is_settled(job: TrainJob) -> bool:
    folder = Path(job.folder)
    return (folder / OUTCOME).exists() or (folder / ERROR_FILE).exists()


def failure_of(job: TrainJob) -> dict[str, object] | None:
    """The reason why it failed; None where it is done, or not settled."""
    path = Path(job.folder) / ERROR_FILE
    if (Path(job.folder) / OUTCOME).exists() or not path.exists():
        return None
    said: dict[str, object] = json.loads(path.read_text())
    return said
