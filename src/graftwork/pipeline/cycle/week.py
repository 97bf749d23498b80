"""Follows the plan of a week: starts each session at its place, and plans again when something happens.

In: a schedule, and a desk that starts jobs, looks after them, judges models and plans; a real or a simulated
one. Out: one round a tick. Killed at any moment, the next follower goes on: a session is written down before
its job is ordered, so it is found again and not started twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal, Protocol

from graftwork.fleet.place import PlaceUnreachable
from graftwork.plan.week.replan import WeekEvent
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, Interrupted, Stale, StoppedInOrder
from graftwork.records.fleet import FleetJob
from graftwork.records.week import ShownSession, WeekSchedule

SHORTEST = timedelta(minutes=10)
"""With less time left, a session is not begun."""
OVERDUE = timedelta(hours=1)
"""A job that has not ended so long after its limit is given up."""
POLL = timedelta(seconds=30)
LASTING = ("quota", "gate", "closed", "complete")
"""Events that hold for the rest of the week. The others change the sessions, which the plan remembers."""

SessionState = Literal["ordered", "running", "done", "ended", "missed", "judged"]
"""`ordered`: written down, and perhaps at the place. `done`: the run is complete and waits for the gate."""


class SessionJob(Record):
    """A session that was begun or missed, and its job."""

    model: str
    place: str
    starts_at: datetime
    ordered_at: datetime
    state: SessionState = "ordered"
    job: str = ""
    why: str = ""


class FollowedWeek(Record):
    """All that the follower remembers."""

    schedule: WeekSchedule
    sessions: tuple[SessionJob, ...] = ()
    events: tuple[WeekEvent, ...] = ()
    """Those that hold for the rest of the week."""
    pending: tuple[WeekEvent, ...] = ()
    """Those that the rest of the week is not planned with yet."""


class RunIsComplete(GraftError):
    """There is nothing left to train for a session: the run of its model is complete."""


class WeekDesk(Protocol):
    """What following a week needs from outside."""

    def load(self) -> FollowedWeek: ...

    def save(self, week: FollowedWeek) -> None: ...

    def look_after_jobs(self) -> Sequence[FleetJob]:
        """Bring what has ended, end what is over its limits. All jobs of the project."""

    def start(self, session: ShownSession, *, seconds: float) -> FleetJob:
        """Order the job of a session. Raises `RunIsComplete` where there is nothing left to train, another
        GraftError if the place or the project does not allow it."""

    def runs_at(self, job: FleetJob, session: SessionJob) -> bool:
        """Whether the job is at the place of the session and trains its model."""

    def give_up(self, job: FleetJob) -> None:
        """Stop a job that has not ended in its time."""

    def judge(self, model: str) -> bool:
        """Evaluate, gate and release a model whose run is complete. Doing it again changes nothing."""

    def plan_again(
        self, schedule: WeekSchedule, events: Sequence[WeekEvent], now: datetime
    ) -> WeekSchedule: ...

    def report(self, text: str) -> None: ...


class WeekTick(Record):
    """What one round did, and when the next one is due."""

    started: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    judged: tuple[str, ...] = ()
    planned_again: bool = False
    next_at: datetime | None = None
    """None: nothing is left of the week."""


@dataclass
class WeekFollower:
    desk: WeekDesk

    def tick(self, now: datetime) -> WeekTick:
        jobs = {job.id: job for job in self.desk.look_after_jobs()}
        week = self._find_lost(self.desk.load(), jobs)
        week, ended = self._end_sessions(week, jobs, now)
        _, judged = self._judge(week, now)
        # To judge a model takes long: a person may have written another plan meanwhile.
        week = self.desk.load()
        week, started, missed = self._begin_sessions(week, now)
        planned_again = bool(week.pending)
        if planned_again:
            week = self._plan_again(week, now)
        return WeekTick(
            started=tuple(started),
            ended=tuple(ended),
            missed=tuple(missed),
            judged=tuple(judged),
            planned_again=planned_again,
            next_at=next_moment(week, now),
        )

    def _find_lost(self, week: FollowedWeek, jobs: dict[str, FleetJob]) -> FollowedWeek:
        """Sessions that a killed follower had written down: found at their place, or never started."""
        linked = {session.job for session in week.sessions}
        for session in week.sessions:
            if session.state != "ordered":
                continue
            found = next(
                (
                    job
                    for job in jobs.values()
                    if job.id not in linked
                    and job.created_at >= session.ordered_at.timestamp()
                    and self.desk.runs_at(job, session)
                ),
                None,
            )
            kept = [other for other in week.sessions if other is not session]
            if found is not None:
                linked.add(found.id)
                kept.append(session.model_copy(update={"state": "running", "job": found.id}))
            week = week.model_copy(update={"sessions": tuple(kept)})
            self.desk.save(week)
        return week

    def _end_sessions(
        self, week: FollowedWeek, jobs: dict[str, FleetJob], now: datetime
    ) -> tuple[FollowedWeek, list[str]]:
        """A run that is complete ends its session, and the model needs no other one."""
        ended = []
        for session in week.sessions:
            job = jobs.get(session.job)
            if session.state != "running" or (job is not None and not self._is_over(job, now)):
                continue
            complete = job is not None and job.state == "done"
            stopped = job is not None and job.state == "stopped"
            why = "complete" if complete else (job.reason or job.state) if job is not None else "gone"
            kind: Literal["finished", "preempted"] = "finished" if complete or stopped else "preempted"
            events = [WeekEvent(kind=kind, at=now, place=session.place, model=session.model)]
            if complete:
                events.append(WeekEvent(kind="complete", at=now, model=session.model))
            week = _change(week, session, *events, state="done" if complete else "ended", why=why)
            self.desk.save(week)
            ended.append(f"{session.model} at {session.place}: {why}")
            self.desk.report(f"session ended: {ended[-1]}")
        return week, ended

    def _is_over(self, job: FleetJob, now: datetime) -> bool:
        """Whether a job has ended. One that never runs would keep its model from other places."""
        if not job.is_open:
            return True
        if now.timestamp() < job.created_at + job.seconds + OVERDUE.total_seconds():
            return False
        self.desk.give_up(job)
        return True

    def _judge(self, week: FollowedWeek, now: datetime) -> tuple[FollowedWeek, list[str]]:
        judged = []
        for session in week.sessions:
            if session.state != "done":
                continue
            try:
                passed = self.desk.judge(session.model)
            except (Interrupted, StoppedInOrder):
                raise
            except Stale as error:
                week = _change(week, session, state="ended", why=error.why or error.what)
                self.desk.save(week)
                self.desk.report(f"{session.model} is not judged: {error.what}")
                continue
            except GraftError as error:
                self.desk.report(f"{session.model} could not be judged, tried again later: {error.what}")
                continue
            verdict = WeekEvent(kind="gate", at=now, model=session.model, passed=passed)
            week = _change(week, session, verdict, state="judged")
            self.desk.save(week)
            judged.append(f"{session.model}: {'passed' if passed else 'not passed'}")
        return week, judged

    def _begin_sessions(self, week: FollowedWeek, now: datetime) -> tuple[FollowedWeek, list[str], list[str]]:
        started, missed = [], []
        for due in due_sessions(week, now):
            ordered = SessionJob(model=due.model, place=due.place, starts_at=due.starts_at, ordered_at=now)
            week = week.model_copy(update={"sessions": (*week.sessions, ordered)})
            # Written down first: a job that was ordered before a kill is found again by this.
            self.desk.save(week)
            try:
                job = self.desk.start(due, seconds=(due.ends_at - now).total_seconds())
            except (Interrupted, StoppedInOrder):
                raise
            except RunIsComplete:
                event = WeekEvent(kind="complete", at=now, model=due.model)
                week = _change(week, ordered, event, state="done", why="complete")
            except PlaceUnreachable as error:
                # It may have arrived: the next round finds the job, or orders it again.
                self.desk.report(f"{due.model} at {due.place}: {error.what}; tried again")
                continue
            except GraftError as error:
                why = f"{error.what}: {error.why}" if error.why else error.what
                event = WeekEvent(kind="missed", at=now, place=due.place, model=due.model)
                week = _change(week, ordered, event, state="missed", why=why)
                missed.append(f"{due.model} at {due.place}: {why}")
                self.desk.report(f"session missed: {missed[-1]}")
            else:
                week = _change(week, ordered, state="running", job=job.id)
                started.append(f"{due.model} at {due.place} until {due.ends_at:%a %H:%M}: job {job.id}")
                self.desk.report(f"session started: {started[-1]}")
            self.desk.save(week)
        return week, started, missed

    def _plan_again(self, week: FollowedWeek, now: datetime) -> FollowedWeek:
        passing = [event for event in week.pending if event.kind not in LASTING]
        try:
            schedule = self.desk.plan_again(week.schedule, (*week.events, *passing), now)
        except GraftError as error:
            # The rest of the old plan still keeps the rules of every place.
            self.desk.report(f"the rest of the week stays as planned: {error.what}")
            schedule = week.schedule
        week = week.model_copy(update={"schedule": schedule, "pending": ()})
        self.desk.save(week)
        return week


def due_sessions(week: FollowedWeek, now: datetime) -> list[ShownSession]:
    """Sessions that should run now, and were neither begun nor missed; one of a model at a time."""
    known = {(session.model, session.place, session.starts_at) for session in week.sessions}
    busy = {session.model for session in week.sessions if session.state in ("ordered", "running")}
    complete = {event.model for event in week.events if event.kind == "complete"}
    due = []
    for session in sorted(week.schedule.sessions, key=lambda session: session.starts_at):
        if not session.starts_at <= now < session.ends_at - SHORTEST:
            continue
        if (session.model, session.place, session.starts_at) in known:
            continue
        if session.model in busy or session.model in complete:
            continue
        busy.add(session.model)
        due.append(session)
    return due


def next_moment(week: FollowedWeek, now: datetime) -> datetime | None:
    """When a session begins, or a running one is to end; None if there is neither."""
    complete = {event.model for event in week.events if event.kind == "complete"}
    begins = [s.starts_at for s in week.schedule.sessions if s.starts_at > now and s.model not in complete]
    if any(session.state in ("ordered", "running", "done") for session in week.sessions):
        ends = [s.ends_at for s in week.schedule.sessions if s.starts_at <= now < s.ends_at]
        return min([*begins, *ends], default=now + POLL)
    return min(begins, default=None)


def _change(week: FollowedWeek, session: SessionJob, *events: WeekEvent, **changes: str) -> FollowedWeek:
    """The week with this session changed, and with what has happened to it."""
    key = (session.model, session.place, session.starts_at, session.ordered_at)
    sessions = tuple(
        other.model_copy(update=changes)
        if (other.model, other.place, other.starts_at, other.ordered_at) == key
        else other
        for other in week.sessions
    )
    return week.model_copy(
        update={
            "sessions": sessions,
            "events": (*week.events, *(event for event in events if event.kind in LASTING)),
            "pending": (*week.pending, *events),
        }
    )
