"""`graft up` on a project: one coordinator a folder, its lease, its loop, and what people ask of it.

Input: an open project. Output: the state of the coordinator. A second coordinator in the same folder is
refused at once; one on another machine with the same database waits for its turn.
"""

import os
import socket
import time
import uuid
from contextlib import suppress
from typing import Literal

from graftwork.cycle.coordinator import ClaimKeeper, Coordinator
from graftwork.cycle.decide import Action, AwaitApproval, Rest, count_new, find_cause, next_scheduled
from graftwork.cycle.runner import BY_HAND, ProjectRunner, stop_jobs
from graftwork.cycle.settings import CYCLE_STEPS
from graftwork.cycle.state import (
    CoordinatorState,
    CycleState,
    Holder,
    LogEntry,
    approve,
    cancel,
    pause,
    request,
    resume,
)
from graftwork.fleet.jobs import reconcile
from graftwork.pipeline.status import StepState, examine_steps
from graftwork.process import clock
from graftwork.process.worker import hold_lock, lock_holder
from graftwork.project.open_project import OpenProject, current_user
from graftwork.records.base import Record
from graftwork.records.errors import GracefulStop, GraftError, NegativeResult
from graftwork.version import __version__

LOCK = "cycle"
POLL_SECONDS = 2.0
"""How soon a decision of a person takes effect."""
RECENT_SECONDS = 86400.0


def make_coordinator(work: OpenProject, housekeeper: "Housekeeper | None" = None) -> Coordinator:
    settings = work.settings
    host_and_folder = f"{socket.gethostname()}:{work.project.state.resolve()}"
    coordinator = Coordinator(
        store=work.cycles,
        runner=ProjectRunner(work),
        settings=settings.cycle,
        steps=CYCLE_STEPS,
        models=settings.cycle.models or (settings.main_model,),
        holder=Holder(
            f"{socket.gethostname()} process {os.getpid()} {uuid.uuid4().hex[:6]}", host_and_folder
        ),
        version=__version__,
        on_event=work.reporter.info,
    )
    coordinator.keep_claim = ClaimKeeper(coordinator, (housekeeper or Housekeeper(work)).tick).keep
    return coordinator


def run_once(work: OpenProject) -> CycleState:
    """Do one cycle of each model, or continue with the open one, until it ends or waits for a person."""
    with hold_lock(work.project.state / LOCK):
        coordinator = make_coordinator(work)
        coordinator.request_unless_open(BY_HAND)
        while True:
            action = coordinator.tick()
            state = coordinator.store.read()
            if state.open_cycle is None and not state.queue and state.cycle is not None:
                return state.cycle
            if isinstance(action, AwaitApproval) or (state.paused is not None and isinstance(action, Rest)):
                raise GracefulStop(
                    f"{action.step} waits for approval" if isinstance(action, AwaitApproval) else action.why,
                    fix=f"graft up approve {action.step}, then graft up --once"
                    if isinstance(action, AwaitApproval)
                    else "graft up resume, then graft up --once",
                )
            _wait(action)


def run_forever(work: OpenProject) -> None:
    """Tick until a signal comes. Reconciles the fleet while jobs are open."""
    with hold_lock(work.project.state / LOCK):
        housekeeper = Housekeeper(work)
        coordinator = make_coordinator(work, housekeeper)
        reported = ""
        while True:
            action = coordinator.tick()
            text = action.why if isinstance(action, Rest) else ""
            text = f"{action.step} waits for approval" if isinstance(action, AwaitApproval) else text
            if text and text != reported:
                work.reporter.info(text)
            reported = text
            housekeeper.tick()
            _wait(action)


class Housekeeper:
    """Reconciles the fleet at the interval that the caps assume, even while a step runs."""

    def __init__(self, work: OpenProject) -> None:
        self._work = work
        self._next = float("-inf")

    def tick(self) -> None:
        # Not by the clock of the day: one that is set back would put this off, and machines are paid for.
        if clock.steady() < self._next:
            return
        self._next = clock.steady() + self._work.settings.fleet.reconcile_minutes * 60 / 2
        # Machines of closed jobs may show late: those are ended too.
        recent = time.time() - RECENT_SECONDS
        if any(job.is_open or job.updated_at > recent for job in self._work.jobs.list()):
            with suppress(GraftError):
                reconcile(self._work)


def _wait(action: Action) -> None:
    """Wait until the action is due, or for a moment: a person may have decided something."""
    if isinstance(action, AwaitApproval):
        time.sleep(POLL_SECONDS)
    elif isinstance(action, Rest):
        seconds = action.until - time.time()
        time.sleep(min(max(seconds, 0.0), POLL_SECONDS))


class CycleStatus(Record):
    """What `graft up status` shows."""

    project: str
    running: int | None
    """The process of the coordinator in this folder."""
    state: CoordinatorState
    next: str
    """What comes next, and when or why."""
    history: tuple[CycleState, ...] = ()


