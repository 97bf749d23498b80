"""Rates, pairs and the counts that decide: against scipy and against published figures."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats

from graftwork.evaluate.statistics.intervals import clopper_pearson, incomplete_beta
from graftwork.evaluate.statistics.means import bootstrap_mean, paired_difference
from graftwork.evaluate.statistics.significance import mcnemar, successes_to_clear

counts = st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


@given(x=st.floats(0.0, 1.0), a=st.floats(0.1, 5000), b=st.floats(0.1, 5000))
def test_the_incomplete_beta_function_agrees_with_scipy(x, a, b):
    assert incomplete_beta(x, a=a, b=b) == pytest.approx(special.betainc(a, b, x), rel=1e-7, abs=1e-11)


@given(counts, st.sampled_from([0.8, 0.9, 0.95, 0.99]))
def test_the_exact_interval_agrees_with_scipy(count, confidence):
    successes, n = count
    ours = clopper_pearson(successes, n=n, confidence=confidence)
    theirs = stats.binomtest(successes, n).proportion_ci(confidence, "exact")
    assert ours.low == pytest.approx(theirs.low, abs=1e-9)
    assert ours.high == pytest.approx(theirs.high, abs=1e-9)


@given(counts)
def test_the_interval_holds_the_rate_and_mirrors(count):
    successes, n = count
    low, high = clopper_pearson(successes, n=n)
    assert 0 <= low <= successes / n <= high <= 1
    other = clopper_pearson(n - successes, n=n)
    assert (1 - high, 1 - low) == pytest.approx(other, abs=1e-12)


def test_no_cases_say_nothing():
    assert clopper_pearson(0, n=0) == (0.0, 1.0)


def test_31_of_31_still_allow_a_failure_rate_of_9_percent():
    low, high = clopper_pearson(31, n=31, sided="lower")
    assert 1 - low == pytest.approx(0.092, abs=5e-4)
    assert high == 1.0


@given(st.integers(0, 200), st.integers(0, 200))
def test_mcnemar_agrees_with_scipy(wins, losses):
    if wins + losses:
        theirs = stats.binomtest(wins, wins + losses, 0.5).pvalue
        assert mcnemar(wins, losses=losses) == pytest.approx(theirs, rel=1e-9)
    assert mcnemar(wins, losses=losses) == mcnemar(losses, losses=wins)


def test_mcnemar_needs_six_discordant_pairs():
    assert mcnemar(5, losses=0) == 0.0625
    assert mcnemar(6, losses=0) == pytest.approx(0.031, abs=5e-4)
    assert mcnemar(0, losses=0) == 1.0


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=30))
def test_the_bootstrap_is_seeded_and_stays_inside_the_values(values):
    first = bootstrap_mean(values, resamples=200)
    assert first == bootstrap_mean(values, resamples=200)
    assert min(values) - 1e-9 <= first.low <= first.high <= max(values) + 1e-9


def test_counts_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="between 0 and n"):
        clopper_pearson(3, n=2)
    with pytest.raises(ValueError, match="do not fit"):
        paired_difference(2, losses=2, n=3)
    with pytest.raises(ValueError, match="confidence"):
        clopper_pearson(1, n=2, confidence=95)


@given(st.integers(1, 300), st.integers(1, 99).map(lambda p: p / 100))
def test_the_successes_that_clear_a_limit_are_the_fewest(n, limit):
    fewest = successes_to_clear(n, limit=limit)
    if fewest is None:
        assert clopper_pearson(n, n=n).low <= limit
        return
    assert clopper_pearson(fewest, n=n).low > limit
    assert clopper_pearson(fewest - 1, n=n).low <= limit
