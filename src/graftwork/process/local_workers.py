"""Workers as child processes of this one, and what a supervisor asks of a host of workers.

A worker runs in a process of its own. The job's folder holds all that the two sides exchange: the job file,
the heartbeat, journals, checkpoints, `error.json` and the log. A child is asked to stop when this process
dies. Restarts, alerts and patience belong to the supervisor (`project/supervise.py`). Whole jobs on other
machines are the work of `fleet/`.
"""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from graftwork.files.disk import append_to, make_folder
from graftwork.process.heartbeat import process_state
from graftwork.process.machine import kernel_kills
from graftwork.process.preload import SHARED, ChildProcess, PreloadedWorker
from graftwork.process.worker import PARENT_VARIABLE, WORKER_ENVIRONMENT, compiled_cache
from graftwork.records.fleet import Job, JobStatus

LOG_FILE = "worker.log"
"""In the job's folder: the job's output."""


class WorkerHost(Protocol):
    def submit(self, job: Job) -> str:
        """Start the job. Returns its id."""

    def poll(self, job_id: str, *, seconds: float = 0.0) -> JobStatus:
        """Wait up to `seconds` for the end of the job, and update its heartbeat and journals."""

    def stop(self, job_id: str, *, at_once: bool = False) -> None:
        """Ask the job to stop at its next safe point; or, `at_once`, end it and everything it started."""


def read_log_tail(folder: Path, *, lines: int = 12) -> str:
    """Return the end of a job's log, to explain why it died."""
    path = folder / LOG_FILE
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])


class LocalWorkers:
    def __init__(self) -> None:
        self._children: dict[str, tuple[ChildProcess, int]] = {}

    def warm_up(self, *, further: Sequence[str] = ()) -> None:
        """Import what workers need before they are needed; returns at once. `further` are modules besides the
        libraries, none of which a worker runs as its program.
        """
        SHARED.warm_up(worker_environment(), further=further)

    def submit(self, job: Job) -> str:
        kills = kernel_kills()
        child = start_preloaded(job) or start_child(job)
        job_id = str(child.pid)
        self._children[job_id] = child, kills
        return job_id

    def poll(self, job_id: str, *, seconds: float = 0.0) -> JobStatus:
        child, kills = self._children[job_id]
        try:
            code = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return JobStatus(running=True, process_state=process_state(child.pid))
        return JobStatus(running=False, exit_code=code, memory_kills=kernel_kills() - kills)

    def stop(self, job_id: str, *, at_once: bool = False) -> None:
        child, _ = self._children[job_id]
        if child.poll() is not None:
            return
        if not at_once:
            child.terminate()
            return
        # The child leads a session of its own: its helpers end with it. One that was forked a moment ago
        # has none yet, and no helpers.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(child.pid, signal.SIGKILL)
        child.wait()


def worker_environment() -> dict[str, str]:
    return {
        **WORKER_ENVIRONMENT,
        **compiled_cache(),
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        PARENT_VARIABLE: str(os.getpid()),
    }


def start_preloaded(job: Job) -> PreloadedWorker | None:
    """Start a worker with its imports done; None if that is not possible."""
    make_folder(Path(job.folder))
    environment = {**worker_environment(), **job.environment}
    with append_to(Path(job.folder) / LOG_FILE) as log:
        return SHARED.start(job.module, _arguments(job), environment=environment, log=log)


def start_child(job: Job) -> ChildProcess:
    """Start the job's module as a new interpreter."""
    make_folder(Path(job.folder))
    with append_to(Path(job.folder) / LOG_FILE) as log:
        return subprocess.Popen(
            [sys.executable, "-m", job.module, *_arguments(job)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**worker_environment(), **job.environment},
            # A session of its own: Ctrl-C reaches only the parent, which then stops the child in order.
            start_new_session=True,
        )


def _arguments(job: Job) -> tuple[str, ...]:
    """The job's file, or the arguments that it names."""
    return job.arguments or (job.job_file,)
