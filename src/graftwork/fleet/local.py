"""This machine as a place: a job is a child process.

In: a Job. Out: a running child whose output goes to `worker.log` in the job's folder, and which is
asked to stop when its parent dies. Does not restart anything: that is the supervisor's business.
"""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from graftwork.files.disk import append_to, make_folder
from graftwork.process.worker import PARENT_VARIABLE, WORKER_ENVIRONMENT, compiled_cache
from graftwork.records.job import Job, Place

PLACE = Place(name="local", kind="local")
LOG_FILE = "worker.log"


def start(job: Job) -> subprocess.Popen[bytes]:
    """Start the job's module with its arguments: the job's file, where it names no others."""
    folder = Path(job.folder)
    make_folder(folder)
    environment = {
        **WORKER_ENVIRONMENT,
        **compiled_cache(),
        **os.environ,
        **job.environment,
        "PYTHONUNBUFFERED": "1",
        PARENT_VARIABLE: str(os.getpid()),
    }
    with append_to(folder / LOG_FILE) as log:
        return subprocess.Popen(
            [sys.executable, "-m", job.module, *(job.arguments or (job.job_file,))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            # A session of its own: Ctrl-C reaches the parent alone, which then stops the child in order.
            start_new_session=True,
        )


def stop(child: subprocess.Popen[bytes], *, patience: float = 30.0) -> int:
    """Ask the child to stop at its next safe point; end it if it does not."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            end(child)
    return child.wait()


def end(child: subprocess.Popen[bytes]) -> int:
    """End the child at once, and whatever it started: it leads a session of its own."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    return child.wait()


def last_words(folder: Path, *, lines: int = 12) -> str:
    """The end of a worker's log, for whoever must find out why it died."""
    path = folder / LOG_FILE
    if not path.exists():
        return ""
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
