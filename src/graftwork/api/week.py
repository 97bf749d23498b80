"""The week that was planned, as far as a page shows it: sessions at places, and what changes would bring.

In: the file that `graft plan week --out week.json` writes in the project folder. Out: the schedule; None
where there is no such file. `try_terms` plans a week under other terms, and writes nothing.
"""

import threading
from datetime import datetime

from graftwork.api.project import Project
from graftwork.pipeline.week import read_schedule
from graftwork.pipeline.week_trial import WeekDial as WeekDial  # noqa: PLC0414
from graftwork.pipeline.week_trial import WeekTerms as WeekTerms  # noqa: PLC0414
from graftwork.pipeline.week_trial import WeekTrial, list_dials, try_week
from graftwork.records.errors import Busy
from graftwork.records.week import Scenario, ShownSession, WeekSchedule

WEEK_FILE = "week.json"
WAIT_SECONDS = 60.0
_planning = threading.Lock()
"""One search at a time: each takes a processor for seconds."""


def read_week(project: Project) -> WeekSchedule | None:
    path = project.root / WEEK_FILE
    return read_schedule(path) if path.exists() else None


def next_sessions(week: WeekSchedule, *, now: datetime, most: int = 3) -> tuple[ShownSession, ...]:
    """Those that run or come next."""
    coming = [session for session in week.sessions if session.ends_at > now]
    return tuple(sorted(coming, key=lambda session: session.starts_at)[:most])


def list_terms(project: Project) -> tuple[WeekDial, ...]:
    """The terms of the week that `try_terms` can change, with what they are now."""
    return list_dials(project.folder)


def try_terms(
    project: Project, terms: WeekTerms, *, seconds: float, scenario: Scenario | None = None
) -> WeekTrial:
    """The week as graft.yaml has it, and under these terms."""
    if not _planning.acquire(timeout=WAIT_SECONDS):
        raise Busy("another week is being planned", why="one is planned at a time", fix="try again later")
    try:
        return try_week(project.folder, terms, seconds=seconds, scenario=scenario)
    finally:
        _planning.release()
