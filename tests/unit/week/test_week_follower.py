"""Following a week: sessions start on time, once, at their place; what happens is planned around."""

import shlex
from datetime import UTC, datetime, timedelta
from random import Random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.fleet.place import PlaceUnreachable
from graftwork.records.errors import GracefulStop, NegativeResult, Stale, WorkerFailed
from graftwork.records.week import ShownSession, WeekSchedule
from graftwork.views.week import summarize_week
from graftwork.week import follow as followed_week
from graftwork.week.follow import (
    FollowedWeek,
    RunIsComplete,
    WeekFollower,
    WeekStatus,
    WeekTick,
    current_week,
    due_sessions,
    lost_sessions,
    over_sessions,
)
from graftwork.week.project import write_schedule
from graftwork.week.replan import WeekEvent

START = datetime(2026, 11, 16, tzinfo=UTC)
HOUR = timedelta(hours=1)


def hours(number):
    return START + number * HOUR


def shown(place, model, start, end):
    return ShownSession(
        place=place, model=model, start=start * 60, end=end * 60, train=(end - start) * 60,
        starts_at=hours(start), ends_at=hours(end), hours=float(end - start), cost_usd=0.0, by_hand=False,
    )  # fmt: skip


def schedule(*sessions, now=START):
    return WeekSchedule(
        start=START, end=START + 168 * HOUR, now=now, timezone="UTC", scenario="parallel",
        sessions=sessions, models=(), places=(), value=1.0, bound=1.0, gap=0.0, optimal=True, cost_usd=0.0,
        cap_usd=None, scenarios=(),
    )  # fmt: skip


class Killed(Exception):
    """The follower's process ends here."""


class SimulatedDesk:
    """Jobs that end by themselves; `faults` may kill the follower before or after any call."""

    def __init__(self, plan, needed, *, faults=None, refuses=()):
        self.saved, self.needed, self.refuses = FollowedWeek(schedule=plan), dict(needed), refuses
        self.faults = faults or (lambda: None)
        self.now, self.jobs, self.trained = START, [], dict.fromkeys(needed, 0.0)
        self.events, self.judged, self.planned, self.judgements = [], [], 0, 0

    def _call(self, do):
        self.faults()
        result = do()
        self.faults()
        return result

    def load(self):
        return self.saved

    def save(self, week):
        self._call(lambda: setattr(self, "saved", FollowedWeek.from_json(week.to_json())))

    def look_after_jobs(self):
        for job in self.jobs:
            if job.is_open and self.now >= job.ends:
                job.is_open = False
                self.trained[job.model] += job.hours
                left = self.needed[job.model] - self.trained[job.model]
                job.state = "failed" if job.preempted else "done" if left <= 0 else "stopped"
        return list(self.jobs)

    def start(self, session, *, seconds):
        def order():
            if session.place in self.refuses:
                raise NegativeResult("the quota is used up", why="30 of 30 hours")
            running = [job for job in self.jobs if job.is_open]
            assert session.model not in {job.model for job in running}, "two sessions of one model"
            assert session.place not in {job.place for job in running}, "two sessions at one place"
            left = self.needed[session.model] - self.trained[session.model]
            long = min(seconds / 3600, left)
            job = SimpleNamespace(
                id=f"j{len(self.jobs)}", place=session.place, model=session.model, is_open=True,
                state="submitted", reason="", created_at=self.now.timestamp(),
                ends=self.now + long * HOUR, hours=long, preempted=False, seconds=seconds,
            )  # fmt: skip
            self.jobs.append(job)
            return job

        return self._call(order)

    def runs_at(self, job, session):
        return (job.place, job.model) == (session.place, session.model)

    def give_up(self, job):
        job.is_open, job.state = False, "stopped"

    def judge(self, model):
        assert self.trained[model] >= self.needed[model] - 1e-6, "judged before its run was complete"
        self.judgements += 1
        return self._call(lambda: True)

    def plan_again(self, earlier, events, now):
        self.events += events
        self.planned += 1
        return earlier

    def report(self, text):
        pass


def follow(desk, *, until=168, every=0.25):
    """Tick through the week, with a new follower after each kill."""
    ticks, number = [], 0.0
    while number <= until:
        desk.now = hours(number)
        try:
            ticks.append(WeekFollower(desk).tick(desk.now))
        except Killed:
            continue
        number += every
    return ticks


