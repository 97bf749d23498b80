"""A Slurm array as an engine: its tasks take pieces from a folder that all nodes share.

In: pieces as bytes. Out: one event for each, in order. A piece is taken by renaming its file; that of a task
which ended without finishing it goes back. Works without accounting: states come from `squeue` and files.
"""

import json
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from graftwork.files.disk import write_atomic
from graftwork.process.cluster.pieces import EngineLost, code_stamp
from graftwork.process.cluster.ray_tasks import to_error
from graftwork.records.errors import EnvironmentLacks

TODO, TAKEN, DONE, FAILED = "todo", "taken", "done", "failed"
SHARED, ORDER, CLOSED, ALIVE = "shared.bin", "order.json", "closed", "alive"
WORKER = "graftwork.process.cluster.slurm_task"
WAITING_PER_TASK = 3
POLL_SECONDS = 0.1
QUEUE_SECONDS = 3.0
COMMAND_SECONDS = 60.0
LOST_SECONDS = 60.0
"""So long without an answer of the queue and without a piece: the controller counts as lost."""


@dataclass
class SlurmArray:
    """Implements `PieceRunner`."""

    tasks: int = 4
    options: tuple[str, ...] = ()
    """More options of sbatch."""
    python: str = ""
    minutes: int = 24 * 60
    name: str = "slurm"
    _stopped: threading.Event = field(default_factory=threading.Event, init=False, repr=False, compare=False)

    def stop(self) -> None:
        self._stopped.set()

    def run(
        self, pieces: Iterator[bytes], *, entry: str, shared: bytes, folder: Path
    ) -> Generator[None, None, None]:
        for name in (TODO, TAKEN, DONE, FAILED):
            (folder / name).mkdir()
        write_atomic(folder / SHARED, shared, durable=False)
        write_atomic(folder / ORDER, json.dumps({"entry": entry, "stamp": code_stamp()}), durable=False)
        number = self._submit(folder)
        try:
            queue = _Queue(folder, number, most=self.tasks * WAITING_PER_TASK, stopped=self._stopped)
            yield from queue.run(pieces)
        finally:
            (folder / CLOSED).touch()
            _try("scancel", number)

    def _submit(self, folder: Path) -> str:
        command = [self.python or sys.executable, "-m", WORKER, str(folder)]
        script = f'#!/bin/sh\nexec {shlex.join(command)} "$SLURM_ARRAY_TASK_ID"\n'
        words = ["sbatch", "--parsable", f"--array=0-{self.tasks - 1}", f"--time={self.minutes}", "--requeue"]
        words += ["--job-name=graft-map", "--open-mode=append", f"--output={folder}/task-%a.log"]
        words += ["--export=ALL", "--ntasks=1", "--cpus-per-task=1", *self.options]
        try:
            done = subprocess.run(
                words, input=script, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS
            )
        except OSError as error:
            raise EnvironmentLacks(
                "there is no sbatch on this machine",
                why=str(error.strerror),
                fix="run it on a login node of the cluster, or set `engine: local`",
                where="engine",
            ) from error
        except subprocess.TimeoutExpired:
            raise EngineLost("sbatch does not answer") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no output"])[-1][:300]
            if "ontact" in last:
                raise EngineLost(f"the controller does not answer: {last}")
            raise EnvironmentLacks(
                f"Slurm refuses the array: {last}", fix="check fleet.slurm", where="fleet.slurm"
            )
        return done.stdout.strip().partition(";")[0]


class _Queue:
    """The folder of one map, seen from the command."""

    def __init__(self, folder: Path, number: str, *, most: int, stopped: threading.Event) -> None:
        self._folder, self._number, self._most, self._stopped = folder, number, most, stopped
        self._asked = self._moved = time.monotonic()

    def run(self, pieces: Iterator[bytes]) -> Generator[None, None, None]:
        sent = next_out = 0
        more = True
        while True:
            while more and sent - next_out < self._most:
                piece = next(pieces, None)
                more = piece is not None
                if piece is not None:
                    write_atomic(self._folder / TODO / name_piece(sent), piece, durable=False)
                    sent += 1
            if next_out == sent:
                return
            while (self._folder / DONE / name_piece(next_out)).exists():
                self._moved = time.monotonic()
                next_out += 1
                yield
            self._raise_failure()
            if time.monotonic() - self._asked > QUEUE_SECONDS:
                self._look_after()
            if self._stopped.wait(POLL_SECONDS):
                return

    def _raise_failure(self) -> None:
        for path in sorted((self._folder / FAILED).glob("*.json")):
            raise to_error(json.loads(path.read_text()))

    def _look_after(self) -> None:
        """Say that this command lives, and put back the pieces of tasks that ended."""
        (self._folder / ALIVE).touch()
        self._asked = time.monotonic()
        states = _states(self._number)
        if states is None:
            if time.monotonic() - self._moved > LOST_SECONDS:
                raise EngineLost("the controller does not answer, and no piece was finished")
            return
        if not states:
            raise EngineLost("all tasks of the array have ended")
        for folder in (self._folder / TAKEN).iterdir():
            if states.get(folder.name) not in ("RUNNING", "COMPLETING"):
                put_back(self._folder, folder.name)


def name_piece(number: int) -> str:
    return f"{number:08d}"


def put_back(folder: Path, task: str) -> None:
    """Let another task have what this one had taken."""
    taken = folder / TAKEN / task
    for path in taken.glob("[0-9]*"):
        if not (folder / DONE / path.name).exists():
            path.replace(folder / TODO / path.name)


def _states(number: str) -> dict[str, str] | None:
    """The state of each task in the queue; None if the controller does not answer."""
    text = _try("squeue", "-h", "-r", "-j", number, "-o", "%K %T")
    if text is None:
        return None
    return dict(re.findall(r"^(\S+) (\S+)$", text, re.MULTILINE))


def _try(*words: str) -> str | None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=COMMAND_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return None
    # A job that has left the queue for a while is unknown: it has ended.
    if done.returncode and "nvalid job id" in done.stderr:
        return ""
    return None if done.returncode else done.stdout
