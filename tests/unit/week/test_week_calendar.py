"""The calendar of a week, and the checker of its rules."""

from datetime import UTC, date, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st
from week_samples import DAY, WEEK, daytime, model, nights, place, session, week

from graftwork.records.week import parse_moment, parse_window
from graftwork.week.calendar import (
    clip,
    cut_at,
    intersect,
    local_moment,
    minutes_since,
    overlap,
    periods_of,
    spans_of,
    subtract,
    union,
    week_end,
    week_start,
)
from graftwork.week.checker import check_week
from graftwork.week.problem import QuotaPeriod, QuotaReading, RollingQuota, WeekState

BERLIN = "Europe/Berlin"
SPRING, AUTUMN = date(2026, 3, 23), date(2026, 10, 19)
"""Mondays of weeks that end with a change of the clock."""


def length_of(monday, zone=BERLIN):
    start = week_start(monday, zone)
    return start, minutes_since(start, week_end(start, zone))


def test_a_week_with_a_clock_change_has_an_hour_less_or_more():
    assert length_of(date(2026, 11, 16))[1] == 168 * 60
    assert length_of(SPRING)[1] == 167 * 60
    assert length_of(AUTUMN)[1] == 169 * 60


@pytest.mark.parametrize(("monday", "minutes"), [(SPRING, 8 * 60), (AUTUMN, 10 * 60)])
def test_a_night_in_which_clocks_change_is_as_long_as_it_is(monday, minutes):
    start, length = length_of(monday)
    found = spans_of([parse_window("22:00-07:00")], start=start, length=length, zone=BERLIN)
    nights = [end - begin for begin, end in found]
    assert nights[1:6] == [9 * 60] * 5
    assert nights[6] == minutes
    assert nights[7] == 2 * 60


def test_a_time_that_the_clock_skips_is_the_moment_of_the_change():
    skipped = local_moment(date(2026, 3, 29), 2 * 60 + 30, ZoneInfo(BERLIN))
    assert skipped.astimezone(UTC) == datetime(2026, 3, 29, 1, 0, tzinfo=UTC)


def test_a_time_that_occurs_twice_is_the_first():
    twice = local_moment(date(2026, 10, 25), 2 * 60 + 30, ZoneInfo(BERLIN))
    assert twice.astimezone(UTC) == datetime(2026, 10, 25, 0, 30, tzinfo=UTC)


def test_a_quota_resets_by_its_own_clock_whatever_the_zone_of_the_week():
    start, length = length_of(date(2026, 11, 16))
    periods = periods_of(*parse_moment("sat 00:00"), start=start, length=length, zone="UTC")
    assert periods == ((60 - 2 * 1440, 5 * 1440 + 60), (5 * 1440 + 60, 12 * 1440 + 60))


def test_daily_periods_cover_the_week_without_gaps():
    start, length = length_of(AUTUMN)
    periods = periods_of(*parse_moment("00:00"), start=start, length=length, zone=BERLIN)
    assert periods[0][0] <= 0
    assert periods[-1][1] >= length
    assert all(a[1] == b[0] for a, b in pairwise(periods))
    assert [b - a for a, b in periods].count(25 * 60) == 1


def test_the_week_of_a_day_starts_at_the_configured_moment_before_it():
    assert week_start(date(2026, 11, 18), "UTC", "sat 01:00") == datetime(2026, 11, 14, 1, tzinfo=UTC)
    assert week_start(date(2026, 11, 16), "UTC") == datetime(2026, 11, 16, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "days", "start", "end"),
    [
        ("22:00-08:00", range(7), 1320, 1920),
        ("mon-fri 9:00-17:30", range(5), 540, 1050),
        ("fri-mon 00:00-24:00", (0, 4, 5, 6), 0, 1440),
        ("sat,sun 10:00-18:00", (5, 6), 600, 1080),
    ],
)
def test_windows_are_read_as_people_write_them(text, days, start, end):
    assert parse_window(text) == (tuple(days), start, end)


@pytest.mark.parametrize("text", ["22-8", "monday 10:00-11:00", "10:00-10:00", "25:00-26:00", "", "mon"])
def test_what_is_no_window_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match="write"):
        parse_window(text)


SPANS = st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=6)


@given(SPANS, SPANS)
def test_span_arithmetic_agrees_with_sets_of_minutes(first, second):
    def minutes(spans):
        return {minute for begin, end in spans for minute in range(begin, end)}

    one, two = union(first), union(second)
    assert minutes(one) == minutes(first)
    assert minutes(intersect(one, two)) == minutes(one) & minutes(two)
    assert minutes(subtract(one, two)) == minutes(one) - minutes(two)
    assert minutes(clip(one, (50, 90))) == minutes(one) & set(range(50, 90))
    assert minutes(cut_at(one, [40, 80])) == minutes(one)
    for span in one:
        assert overlap(span, (50, 90)) == len(minutes([span]) & set(range(50, 90)))


@given(st.text(max_size=20))
def test_any_text_is_a_window_or_a_clear_refusal(text):
    try:
        window = parse_window(text)
    except ValueError:
        return
    assert window.end > window.start


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
