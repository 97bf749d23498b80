"""Watch a child process to its end: pass on its heartbeat, restart it after a crash, stop it in order.

In: a job and how often it may be restarted. Out: nothing, or the error that the worker left. A
worker that was killed is started again and goes on from its own last good point; one that says
what is wrong is believed.
"""

import json
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

from graftwork.coordinate.narrator import Narrator
from graftwork.files.whole import write_whole
from graftwork.fleet import local
from graftwork.process.heartbeat import read_beat
from graftwork.process.worker import ERROR_FILE
from graftwork.records import errors
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, Interrupted, StoppedInOrder, WorkerFailed
from graftwork.records.job import Job

POLL_SECONDS = 0.25
JOB_FILE = "job.json"


def run_job(
    *,
    name: str,
    module: str,
    job: Record,
    folder: Path,
    narrator: Narrator,
    max_restarts: int = 3,
    on_poll: Callable[[], None] | None = None,
) -> int:
    """Run the worker until it is done; how often it had to be restarted."""
    write_whole(folder / JOB_FILE, job.to_json())
    order = Job(name=name, module=module, job_file=str(folder / JOB_FILE), folder=str(folder))
    attempt = 0
    while (code := _watch(local.start(order), folder, narrator, on_poll)) != errors.EXIT_DONE:
        _raise_what_it_said(code, folder, name)
        # Who was killed is started again; a fault of the program would only come again, so once.
        if attempt >= (max_restarts if code < 0 else min(max_restarts, 1)):
            raise _given_up(name, code, folder, crashes=attempt + 1)
        narrator.word(f"{name} {_cause(code)}; starting it again from its last good point")
        # Wait a little longer each time: a machine in trouble needs air.
        threading.Event().wait(min(0.5 * 2**attempt, 30.0))
        attempt += 1
    return attempt


def _given_up(name: str, code: int, folder: Path, *, crashes: int) -> WorkerFailed:
    return WorkerFailed(
        f"{name} crashed {crashes} time(s); the last time it {_cause(code)}",
        why=local.last_words(folder) or "it left no output",
        fix="look at the log; what was done so far is kept, the same command goes on from there",
        where=str(folder / local.LOG_FILE),
    )


def _watch(
    child: subprocess.Popen[bytes], folder: Path, narrator: Narrator, on_poll: Callable[[], None] | None
) -> int:
    try:
        while True:
            try:
                return child.wait(timeout=POLL_SECONDS)
            except subprocess.TimeoutExpired:
                _pass_on(child.pid, folder, narrator)
                if on_poll is not None:
                    on_poll()
    except KeyboardInterrupt as interrupt:
        narrator.word("stopping in good order; press Ctrl-C again to end it at once")
        try:
            local.stop(child)
        except KeyboardInterrupt:
            child.kill()
            child.wait()
        raise Interrupted(
            "interrupted", fix="run the same command again: it goes on from the last good point"
        ) from interrupt
    finally:
        if child.poll() is None:
            local.stop(child)
        if on_poll is not None:
            on_poll()


def _pass_on(pid: int, folder: Path, narrator: Narrator) -> None:
    beat = read_beat(folder)
    if beat is not None and beat.pid == pid:
        narrator.progress(
            beat.phase, beat.done, beat.total, seconds_left=beat.seconds_left, detail=beat.detail
        )


def _raise_what_it_said(code: int, folder: Path, name: str) -> None:
    """An expected error is passed on as it is; a crash is left to the caller."""
    if code == errors.EXIT_RESUME_ME:
        raise StoppedInOrder(
            f"{name} was stopped in good order", fix="run the same command again: it goes on from here"
        )
    path = folder / ERROR_FILE
    if code > 0 and path.exists():
        said = json.loads(path.read_text())
        kind = getattr(errors, said["error"], None)
        known = kind if isinstance(kind, type) and issubclass(kind, GraftError) else None
        for candidate in (errors.AnswerIsNo, errors.UserMistake, errors.EnvironmentLacks):
            if known is None and candidate.exit_code == said["exit_code"]:
                known = candidate
        raise (known or WorkerFailed)(said["what"], why=said["why"], fix=said["fix"], where=said["where"])


def _cause(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
