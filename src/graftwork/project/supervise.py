"""Supervise a worker at a place to its end: report its heartbeat, restart it after a crash, stop it in order.

Input: a task, a place and how often the worker may be restarted. Output: the number of restarts, or the error
that the worker left. A worker that was killed is started again and continues from its last checkpoint; an
expected error is passed on; one that ran out of memory gets another job where the caller knows a smaller one.
"""

import json
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from graftwork.files.disk import write_atomic
from graftwork.process import clock
from graftwork.process.alert import Alarm
from graftwork.process.heartbeat import Patience, assess_health, read_beat, remove_beat
from graftwork.process.local_workers import LOG_FILE, LocalWorkers, WorkerHost, read_log_tail
from graftwork.process.machine import killed_for_memory
from graftwork.process.worker import ERROR_FILE, interruption_error
from graftwork.project.reporter import Reporter
from graftwork.records import errors
from graftwork.records.base import Record
from graftwork.records.errors import (
    EnvironmentFailure,
    GracefulStop,
    GraftError,
    Interrupted,
    NegativeResult,
    OutOfMemory,
    UserError,
    WorkerFailed,
)
from graftwork.records.fleet import AlertKind, Beat, Health, Job, JobStatus
from graftwork.text.redact import publish_text

FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
POLL_SECONDS = 0.25
STALL_CHECK_SECONDS = 2.0
JOB_FILE = "job.json"
STOP_SECONDS = 30.0
FRESH_SECONDS = 60.0
"""A heartbeat older than this is outdated; it comes every two seconds, later on a busy disk."""
SAVING = "checkpoint"
"""Activity in the heartbeat while a checkpoint is not safe yet, here or at the mirror."""


@dataclass(frozen=True)
class WorkerTask:
    """A worker process: its module, its job, and the shared folder."""

    name: str
    module: str
    job: Record
    folder: Path
    arguments: tuple[str, ...] = ()
    """Arguments of the module, instead of the job's file."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment of the worker that no file may contain: secrets."""
    max_restarts: int = 3


class RunWatcher(Protocol):
    """Watches the health of a worker: a StallWatcher, of one run or of those in a batch."""

    @property
    def expected_seconds(self) -> float:
        """How long the plan expected a step to take."""

    def check(self, process_state: str) -> None: ...

    def alert(self, kind: AlertKind, what: str, *, why: str = "", fix: str = "") -> None: ...

    def worker_ended(self) -> None: ...


@dataclass(frozen=True)
class Hooks:
    """Callbacks of the supervision."""

    on_start: Callable[[], None] = lambda: None
    on_poll: Callable[[], None] = lambda: None
    on_out_of_memory: Callable[[OutOfMemory], Record | None] = lambda _exhausted: None
    """Returns the job to continue with, or None if there is no smaller one."""
    active_folders: Callable[[], Sequence[Path]] | None = None
    """The folders whose heartbeats show the worker's progress, if it is not its own folder."""
    watcher: RunWatcher | None = None


@dataclass
class Restarts:
    """Whether a crashed worker may be started again. Only crashes without progress in between count."""

    most: int
    """How many times in a row, without progress, a killed worker is restarted."""
    total: int = 0
    consecutive: int = 0
    furthest: float = 0.0

    def after_crash(self, code: int, *, done: float) -> float | None:
        """Seconds to wait, or None to give up. `code` is negative for a signal; `done` is the progress."""
        if done > self.furthest:
            self.furthest, self.consecutive = done, 0
        self.consecutive += 1
        # A killed worker is started again; a bug of the program would only come again, so once.
        if self.consecutive > (self.most if code < 0 else min(self.most, 1)):
            return None
        self.total += 1
        exponent = min(self.consecutive - 1, 30)
        return min(FIRST_PAUSE_SECONDS * 2.0**exponent, LONGEST_PAUSE_SECONDS)


