"""The plan of a week: what it gives to whom, replanning, impossible weeks, manual sessions as a calendar."""

from datetime import UTC, datetime, timedelta

import pytest
from week_samples import DAY, START, WEEK, model, nights, place, session, small_week, week

from graftwork.records.errors import UserError
from graftwork.records.week import WeekSchedule
from graftwork.week.calendar import calendar_text
from graftwork.week.checker import check_week
from graftwork.week.plan import WeekImpossible, plan_week
from graftwork.week.problem import (
    Effort,
    QuotaPeriod,
    QuotaReading,
    RollingQuota,
    WeekState,
    as_scenario,
    bin_losses,
    fit_half_hours,
    quota_left,
    reading_notes,
    score,
    window_use,
)
from graftwork.week.replan import WeekEvent, sessions_ahead, state_after

BRIEF = Effort(seconds=2.0, workers=1, what_if=False, enough=0.05)


def at(minute):
    return START + timedelta(minutes=minute)


@pytest.fixture(scope="module")
def problem():
    return small_week()


@pytest.fixture(scope="module")
def planned(problem):
    return plan_week(problem, effort=BRIEF)


def test_a_schedule_keeps_every_rule_and_its_figures_agree(problem, planned):
    own = as_scenario(problem, planned.scenario)
    assert check_week(own, WeekState(), planned.sessions) == []
    assert planned.value == pytest.approx(score(own, planned.sessions).value)
    assert planned.value == pytest.approx(sum(model.value for model in planned.models))
    assert planned.cost_usd == pytest.approx(sum(place.cost_usd for place in planned.places))
    assert planned.cost_usd <= problem.cap_usd
    assert planned.value <= planned.bound


def test_all_scenarios_are_compared_and_the_best_is_chosen(planned):
    values = {found.scenario: found.value for found in planned.scenarios}
    assert set(values) == {"parallel", "sequential", "iterative"}
    assert max(values.values()) == pytest.approx(planned.value)
    assert all(found.value >= found.greedy_value - 1e-9 for found in planned.scenarios)


def test_more_terms_never_cost_value_and_are_listed_by_their_gain():
    places = [
        place("kaggle", periods=((QuotaPeriod(start=0, end=WEEK, minutes=600),),)),
        place("rented", speed=3.0, usd_per_hour=0.5),
    ]
    planned = plan_week(
        week(places, [model()], cap_usd=4.0), effort=BRIEF.model_copy(update={"what_if": True})
    )
    gains = [change.gain for change in planned.what_if]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 0
    assert any("$10" in change.change for change in planned.what_if)
    assert any("one more hour" in change.change for change in planned.what_if)
    assert {check.assumption for check in planned.curve_checks} >= {"half is learned in half the hours"}


def test_a_schedule_is_read_back_as_it_was_written(planned):
    assert WeekSchedule.from_json(planned.to_json()) == planned


def test_sequential_heirs_start_after_the_main_models_gate(problem):
    made = plan_week(problem, effort=BRIEF.model_copy(update={"scenario": "sequential"}))
    main = max(s.end for s in made.sessions if s.model == "main")
    assert all(s.start >= main + 60 for s in made.sessions if s.model != "main")


def test_replanning_keeps_what_has_begun(problem, planned):
    now = 2 * DAY + 30
    state = state_after(problem, planned, (), at(now))
    made = plan_week(problem, state, BRIEF.model_copy(update={"scenario": planned.scenario}))
    begun = {(s.place, s.model, s.start, s.end) for s in planned.sessions if s.start < now}
    assert begun == {(s.place, s.model, s.start, s.end) for s in made.sessions if s.fixed}
    assert all(s.start >= now for s in made.sessions if not s.fixed)
    assert made.now == at(now)


def test_a_preempted_session_ends_then_and_loses_what_was_not_saved(problem):
    running = session("kaggle", "main", 0, 720, train=700)
    earlier = plan_week(
        problem, WeekState(now=10, fixed=(running.model_copy(update={"fixed": True}),)), BRIEF
    )
    event = WeekEvent(kind="preempted", at=at(300), place="kaggle")
    state = state_after(problem, earlier, [event], at(310))
    cut = next(s for s in state.fixed if s.place == "kaggle")
    assert (cut.end, cut.train) == (300, 280)


def test_events_fill_the_state(problem):
    events = [
        WeekEvent(kind="gate", at=at(900), model="main", passed=False),
        WeekEvent(kind="quota", at=at(100), place="kaggle", used_hours=9),
        WeekEvent(kind="closed", at=at(1000), place="card", until=at(3000)),
        WeekEvent(kind="started", at=at(950), place="rented", model="reads", hours=2),
    ]
    state = state_after(problem, None, events, at(1000))
    assert state.failed_gates == {"main": 900}
    assert state.readings == (QuotaReading(place="kaggle", at=100, used=540),)
    assert state.closed == {"card": ((1000, 3000),)}
    assert [(s.start, s.end, s.train) for s in state.fixed] == [(950, 1070, 110)]


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"kind": "quota", "at": at(5), "place": "kagle", "used_hours": 1}, "kaggle"),
        ({"kind": "gate", "at": at(5), "model": "raeds", "passed": True}, "reads"),
        ({"kind": "quota", "at": at(5), "place": "kaggle"}, "used_hours"),
        ({"kind": "missed", "at": datetime(2026, 11, 16), "place": "kaggle"}, "offset"),
    ],
)
def test_an_event_that_makes_no_sense_is_refused_with_a_fix(problem, event, message):
    with pytest.raises(UserError) as refused:
        state_after(problem, None, [WeekEvent.model_validate(event)], at(10))
    assert message in f"{refused.value.what} {refused.value.fix}"


