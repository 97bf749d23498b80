"""The training cycle of `graft up`, and the week that was planned: what a page shows and asks of them.

Input: a project. Output: the status of the cycle, the state after a decision; the schedule of the file that
`graft plan week --out week.json` writes, None if there is none. Starts no coordinator; `try_terms` writes
nothing.
"""

import math
import threading
from collections.abc import Mapping, Sequence
from datetime import datetime

from graftwork.api.project import Project
from graftwork.cycle.session import ControlAction as ControlAction  # noqa: PLC0414
from graftwork.cycle.session import CycleStatus, approve_step, decide, read_status
from graftwork.cycle.settings import CycleSettings
from graftwork.cycle.state import CoordinatorState
from graftwork.records.errors import Busy, UserError
from graftwork.records.week import Scenario, ShownSession, WeekSchedule
from graftwork.week.project import WeekDial as WeekDial  # noqa: PLC0414
from graftwork.week.project import WeekTerms as WeekTerms  # noqa: PLC0414
from graftwork.week.project import list_dials, read_schedule, try_week


def read_cycle(project: Project) -> CycleStatus:
    """What `graft up status` shows."""
    with project.open() as work:
        return read_status(work, limit=SHOWN_CYCLES)


def find_waiting_step(state: CoordinatorState, settings: CycleSettings) -> str | None:
    """The step of the open cycle that waits for approval."""
    cycle = state.open_cycle
    step = cycle.current if cycle is not None else None
    if cycle is None or step is None or step.name not in settings.approve:
        return None
    return None if any(approval.step == step.name for approval in cycle.approvals) else step.name


def list_controls(state: CoordinatorState) -> tuple[ControlAction, ...]:
    """The decisions that are possible now."""
    if state.open_cycle is None:
        return ("begin", "resume") if state.paused is not None else ("begin", "pause")
    return ("resume", "cancel") if state.paused is not None else ("pause", "cancel")


def control_cycle(
    project: Project, action: ControlAction, *, why: str, who: str, cycle: str = ""
) -> CoordinatorState:
    """Begin, pause, resume or cancel, with name and reason; `cycle` is the number that was shown."""
    with project.open() as work:
        return decide(work, action, why=why, who=who, cycle=_parse_number(cycle))


def approve_in_cycle(project: Project, step: str, *, why: str, who: str, cycle: str = "") -> CoordinatorState:
    """Allow a step of the open cycle; `cycle` is the number that was shown."""
    with project.open() as work:
        return approve_step(work, step or None, why=why, who=who, cycle=_parse_number(cycle))


def _parse_number(cycle: str) -> int | None:
    if cycle and not cycle.isdecimal():
        raise UserError(f"{cycle!r} is not a cycle number", fix="reload the page and decide again")
    return int(cycle) if cycle else None


SHOWN_CYCLES = 20
SHOWN_SESSIONS = 3
WEEK_FILE = "week.json"
WAIT_SECONDS = 60.0
_planning = threading.Lock()
"""One search at a time: each keeps a CPU core busy for seconds."""


def read_week(project: Project) -> WeekSchedule | None:
    path = project.root / WEEK_FILE
    return read_schedule(path) if path.exists() else None


def next_sessions(week: WeekSchedule, *, now: datetime) -> tuple[ShownSession, ...]:
    """The sessions that run or come next."""
    coming = [session for session in week.sessions if session.ends_at > now]
    return tuple(sorted(coming, key=lambda session: session.starts_at)[:SHOWN_SESSIONS])


def list_terms(project: Project) -> tuple[WeekDial, ...]:
    """The terms of the week that `try_terms` can change, with their current values."""
    return list_dials(project.folder)


def try_terms(
    project: Project, terms: WeekTerms, *, seconds: float, scenario: Scenario | None = None
) -> tuple[WeekSchedule, WeekSchedule | None]:
    """The week as graft.yaml has it, and under these terms."""
    if not _planning.acquire(timeout=WAIT_SECONDS):
        raise Busy("another week is being planned", why="one is planned at a time", fix="try again later")
    try:
        return try_week(project.folder, terms, seconds=seconds, scenario=scenario)
    finally:
        _planning.release()


def read_terms(dials: Sequence[WeekDial], texts: Mapping[str, str]) -> WeekTerms:
    """Return the terms that differ from the current week. Zero counts as a value."""
    found: dict[str, float] = {}
    for dial in dials:
        if texts[dial.name]:
            value = parse_number(texts[dial.name], dial.label)
            if value < dial.least:
                raise UserError(
                    f"{dial.label} is {value:g}",
                    why=f"it is {dial.least:g} or more",
                    fix=f"enter {dial.least:g} or more",
                )
            if not math.isclose(value, dial.now, rel_tol=1e-6, abs_tol=1e-6):
                found[dial.name] = value
    parts: dict[str, dict[str, float]] = {kind: {} for kind in ("hours", "priority")}
    for name, value in found.items():
        kind, dot, dial_name = name.partition(".")
        if dot:
            parts[kind][dial_name] = value
    return WeekTerms(
        spend_usd=found.get("spend"),
        gate_minutes=found.get("gate"),
        hours=parts["hours"],
        priority=parts["priority"],
    )


def parse_number(text: str, label: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{label} is {text!r}", why="it must be a number", fix="enter a number")
    return value
