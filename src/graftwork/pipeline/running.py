"""Which run is meant, and who works on it now.

In: an open workplace and, perhaps, the beginning of a run's id. Out: the run, and the processes that
hold its locks. Changes nothing but where it says so.
"""

import os
import signal
from pathlib import Path
from typing import NamedTuple

from graftwork.pipeline.workplace import Workplace, now
from graftwork.process.worker import lock_holder
from graftwork.records.errors import EnvironmentLacks, StoppedInOrder, UserMistake
from graftwork.store.runs import RunEntry


class AtWork(NamedTuple):
    """Process ids; None where nobody is. The supervisor holds the project, the worker its run."""

    supervisor: int | None
    worker: int | None

    def __bool__(self) -> bool:
        return self.supervisor is not None or self.worker is not None


def find_run(work: Workplace, asked: str | None = None) -> RunEntry | None:
    """The run whose id begins so; without one that which is at work, or the one last changed."""
    runs = work.runs.list()
    if asked is None:
        newest_first = sorted(runs, key=lambda run: run.updated_at, reverse=True)
        return min(newest_first, key=lambda run: run.state != "running", default=None)
    found = [run for run in runs if run.id.startswith(asked)]
    if len(found) != 1:
        raise UserMistake(
            f"there is no run {asked}" if not found else f"several runs begin with {asked}",
            why=f"runs: {', '.join(run.id for run in found or runs) or 'none yet'}",
            fix="`graft status` names the runs",
            where="--run",
        )
    return found[0]


def at_work(work: Workplace, run: RunEntry | None) -> AtWork:
    """Who works on the project, and on this run of it, now."""
    return AtWork(
        supervisor=lock_holder(work.project.state / "pipeline"),
        worker=lock_holder(Path(run.folder)) if run is not None else None,
    )


def ask_to_stop(busy: AtWork) -> None:
    """The supervisor stops its worker in good order; a worker without one stops by itself."""
    _send(busy.supervisor if busy.supervisor is not None else busy.worker, signal.SIGTERM)


def end_at_once(work: Workplace, run: RunEntry | None, busy: AtWork) -> None:
    """Kill both, the supervisor first: it would start the worker again. The store is told."""
    _send(busy.supervisor, signal.SIGKILL)
    if busy.worker is not None:
        _send(busy.worker, signal.SIGKILL, group=True)
    if run is not None and run.state == "running":
        ended = StoppedInOrder(
            "ended at once, as asked", fix="run the same command again: it goes on from the last checkpoint"
        )
        work.runs.update(run.id, state="stopped", when=now(), error=ended.as_json())


def _send(pid: int | None, number: signal.Signals, *, group: bool = False) -> None:
    if pid is None:
        return
    if pid <= 0:
        raise EnvironmentLacks(
            "who works here cannot be told", why="its lock names no process", fix="try again in a moment"
        )
    try:
        # A worker leads a session of its own: its helpers end with it.
        if group and os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)
    except ProcessLookupError:
        return
    except PermissionError as error:
        raise EnvironmentLacks(
            f"process {pid} belongs to somebody else",
            why="only its owner may stop it",
            fix="ask them, or do it as that user",
        ) from error
