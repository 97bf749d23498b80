"""What has happened, from an earlier plan and events: the state that the rest of the week is planned from.

Input: a schedule, the time now, events as records. Output: a `WeekState`. Sessions of the plan that began
before now are taken as run as planned, unless an event says otherwise. Events are applied in order of time.
"""

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Literal

from pydantic import Field

from graftwork.records.base import Record
from graftwork.records.errors import UserError
from graftwork.records.week import Session, WeekSchedule
from graftwork.week.calendar import minutes_since
from graftwork.week.problem import QuotaReading, WeekProblem, WeekState, require_name

EventKind = Literal["quota", "started", "preempted", "finished", "missed", "gate", "closed", "complete"]


class WeekEvent(Record):
    """Something that happened.

    quota: `place` says that `used_hours` were used since its reset. started: a session of `model` at `place`
    began, and is expected to take `hours`. preempted or finished: the session at `place` ended at `at`.
    missed: the session planned for `at` at `place` did not take place. gate: `model` passed or not.
    closed: `place` cannot be used from `at` until `until`. complete: the run of `model` needs no more hours.
    """

    kind: EventKind
    at: datetime
    place: str | None = None
    model: str | None = None
    used_hours: float | None = Field(None, ge=0)
    hours: float | None = Field(None, gt=0)
    passed: bool | None = None
    until: datetime | None = None


NEEDED: dict[EventKind, tuple[str, ...]] = {
    "quota": ("place", "used_hours"),
    "started": ("place", "model", "hours"),
    "preempted": ("place",),
    "finished": ("place",),
    "missed": ("place",),
    "gate": ("model", "passed"),
    "closed": ("place", "until"),
    "complete": ("model",),
}


def state_after(
    problem: WeekProblem, earlier: WeekSchedule | None, events: Iterable[WeekEvent], now: datetime
) -> WeekState:
    """The current state: past and running sessions, readings, failed gates."""
    minute_now = minutes_since(problem.start, now)
    if not 0 <= minute_now <= problem.length:
        raise UserError(
            f"{now.isoformat()} is not in the week that starts {problem.start.isoformat()}",
            fix="give a time of this week with --now, or plan another week with --start",
            where="--now",
        )
    sessions = (
        [_plain(s, fixed=True) for s in earlier.sessions if s.start < minute_now]
        if earlier is not None
        else []
    )
    past = WeekState(now=minute_now, fixed=tuple(sessions))
    for event in sorted(events, key=lambda event: event.at):
        past = _apply(problem, past, event)
    return past


def sessions_ahead(earlier: WeekSchedule, state: WeekState) -> tuple[Session, ...]:
    """The earlier plan's sessions from now on, without models that need no more hours."""
    return tuple(
        _plain(session, fixed=False)
        for session in earlier.sessions
        if not session.fixed and session.start >= state.now and session.model not in state.complete
    )


def _plain(session: Session, *, fixed: bool) -> Session:
    return Session(
        place=session.place, model=session.model, start=session.start, end=session.end,
        train=session.train, lane=session.lane, round=session.round, fixed=fixed,
    )  # fmt: skip


def _apply(problem: WeekProblem, state: WeekState, event: WeekEvent) -> WeekState:
    missing = [name for name in NEEDED[event.kind] if getattr(event, name) is None]
    if missing:
        raise UserError(
            f"the event {event.kind!r} at {event.at.isoformat()} lacks {', '.join(missing)}",
            fix=f"an event of this kind has: at, {', '.join(NEEDED[event.kind])}",
            where="--event",
        )
    if event.at.tzinfo is None:
        raise UserError(
            f"the time {event.at.isoformat()} of an event has no offset",
            fix="write it as 2026-11-18T09:00:00+01:00",
            where="--event",
        )
    if event.place is not None:
        require_name(event.place, [p.name for p in problem.places], kind="place", where="--event")
    if event.model is not None:
        require_name(event.model, [m.name for m in problem.models], kind="model", where="--event")
    minute = minutes_since(problem.start, event.at)
    if event.kind == "quota":
        reading = QuotaReading(place=event.place or "", at=minute, used=round((event.used_hours or 0) * 60))
        return state.model_copy(update={"readings": (*state.readings, reading)})
    if event.kind == "gate":
        failed = {name: when for name, when in state.failed_gates.items() if name != event.model}
        if event.passed is False:
            failed[event.model or ""] = minute
        return state.model_copy(update={"failed_gates": failed})
    if event.kind == "complete":
        return state.model_copy(update={"complete": state.complete | {event.model or ""}})
    if event.kind == "closed":
        until = minutes_since(problem.start, event.until or event.at)
        spans = (*state.closed.get(event.place or "", ()), (minute, until))
        return state.model_copy(update={"closed": {**state.closed, event.place or "": spans}})
    fixed = _changed(problem, state.fixed, event, minute)
    return state.model_copy(update={"fixed": tuple(fixed)})


def _changed(problem: WeekProblem, fixed: Sequence[Session], event: WeekEvent, minute: int) -> list[Session]:
    provider = problem.place(event.place or "")
    if event.kind == "started":
        length = round((event.hours or 0) * 60)
        last_round = max((s.round for s in fixed if s.model == event.model), default=0)
        busy_lanes = {s.lane for s in fixed if s.place == provider.name and s.start <= minute < s.end}
        lane = next((n for n in range(provider.lanes) if n not in busy_lanes), 0)
        begun_session = Session(
            place=provider.name, model=event.model or "", start=minute, end=minute + length,
            train=max(0, length - provider.overhead), lane=lane, round=last_round, fixed=True,
        )  # fmt: skip
        return [
            *(s for s in fixed if not (s.place == provider.name and s.lane == lane and s.end > minute)),
            begun_session,
        ]
    running = [
        s
        for s in fixed
        if s.place == provider.name and s.start <= minute < s.end and event.model in (None, s.model)
    ]
    if not running:
        return list(fixed)
    ended = running[-1]
    other_sessions = [session for session in fixed if session is not ended]
    if event.kind == "missed":
        return other_sessions
    # What was not saved is lost with a preemption: a transfer's time of training, as saving takes.
    lost = provider.transfer if event.kind == "preempted" else 0
    train = max(0, min(ended.train, minute - ended.start - provider.setup - provider.transfer - lost))
    return (
        [*other_sessions, ended.model_copy(update={"end": minute, "train": train})]
        if minute > ended.start
        else other_sessions
    )