class StallWatcher:
    """Sends one alert when a worker stalls and one when it continues. It does not end the worker."""

    def __init__(self, folder: Path, alarm: Alarm, *, expected_seconds: float, patience: Patience) -> None:
        self.alarm = alarm
        self.expected_seconds = expected_seconds
        self._folder = folder
        self._patience = patience
        self._stalled_at: float | None = None
        self._checked = float("-inf")

    def check(self, process_state: str) -> None:
        """May be called at any rate: it checks every other second."""
        now = clock.steady()
        if now - self._checked < min(STALL_CHECK_SECONDS, self._patience.silent_seconds / 4):
            return
        self._checked = now
        beat = read_beat(self._folder)
        report = assess_health(
            beat,
            alive=True,
            age=clock.seconds_since(beat.moment) if beat is not None else 0.0,
            expected_seconds=self.expected_seconds,
            process_state=process_state,
            patience=self._patience,
        )
        self.update(report.health, report.reason)

    def update(self, health: Health, reason: str) -> None:
        """A stall begins when the worker is stuck, and ends only when it works again, not when it is slow."""
        if health == "stuck" and self._stalled_at is None:
            self._stalled_at = clock.steady()
            self.alarm.send(
                "stalled",
                "the run is stuck",
                why=reason,
                fix="`graft status` says more; `graft stop` ends it",
            )
        elif health == "working" and self._stalled_at is not None:
            still = clock.steady() - self._stalled_at
            self._stalled_at = None
            self.alarm.send("recovered", f"the run continues after {still:.0f} s", why=reason)

    def alert(self, kind: AlertKind, what: str, *, why: str = "", fix: str = "") -> None:
        self.alarm.send(kind, what, why=why, fix=fix)

    def worker_ended(self) -> None:
        """A later stall belongs to another worker."""
        self._stalled_at = None


def run_job(
    task: WorkerTask, *, reporter: Reporter, hooks: Hooks | None = None, place: WorkerHost | None = None
) -> int:
    """Run the worker until it is done; return how often it was restarted."""
    hooks = hooks or Hooks()
    supervisor = _Supervisor(task, place or LocalWorkers(), reporter, hooks)
    restarts = Restarts(most=task.max_restarts)
    write_atomic(task.folder / JOB_FILE, task.job.to_json())
    try:
        while (status := supervisor.attempt()).exit_code != errors.EXIT_DONE:
            code = status.exit_code or 0
            exhausted = supervisor.out_of_memory(status)
            smaller = hooks.on_out_of_memory(exhausted) if exhausted is not None else None
            if smaller is not None:
                write_atomic(task.folder / JOB_FILE, smaller.to_json())
                continue
            _raise_reported_error(code, task.folder, task.name)
            pause = restarts.after_crash(code, done=supervisor.progress)
            if pause is None:
                raise WorkerFailed(
                    f"{task.name} crashed {restarts.consecutive} time(s) without progress; the last time it "
                    f"{_cause(code)}",
                    why=publish_text(read_log_tail(task.folder)) or "it left no output",
                    fix="check the log; what was done so far is kept, the same command resumes from there",
                    where=str(task.folder / LOG_FILE),
                )
            supervisor.report_restart(code, pause)
            _wait(pause)
    except (GracefulStop, Interrupted):
        raise
    except GraftError as failure:
        if hooks.watcher is not None:
            hooks.watcher.alert("failed", failure.what, why=failure.why, fix=failure.fix)
        raise
    return restarts.total