def test_sessions_run_at_their_places_at_the_same_time_and_models_are_judged_when_complete():
    desk = SimulatedDesk(
        schedule(shown("kaggle", "main", 1, 9), shown("own", "ufm", 2, 6), shown("kaggle", "ufm", 10, 14)),
        {"main": 8.0, "ufm": 6.0},
    )
    follow(desk, until=20)
    assert [(job.place, job.model, job.created_at) for job in desk.jobs] == [
        ("kaggle", "main", hours(1).timestamp()),
        ("own", "ufm", hours(2).timestamp()),
        ("kaggle", "ufm", hours(10).timestamp()),
    ]
    assert [session.state for session in desk.saved.sessions] == ["judged", "ended", "judged"]
    assert {event.model for event in desk.saved.events if event.kind == "gate" and event.passed} == {
        "main",
        "ufm",
    }


def test_a_complete_model_gets_no_other_session():
    desk = SimulatedDesk(schedule(shown("own", "main", 0, 8), shown("own", "main", 9, 12)), {"main": 2.0})
    ticks = follow(desk, until=24)
    assert len(desk.jobs) == 1
    assert ticks[-1].next_at is None


def test_a_refused_session_is_missed_once_and_planned_around():
    desk = SimulatedDesk(schedule(shown("kaggle", "main", 1, 9)), {"main": 8.0}, refuses=("kaggle",))
    ticks = follow(desk, until=10)
    missed = [tick for tick in ticks if tick.missed]
    assert [tick.missed for tick in missed] == [("main at kaggle: the quota is used up: 30 of 30 hours",)]
    assert [event.kind for event in desk.events] == ["missed"]
    assert desk.planned == 1


def test_sessions_that_ended_while_nothing_followed_the_week_are_missed_and_planned_around():
    desk = SimulatedDesk(
        schedule(
            shown("kaggle", "main", 1, 9), shown("own", "ufm", 2, 6), shown("own", "main", 20, 30),
            now=hours(4),
        ),
        {"main": 8.0, "ufm": 1.0},
    )  # fmt: skip
    desk.saved = desk.saved.model_copy(
        update={"events": (WeekEvent(kind="complete", at=hours(3), model="ufm"),)}
    )
    first, second = (WeekFollower(desk).tick(hours(moment)) for moment in (15, 15.25))
    assert [line.partition(" on ")[0] for line in first.missed] == ["main at kaggle"]
    assert not second.missed
    assert [(event.kind, event.at, event.place) for event in desk.events if event.kind == "missed"] == [
        ("missed", hours(1), "kaggle")
    ]
    assert desk.planned == 1
    assert not desk.jobs


@pytest.mark.parametrize(
    ("session", "planned_at"),
    [
        ({"by_hand": True}, 0),  # a person may have started it
        ({"fixed": True}, 0),  # an event has said what became of it
        ({}, 9),  # the plan was made after it
    ],
)
def test_a_session_that_may_have_taken_place_is_not_called_missed(session, planned_at):
    past = shown("kaggle", "main", 1, 9).model_copy(update=session)
    desk = SimulatedDesk(schedule(past, now=hours(planned_at)), {"main": 8.0})
    assert not WeekFollower(desk).tick(hours(15)).missed
    assert not desk.planned


def test_the_status_names_what_was_missed_and_the_command_for_each_kind():
    by_hand = shown("studio-lab", "ufm", 1, 9).model_copy(update={"by_hand": True})
    week = FollowedWeek(
        schedule=schedule(shown("kaggle", "main", 1, 9), by_hand, shown("own", "main", 20, 30))
    )
    lost, unreported = lost_sessions(week, hours(15)), over_sessions(week, hours(15))[1:]
    lines = summarize_week(
        WeekStatus(due=(), next=week.schedule.sessions[2:], sessions=(), lost=lost, unreported=unreported)
    )
    assert "1 session missed" in lines[0]
    assert "main at kaggle" in lines[0]
    assert '"place": "studio-lab"' in lines[1]
    assert "main at own on Mon 20:00" in lines[2]


