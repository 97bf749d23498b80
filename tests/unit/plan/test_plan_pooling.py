"""Ranges that past runs narrow: never below the spread that was seen, never from one or two runs."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_plan_estimate import plan

from graftwork.plan.estimate import ENOUGH_RUNS, pool_runs
from graftwork.records.base import Figure

PRIOR = Figure.about(100.0, down=0.55, up=1.6, unit="tokens/s")
speeds = st.lists(st.floats(1.0, 10_000.0), max_size=10)


def test_one_slow_run_does_not_make_the_plan_overconfident():
    """The case of issue 15: one run four times slower than planned, and the next one as planned at first."""
    first = plan()
    slow = first.tokens_per_second.value / 4
    second = plan(learned=(slow,))
    assert second.minutes.holds(first.minutes.value)
    assert second.tokens_per_second.holds(slow)
    assert second.tokens_per_second.low <= first.tokens_per_second.low
    assert second.tokens_per_second.high >= first.tokens_per_second.high
    assert second.certainty == first.certainty == "probed"


@given(seen=speeds)
def test_pooled_range_holds_every_speed_that_was_seen(seen):
    pooled = pool_runs(PRIOR, seen)
    assert all(pooled.low <= speed <= pooled.high for speed in seen)
    assert pooled.low <= pooled.value <= pooled.high
    assert pooled.unit == "tokens/s"


@given(seen=st.lists(st.floats(1.0, 10_000.0), max_size=ENOUGH_RUNS - 1))
def test_fewer_than_three_runs_never_narrow_the_prior_range(seen):
    pooled = pool_runs(PRIOR, seen)
    assert pooled.low <= PRIOR.low
    assert pooled.high >= PRIOR.high


def test_without_runs_the_estimate_is_the_prior():
    assert pool_runs(PRIOR, ()) == PRIOR


def test_runs_that_agree_narrow_the_range_slowly():
    def width(count):
        pooled = pool_runs(PRIOR, (90.0, 100.0, 110.0, 95.0, 105.0)[:count])
        return math.log(pooled.high / pooled.low)

    assert width(0) == width(1) == width(2)
    assert width(2) > width(3) > width(5)
    assert width(5) > math.log(110 / 90)


def test_few_runs_move_the_value_part_of_the_way():
    moved = pool_runs(PRIOR, (25.0,)).value
    assert 25.0 < moved < 100.0
    assert pool_runs(PRIOR, (25.0, 25.0)).value < moved
    assert pool_runs(PRIOR, (25.0, 25.0, 26.0)).value == pytest.approx(25.0)


def test_a_wide_prior_gives_way_sooner_than_a_narrow_one():
    wide = Figure.about(100.0, down=0.25, up=4.0)
    assert pool_runs(wide, (25.0,)).value < pool_runs(PRIOR, (25.0,)).value
