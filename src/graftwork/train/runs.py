"""Training runs: which one is meant, who works on it now, what happened in it, and where its time went.

Input: an open project and, optionally, a prefix of a run's id. Output: the run, the processes that hold its
locks, its events and its page. Changes nothing but where it says so.
"""

import os
import signal
import threading
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from graftwork.files.disk import Journal, write_atomic
from graftwork.plan.estimate import COMPUTE, ROLLOUTS, WAITING, split_memory
from graftwork.process.alert import ALERTS_FILE
from graftwork.process.heartbeat import VITALS_FILE, read_beat
from graftwork.process.local_workers import LOG_FILE
from graftwork.process.worker import lock_holder
from graftwork.project.open_project import OpenProject, timestamp
from graftwork.records.base import Record
from graftwork.records.errors import EnvironmentFailure, GracefulStop, UserError
from graftwork.records.fleet import Vitals
from graftwork.records.plan import Plan, RunParts
from graftwork.records.run import TrainOutcome, TrainStep
from graftwork.store.runs import RunEntry
from graftwork.train.rollouts.episodes import read_extremes
from graftwork.train.rollouts.measures import SAMPLING_SECONDS
from graftwork.train.run_folder import EVALUATIONS, MESSAGES, PAGE, SAVED, STEPS, read_journal

POLL_SECONDS = 0.2


class RunProcesses(NamedTuple):
    """Process ids; None if there is none. The supervisor holds the project, the worker its run."""

    supervisor: int | None
    worker: int | None

    def __bool__(self) -> bool:
        return self.supervisor is not None or self.worker is not None


def find_run(work: OpenProject, prefix: str | None = None) -> RunEntry | None:
    """Find the run by the prefix of its id; by default the running one, or the one last changed."""
    runs = work.runs.list()
    if prefix is None:
        newest_first = sorted(runs, key=lambda run: run.updated_at, reverse=True)
        return min(newest_first, key=lambda run: run.state != "running", default=None)
    matches = [run for run in runs if run.id.startswith(prefix)]
    if len(matches) != 1:
        raise UserError(
            f"there is no run {prefix}" if not matches else f"several runs begin with {prefix}",
            why=f"runs: {', '.join(run.id for run in matches or runs) or 'none yet'}",
            fix="`graft status` names the runs",
            where="--run",
        )
    return matches[0]


def find_processes(work: OpenProject, run: RunEntry | None) -> RunProcesses:
    """Return the processes that work on the project, and on this run of it."""
    return RunProcesses(
        supervisor=lock_holder(work.project.state / "pipeline"),
        worker=lock_holder(Path(run.folder)) if run is not None else None,
    )


class BackgroundRun(Record):
    """A command in the background; `run` and `log` are None if unknown."""

    state: Literal["started", "already running", "nothing left to do"]
    run: str | None
    pid: int
    log: str | None


class StopResult(Record):
    """What was stopped, and its progress."""

    state: Literal["not running", "stopping", "stopped", "killed"]
    run: str | None
    run_state: str | None
    done: float | None
    total: float | None


def stop_run(
    work: OpenProject, prefix: str | None = None, *, now: bool = False, wait: bool = True
) -> StopResult:
    """Stop the running work at its next checkpoint, or `now`; nothing for a run that has ended."""
    run = find_run(work, prefix)
    busy = find_processes(work, run)
    state: Literal["not running", "stopping", "stopped", "killed"] = "not running"
    if busy and (prefix is None or run is None or run.state == "running"):
        state = "killed" if now else "stopped" if wait else "stopping"
        if now:
            end_at_once(work, run, busy)
        else:
            ask_to_stop(busy)
        pause = threading.Event()
        while wait and find_processes(work, run):
            pause.wait(POLL_SECONDS)
        run = find_run(work, run.id) if run is not None else None
    beat = read_beat(Path(run.folder)) if run is not None else None
    return StopResult(
        state=state,
        run=run.id if run else None,
        run_state=run.state if run else None,
        done=beat.done if beat else None,
        total=beat.total if beat else None,
    )


def ask_to_stop(busy: RunProcesses) -> None:
    """The supervisor stops its worker cleanly; a worker without one stops on its own."""
    _send(busy.supervisor if busy.supervisor is not None else busy.worker, signal.SIGTERM)


def end_at_once(work: OpenProject, run: RunEntry | None, busy: RunProcesses) -> None:
    """Kill both, the supervisor first, since it would restart the worker. Update the store."""
    _send(busy.supervisor, signal.SIGKILL)
    if busy.worker is not None:
        _send(busy.worker, signal.SIGKILL, group=True)
    if run is not None and run.state == "running":
        ended = GracefulStop(
            "ended at once, as asked", fix="run the same command again: it resumes from the last checkpoint"
        )
        work.runs.update(run.id, state="stopped", when=timestamp(), error=ended.as_json())


