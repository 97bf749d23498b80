"""Watch a child process to its end: pass on its heartbeat, restart it after a crash, stop it in order.

In: a job and how often it may be restarted. Out: nothing, or the error that the worker left. A
worker that was killed is started again and goes on from its own last good point; one that says
what is wrong is believed; one that ran out of memory gets another job, where the caller knows one.
"""

import json
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from graftwork.files.whole import write_whole
from graftwork.fleet import local
from graftwork.pipeline.reporter import Reporter
from graftwork.pipeline.restarts import Restarts
from graftwork.process import clock
from graftwork.process.exhausted import killed_for_memory
from graftwork.process.heartbeat import read_beat
from graftwork.process.memory import kernel_kills
from graftwork.process.stopping import how_it_ended
from graftwork.process.worker import ERROR_FILE
from graftwork.records import errors
from graftwork.records.base import Record
from graftwork.records.errors import (
    AnswerIsNo,
    EnvironmentLacks,
    GraftError,
    Interrupted,
    OutOfMemory,
    StoppedInOrder,
    UserMistake,
    WorkerFailed,
)
from graftwork.records.job import AlertKind, Beat, Job
from graftwork.text.publish import publish_text

POLL_SECONDS = 0.25
JOB_FILE = "job.json"
STOP_SECONDS = 30.0
FRESH_SECONDS = 60.0
"""A heartbeat older than this says nothing about now; it comes every two seconds, on a busy disk later."""
SAVING = "checkpoint"
"""What a heartbeat says is done while a checkpoint is not safe yet, here or at the mirror."""


class Watching(Protocol):
    """Who is told of what happens to the worker: a Vigil, over one run or over those of a batch."""

    @property
    def expected_seconds(self) -> float:
        """What the plan expected a step to take."""

    def look(self, pid: int) -> None: ...

    def tell(self, kind: AlertKind, what: str, *, why: str = "", fix: str = "") -> None: ...

    def ended(self) -> None: ...


