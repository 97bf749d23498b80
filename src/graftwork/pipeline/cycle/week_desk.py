"""The week of a project, followed: jobs of the fleet, the gate, and the planner behind `graft up week`.

In: an open project with `week.json`, which `graft plan week --out week.json` wrote. Out: jobs at places, and
`week.json` planned again whenever something happens. What was begun is in `.graft/week.json`.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from graftwork.files.disk import write_atomic
from graftwork.fleet.control import what_failed
from graftwork.pipeline.cycle.place import find_trained
from graftwork.pipeline.cycle.week import (
    FollowedWeek,
    RunIsComplete,
    SessionJob,
    WeekFollower,
    WeekTick,
    due_sessions,
)
from graftwork.pipeline.cycle.week_data import WeekData
from graftwork.pipeline.fleet_jobs import FleetRequest, find_jobs, reconcile, start_run, stop
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.table import finish_run
from graftwork.pipeline.week import WeekRequest, plan_project_week, read_schedule, write_schedule
from graftwork.plan.week.problem import Effort
from graftwork.plan.week.replan import WeekEvent
from graftwork.process.worker import hold_lock
from graftwork.records.base import Record
from graftwork.records.errors import Damaged, Interrupted, Stale, StoppedInOrder, UserMistake
from graftwork.records.fleet import FleetJob
from graftwork.records.plan import Plan
from graftwork.records.report import Verdict
from graftwork.records.week import ShownSession, WeekSchedule
from graftwork.text.validation import explain_error

WEEK_FILE = "week.json"
LOCK = "week"
POLL_SECONDS = 30.0
REPLAN_SECONDS = 4.0
"""Replanning must not keep sessions waiting."""


class ProjectWeek:
    """The desk of a `WeekFollower` on a project."""

    def __init__(self, work: OpenProject) -> None:
        self._work = work
        self._known_plan: WeekSchedule | None = None
        """The plan in the file, as this desk loaded or wrote it last."""

    @property
    def _plan_file(self) -> Path:
        return self._work.project.root / WEEK_FILE

    @property
    def _state_file(self) -> Path:
        return self._work.project.state / WEEK_FILE

    def load(self) -> FollowedWeek:
        week = self._read()
        self._known_plan = week.schedule
        return week

    def _read(self) -> FollowedWeek:
        """The plan in the project's folder; what was begun in it, unless it is another week's."""
        if not self._plan_file.exists():
            raise UserMistake(
                "no week is planned",
                why=f"there is no {WEEK_FILE} in this project",
                fix=f"graft plan week --now {datetime.now(tz=UTC):%Y-%m-%dT%H:%M%z} --out {WEEK_FILE}; "
                "without --now, the next week is planned",
                where=WEEK_FILE,
            )
        schedule = read_schedule(self._plan_file)
        if not self._state_file.exists():
            return FollowedWeek(schedule=schedule)
        try:
            known = FollowedWeek.from_json(self._state_file.read_bytes())
        except ValidationError as error:
            raise Damaged(
                f"{self._state_file} cannot be read",
                why=explain_error(error.errors(include_url=False, include_input=False)[0]),
                fix="move it away: jobs that run are still listed by `graft fleet list`",
                where=str(self._state_file),
            ) from error
        if known.schedule.start != schedule.start:
            open_ones = tuple(s for s in known.sessions if s.state in ("ordered", "running", "done"))
            return FollowedWeek(schedule=schedule, sessions=open_ones)
        # A plan that a person wrote meanwhile counts.
        return known.model_copy(update={"schedule": schedule})

    def save(self, week: FollowedWeek) -> None:
        # The plan first: after a kill in between, what is pending is planned once more. A plan that a person
        # wrote since it was loaded counts, and is not overwritten.
        found = read_schedule(self._plan_file) if self._plan_file.exists() else None
        if found is None or (found != week.schedule and self._known_plan in (None, found)):
            write_schedule(self._plan_file, week.schedule)
            self._known_plan = week.schedule
        write_atomic(self._state_file, week.to_json())

    def look_after_jobs(self) -> Sequence[FleetJob]:
        if any(job.is_open for job in self._work.jobs.list()):
            reconcile(self._work)
        return self._work.jobs.list()

    def start(self, session: ShownSession, *, seconds: float) -> FleetJob:
        work, place = self._of(session.model), self._work.settings.fleet.places.get(session.place)
        if place is None:
            raise UserMistake(
                f"fleet.places has no {session.place}",
                why="the plan of the week was made with other settings",
                fix=f"graft plan week --keep {WEEK_FILE} --out {WEEK_FILE}",
                where=f"fleet.places.{session.place}",
            )
        made = self._data.outputs_of(session.model)
        self._data.report_changes()
        if find_trained(work, made) is not None:
            raise RunIsComplete(f"the run of {session.model} is complete")
        request = FleetRequest(
            place=place.place or session.place,
            gpu=place.gpu if place.usd_per_hour else "",
            deadline_seconds=seconds,
        )
        # The caps of the fleet are the confirmation: the ledger refuses what could break one.
        return start_run(work, request, confirm=lambda _quote: True, made=made)

    def runs_at(self, job: FleetJob, session: SessionJob) -> bool:
        place = self._work.settings.fleet.places.get(session.place)
        if place is None:
            return False
        wanted = place.place or session.place
        # Jobs of all SSH hosts are listed under one place.
        if job.place not in (wanted, wanted.partition(":")[0]):
            return False
        plan = self._data.outputs_of(session.model).get("plan", Plan)
        return any(found.id == job.id for found in find_jobs(self._of(session.model), plan))

    def give_up(self, job: FleetJob) -> None:
        try:
            stop(self._work, job, at_once=True)
        except Exception as error:  # whatever a place may raise: the reconciliation repeats it
            self.report(f"job {job.id} at {job.place} is not stopped yet: {what_failed(error)}")
        else:
            self.report(f"job {job.id} at {job.place} did not end in its time and is stopped")

    def judge(self, model: str) -> bool:
        work = self._of(model)
        made = find_trained(work, self._data.outputs_of(model))
        if made is None:
            # Otherwise the whole run would be trained here.
            raise Stale(
                f"the run of {model} is not the one of this week",
                why="its data or its plan was made again since its session began",
                fix=f"judge it by `graft release make --model {model}`",
                where=model,
            )
        return finish_run(work, made).get("gate", Verdict).decision == "deploy"

    @property
    def _data(self) -> WeekData:
        week = self._read()
        busy = {s.model for s in week.sessions if s.state in ("ordered", "running", "done")}
        models = [s.model for s in week.schedule.sessions]
        return WeekData(self._work, week.schedule.start, tuple(dict.fromkeys(models)), frozenset(busy))

    def plan_again(self, schedule: WeekSchedule, events: Sequence[WeekEvent], now: datetime) -> WeekSchedule:
        asked = WeekRequest(
            effort=Effort(seconds=REPLAN_SECONDS, scenario=schedule.scenario, what_if=False),
            now=now,
            earlier=schedule,
            events=tuple(events),
        )
        return plan_project_week(self._work.project, asked)

    def report(self, text: str) -> None:
        self._work.reporter.info(text)

    def _of(self, model: str) -> OpenProject:
        asked = None if model == self._work.settings.main_model else model
        return replace(self._work, asked_model=asked)


class WeekStatus(Record):
    """What `graft up week --dry-run` shows. Nothing was started."""

    due: tuple[ShownSession, ...]
    """What would be started now."""
    next: tuple[ShownSession, ...]
    sessions: tuple[SessionJob, ...]
    """What was begun or missed so far."""


COMING = 8


def week_status(work: OpenProject, *, now: datetime | None = None) -> WeekStatus:
    moment = now or datetime.now(tz=UTC)
    week = ProjectWeek(work).load()
    coming = sorted((s for s in week.schedule.sessions if s.starts_at > moment), key=lambda s: s.starts_at)
    return WeekStatus(
        due=tuple(due_sessions(week, moment)), next=tuple(coming[:COMING]), sessions=week.sessions
    )


def follow_once(work: OpenProject) -> WeekTick:
    """One round: end, judge, begin, plan again."""
    with hold_lock(work.project.state / LOCK):
        return WeekFollower(ProjectWeek(work)).tick(datetime.now(tz=UTC))


def follow_week(work: OpenProject) -> WeekTick:
    """Follow the plan until nothing is left of it, or a signal comes. Jobs go on without the follower."""
    with hold_lock(work.project.state / LOCK):
        follower = WeekFollower(ProjectWeek(work))
        reported: datetime | None = None
        while True:
            try:
                done = follower.tick(datetime.now(tz=UTC))
            except (UserMistake, Interrupted, StoppedInOrder):
                raise
            except Exception as error:  # nobody else looks after the machines of this week
                work.reporter.info(f"{what_failed(error)}; trying again")
                time.sleep(POLL_SECONDS)
                continue
            if done.next_at is None:
                work.reporter.info("nothing is left of the week")
                return done
            if done.next_at != reported:
                work.reporter.info(f"next: {done.next_at:%a %d %b %H:%M}")
                reported = done.next_at
            left = (done.next_at - datetime.now(tz=UTC)).total_seconds()
            time.sleep(min(max(left, 1.0), POLL_SECONDS))
