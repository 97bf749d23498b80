"""A worker without a model, to try out a place: `python -m trial_worker JOB_FILE`.

In: how many steps of how many seconds. Out: `adapter/trial.txt`, a hash over all steps, and `outcome.json`.
Works as training does: heartbeat, a checkpoint at every step, resume, a stop at a safe point. The same job
gives the same bytes however often it was stopped and wherever it went on.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

from graftwork.files.disk import atomic_folder, folder_digest, write_atomic
from graftwork.process.heartbeat import Heart
from graftwork.process.worker import run_worker, stop_asked
from graftwork.records.base import Record
from graftwork.records.errors import GracefulStop
from graftwork.records.fleet import Moment

STATE = "trial.json"


class TrialJob(Record):
    """A chain of hashes, one a step."""

    run_id: str
    folder: str = ""
    base_folder: str = ""
    dataset_folder: str = ""
    start_adapter: str | None = None
    deadline: float | None = None
    deadline_from: Moment | None = None
    steps: int = 3
    step_seconds: float = 0.0
    seed: str = "trial"


def work(job: TrialJob) -> None:
    folder = Path(job.folder)
    checkpoints = folder / "checkpoints"
    step, state = _resume(checkpoints, job.seed)
    with Heart(folder) as heart:
        while step < job.steps:
            heart.beat("trial", step, job.steps)
            late = job.deadline is not None and time.time() >= job.deadline
            if stop_asked.wait(job.step_seconds) or late:
                raise GracefulStop(f"stopped cleanly after step {step}", fix="run the job again to continue")
            step, state = step + 1, hashlib.sha256(state.encode()).hexdigest()
            with atomic_folder(checkpoints / f"step-{step:06d}") as part:
                (part / STATE).write_text(json.dumps({"step": step, "state": state}))
        write_atomic(folder / "adapter" / "trial.txt", state)
        heart.beat("trial", step, job.steps)
    outcome = {"run_id": job.run_id, "adapter_folder": str(folder / "adapter")}
    outcome["adapter_hash"] = folder_digest(folder / "adapter")
    write_atomic(folder / "outcome.json", json.dumps(outcome))


def _resume(checkpoints: Path, seed: str) -> tuple[int, str]:
    last = max(checkpoints.glob("step-*"), default=None)
    if last is None:
        return 0, seed
    saved = json.loads((last / STATE).read_text())
    return saved["step"], saved["state"]


if __name__ == "__main__":
    sys.exit(run_worker(TrialJob, lambda job: Path(job.folder), work))