def test_the_command_for_a_session_by_hand_names_it_alone_and_survives_a_shell():
    """Two models may have a session at one place at the same time."""
    by_hand = shown("the lab's GPUs", "ufm", 1, 9).model_copy(update={"by_hand": True})
    [line] = summarize_week(WeekStatus(due=(), next=(), sessions=(), unreported=(by_hand,)))
    event = WeekEvent.from_json(shlex.split(line.split("`")[1])[-1])
    assert (event.kind, event.at, event.place, event.model) == ("missed", hours(1), "the lab's GPUs", "ufm")


@pytest.mark.parametrize("broken", ["week.json", ".graft/week.json"])
def test_the_status_of_a_project_does_without_a_week_that_cannot_be_read(tmp_path, broken):
    work = SimpleNamespace(project=SimpleNamespace(root=tmp_path, state=tmp_path / ".graft"))
    work.project.state.mkdir()
    running = schedule().model_copy(update={"end": datetime.now(tz=UTC) + HOUR})
    write_schedule(tmp_path / "week.json", running)
    assert current_week(work) is not None
    (tmp_path / broken).write_text('{"monday": "meeting"}')
    assert current_week(work) is None


def test_a_preempted_session_is_an_event_and_a_model_that_fails_to_be_judged_is_tried_again():
    desk = SimulatedDesk(schedule(shown("kaggle", "main", 0, 8), shown("own", "main", 9, 20)), {"main": 8.0})
    desk.now = START
    WeekFollower(desk).tick(START)
    desk.jobs[0].preempted, desk.jobs[0].ends, desk.jobs[0].hours = True, hours(3), 3.0
    follow(desk, until=10)
    assert desk.events[0].kind == "preempted"
    answers = iter([WorkerFailed("no memory"), None])

    def judge(model):
        if (error := next(answers)) is not None:
            raise error
        return False

    desk.judge = judge
    follow(desk, until=40)
    gates = [event for event in desk.saved.events if event.kind == "gate"]
    assert [gate.passed for gate in gates] == [False]


def test_a_session_that_nobody_carries_out_does_not_keep_its_model_from_other_places():
    desk = SimulatedDesk(schedule(shown("lab", "main", 0, 4), shown("own", "main", 6, 12)), {"main": 3.0})
    desk.now = START
    WeekFollower(desk).tick(START)
    desk.jobs[0].ends = hours(1000)
    follow(desk, until=20)
    assert [job.place for job in desk.jobs] == ["lab", "own"]
    assert {session.state for session in desk.saved.sessions} == {"ended", "judged"}


def test_a_place_that_does_not_answer_is_asked_again_and_a_complete_run_is_not_ordered():
    desk = SimulatedDesk(schedule(shown("own", "main", 0, 4)), {"main": 3.0})
    start, answers = desk.start, iter([PlaceUnreachable("no route"), None])

    def flaky(session, *, seconds):
        if (error := next(answers)) is not None:
            raise error
        return start(session, seconds=seconds)

    desk.start = flaky
    follow(desk, until=6)
    assert len(desk.jobs) == 1
    assert desk.saved.sessions[-1].state == "judged"

    def complete(session, *, seconds):
        raise RunIsComplete("complete")

    other = SimulatedDesk(schedule(shown("own", "main", 0, 4)), {"main": 0.0})
    other.start = complete
    follow(other, until=2)
    assert (other.jobs, other.saved.sessions[0].state) == ([], "judged")


def test_a_stop_ends_the_follower_and_changed_logs_end_a_session_without_training_here():
    desk = SimulatedDesk(schedule(shown("own", "main", 0, 4)), {"main": 1.0})
    desk.judge = lambda model: raise_error(GracefulStop("SIGTERM"))
    with pytest.raises(GracefulStop):
        follow(desk, until=4)
    desk.judge = lambda model: raise_error(Stale("the logs have changed"))
    follow(desk, until=5)
    assert desk.saved.sessions[0].state == "ended"


def raise_error(error):
    raise error