def test_a_quota_reading_that_goes_backwards_is_not_believed(problem):
    readings = [QuotaReading(place="kaggle", at=when, used=used) for when, used in ((60, 600), (120, 300))]
    left, notes = quota_left(problem.place("kaggle"), WeekState(now=200, readings=tuple(readings)))
    assert left[0][0].minutes == 1200
    assert "the larger one counts" in notes[0]
    after_reset = QuotaReading(place="kaggle", at=5 * DAY + 10, used=0)
    _, notes = quota_left(
        problem.place("kaggle"), WeekState(now=6 * DAY, readings=(readings[0], after_reset))
    )
    assert notes == []


def test_an_impossible_week_names_the_rules_that_the_nearest_one_breaks():
    busy = place("card", open=nights(end=24 * 60))
    spare = place("spare", periods=((QuotaPeriod(start=0, end=WEEK, minutes=120),),), longest=60)
    problem = week([busy, spare], [model(least_hours=8, deadline=DAY), model("other", least_hours=1)])
    with pytest.raises(WeekImpossible) as refused:
        plan_week(problem, effort=BRIEF)
    # Two hours of each place are open before the deadline.
    assert refused.value.why == "the nearest one breaks: main: 4.00 hours, 8.00 at least"


def test_a_model_that_no_place_trains_is_what_the_nearest_week_breaks():
    problem = week([place("card", speeds={"main": 0.0})], [model(least_hours=1)])
    with pytest.raises(WeekImpossible) as refused:
        plan_week(problem, effort=BRIEF)
    assert refused.value.why.endswith("breaks: main: 0.00 hours, 1.00 at least")


def test_unknown_models_and_circles_are_refused_with_the_nearest_name():
    with pytest.raises(UserError, match="mian") as refused:
        week([place()], [model(), model("next", after=("mian",))])
    assert "did you mean main?" in refused.value.fix
    with pytest.raises(UserError, match="wait for each other"):
        week([place()], [model("a", after=("b",)), model("b", after=("a",))])


def test_rolling_quotas_allow_a_session_each_day_at_the_same_time():
    lab = place("lab", rolling=(RollingQuota(window=DAY, minutes=240),), longest=240)
    made = plan_week(week([lab], [model()]), effort=BRIEF)
    assert sum(s.end - s.start for s in made.sessions) == 7 * 240


def test_the_calendar_has_every_session_and_alarms_for_those_that_a_person_starts(planned):
    text = calendar_text(planned)
    manual = [s for s in planned.sessions if s.by_hand]
    assert manual
    assert text.count("BEGIN:VEVENT") == len(planned.sessions) > len(manual)
    assert text.count("TRIGGER:-PT10M") == text.count("SUMMARY:Start by hand") == len(manual)
    assert text.endswith("END:VCALENDAR\r\n")
    assert all(len(line.encode()) <= 75 for line in text.split("\r\n"))
    first = manual[0].starts_at.astimezone(UTC).strftime("DTSTART:%Y%m%dT%H%M%SZ")
    assert first in text
    assert len({line for line in text.split("\r\n") if line.startswith("UID:")}) == len(planned.sessions)


def test_a_curve_is_fitted_to_losses_that_follow_one():
    hours = [number / 50 for number in range(400)]
    losses = [1.2 + 0.8 * 2 ** (-h / 1.5) + 0.02 * (-1) ** number for number, h in enumerate(hours)]
    assert fit_half_hours(bin_losses(hours, losses), least=0.99) == pytest.approx(1.5, rel=0.1)


def test_losses_that_do_not_fall_give_no_curve():
    hours = [float(number) for number in range(40)]
    assert fit_half_hours(bin_losses(hours, [1.0 + 0.01 * h for h in hours])) is None
    assert fit_half_hours([(0.0, 1.0)]) is None


def test_a_changed_copy_of_a_problem_looks_up_its_own_models_and_places(problem):
    before = problem.model("main"), problem.place("card")
    changed = problem.model_copy(
        update={
            "models": tuple(m.model_copy(update={"gate": 5}) for m in problem.models),
            "places": tuple(p.model_copy(update={"setup": 20}) for p in problem.places),
        }
    )
    assert before[0].gate == 60
    assert (changed.model("main").gate, changed.place("card").setup) == (5, 20)


