"""When a cron expression is due, over the changes of daylight saving time too."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.cycle.cron import parse_cron

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


FIELD = st.one_of(
    st.just("*"),
    st.integers(2, 30).map(lambda step: f"*/{step}"),
)


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
