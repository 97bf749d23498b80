"""What every place offers: `Place`.

A place runs a job in a process of its own, here or on another machine. The job's folder holds all that the
two sides exchange: the job file, the heartbeat, journals, checkpoints, `error.json` and the log. Restarts,
alerts and patience belong to the supervisor (`pipeline/supervise.py`).
"""

from pathlib import Path
from typing import Protocol

from graftwork.records.hardware import Offer
from graftwork.records.job import Job, JobHandle, JobStatus

LOG_FILE = "worker.log"
"""In the job's folder: all that the job prints."""


class Place(Protocol):
    name: str

    def offer(self) -> tuple[Offer, ...]:
        """The machines that can be had now, with their prices."""

    def submit(self, job: Job) -> JobHandle:
        """Start the job. A place that bills by time must be able to find it again by its name."""

    def poll(self, handle: JobHandle, *, seconds: float = 0.0) -> JobStatus:
        """Wait up to `seconds` for the end of the job, and bring its heartbeat and journals up to date."""

    def fetch(self, handle: JobHandle) -> None:
        """Bring all files of the job into its folder here. Called once it has ended."""

    def stop(self, handle: JobHandle, *, at_once: bool = False) -> None:
        """Ask the job to stop at its next safe point; or end it, and all that it started, `at_once`."""

    def list(self) -> tuple[JobHandle, ...]:
        """The jobs of ours that this place still runs."""


def read_log_tail(folder: Path, *, lines: int = 12) -> str:
    """Return the end of a job's log, to explain why it died."""
    path = folder / LOG_FILE
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