def read_status(work: OpenProject, *, limit: int = 10) -> CycleStatus:
    state = work.cycles.read()
    running = lock_holder(work.project.state / LOCK)
    return CycleStatus(
        project=work.settings.project,
        running=running,
        state=state,
        next=_describe_next(work, state),
        history=work.cycles.history(limit=limit),
    )


def _describe_next(work: OpenProject, state: CoordinatorState) -> str:
    settings, now = work.settings.cycle, time.time()
    if state.paused is not None:
        return f"paused by {state.paused.who}" + (f": {state.paused.why}" if state.paused.why else "")
    cycle = state.open_cycle
    if cycle is not None and (step := cycle.current) is not None:
        approved = {approval.step for approval in cycle.approvals}
        if step.name in settings.approve and step.name not in approved:
            return f"{step.name} waits for approval: graft up approve {step.name}"
        if step.status == "running":
            return f"{step.name}, done by {step.holder}"
        return f"{step.name}" + (f": {step.summary['why']}" if "why" in step.summary else "")
    if state.queue:
        return f"a cycle of {', '.join(state.queue)}: {state.queue_cause}"
    due = next_scheduled(state, settings, now=now)
    parts = [f"{time.strftime('%Y-%m-%d %H:%M', time.gmtime(due))} UTC by the schedule"] if due else []
    if settings.when.new_rows is not None:
        parts.append(f"at {settings.when.new_rows:,} new rows")
    if settings.when.drift is not None:
        parts.append(f"at a drift of {settings.when.drift:.0%}")
    return ", or ".join(parts) or "by hand: graft up --once"


class CyclePlan(Record):
    """What `graft up --dry-run` shows. Nothing was done."""

    due: str
    """Why a cycle would begin now; empty if none is due."""
    next: str
    new_rows: int | None = None
    drift: float | None = None
    place: str
    models: tuple[str, ...]
    steps: tuple[StepState, ...]
    """The steps of `graft run`, as they are for the first model."""
    cycle_steps: tuple[str, ...]
    approve: tuple[str, ...]
    deliver: tuple[str, ...]
    notified: tuple[str, ...]


def plan_cycle(work: OpenProject) -> CyclePlan:
    settings, state = work.settings.cycle, work.cycles.read()
    facts = ProjectRunner(work).measure_facts()
    notify = settings.notify
    channels = {"command": notify.command, "webhook": notify.webhook}
    return CyclePlan(
        due=find_cause(state, settings, facts, now=time.time()) if state.open_cycle is None else "",
        next=_describe_next(work, state),
        new_rows=count_new(state, facts),
        drift=facts.drift,
        place=settings.place,
        models=settings.models or (work.settings.main_model,),
        steps=examine_steps(work),
        cycle_steps=CYCLE_STEPS,
        approve=settings.approve,
        deliver=tuple(target.to for target in settings.deliver),
        notified=tuple(name for name, channel in channels.items() if channel is not None),
    )


ControlAction = Literal["begin", "pause", "resume", "cancel"]


def decide(
    work: OpenProject,
    action: ControlAction,
    *,
    why: str = "",
    who: str | None = None,
    cycle: int | None = None,
) -> CoordinatorState:
    """Apply a person's decision about the coordinator, with name and reason; `cycle` is the one they saw."""
    entry = LogEntry(at=time.time(), who=who or current_user(), action=action, why=why)
    if action == "begin":
        models = work.settings.cycle.models or (work.settings.main_model,)
        return work.cycles.change(lambda state: request(state, models, entry, cause=BY_HAND))
    change = {"pause": pause, "resume": resume, "cancel": cancel}[action]
    state = work.cycles.change(lambda state: change(_with_open(state, cycle), entry))
    if action == "cancel" and state.cycle is not None:
        # No coordinator may be running to do it.
        stop_jobs(work, state.cycle)
    return state


def approve_step(
    work: OpenProject, step: str | None, *, why: str = "", who: str | None = None, cycle: int | None = None
) -> CoordinatorState:
    """Allow a step of the open cycle, or of the one that was shown; by default the one that waits."""
    open_cycle = work.cycles.read().open_cycle
    step_name = step or (
        open_cycle.current.name if open_cycle is not None and open_cycle.current is not None else ""
    )
    entry = LogEntry(at=time.time(), who=who or current_user(), action="approve", what=step_name, why=why)
    # The same step of the next cycle is another decision.
    number = cycle if cycle is not None or open_cycle is None else open_cycle.number
    return work.cycles.change(lambda state: approve(_with_open(state, number), step_name, entry))


def _with_open(state: CoordinatorState, number: int | None) -> CoordinatorState:
    """Return the state, if this cycle is open in it: a decision must be about the one that was seen."""
    open_cycle = state.open_cycle
    if number is not None and (open_cycle is None or open_cycle.number != number):
        raise NegativeResult(
            f"cycle {number} is no longer open",
            why="it ended since it was shown",
            fix="check the state again (`graft up status`, or reload the page) and decide again",
        )
    return state
