"""Follows the plan of a week: starts each session at its place, and plans again when something happens.

Input: an open project with `week.json`, which `graft plan week --out week.json` wrote. Output: one round a
tick: jobs at places, and `week.json` planned again. What was begun is in `.graft/week.json`. Killed at any
moment, the next follower continues: a session is written down before its job is ordered, so it is found again
and not started twice. All sessions of a week train and judge the data that its first session found.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from graftwork.cycle.runner import find_trained
from graftwork.data.project import log_hashes
from graftwork.files.disk import write_atomic
from graftwork.fleet.control import what_failed
from graftwork.fleet.jobs import FleetRequest, find_jobs, reconcile, start_run, stop
from graftwork.fleet.place import PlaceUnreachable
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.table import finish_run, get_step, run_pipeline
from graftwork.process.worker import hold_lock
from graftwork.project.open_project import OpenProject, timestamp
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import Corrupted, GracefulStop, GraftError, Interrupted, Stale, UserError
from graftwork.records.fleet import FleetJob
from graftwork.records.plan import Plan
from graftwork.records.report import Verdict
from graftwork.records.week import ShownSession, WeekSchedule
from graftwork.text.wording import explain_error
from graftwork.week.problem import Effort
from graftwork.week.project import WeekRequest, plan_project_week, read_schedule, write_schedule
from graftwork.week.replan import WeekEvent

SHORTEST = timedelta(minutes=10)
"""With less time left, a session is not begun."""
OVERDUE = timedelta(hours=1)
"""A job that has not ended this long after its limit is abandoned."""
POLL = timedelta(seconds=30)
LASTING = ("quota", "gate", "closed", "complete")
"""Events that hold for the rest of the week. The others change the sessions, which the plan remembers."""

SessionState = Literal["ordered", "running", "done", "ended", "missed", "judged"]
"""`ordered`: recorded, and perhaps at the place. `done`: the run is complete and waits for the gate."""


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
    """State of the follower."""

    schedule: WeekSchedule
    sessions: tuple[SessionJob, ...] = ()
    events: tuple[WeekEvent, ...] = ()
    """Events that hold for the rest of the week."""
    pending: tuple[WeekEvent, ...] = ()
    """Events that are not in the plan of the rest of the week yet."""


class RunIsComplete(GraftError):
    """There is nothing left to train for a session: the run of its model is complete."""


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
    desk: "ProjectWeek"

    def tick(self, now: datetime) -> WeekTick:
        jobs = {job.id: job for job in self.desk.look_after_jobs()}
        week = self._find_lost(self.desk.load(), jobs)
        week, ended = self._end_sessions(week, jobs, now)
        judged = self._judge(week, now)
        # To judge a model takes long: a person may have written another plan meanwhile.
        week = self.desk.load()
        week, over = self._miss_sessions(week, now)
        week, started, refused = self._begin_sessions(week, now)
        planned_again = bool(week.pending)
        if planned_again:
            passing = [event for event in week.pending if event.kind not in LASTING]
            try:
                schedule = self.desk.plan_again(week.schedule, (*week.events, *passing), now)
            except GraftError as error:
                # The rest of the old plan still keeps the rules of every place.
                self.desk.report(f"the rest of the week stays as planned: {error.what}")
                schedule = week.schedule
            week = week.model_copy(update={"schedule": schedule, "pending": ()})
            self.desk.save(week)
        return WeekTick(
            started=tuple(started),
            ended=tuple(ended),
            missed=(*over, *refused),
            judged=tuple(judged),
            planned_again=planned_again,
            next_at=next_moment(week, now),
        )

    def _find_lost(self, week: FollowedWeek, jobs: dict[str, FleetJob]) -> FollowedWeek:
        """Sessions that a killed follower had recorded: found at their place, or never started."""
        linked = {session.job for session in week.sessions}
        for session in week.sessions:
            if session.state != "ordered":
                continue
            match = next(
                (
                    job
                    for job in jobs.values()
                    if job.id not in linked
                    and job.created_at >= session.ordered_at.timestamp()
                    and self.desk.runs_at(job, session)
                ),
                None,
            )
            sessions = [past for past in week.sessions if past is not session]
            if match is not None:
                linked.add(match.id)
                sessions.append(session.model_copy(update={"state": "running", "job": match.id}))
            week = week.model_copy(update={"sessions": tuple(sessions)})
            self.desk.save(week)
        return week

    def _end_sessions(
        self, week: FollowedWeek, jobs: dict[str, FleetJob], now: datetime
    ) -> tuple[FollowedWeek, list[str]]:
        """A complete run ends its session, and the model needs no other one."""
        ended = []
        for session in week.sessions:
            job = jobs.get(session.job)
            if session.state != "running":
                continue
            if job is not None and job.is_open:
                if now.timestamp() < job.created_at + job.seconds + OVERDUE.total_seconds():
                    continue
                # One that never runs would keep its model from other places.
                self.desk.give_up(job)
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

    def _judge(self, week: FollowedWeek, now: datetime) -> list[str]:
        judged = []
        for session in week.sessions:
            if session.state != "done":
                continue
            try:
                passed = self.desk.judge(session.model)
            except (Interrupted, GracefulStop):
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
        return judged

    def _miss_sessions(self, week: FollowedWeek, now: datetime) -> tuple[FollowedWeek, list[str]]:
        """Sessions that ended while no follower ran: the rest of the week is planned without them."""
        missed = []
        for lost in lost_sessions(week, now):
            why = "nothing was running to start it"
            session = SessionJob(
                model=lost.model, place=lost.place, starts_at=lost.starts_at, ordered_at=now,
                state="missed", why=why,
            )  # fmt: skip
            # The event counts for the time that the session was planned for.
            event = WeekEvent(kind="missed", at=lost.starts_at, place=lost.place, model=lost.model)
            week = week.model_copy(
                update={"sessions": (*week.sessions, session), "pending": (*week.pending, event)}
            )
            self.desk.save(week)
            missed.append(f"{lost.model} at {lost.place} on {lost.starts_at:%a %H:%M}: {why}")
            self.desk.report(f"session missed: {missed[-1]}")
        return week, missed

    def _begin_sessions(self, week: FollowedWeek, now: datetime) -> tuple[FollowedWeek, list[str], list[str]]:
        started, missed = [], []
        for due in due_sessions(week, now):
            ordered = SessionJob(model=due.model, place=due.place, starts_at=due.starts_at, ordered_at=now)
            week = week.model_copy(update={"sessions": (*week.sessions, ordered)})
            # Written down first: a job that was ordered before a kill is found again by this.
            self.desk.save(week)
            try:
                job = self.desk.start(due, seconds=(due.ends_at - now).total_seconds())
            except (Interrupted, GracefulStop):
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


def open_sessions(week: FollowedWeek) -> list[ShownSession]:
    """Planned sessions that were neither begun nor missed, of models that still need them, by their start."""
    begun_keys = {(session.model, session.place, session.starts_at) for session in week.sessions}
    complete = {event.model for event in week.events if event.kind == "complete"}
    return [
        session
        for session in sorted(week.schedule.sessions, key=lambda session: session.starts_at)
        if (session.model, session.place, session.starts_at) not in begun_keys
        and session.model not in complete
    ]


def over_sessions(week: FollowedWeek, now: datetime) -> list[ShownSession]:
    """Sessions that ended since the week was planned, without a job of ours."""
    return [
        session
        for session in open_sessions(week)
        if not session.fixed and week.schedule.now < session.ends_at - SHORTEST <= now
    ]


def lost_sessions(week: FollowedWeek, now: datetime) -> list[ShownSession]:
    """Of these, those that we were to start. Others may have taken place: a person says so with an event."""
    return [session for session in over_sessions(week, now) if not session.by_hand]


def due_sessions(week: FollowedWeek, now: datetime) -> list[ShownSession]:
    """Sessions that should run now, and were neither begun nor missed; one of a model at a time."""
    busy = {session.model for session in week.sessions if session.state in ("ordered", "running")}
    due = []
    for session in open_sessions(week):
        if not session.starts_at <= now < session.ends_at - SHORTEST or session.model in busy:
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
    """The week with this session changed, and its event."""
    key = (session.model, session.place, session.starts_at, session.ordered_at)
    sessions = tuple(
        past.model_copy(update=changes)
        if (past.model, past.place, past.starts_at, past.ordered_at) == key
        else past
        for past in week.sessions
    )
    return week.model_copy(
        update={
            "sessions": sessions,
            "events": (*week.events, *(event for event in events if event.kind in LASTING)),
            "pending": (*week.pending, *events),
        }
    )


BEFORE_TRAINING = ("audit", "prepare", "plan")
LOGS = "logs"


@dataclass(frozen=True)
class WeekData:
    work: OpenProject
    start: datetime
    models: Sequence[str]
    """Models with a session in this week; their data are fixed at the same time."""
    busy: frozenset[str] = frozenset()
    """Models with a session that has not ended: it may have begun in the week before."""

    def outputs_of(self, model: str) -> StepOutputs:
        """The steps before training, as this week has them."""
        outputs = self._read(model)
        if outputs is not None:
            return outputs
        logs = fingerprint(log_hashes(self.work))
        self._keep_logs(used=logs, latest=logs)
        for name in dict.fromkeys((self.work.settings.main_model, model, *self.models)):
            if name in self.busy and self._read(name) is not None:
                continue
            try:
                fresh = self._make(name)
            except (Interrupted, GracefulStop):
                raise
            except GraftError:
                if name == model:
                    raise
                continue  # its own first session says what is wrong
            for step in BEFORE_TRAINING:
                self._keep(_name(step, name), fresh.outputs[step].model_dump(mode="json"))
        outputs = self._read(model)
        # Data whose files were deleted are made again.
        return outputs if outputs is not None else self._make(model)

    def report_changes(self) -> None:
        """Report each change of the logs once."""
        entry, now = self.work.ledger.get(_name(LOGS)), log_hashes(self.work)
        if entry is None or entry.output is None or entry.output.get("seen") == fingerprint(now):
            return
        if entry.output.get("taken") != fingerprint(now):
            self.work.reporter.info(
                "the logs have changed: this week continues with the data that it began with"
            )
        self._keep_logs(used=str(entry.output.get("taken")), latest=fingerprint(now))

    def _make(self, model: str) -> StepOutputs:
        # Nothing is trained here on the way: a model that starts from another waits for its adapter.
        results = [
            run_pipeline(self._of(model), upto=name, may_do=BEFORE_TRAINING) for name in ("audit", "plan")
        ]
        return StepOutputs({**results[0].outputs, **results[1].outputs})

    def _read(self, model: str) -> StepOutputs | None:
        outputs: dict[str, Record] = {}
        for name in BEFORE_TRAINING:
            step, entry = get_step(name), self.work.ledger.get(_name(name, model))
            if entry is None or (entry.fingerprint != self.start.isoformat() and model not in self.busy):
                return None
            outputs[name] = step.makes.model_validate(entry.output)
            if not step.still_there(self._of(model), outputs[name]):
                return None
        return StepOutputs(outputs)

    def _keep_logs(self, *, used: str, latest: str) -> None:
        self._keep(_name(LOGS), {"taken": used, "seen": latest})

    def _keep(self, name: str, output: dict[str, object]) -> None:
        self.work.ledger.put(
            name, fingerprint=self.start.isoformat(), output=output, finished_at=timestamp(), seconds=0.0
        )

    def _of(self, model: str) -> OpenProject:
        return replace(self.work, asked_model=None if model == self.work.settings.main_model else model)


def _name(step: str, model: str = "") -> str:
    return f"week.{step}@{model}" if model else f"week.{step}"


WEEK_FILE = "week.json"
LOCK = "week"
POLL_SECONDS = 30.0
REPLAN_SECONDS = 4.0
"""Replanning must not keep sessions waiting."""


class ProjectWeek:
    """The operations of a `WeekFollower` on a project."""

    def __init__(self, work: OpenProject) -> None:
        self._work = work
        self._known_plan: WeekSchedule | None = None
        """The plan in the file, as last loaded or written here."""

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
        """The plan in the project's folder, and what was begun in it, unless it is another week's."""
        if not self._plan_file.exists():
            raise UserError(
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
            followed = FollowedWeek.from_json(self._state_file.read_bytes())
        except ValidationError as error:
            raise Corrupted(
                f"{self._state_file} cannot be read",
                why=explain_error(error.errors(include_url=False, include_input=False)[0]),
                fix="move it away: jobs that run are still listed by `graft fleet list`",
                where=str(self._state_file),
            ) from error
        if followed.schedule.start != schedule.start:
            open_ones = tuple(s for s in followed.sessions if s.state in ("ordered", "running", "done"))
            return FollowedWeek(schedule=schedule, sessions=open_ones)
        # A plan that a person wrote meanwhile counts.
        return followed.model_copy(update={"schedule": schedule})

    def save(self, week: FollowedWeek) -> None:
        # The plan first: after a kill in between, what is pending is planned once more. A plan that a person
        # wrote since it was loaded counts, and is not overwritten.
        plan = read_schedule(self._plan_file) if self._plan_file.exists() else None
        if plan is None or (plan != week.schedule and self._known_plan in (None, plan)):
            write_schedule(self._plan_file, week.schedule)
            self._known_plan = week.schedule
        write_atomic(self._state_file, week.to_json())

    def look_after_jobs(self) -> Sequence[FleetJob]:
        """Fetch jobs that have ended, end those over their limits. All jobs of the project."""
        if any(job.is_open for job in self._work.jobs.list()):
            reconcile(self._work)
        return self._work.jobs.list()

    def start(self, session: ShownSession, *, seconds: float) -> FleetJob:
        """Order the job of a session. Raises `RunIsComplete` if there is nothing left to train, another
        GraftError if the place or the project does not allow it.
        """
        work, provider = self._of(session.model), self._work.settings.fleet.places.get(session.place)
        if provider is None:
            raise UserError(
                f"fleet.places has no {session.place}",
                why="the plan of the week was made with other settings",
                fix=f"graft plan week --keep {WEEK_FILE} --out {WEEK_FILE}",
                where=f"fleet.places.{session.place}",
            )
        outputs = self._data.outputs_of(session.model)
        self._data.report_changes()
        if find_trained(work, outputs) is not None:
            raise RunIsComplete(f"the run of {session.model} is complete")
        request = FleetRequest(
            place=provider.place or session.place,
            gpu=provider.gpu if provider.usd_per_hour else "",
            deadline_seconds=seconds,
        )
        # The caps of the fleet are the confirmation: the ledger refuses what could break one.
        return start_run(work, request, confirm=lambda _quote: True, outputs=outputs)

    def runs_at(self, job: FleetJob, session: SessionJob) -> bool:
        """Whether the job is at the place of the session and trains its model."""
        provider = self._work.settings.fleet.places.get(session.place)
        if provider is None:
            return False
        target = provider.place or session.place
        # Jobs of all SSH hosts are listed under one place.
        if job.place not in (target, target.partition(":")[0]):
            return False
        plan = self._data.outputs_of(session.model).get("plan", Plan)
        return any(job_here.id == job.id for job_here in find_jobs(self._of(session.model), plan))

    def give_up(self, job: FleetJob) -> None:
        """Stop a job that has not ended in time."""
        try:
            stop(self._work, job, at_once=True)
        except Exception as error:  # whatever a place may raise: the reconciliation repeats it
            self.report(f"job {job.id} at {job.place} is not stopped yet: {what_failed(error)}")
        else:
            self.report(f"job {job.id} at {job.place} did not end in its time and is stopped")

    def judge(self, model: str) -> bool:
        """Evaluate, gate and release a model whose run is complete. Idempotent."""
        work = self._of(model)
        outputs = find_trained(work, self._data.outputs_of(model))
        if outputs is None:
            # Otherwise the whole run would be trained here.
            raise Stale(
                f"the run of {model} does not belong to this week",
                why="its data or its plan was made again since its session began",
                fix=f"judge it by `graft release make --model {model}`",
                where=model,
            )
        return finish_run(work, outputs).get("gate", Verdict).decision == "deploy"

    @property
    def _data(self) -> WeekData:
        week = self._read()
        busy = {s.model for s in week.sessions if s.state in ("ordered", "running", "done")}
        models = [s.model for s in week.schedule.sessions]
        return WeekData(self._work, week.schedule.start, tuple(dict.fromkeys(models)), frozenset(busy))

    def plan_again(self, schedule: WeekSchedule, events: Sequence[WeekEvent], now: datetime) -> WeekSchedule:
        request = WeekRequest(
            effort=Effort(seconds=REPLAN_SECONDS, scenario=schedule.scenario, what_if=False),
            now=now,
            earlier=schedule,
            events=tuple(events),
        )
        return plan_project_week(self._work.project, request)

    def report(self, text: str) -> None:
        self._work.reporter.info(text)

    def _of(self, model: str) -> OpenProject:
        model_name = None if model == self._work.settings.main_model else model
        return replace(self._work, asked_model=model_name)


class WeekStatus(Record):
    """Output of `graft up week --dry-run`. Nothing was started."""

    due: tuple[ShownSession, ...]
    """Sessions that would be started now."""
    next: tuple[ShownSession, ...]
    sessions: tuple[SessionJob, ...]
    """Sessions begun or missed so far."""
    lost: tuple[ShownSession, ...] = ()
    """Sessions that ended without having been started; the next round plans the week without them."""
    unreported: tuple[ShownSession, ...] = ()
    """Sessions that a person was to start and that are over: only the person knows what became of them."""


COMING = 8


def week_status(work: OpenProject, *, now: datetime | None = None) -> WeekStatus:
    moment = now or datetime.now(tz=UTC)
    week = ProjectWeek(work).load()
    coming = sorted((s for s in week.schedule.sessions if s.starts_at > moment), key=lambda s: s.starts_at)
    return WeekStatus(
        due=tuple(due_sessions(week, moment)),
        next=tuple(coming[:COMING]),
        sessions=week.sessions,
        lost=tuple(lost_sessions(week, moment)),
        unreported=tuple(session for session in over_sessions(week, moment) if session.by_hand),
    )


def current_week(work: OpenProject) -> WeekStatus | None:
    """The planned week that is not over; None without one that can be read: `graft up week` says why."""
    path, now = work.project.root / WEEK_FILE, datetime.now(tz=UTC)
    try:
        return week_status(work, now=now) if path.exists() and read_schedule(path).end > now else None
    except (UserError, Corrupted):
        return None


def follow_once(work: OpenProject) -> WeekTick:
    """One round: end, judge, begin, plan again."""
    with hold_lock(work.project.state / LOCK):
        return WeekFollower(ProjectWeek(work)).tick(datetime.now(tz=UTC))


def follow_week(work: OpenProject) -> WeekTick:
    """Follow the plan until nothing is left of it, or a signal comes. Jobs continue without the follower."""
    with hold_lock(work.project.state / LOCK):
        follower = WeekFollower(ProjectWeek(work))
        reported: datetime | None = None
        while True:
            try:
                done = follower.tick(datetime.now(tz=UTC))
            except (UserError, Interrupted, GracefulStop):
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
            seconds = (done.next_at - datetime.now(tz=UTC)).total_seconds()
            time.sleep(min(max(seconds, 1.0), POLL_SECONDS))
