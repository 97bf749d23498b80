"""Windows, quota periods and the length of a week, across changes of the clock."""

from datetime import UTC, date, datetime
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
