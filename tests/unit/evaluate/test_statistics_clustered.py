"""Sessions: with one case each nothing changes; with several the interval is as wide as it must be."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from graftwork.evaluate.statistics.intervals import clopper_pearson
from graftwork.evaluate.statistics.means import bounded_mean, mean_difference


@settings(max_examples=60)
@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0, 9)), min_size=2, max_size=50))
def test_a_mean_difference_with_one_case_a_session_is_the_paired_t_interval_of_scipy(pairs):
    a, b = zip(*pairs, strict=True)
    if len({y - x for x, y in pairs}) < 2:
        return
    theirs = stats.ttest_rel(b, a).confidence_interval(0.95)
    assert mean_difference(a, b, range(len(a))) == pytest.approx(
        (theirs.low, theirs.high), abs=1e-6, rel=1e-6
    )


def test_the_robust_error_is_the_one_of_the_formula():
    """Cameron and Miller, Journal of Human Resources 50:317 (2015), for a mean: G/(G-1) Σ_g(Σ_i e_gi)²/n²."""
    values, clusters = [1.0, 0.0, 1.0, 1.0, 0.0, 0.0], ["a", "a", "b", "b", "c", "c"]
    # The mean is 1/2; the residual sums of the sessions are 0, 1 and -1.
    error = (3 / 2 * (0 + 1 + 1) / 36) ** 0.5
    reach = stats.t.isf(0.025, 2) * error
    low, high = mean_difference([0.0] * 6, values, clusters)
    assert (low, high) == pytest.approx((0.5 - reach, 0.5 + reach))


@pytest.mark.parametrize(("count", "size", "rate", "together"), [(15, 4, 0.9, 0.6), (5, 20, 0.7, 0.3)])
def test_the_bound_holds_where_the_plain_one_does_not(count, size, rate, together):
    """Beta-binomial sessions: a lower bound at 95 % must miss in at most 5 % of the draws."""
    draw = random.Random(11)
    a, b = rate * (1 - together) / together, (1 - rate) * (1 - together) / together
    runs, missed, missed_plain = 150, 0, 0
    sessions = [s for s in range(count) for _ in range(size)]
    for _ in range(runs):
        chances = [draw.betavariate(a, b) for _ in range(count)]
        scores = [float(draw.random() < chances[s]) for s in sessions]
        missed += bounded_mean(scores, sessions, sided="lower").low > rate
        missed_plain += clopper_pearson(sum(scores), n=len(scores), sided="lower").low > rate
    assert missed / runs <= 0.05
    assert missed_plain / runs > 0.07


def test_one_session_alone_proves_nothing_of_numbers_without_bounds():
    low, high = mean_difference([0.0, 0.1], [1.0, 0.9], ["s", "s"])
    assert (low, high) == (float("-inf"), float("inf"))
