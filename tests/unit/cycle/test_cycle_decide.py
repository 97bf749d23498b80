"""When to train again: schedules, and the pure decisions of a cycle."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.cycle.cron import parse_cron
from graftwork.cycle.decide import (
    AwaitApproval,
    Begin,
    Close,
    CycleFacts,
    DoStep,
    Rest,
    SkipStep,
    next_action,
)
from graftwork.cycle.settings import (
    CYCLE_STEPS,
    CanarySettings,
    CycleSettings,
    TriggerSettings,
)
from graftwork.cycle.state import (
    CoordinatorState,
    Holder,
    LogEntry,
    Superseded,
    approve,
    begin,
    cancel,
    claim,
    complete,
    enqueue,
    fail,
    finish,
    pause,
    postpone,
    renew,
    request,
    resume,
    skip,
)
from graftwork.pipeline.table import STEPS
from graftwork.records.errors import UserError

NOW = 1_800_000_000.0
HERE, THERE = Holder("here 1", "a:/p"), Holder("there 1", "b:/p")
NIGHTLY = CycleSettings(schedule="0 2 * * *")
ADA = LogEntry(at=NOW, who="ada", action="approve", why="looked at it")


def opened(steps=CYCLE_STEPS, settings=NIGHTLY):
    del settings
    return begin(CoordinatorState(), model="main", cause="by hand", now=NOW, steps=steps, version="1")


def act(state, settings=NIGHTLY, *, facts=None, now=NOW, place=HERE.place):
    return next_action(state, settings, facts or CycleFacts(), now=now, here=place)


def do(state, step, summary=None, *, holder=HERE, now=NOW):
    state, token = claim(state, step, holder, now=now, lease=60)
    return complete(state, step, token, now=now, summary=summary or {})


def do_until(step, summaries=None):
    state = opened()
    for name in CYCLE_STEPS[: CYCLE_STEPS.index(step)]:
        state = do(state, name, (summaries or {}).get(name))
    return state


def test_the_steps_of_a_cycle_are_those_of_a_run_in_the_same_order():
    of_run = [step.name for step in STEPS]
    assert [step for step in CYCLE_STEPS if step in of_run] == of_run
    assert set(CYCLE_STEPS) - set(of_run) == {"collect", "canary", "promote", "deliver"}


def test_a_cycle_begins_by_the_schedule_and_not_again_before_the_next_date():
    served = CoordinatorState(served_until=NOW)
    assert isinstance(act(served), Rest)
    due = act(served).until
    assert act(served, now=due) == Begin("", "schedule 0 2 * * *")
    ended = finish(
        begin(served, model="main", cause="", now=due, steps=(), version=""), "promoted", reason="", now=due
    )
    assert act(ended, now=due + 1) == Rest(due + 86400, "waiting for the schedule")


def test_dates_that_were_missed_count_once():
    state = CoordinatorState(served_until=NOW)
    late = NOW + 10 * 86400
    assert isinstance(act(state, now=late), Begin)
    began = begin(state, model="main", cause="", now=late, steps=(), version="")
    ended = finish(began, "promoted", reason="", now=late)
    assert act(ended, now=late).until > late


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (CycleFacts(rows=499), ""),
        (CycleFacts(rows=500), "500 new usable rows"),
        (CycleFacts(rows=10, drift=0.3), ""),
        (CycleFacts(rows=10, drift=0.31), "drift"),
    ],
)
def test_an_event_begins_a_cycle(facts, cause):
    settings = CycleSettings(when=TriggerSettings(new_rows=500, drift=0.3))
    found = act(CoordinatorState(), settings, facts=facts)
    assert isinstance(found, Begin) == bool(cause)
    assert not cause or cause in found.cause


def test_after_a_cycle_no_event_begins_another_one_for_a_while():
    settings = CycleSettings(when=TriggerSettings(drift=0.3))
    ended = finish(opened(), "not_promoted", reason="", now=NOW)
    drifted = CycleFacts(drift=0.9)
    assert act(ended, settings, facts=drifted, now=NOW + 3600).until == NOW + 12 * 3600
    assert isinstance(act(ended, settings, facts=drifted, now=NOW + 12 * 3600), Begin)


def test_rows_of_the_last_cycle_are_not_new():
    settings = CycleSettings(when=TriggerSettings(new_rows=500))
    counted = CoordinatorState(rows_counted=1000)
    assert isinstance(act(counted, settings, facts=CycleFacts(rows=1499)), Rest)
    assert act(counted, settings, facts=CycleFacts(rows=1500)).cause == "500 new usable rows"


def test_a_queue_of_models_is_served_in_order():
    state = enqueue(CoordinatorState(), ("main", "tagger"), cause="by hand")
    assert act(state) == Begin("main", "by hand")
    state = begin(state, model="main", cause="by hand", now=NOW, steps=(), version="")
    assert state.queue == ("tagger",)
    assert act(finish(state, "promoted", reason="", now=NOW)) == Begin("tagger", "by hand")


def test_a_person_may_ask_for_a_cycle_while_one_is_open():
    asked = request(
        opened(), ("main",), LogEntry(at=NOW, who="ada", action="begin", why="new rows"), cause="by hand"
    )
    assert act(asked) == DoStep("collect")
    ended = finish(asked, "promoted", reason="", now=NOW)
    assert act(ended) == Begin("main", "by hand of ada, new rows")
    assert asked.log[-1].who == "ada"


def test_nothing_after_the_gate_is_done_unless_it_says_deploy():
    state = do_until("release", {"gate": {"decision": "iterate", "reason": "worse"}})
    skipped = []
    while isinstance(found := act(state), SkipStep):
        skipped.append(found.step)
        state = skip(state, found.step, why=found.why, now=NOW)
    assert skipped == ["release", "try", "canary", "promote", "deliver"]
    assert found == DoStep("report")
    assert act(do(state, "report")) == Close("not_promoted", "the gate said iterate: worse")


def test_a_cycle_that_would_train_the_same_again_ends_early():
    state = do_until("train", {"plan": {"run": "r", "same_as_last": True}})
    while isinstance(found := act(state), SkipStep):
        state = skip(state, found.step, why=found.why, now=NOW)
    assert found.outcome == "nothing_new"


def test_a_release_that_the_canary_refuses_is_not_delivered():
    settings = CycleSettings(canary=CanarySettings())
    state = do_until(
        "deliver",
        {
            "gate": {"decision": "deploy"},
            "canary": {"verdict": "roll_back", "why": "failures"},
            "promote": {"action": "rolled_back", "why": "failures"},
        },
    )
    assert act(state, settings) == SkipStep("deliver", "the release was rolled back")
    state = do(skip(state, "deliver", why="", now=NOW), "report")
    assert act(state, settings) == Close("rolled_back", "failures")


def test_a_step_waits_until_a_person_approves_it():
    settings = CycleSettings(approve=("train",))
    state = do_until("train")
    assert act(state, settings) == AwaitApproval("train")
    state = approve(state, "train", ADA)
    assert act(state, settings) == DoStep("train")
    assert state.cycle.approvals[0].who == "ada"
    assert state.log[-1].why == "looked at it"


def test_only_a_step_that_is_to_be_done_can_be_approved():
    with pytest.raises(UserError, match="'plan' is not an open step"):
        approve(do_until("train"), "plan", ADA)
    with pytest.raises(UserError, match="no cycle is open"):
        approve(CoordinatorState(), "train", ADA)


def test_a_claimed_step_belongs_to_its_holder_until_the_lease_ends():
    state, token = claim(opened(), "collect", HERE, now=NOW, lease=60)
    assert act(state, place=THERE.place) == Rest(NOW + 60, "here 1 does collect")
    assert claim(state, "collect", THERE, now=NOW + 59, lease=60)[1] is None
    renewed = renew(state, "collect", token, now=NOW + 50, lease=60)
    assert claim(renewed, "collect", THERE, now=NOW + 70, lease=60)[1] is None
    taken, later = claim(renewed, "collect", THERE, now=NOW + 110, lease=60)
    assert later == token + 1
    with pytest.raises(Superseded):
        complete(taken, "collect", token, now=NOW + 111, summary={})
    with pytest.raises(Superseded):
        renew(taken, "collect", token, now=NOW + 111, lease=60)
    assert complete(taken, "collect", later, now=NOW + 112, summary={}).cycle.step("collect").status == "done"


def test_a_coordinator_that_starts_in_the_same_folder_takes_over_at_once():
    state, _ = claim(opened(), "collect", HERE, now=NOW, lease=60)
    assert act(state, now=NOW + 1) == DoStep("collect")
    assert claim(state, "collect", Holder("here 2", HERE.place), now=NOW + 1, lease=60)[1] == 2


def test_a_step_is_only_claimed_in_its_turn():
    assert claim(opened(), "train", HERE, now=NOW, lease=60)[1] is None
    assert claim(do(opened(), "collect"), "collect", HERE, now=NOW, lease=60)[1] is None


def test_failures_pause_twice_as_long_each_time_and_then_end_the_cycle(monkeypatch):
    monkeypatch.setattr("graftwork.cycle.state.LONGEST_PAUSE_SECONDS", 100.0)
    state, pauses = opened(), []
    for number in range(5):
        state, token = claim(state, "collect", HERE, now=NOW, lease=60)
        state = fail(state, "collect", token, now=NOW, error={"what": "no disk"}, may_pass=True)
        if number < 4:
            pauses.append(state.cycle.step("collect").not_before - NOW)
    assert pauses == [30, 60, 100, 100]
    assert state.cycle.outcome == "failed"
    assert state.cycle.reason == "collect failed after 5 attempts: no disk"
    assert state.consecutive_failures == 1


def test_waiting_is_no_failure():
    state, token = claim(opened(), "collect", HERE, now=NOW, lease=60)
    state = postpone(state, "collect", token, until=NOW + 60, why="3 of 20 sessions")
    assert act(state) == Rest(NOW + 60, "collect: 3 of 20 sessions")
    assert act(state, now=NOW + 60) == DoStep("collect")
    assert state.cycle.step("collect").failures == 0


def test_a_paused_coordinator_does_nothing_until_it_is_resumed():
    paused = pause(opened(), LogEntry(at=NOW, who="ada", action="pause", why="the card is needed"))
    assert "the card is needed" in act(paused).why
    assert act(resume(paused, LogEntry(at=NOW, who="ada", action="resume"))) == DoStep("collect")


def test_a_canceled_cycle_takes_no_result():
    state, token = claim(opened(), "collect", HERE, now=NOW, lease=60)
    state = cancel(state, LogEntry(at=NOW, who="ada", action="cancel", why="wrong data"))
    assert state.cycle.reason == "canceled by ada: wrong data"
    with pytest.raises(Superseded):
        complete(state, "collect", token, now=NOW, summary={})


def test_two_coordinators_that_see_a_cycle_due_open_one():
    assert begin(opened(), model="main", cause="again", now=NOW, steps=(), version="").cycle.number == 1


BERLIN, UTC_ZONE = ZoneInfo("Europe/Berlin"), ZoneInfo("UTC")


def at(text, zone=UTC_ZONE):
    return datetime.fromisoformat(text).replace(tzinfo=zone).timestamp()


def following(expression, moment, zone=UTC_ZONE, count=1):
    found = []
    for _ in range(count):
        moment = parse_cron(expression).next_after(moment, zone)
        found.append(datetime.fromtimestamp(moment, zone).strftime("%Y-%m-%d %H:%M"))
    return found


@pytest.mark.parametrize(
    ("expression", "first"),
    [
        ("0 2 * * *", "2026-11-17 02:00"),
        ("*/15 * * * *", "2026-11-16 10:15"),
        ("30 9-17/4 * * mon-fri", "2026-11-16 13:30"),
        ("0 0 1 * *", "2026-12-01 00:00"),
        ("0 12 * * 7", "2026-11-22 12:00"),
        ("0 12 * * sun", "2026-11-22 12:00"),
        ("0 0 13 * fri", "2026-11-20 00:00"),
        ("5,35 10 16 nov *", "2026-11-16 10:05"),
        ("0 0 29 2 *", "2028-02-29 00:00"),
        ("@daily", "2026-11-17 00:00"),
        ("@Weekly", "2026-11-22 00:00"),
    ],
)
def test_an_expression_gives_the_next_moment(expression, first):
    assert following(expression, at("2026-11-16 10:00")) == [first]


def test_a_moment_that_is_due_is_not_given_twice():
    assert following("0 2 * * *", at("2026-11-16 02:00"), count=2) == ["2026-11-17 02:00", "2026-11-18 02:00"]


def test_a_local_time_that_is_skipped_in_spring_comes_later_on_the_same_day():
    found = following("30 2 * * *", at("2026-03-28 12:00", BERLIN), BERLIN, count=2)
    assert found == ["2026-03-29 03:30", "2026-03-30 02:30"]


def test_a_local_time_that_occurs_twice_in_autumn_counts_once():
    found = following("30 2 * * *", at("2026-10-24 12:00", BERLIN), BERLIN, count=2)
    assert found == ["2026-10-25 02:30", "2026-10-26 02:30"]


def test_every_hour_is_every_hour_that_passes_in_autumn():
    begin = at("2026-10-25 00:00", BERLIN)
    schedule, moments = parse_cron("0 * * * *"), [begin]
    for _ in range(5):
        moments.append(schedule.next_after(moments[-1], BERLIN))
    assert [later - earlier for earlier, later in pairwise(moments)] == [3600.0] * 5


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("0 2 * *", "five fields"),
        ("60 * * * *", "minute must be 0 to 59"),
        ("* 24 * * *", "hour must be 0 to 23"),
        ("* * 0 * *", "day of the month"),
        ("* * * 13 *", "month must be 1 to 12"),
        ("* * * * someday", "day of the week"),
        ("*/0 * * * *", "is empty"),
        ("5-1 * * * *", "is empty"),
        ("a-b-c * * * *", "cannot be read"),
        ("0 0 30 2 *", "never occurs"),
        ("² * * * *", "minute must be 0 to 59"),
    ],
)
def test_a_bad_expression_names_its_field(expression, reason):
    with pytest.raises(ValueError, match=reason):
        parse_cron(expression)


FIELD = st.one_of(st.just("*"), st.integers(2, 30).map(lambda step: f"*/{step}"))


@given(
    minute=st.one_of(FIELD, st.integers(0, 59).map(str)),
    hour=st.one_of(FIELD, st.integers(0, 23).map(str)),
    weekday=st.one_of(st.just("*"), st.integers(0, 7).map(str)),
    days=st.integers(0, 730),
    minutes=st.integers(0, 1439),
)
@settings(max_examples=150, deadline=None)
def test_the_next_moment_matches_and_none_is_between(minute, hour, weekday, days, minutes):
    """Against a search minute by minute, in a zone without daylight saving time."""
    schedule = parse_cron(f"{minute} {hour} * * {weekday}")
    begin = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=days, minutes=minutes)
    found = datetime.fromtimestamp(schedule.next_after(begin.timestamp(), UTC_ZONE), UTC)

    def matches(moment):
        return (
            moment.minute in schedule.minutes
            and moment.hour in schedule.hours
            and moment.isoweekday() % 7 in schedule.weekdays
        )

    moment = begin + timedelta(minutes=1)
    while not matches(moment):
        moment += timedelta(minutes=1)
    assert found == moment


@given(days=st.integers(0, 800), hour=st.integers(0, 23), minute=st.integers(0, 59))
@settings(max_examples=100, deadline=None)
def test_a_daily_time_comes_once_a_local_day(days, hour, minute):
    schedule = parse_cron(f"{minute} {hour} * * *")
    moment = at("2026-01-01 00:00", BERLIN) + days * 86400
    found = []
    for _ in range(4):
        moment = schedule.next_after(moment, BERLIN)
        found.append(datetime.fromtimestamp(moment, BERLIN).date())
    assert [(later - earlier).days for earlier, later in pairwise(found)] == [1, 1, 1]


@given(st.text(max_size=30))
@settings(max_examples=300, deadline=None)
def test_any_text_is_a_schedule_or_a_value_error(text):
    try:
        schedule = parse_cron(text)
    except ValueError:
        return
    assert schedule.next_after(0.0, BERLIN) > 0