def test_a_round_that_has_begun_is_not_left_for_an_earlier_one(problem):
    past = (
        session("kaggle", "main", 0, 300, train=280, fixed=True),
        session("kaggle", "main", 400, 700, train=280, fixed=True, round=1),
    )
    made = plan_week(
        problem, WeekState(now=DAY, fixed=past), BRIEF.model_copy(update={"scenario": "iterative"})
    )
    assert {s.round for s in made.sessions if s.model == "main" and not s.fixed} <= {1}


def test_a_plan_of_one_scenario_can_be_replanned_in_another(problem, planned):
    state = state_after(problem, planned, (), at(3 * DAY))
    made = plan_week(problem, state, BRIEF)
    assert len(made.scenarios) == 3


def rolling_week(**given):
    return week([place("kaggle", rolling=(RollingQuota(window=WEEK, minutes=1800),), **given)], [model()])


def used_minutes(schedule):
    return sum(s.end - s.start for s in schedule.sessions if not s.fixed)


def test_a_reading_of_a_rolling_quota_counts_what_was_used_before_the_week():
    problem = rolling_week()
    reading = QuotaReading(place="kaggle", at=0, used=600)
    state = WeekState(readings=(reading,))
    made = plan_week(problem, state, BRIEF)
    assert check_week(problem, state, made.sessions) == []
    # 20 h are left; the 10 h count until a week after they began, at the latest.
    early = [s for s in made.sessions if s.start < WEEK - 600]
    assert sum(s.end - s.start for s in early) <= 1200
    assert used_minutes(plan_week(problem, WeekState(), BRIEF)) == 1800
    assert window_use(problem.place("kaggle"), state, WEEK) == ((-600, 0),)


def test_a_reading_of_a_rolling_quota_replaces_the_sessions_before_it():
    kaggle = rolling_week().place("kaggle")
    past = (
        session("kaggle", "main", 0, 300, fixed=True),
        session("kaggle", "main", 1000, 1300, fixed=True),
        session("kaggle", "main", 2000, 2600, fixed=True),
    )
    state = WeekState(now=2400, fixed=past, readings=(QuotaReading(place="kaggle", at=2300, used=700),))
    # Of the 900 minutes before the reading it has 700: the earliest did not count. What runs goes on.
    assert window_use(kaggle, state, WEEK) == ((200, 300), (1000, 1300), (2000, 2300), (2300, 2600))
    more = state.model_copy(update={"readings": (QuotaReading(place="kaggle", at=2300, used=1000),)})
    assert (2200, 2300) in window_use(kaggle, more, WEEK)
    assert sum(end - begin for begin, end in window_use(kaggle, more, WEEK)) == 1300


def test_a_reading_of_a_rolling_quota_does_not_fall_faster_than_time_leaves_the_window():
    problem = rolling_week()
    readings = [QuotaReading(place="kaggle", at=when, used=used) for when, used in ((600, 700), (630, 300))]
    state = WeekState(now=700, readings=tuple(readings))
    assert sum(end - begin for begin, end in window_use(problem.place("kaggle"), state, WEEK)) == 670
    assert plan_week(problem, state, BRIEF).notes == (
        "kaggle: a quota reading of 5.0 h comes too soon after one of 11.7 h: at least 11.2 h count",
    )
    later = WeekState(now=1200, readings=(readings[0], readings[1].model_copy(update={"at": 1100})))
    assert reading_notes(problem.place("kaggle"), later) == []


def test_a_reading_that_exceeds_a_rolling_quota_closes_the_place_until_it_has_left_the_window():
    lab = place("lab", rolling=(RollingQuota(window=DAY, minutes=240),), longest=240)
    problem = week([lab], [model()])
    state = WeekState(now=600, readings=(QuotaReading(place="lab", at=600, used=300),))
    made = plan_week(problem, state, BRIEF)
    assert min(s.start for s in made.sessions) >= 600 + DAY
    assert check_week(problem, state, made.sessions) == []


def test_what_the_ledger_spent_in_the_week_is_not_spent_again():
    rented = place("rented", usd_per_hour=1.0)
    problem = week([rented], [model()], cap_usd=10.0)
    made = plan_week(problem, WeekState(spent_usd=7.0), BRIEF)
    assert 2.5 < made.cost_usd <= 3.0
    assert made.places[0].offered_hours == pytest.approx(3.0)
    assert check_week(problem, WeekState(spent_usd=8.0), made.sessions) == [
        f"spending: {8 + made.cost_usd:.2f} of 10.00 dollars"
    ]


def test_replanning_never_loses_the_plan_that_it_has(problem, planned):
    state = state_after(problem, planned, (), at(2 * DAY))
    ahead = sessions_ahead(planned, state)
    brief = Effort(seconds=0.1, workers=1, what_if=False, scenario=planned.scenario)
    made = plan_week(problem, state, brief, ahead)
    assert made.value >= 0.998 * planned.value


def test_a_plan_whose_place_is_gone_is_replanned_without_it(problem, planned):
    state = state_after(problem, planned, (), at(0))
    fewer = problem.model_copy(update={"places": tuple(p for p in problem.places if p.name != "rented")})
    made = plan_week(fewer, state, BRIEF, sessions_ahead(planned, state))
    assert {s.place for s in made.sessions} <= {"kaggle", "lab", "card"}
