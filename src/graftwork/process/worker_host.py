"""What starts the worker processes of a supervisor: `WorkerHost`.

A worker runs in a process of its own. The job's folder holds all that the two sides exchange: the job file,
the heartbeat, journals, checkpoints, `error.json` and the log. Restarts, alerts and patience belong to the
supervisor (`pipeline/supervise.py`). Whole jobs on other machines are the work of `fleet/`.
"""

from pathlib import Path
from typing import Protocol

from graftwork.records.job import Job, JobHandle, JobStatus

LOG_FILE = "worker.log"
"""In the job's folder: all that the job prints."""


class WorkerHost(Protocol):
    name: str

    def submit(self, job: Job) -> JobHandle:
        """Start the job."""

    def poll(self, handle: JobHandle, *, seconds: float = 0.0) -> JobStatus:
        """Wait up to `seconds` for the end of the job, and bring its heartbeat and journals up to date."""

    def fetch(self, handle: JobHandle) -> None:
        """Bring all files of the job into its folder here. Called once it has ended."""

    def stop(self, handle: JobHandle, *, at_once: bool = False) -> None:
        """Ask the job to stop at its next safe point; or end it, and all that it started, `at_once`."""


def read_log_tail(folder: Path, *, lines: int = 12) -> str:
    """Return the end of a job's log, to explain why it died."""
    path = folder / LOG_FILE
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