def test_too_little_of_a_session_is_not_begun():
    week = FollowedWeek(schedule=schedule(shown("own", "main", 0, 4)))
    assert due_sessions(week, hours(3))
    assert not due_sessions(week, hours(4) - timedelta(minutes=5))
    assert not due_sessions(week, hours(5))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_killed_between_any_two_actions_no_session_is_started_twice_or_lost(seed):
    random = Random(seed)
    names, sessions = ("main", "ufm", "ucm"), []
    for place in ("kaggle", "own"):
        at = 0
        while at < 60:
            start, length = at + random.randint(0, 4), random.randint(1, 9)
            sessions.append(shown(place, random.choice(names), start, start + length))
            at = start + length + 1
    needed = {name: float(random.randint(2, 30)) for name in names}
    plain = SimulatedDesk(schedule(*sessions), needed)
    follow(plain, until=80)

    def faults():
        if random.random() < 0.1:
            raise Killed

    killed = SimulatedDesk(schedule(*sessions), needed, faults=faults)
    follow(killed, until=80)
    assert [(j.place, j.model, j.created_at) for j in killed.jobs] == [
        (j.place, j.model, j.created_at) for j in plain.jobs
    ]
    assert killed.trained == pytest.approx(plain.trained)
    assert sorted(s.state for s in killed.saved.sessions) == sorted(s.state for s in plain.saved.sessions)


def make_work(tmp_path):
    lines = []
    return SimpleNamespace(
        project=SimpleNamespace(state=tmp_path), reporter=SimpleNamespace(info=lines.append)
    ), lines


def test_a_job_that_cannot_be_given_up_does_not_end_the_follower(tmp_path, monkeypatch):
    work, lines = make_work(tmp_path)

    def stop(*_words, **_how):
        raise KeyError("status")

    monkeypatch.setattr(followed_week, "stop", stop)
    followed_week.ProjectWeek(work).give_up(SimpleNamespace(id="1", place="runpod"))
    assert lines == ["job 1 at runpod is not stopped yet: its client failed (KeyError)"]


def test_an_unforeseen_error_does_not_end_the_week_while_machines_run(tmp_path, monkeypatch):
    work, lines = make_work(tmp_path)
    rounds = [KeyError("pods"), WorkerFailed("no answer"), WeekTick()]

    def tick(_follower, _now):
        found = rounds.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(WeekFollower, "tick", tick)
    monkeypatch.setattr(followed_week.time, "sleep", lambda _seconds: None)
    assert followed_week.follow_week(work) == WeekTick()
    assert [line.partition(";")[0] for line in lines[:2]] == ["its client failed (KeyError)", "no answer"]


def test_a_plan_that_a_person_writes_during_a_round_is_not_overwritten(tmp_path):
    """A round may judge a model for an hour."""
    root, state = tmp_path, tmp_path / ".graft"
    state.mkdir()
    planned, theirs = schedule(shown("a", "m", 0, 2)), schedule(shown("b", "m", 5, 9))
    again = schedule(shown("a", "m", 3, 4))
    write_schedule(root / followed_week.WEEK_FILE, planned)
    settings = SimpleNamespace(fleet=SimpleNamespace(places={}), main_model="m")
    desk = followed_week.ProjectWeek(
        SimpleNamespace(project=SimpleNamespace(root=root, state=state), settings=settings)
    )
    week = desk.load()
    write_schedule(root / followed_week.WEEK_FILE, theirs)
    desk.save(week)
    assert desk._data.models == ("m",)
    desk.save(week.model_copy(update={"schedule": again}))
    assert desk.load().schedule == theirs
    desk.save(desk.load().model_copy(update={"schedule": again}))
    assert desk.load().schedule == again


def test_a_session_that_a_person_took_out_during_a_round_is_not_begun():
    desk = SimulatedDesk(schedule(shown("a", "one", 0, 4), shown("b", "two", 1, 5)), {"one": 1.0, "two": 9.0})
    follower = WeekFollower(desk)
    follower.tick(hours(0))
    desk.now = hours(1)
    judge = desk.judge

    def replace_plan(model):
        desk.saved = desk.saved.model_copy(update={"schedule": schedule()})
        return judge(model)

    desk.judge = replace_plan
    desk.save = lambda week: setattr(desk, "saved", week.model_copy(update={"schedule": desk.saved.schedule}))
    done = follower.tick(hours(1))
    assert done.judged
    assert done.started == ()