def run_job(
    *,
    name: str,
    module: str,
    job: Record,
    folder: Path,
    reporter: Reporter,
    max_restarts: int = 3,
    on_poll: Callable[[], None] | None = None,
    vigil: Watching | None = None,
    on_out_of_memory: Callable[[OutOfMemory], Record | None] | None = None,
    arguments: tuple[str, ...] = (),
    on_start: Callable[[], None] = lambda: None,
    at_work: Callable[[], Sequence[Path]] | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Run the worker until it is done; how often it had to be restarted.

    `on_out_of_memory` gives the job to go on with instead, or None where there is no smaller one.
    `at_work` names the folders whose heartbeats say how far the worker is, where not its own does.
    `environment` is what the worker needs and no file may hold: secrets.
    """
    watcher = _Watcher(name, folder, reporter, on_poll, vigil, at_work or (lambda: (folder,)))
    order = Job(
        name=name,
        module=module,
        job_file=str(folder / JOB_FILE),
        folder=str(folder),
        arguments=arguments,
        environment=dict(environment or {}),
    )
    restarts = Restarts(most=max_restarts)
    write_whole(folder / JOB_FILE, job.to_json())
    try:
        while (code := watcher.attempt(order, on_start)) != errors.EXIT_DONE:
            smaller = _job_that_fits(watcher.exhaustion(code), on_out_of_memory)
            if smaller is not None:
                write_whole(folder / JOB_FILE, smaller.to_json())
                continue
            _raise_what_it_said(code, folder, name)
            pause = restarts.after_crash(code, done=watcher.furthest)
            if pause is None:
                raise _given_up(name, code, folder, crashes=restarts.in_a_row)
            watcher.tell_restart(code, pause)
            _wait(pause)
    except (StoppedInOrder, Interrupted):
        raise
    except GraftError as failure:
        if vigil is not None:
            vigil.tell("failed", failure.what, why=failure.why, fix=failure.fix)
        raise
    return restarts.total


class _Watcher:
    """One worker after the other in the same folder."""

    def __init__(
        self,
        name: str,
        folder: Path,
        reporter: Reporter,
        on_poll: Callable[[], None] | None,
        vigil: Watching | None,
        at_work: Callable[[], Sequence[Path]],
    ) -> None:
        self._name, self._folder, self._reporter = name, folder, reporter
        self._on_poll, self._vigil, self._at_work = on_poll, vigil, at_work
        self._kills = 0
        self._done: dict[Path, float] = {}

    @property
    def furthest(self) -> float:
        """How far it has ever come, over all that it was at."""
        return sum(self._done.values())

    def attempt(self, order: Job, on_start: Callable[[], None]) -> int:
        """Start the worker and watch it to its end; its exit code."""
        self.begin()
        (self._folder / ERROR_FILE).unlink(missing_ok=True)
        on_start()
        code = self._watch(local.start(order))
        self._beats()
        if self._vigil is not None:
            self._vigil.ended()
        return code

    def begin(self) -> None:
        """From here on a heartbeat is the next worker's."""
        self._begun, self._kills = clock.now(), kernel_kills()

    def exhaustion(self, code: int) -> OutOfMemory | None:
        """Whether the worker that ended so ran out of memory: by its own words, or by the evidence."""
        said = _read_error(self._folder) if code > 0 else None
        if said is not None and said["error"] == OutOfMemory.__name__:
            return OutOfMemory(
                said["what"], why=said["why"], fix=said["fix"], where=said["where"], figures=said["figures"]
            )
        beat = self._own_beat()
        kills = kernel_kills() - self._kills
        return killed_for_memory(code, kills=kills, vitals=beat.vitals if beat else None)

    def tell_restart(self, code: int, pause: float) -> None:
        words = f"{self._name} {_cause(code)}; starting it again from its last good point"
        if pause > 2:
            words += f" in {pause:.0f} s"
        if self._vigil is not None:
            self._vigil.tell("restarted", words)
        else:
            self._reporter.info(words)

    def _watch(self, child: subprocess.Popen[bytes]) -> int:
        try:
            while True:
                try:
                    return child.wait(timeout=POLL_SECONDS)
                except subprocess.TimeoutExpired:
                    self._poll(child.pid)
        except KeyboardInterrupt as interrupt:
            self._reporter.info("stopping in good order; press Ctrl-C again to end it at once")
            try:
                self._stop(child)
            except KeyboardInterrupt:
                local.end(child)
            raise how_it_ended() from interrupt
        finally:
            if child.poll() is None:
                self._stop(child)
            if self._on_poll is not None:
                self._on_poll()

    def _stop(self, child: subprocess.Popen[bytes]) -> None:
        """Ask it to stop, and end it only if it neither does nor writes a checkpoint still."""
        child.terminate()
        usual = until = time.monotonic() + self._patience()
        told = False
        while (now := time.monotonic()) < until or self._is_saving():
            if self._is_saving():
                # What is saved must still find its way out.
                until = max(until, now + STOP_SECONDS)
                if now >= usual and not told:
                    told = True
                    self._reporter.info(f"{self._name} is stopping: waiting for its checkpoint to be safe")
            try:
                child.wait(timeout=POLL_SECONDS)
            except subprocess.TimeoutExpired:
                continue
            return
        local.end(child)

    def _poll(self, pid: int) -> None:
        self._beats()
        beat = self._own_beat()
        if beat is not None:
            self._reporter.progress(
                beat.phase, beat.done, beat.total, seconds_left=beat.seconds_left, detail=self._detail(beat)
            )
        if self._vigil is not None:
            self._vigil.look(pid)
        if self._on_poll is not None:
            self._on_poll()

    def _detail(self, beat: Beat) -> dict[str, float | str]:
        """What a person wants to see beside the bar: memory, and what the plan expected."""
        detail = dict(beat.detail)
        if beat.doing:
            detail["doing"] = beat.doing
        if beat.vitals is not None:
            used = [device.memory_gib for device in beat.vitals.devices if device.memory_gib is not None]
            detail["memory_gib"] = sum(used) if used else beat.vitals.memory_gib
        if self._vigil is not None:
            detail["expected_step_seconds"] = self._vigil.expected_seconds
        return detail

    def _own_beat(self) -> Beat | None:
        return self._beat_in(self._folder)

    def _beats(self) -> list[Beat]:
        """Of all that is at work; how far each has come is remembered."""
        found = []
        for folder in self._at_work():
            beat = self._beat_in(folder)
            if beat is not None:
                self._done[folder] = max(self._done.get(folder, 0.0), beat.done)
                found.append(beat)
        return found

    def _beat_in(self, folder: Path) -> Beat | None:
        """The heartbeat, if it is not what the worker before this one left."""
        beat = read_beat(folder)
        own = beat is not None and clock.seconds_between(self._begun, beat.start) >= 0
        return beat if own else None

    def _patience(self) -> float:
        """A step must find its end, however long it takes."""
        steps = [float(beat.detail.get("step_seconds", 0.0)) for beat in self._beats()]
        return STOP_SECONDS + 5 * max(steps, default=0.0)

    def _is_saving(self) -> bool:
        return any(
            beat.doing == SAVING and clock.seconds_since(beat.moment) < FRESH_SECONDS
            for beat in self._beats()
        )


def _job_that_fits(
    exhausted: OutOfMemory | None, on_out_of_memory: Callable[[OutOfMemory], Record | None] | None
) -> Record | None:
    return on_out_of_memory(exhausted) if exhausted is not None and on_out_of_memory is not None else None


def _wait(seconds: float) -> None:
    try:
        threading.Event().wait(seconds)
    except KeyboardInterrupt as interrupt:
        raise how_it_ended() from interrupt


def _given_up(name: str, code: int, folder: Path, *, crashes: int) -> WorkerFailed:
    return WorkerFailed(
        f"{name} crashed {crashes} time(s) without progress; the last time it {_cause(code)}",
        why=publish_text(local.last_words(folder)) or "it left no output",
        fix="look at the log; what was done so far is kept, the same command goes on from there",
        where=str(folder / local.LOG_FILE),
    )


def _raise_what_it_said(code: int, folder: Path, name: str) -> None:
    """An expected error is passed on as it is; a crash is left to the caller."""
    if code == errors.EXIT_RESUME_ME and _read_error(folder) is None:
        raise StoppedInOrder(
            f"{name} was stopped in good order", fix="run the same command again: it goes on from here"
        )
    said = _read_error(folder) if code > 0 else None
    if said is None:
        return
    kind = getattr(errors, said["error"], None)
    known = kind if isinstance(kind, type) and issubclass(kind, GraftError) else None
    for candidate in (AnswerIsNo, UserMistake, EnvironmentLacks, StoppedInOrder, Interrupted):
        if known is None and candidate.exit_code == said["exit_code"]:
            known = candidate
    raise (known or WorkerFailed)(said["what"], why=said["why"], fix=said["fix"], where=said["where"])


def _read_error(folder: Path) -> dict[str, Any] | None:
    path = folder / ERROR_FILE
    if not path.exists():
        return None
    said: dict[str, Any] = json.loads(path.read_text())
    return said


def _cause(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
