"""The checker finds each broken rule, and none in a plan that keeps them."""

import pytest
from week_samples import DAY, WEEK, daytime, model, nights, place, session, week

from graftwork.week.checker import check_week
from graftwork.week.problem import QuotaPeriod, QuotaReading, RollingQuota, WeekState

NOTHING = WeekState()


def broken(problem, *sessions, state=NOTHING):
    return " | ".join(check_week(problem, state, [*state.fixed, *sessions]))


def test_a_plan_that_keeps_every_rule_has_nothing_broken():
    problem = week([place(longest=240)], [model()])
    assert broken(problem, session("card", "main", 0, 240), session("card", "main", 240, 480)) == ""


@pytest.mark.parametrize(
    ("given", "start", "end", "message"),
    [
        ({"open": nights()}, 0, 120, "closed"),
        ({"starts": daytime()}, 0, 120, "nobody"),
        ({"longest": 100}, 0, 120, "100 possible"),
        ({"shortest": 240}, 0, 120, "240 at least"),
        ({"speeds": {"main": 0}}, 0, 120, "cannot be trained"),
        ({}, WEEK - 60, WEEK + 60, "end of the week"),
    ],
)
def test_a_session_against_the_terms_of_its_place_is_found(given, start, end, message):
    assert message in broken(week([place(**given)], [model()]), session("card", "main", start, end))


def test_set_up_is_not_training():
    problem = week([place(setup=10, transfer=5)], [model()])
    assert "set-up" in broken(problem, session("card", "main", 0, 120))
    assert broken(problem, session("card", "main", 0, 120, train=100)) == ""


def test_two_sessions_at_once_need_two_lanes_and_two_models():
    sessions = session("card", "main", 0, 120), session("card", "other", 60, 180)
    both = [model(), model("other")]
    assert "at once" in broken(week([place()], both), *sessions)
    parallel = sessions[0], sessions[1].model_copy(update={"lane": 1})
    assert broken(week([place(lanes=2)], both), *parallel) == ""
    same = sessions[0], session("card", "main", 60, 180, lane=1)
    assert "has not ended" in broken(week([place(lanes=2)], both), *same)


def test_a_quota_counts_what_lies_in_each_period():
    periods = (QuotaPeriod(start=0, end=DAY, minutes=240), QuotaPeriod(start=DAY, end=2 * DAY, minutes=240))
    problem = week([place(periods=(periods,))], [model()])
    assert broken(problem, session("card", "main", DAY - 240, DAY + 240)) == ""
    assert "quota period" in broken(problem, session("card", "main", DAY - 245, DAY + 240))


def test_a_reading_of_the_quota_replaces_what_was_counted_before_it():
    problem = week([place(periods=((QuotaPeriod(start=0, end=WEEK, minutes=600),),))], [model()])
    state = WeekState(now=DAY, readings=(QuotaReading(place="card", at=DAY, used=500),))
    assert "quota period" in broken(problem, session("card", "main", DAY, DAY + 120), state=state)
    assert broken(problem, session("card", "main", DAY, DAY + 100), state=state) == ""


def test_four_hours_in_any_24_are_counted_in_every_window():
    problem = week([place(rolling=(RollingQuota(window=DAY, minutes=240),))], [model()])
    first = session("card", "main", 600, 840)
    assert broken(problem, first, session("card", "main", 600 + DAY, 840 + DAY)) == ""
    assert "within" in broken(problem, first, session("card", "main", 590 + DAY, 830 + DAY))


def test_money_deadlines_and_hours_are_limits():
    paid = week([place(usd_per_hour=1.0)], [model()], cap_usd=2.0)
    assert broken(paid, session("card", "main", 0, 120)) == ""
    assert "dollars" in broken(paid, session("card", "main", 0, 180))
    due = week([place()], [model(deadline=300, gate=60)])
    assert "deadline" in broken(due, session("card", "main", 0, 245))
    few = week([place()], [model(least_hours=4)])
    assert "at least" in broken(few, session("card", "main", 0, 180))
    many = week([place()], [model(most_hours=2)])
    assert "at most" in broken(many, session("card", "main", 0, 180))


def test_what_waits_for_a_model_comes_after_it_and_its_gate():
    problem = week([place(lanes=2)], [model(gate=60), model("next", after=("main",))])
    first = session("card", "main", 0, 120)
    assert "was not trained" in broken(problem, session("card", "next", 0, 120))
    assert "gate" in broken(problem, first, session("card", "next", 150, 300))
    assert broken(problem, first, session("card", "next", 180, 300)) == ""


def test_a_round_builds_on_the_earlier_rounds_of_the_parent():
    problem = week([place(lanes=2)], [model(gate=60), model("heir", inherits="main", share=0.5)])
    first = session("card", "main", 0, 120)
    assert broken(problem, first, session("card", "heir", 0, 120, lane=1)) == ""
    assert "gate" in broken(problem, first, session("card", "heir", 130, 300, round=1))
    assert broken(problem, first, session("card", "heir", 180, 300, round=1)) == ""


def test_a_failed_gate_needs_another_session_before_others_build_on_it():
    problem = week([place(lanes=2)], [model(gate=60), model("heir", inherits="main", share=0.5)])
    state = WeekState(
        now=300, fixed=(session("card", "main", 0, 120, fixed=True),), failed_gates={"main": 180}
    )
    heir = session("card", "heir", 600, 700, round=1)
    assert "failed its gate" in broken(problem, heir, state=state)
    assert broken(problem, session("card", "main", 300, 500), heir, state=state) == ""


def test_what_has_been_is_neither_changed_nor_held_to_the_rules():
    problem = week([place(longest=60)], [model()])
    state = WeekState(now=200, fixed=(session("card", "main", 0, 200, fixed=True),))
    assert broken(problem, state=state) == ""
    assert "fixed session changed" in " ".join(check_week(problem, state, []))
    assert "now" in broken(problem, session("card", "main", 100, 160), state=WeekState(now=200))
