"""Resampling: seeded, wide enough, and not trusted where there is nothing to resample."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from graftwork.evaluate.gate.figures import SLOWEST
from graftwork.evaluate.statistics.intervals import student_quantile
from graftwork.evaluate.statistics.means import (
    bootstrap_mean,
    bounded_mean,
    score_difference,
    score_mean,
    widened_tail,
)


@given(st.floats(1e-6, 0.49), st.integers(1, 3000))
def test_students_quantile_agrees_with_scipy(tail, freedom):
    assert student_quantile(tail, freedom=freedom) == pytest.approx(stats.t.isf(tail, freedom), rel=1e-6)


def upper_misses(interval, *, n, spread, trials=300):
    """How often the upper bound lies under the true mean of skewed values; the seed makes it one number."""
    draw, mean = random.Random(n), math.exp(spread**2 / 2)
    found = ([draw.lognormvariate(0, spread) for _ in range(n)] for _ in range(trials))
    return sum(interval(values).high < mean for values in found) / trials


@pytest.mark.parametrize("n", [16, 31])
def test_the_bound_of_a_mean_of_seconds_is_hardly_ever_too_low(n):
    """Its level is 2.5 %: nine misses of 100 would be a chance of one in a thousand."""

    def bound(values):
        return bounded_mean(values, highest=SLOWEST * max(values), confidence=0.975, sided="upper")

    assert upper_misses(bound, n=n, spread=0.5, trials=100) <= 8 / 100


def test_the_mean_interval_is_as_wide_as_students():
    draw = random.Random(2)
    values = [draw.gauss(0.5, 0.1) for _ in range(40)]
    theirs = stats.t.interval(0.95, 39, stats.tmean(values), stats.sem(values))
    ours = bootstrap_mean(values, resamples=8000)
    assert ours == pytest.approx(theirs, abs=0.004)


def test_the_widened_tail_is_hesterbergs():
    """Hesterberg, The American Statistician 69:371 (2015): the formula with scipy's quantiles."""
    expected = stats.norm.cdf(-((10 / 9) ** 0.5) * stats.t.isf(0.025, 9))
    assert widened_tail(0.025, n=10) == pytest.approx(expected, rel=1e-6)


def test_clusters_are_drawn_as_wholes():
    values = [float(s % 2) for s in range(20) for _ in range(5)]
    clusters = [s for s in range(20) for _ in range(5)]
    alone, together = bootstrap_mean(values), bootstrap_mean(values, clusters=clusters)
    assert together.high - together.low > 1.8 * (alone.high - alone.low)


@settings(max_examples=30)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=20), st.data())
def test_a_mean_interval_is_seeded_and_stays_inside_the_values(values, data):
    clusters = data.draw(st.none() | st.lists(st.integers(0, 5), min_size=len(values), max_size=len(values)))
    first = bootstrap_mean(values, clusters=clusters, resamples=100)
    assert first == bootstrap_mean(values, clusters=clusters, resamples=100)
    assert min(values) - 1e-9 <= first.low <= first.high <= max(values) + 1e-9


def test_grades_from_0_to_1_are_not_resampled():
    draw = random.Random(7)
    values = [draw.random() for _ in range(60)]
    assert score_mean(values).method == "bounded mean"
    assert score_difference(values, values[::-1]).method == "bounded mean"


def test_numbers_beyond_0_and_1_are_resampled_and_many_of_them_are_not():
    found = score_mean([3.0, 4.0, 5.0])
    assert found.method == "bootstrap"
    assert 3 <= found.interval.low <= found.interval.high <= 5
    draw = random.Random(7)
    many = [2 * draw.random() for _ in range(2500)]
    found = score_mean(many)
    assert found.method == "Student's t"
    assert found.interval == pytest.approx(
        stats.t.interval(0.95, 2499, stats.tmean(many), stats.sem(many)), rel=1e-6
    )