class _Supervisor:
    """Runs one worker after the other in the same folder."""

    def __init__(self, task: WorkerTask, place: WorkerHost, reporter: Reporter, hooks: Hooks) -> None:
        self._name, self._folder = task.name, task.folder
        self._place, self._reporter, self._hooks = place, reporter, hooks
        self._job = Job(
            module=task.module,
            job_file=str(task.folder / JOB_FILE),
            folder=str(task.folder),
            arguments=task.arguments,
            environment=dict(task.environment),
        )
        self._done: dict[Path, float] = {}

    @property
    def progress(self) -> float:
        """The furthest progress of all workers, over all folders."""
        return sum(self._done.values())

    def attempt(self) -> JobStatus:
        """Start the worker and watch it to its end."""
        (self._folder / ERROR_FILE).unlink(missing_ok=True)
        for folder in {self._folder, *self._active_folders()}:
            remove_beat(folder)
        self._hooks.on_start()
        status = self._watch(self._place.submit(self._job))
        self._beats()
        if self._hooks.watcher is not None:
            self._hooks.watcher.worker_ended()
        return status

    def out_of_memory(self, status: JobStatus) -> OutOfMemory | None:
        """Return whether the worker ran out of memory: by its own error file, or by the evidence."""
        code = status.exit_code or 0
        failure = _read_error(self._folder) if code > 0 else None
        if failure is not None and failure["error"] == OutOfMemory.__name__:
            return OutOfMemory(
                failure["what"],
                why=failure["why"],
                fix=failure["fix"],
                where=failure["where"],
                figures=failure["figures"],
            )
        beat = read_beat(self._folder)
        return killed_for_memory(code, kills=status.memory_kills, vitals=beat.vitals if beat else None)

    def report_restart(self, code: int, pause: float) -> None:
        message = f"{self._name} {_cause(code)}; starting it again from its last good point"
        if pause > 2:
            message += f" in {pause:.0f} s"
        if self._hooks.watcher is not None:
            self._hooks.watcher.alert("restarted", message)
        else:
            self._reporter.info(message)

    def _watch(self, job_id: str) -> JobStatus:
        try:
            while (status := self._place.poll(job_id, seconds=POLL_SECONDS)).running:
                self._beats()
                if (beat := read_beat(self._folder)) is not None:
                    self._report_beat(beat)
                if self._hooks.watcher is not None:
                    self._hooks.watcher.check(status.process_state)
                self._hooks.on_poll()
        except KeyboardInterrupt as interrupt:
            self._reporter.info("stopping cleanly; press Ctrl-C again to end it at once")
            try:
                self._stop(job_id)
            except KeyboardInterrupt:
                self._place.stop(job_id, at_once=True)
            raise interruption_error() from interrupt
        else:
            return status
        finally:
            if self._place.poll(job_id).running:
                self._stop(job_id)
            self._hooks.on_poll()

    def _stop(self, job_id: str) -> None:
        """Ask it to stop, and end it if it neither stops nor is writing a checkpoint."""
        self._place.stop(job_id)
        # A step must be able to finish, however long it takes.
        steps = [float(beat.detail.get("step_seconds", 0.0)) for beat in self._beats()]
        usual = until = time.monotonic() + STOP_SECONDS + 5 * max(steps, default=0.0)
        reported = False
        while (now := time.monotonic()) < until or self._is_saving():
            if self._is_saving():
                until = max(until, now + STOP_SECONDS)
                if now >= usual and not reported:
                    reported = True
                    self._reporter.info(f"{self._name} is stopping: waiting for its checkpoint to be safe")
            if not self._place.poll(job_id, seconds=POLL_SECONDS).running:
                return
        self._place.stop(job_id, at_once=True)

    def _report_beat(self, beat: Beat) -> None:
        """Report next to the progress bar: memory, and what the plan expected."""
        detail = dict(beat.detail)
        if beat.doing:
            detail["doing"] = beat.doing
        if beat.vitals is not None:
            used = [device.memory_gib for device in beat.vitals.devices if device.memory_gib is not None]
            detail["memory_gib"] = sum(used) if used else beat.vitals.memory_gib
        if self._hooks.watcher is not None:
            detail["expected_step_seconds"] = self._hooks.watcher.expected_seconds
        self._reporter.progress(
            beat.phase, beat.done, beat.total, seconds_left=beat.seconds_left, detail=detail
        )

    def _active_folders(self) -> Sequence[Path]:
        active = self._hooks.active_folders
        return active() if active is not None else (self._folder,)

    def _beats(self) -> list[Beat]:
        """The heartbeats of all active folders; the progress of each is recorded."""
        beats = []
        for folder in self._active_folders():
            beat = read_beat(folder)
            if beat is not None:
                self._done[folder] = max(self._done.get(folder, 0.0), beat.done)
                beats.append(beat)
        return beats

    def _is_saving(self) -> bool:
        return any(
            beat.doing == SAVING and clock.seconds_since(beat.moment) < FRESH_SECONDS
            for beat in self._beats()
        )


def _wait(seconds: float) -> None:
    try:
        threading.Event().wait(seconds)
    except KeyboardInterrupt as interrupt:
        raise interruption_error() from interrupt


def _raise_reported_error(code: int, folder: Path, name: str) -> None:
    """Raise an expected error unchanged; a crash is left to the caller."""
    if code == errors.EXIT_RESUME and _read_error(folder) is None:
        raise GracefulStop(
            f"{name} was stopped cleanly", fix="run the same command again: it resumes from here"
        )
    failure = _read_error(folder) if code > 0 else None
    if failure is None:
        return
    kind = getattr(errors, failure["error"], None)
    error_class = kind if isinstance(kind, type) and issubclass(kind, GraftError) else None
    for candidate in (NegativeResult, UserError, EnvironmentFailure, GracefulStop, Interrupted):
        if error_class is None and candidate.exit_code == failure["exit_code"]:
            error_class = candidate
    raise (error_class or WorkerFailed)(
        failure["what"], why=failure["why"], fix=failure["fix"], where=failure["where"]
    )


def _read_error(folder: Path) -> dict[str, Any] | None:
    path = folder / ERROR_FILE
    if not path.exists():
        return None
    failure: dict[str, Any] = json.loads(path.read_text())
    return failure


def _cause(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