def _send(pid: int | None, number: signal.Signals, *, group: bool = False) -> None:
    if pid is None:
        return
    if pid <= 0:
        raise EnvironmentFailure(
            "the running process is unknown", why="its lock names no process", fix="try again in a moment"
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
        raise EnvironmentFailure(
            f"process {pid} belongs to another user",
            why="only its owner may stop it",
            fix="ask them, or do it as that user",
        ) from error


Kind = Literal["step", "message", "checkpoint", "evaluation", "machine", "alert", "output"]

JOURNALS: dict[str, Kind] = {
    STEPS: "step",
    EVALUATIONS: "evaluation",
    SAVED: "checkpoint",
    MESSAGES: "message",
    ALERTS_FILE: "alert",
    VITALS_FILE: "machine",
}


class Event(Record):
    """One thing that happened, at a time in seconds since 1970."""

    at: float
    kind: Kind
    body: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {**self.body, "at": self.at, "kind": self.kind}


class Events:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[str, int] = {}
        self._latest = dict.fromkeys(JOURNALS, 0.0)
        self._step_times: dict[int, float] = {}

    def new(self) -> list[Event]:
        """Events not reported before, by time; one without a time follows its predecessor."""
        events = [event for name in JOURNALS for event in self._of_journal(name)]
        events += self._of_output()
        return sorted(events, key=lambda event: event.at)

    def _of_journal(self, name: str) -> list[Event]:
        events = []
        for line, offset in Journal(self._folder / name).follow(self._offsets.get(name, 0)):
            self._offsets[name] = offset
            if not isinstance(line, dict):
                continue
            body = line["evaluation"] if name == EVALUATIONS else line
            moment = float(body.get("at") or self._step_times.get(body.get("step", -1)) or self._latest[name])
            self._latest[name] = moment
            if name == STEPS:
                self._step_times[int(body["step"])] = moment
            kind = JOURNALS[name]
            # An alert has a kind of its own.
            inside = {"alert": body["kind"], **body} if kind == "alert" else body
            events.append(Event(at=moment, kind=kind, body=inside))
        return events

    def _of_output(self) -> list[Event]:
        """The worker's own output has no times: its lines get the time when the file was last written."""
        path = self._folder / LOG_FILE
        if not path.exists():
            return []
        first = LOG_FILE not in self._offsets
        start = self._offsets.get(LOG_FILE, 0)
        with path.open("rb") as handle:
            handle.seek(start)
            text = handle.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offsets[LOG_FILE] = start + len(whole)
        moment = path.stat().st_mtime if first else time.time()
        lines = whole.decode(errors="replace").splitlines()
        return [Event(at=moment, kind="output", body={"text": line}) for line in lines if line.strip()]


SHOWN_ANSWERS = 3
"""Number of the best and the worst answers of the last batch on the page of a run."""


def write_training_page(folder: Path, plan: Plan, outcome: TrainOutcome) -> Path:
    # The template library is not needed to train; planning does not wait for it.
    from graftwork.views.training import make_training_page

    answers = read_extremes(folder, most=SHOWN_ANSWERS, batches=1)
    page = make_training_page(plan, outcome, read_journal(folder), read_vitals(folder), answers=answers)
    write_atomic(folder / PAGE, page)
    return folder / PAGE


def read_vitals(folder: Path) -> tuple[Vitals, ...]:
    """Samples of the machine during the run, by time."""
    vitals = []
    for line in Journal(folder / VITALS_FILE).read():
        try:
            vitals.append(Vitals.model_validate(line))
        except ValidationError:
            continue
    return tuple(sorted(vitals, key=lambda item: item.at))


def read_parts(folder: Path, outcome: TrainOutcome, *, minutes: float) -> RunParts:
    return divide(outcome, read_journal(folder), read_vitals(folder), minutes=minutes)


def divide(
    outcome: TrainOutcome, steps: Sequence[TrainStep], vitals: Sequence[Vitals], *, minutes: float
) -> RunParts:
    """Split the time into loading, computing, sampling, waiting for data, evaluations, checkpoints, and the
    rest: final validation and saving; after restarts, the time lost by them. The loss before the first step
    belongs to loading.
    """
    shares = [vital.data_share for vital in vitals if vital.data_share is not None]
    waiting = outcome.seconds * min(max(sum(shares) / len(shares), 0.0), 1.0) if shares else 0.0
    sampling = sum(step.measures.get(name, 0.0) for step in steps for name in SAMPLING_SECONDS)
    looks = sum(look.seconds for look in outcome.looks)
    checkpoints = max(0.0, between_steps(steps) - looks)
    other_seconds = minutes * 60 - outcome.load_seconds - outcome.seconds - looks - checkpoints
    # The last sample of memory before the first step. A GPU's is its driver's, with others' use in it: there,
    # it is unknown.
    loaded = None
    if steps and steps[0].at and not any(vital.devices for vital in vitals):
        first_start = steps[0].at - steps[0].seconds
        loaded = next((vital.memory_gib for vital in reversed(vitals) if vital.at < first_start), None)
    return RunParts(
        seconds={
            "load": outcome.load_seconds,
            COMPUTE: max(0.0, outcome.seconds - waiting - sampling),
            **({ROLLOUTS: sampling} if sampling else {}),
            WAITING: waiting,
            "looks": looks,
            "checkpoints": checkpoints,
            "restarts" if outcome.restarts else "validation": max(0.0, other_seconds),
        },
        memory_gib=dict(split_memory(loaded=loaded, peak=outcome.peak_memory_gib)),
    )


def between_steps(steps: Sequence[TrainStep]) -> float:
    """Seconds between the end of a step and the start of the next; not across a restart."""
    gaps = [
        later.steady - earlier.steady - later.seconds
        for earlier, later in pairwise(steps)
        if later.step == earlier.step + 1 and earlier.at and later.at
    ]
    return sum(gap for gap in gaps if gap > 0)
