"""The week that was planned, as far as a page shows it: sessions at places, and what changes would bring.

In: the file that `graft plan week --out week.json` writes in the project folder. Out: a `GanttWeek`; None
where there is no such file. `try_terms` plans a week under other terms, and writes nothing.
"""

import json
import threading
from datetime import datetime
from typing import Any

from pydantic import ConfigDict, ValidationError

from graftwork.api.project import Project
from graftwork.pipeline.week_trial import WeekDial as WeekDial  # noqa: PLC0414
from graftwork.pipeline.week_trial import WeekTerms as WeekTerms  # noqa: PLC0414
from graftwork.pipeline.week_trial import WeekTrial, list_dials, try_week
from graftwork.records.base import Record
from graftwork.records.errors import Busy, UserMistake
from graftwork.records.week import Scenario

WEEK_FILE = "week.json"
WAIT_SECONDS = 60.0
_planning = threading.Lock()
"""One search at a time: each takes a processor for seconds."""


class GanttSession(Record):
    """One model at one place; `by_hand` needs a person."""

    # The planner writes more than a page shows.
    model_config = ConfigDict(frozen=True, extra="ignore")

    place: str
    model: str
    lane: int = 0
    """Which of several sessions at once."""
    starts_at: datetime
    ends_at: datetime
    hours: float = 0.0
    cost_usd: float = 0.0
    by_hand: bool = False


class GanttChange(Record):
    """A change of the terms, and the points that it would bring."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    change: str
    value: float
    gain: float


class GanttWeek(Record):
    model_config = ConfigDict(frozen=True, extra="ignore")

    start: datetime
    end: datetime
    timezone: str = "UTC"
    scenario: str = ""
    value: float = 0.0
    gap: float = 0.0
    cost_usd: float = 0.0
    cap_usd: float | None = None
    sessions: tuple[GanttSession, ...] = ()
    what_if: tuple[GanttChange, ...] = ()
    notes: tuple[str, ...] = ()
    models: tuple[dict[str, Any], ...] = ()
    places: tuple[dict[str, Any], ...] = ()


def read_week(project: Project) -> GanttWeek | None:
    path = project.root / WEEK_FILE
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserMistake(
            f"{WEEK_FILE} cannot be read", why=str(error), fix="plan the week again", where=str(path)
        ) from error
    try:
        return GanttWeek.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UserMistake(
            f"{WEEK_FILE} is not a planned week", why=f"{where}: {first['msg']}", fix="plan the week again"
        ) from error


def next_sessions(week: GanttWeek, *, now: datetime, most: int = 3) -> tuple[GanttSession, ...]:
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
