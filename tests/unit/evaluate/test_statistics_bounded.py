"""Means of bounded values: against exact tests, against scipy, against random weights, and their level."""

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from graftwork.evaluate.statistics.intervals import clopper_pearson
from graftwork.evaluate.statistics.means import (
    approximate_chance,
    bounded_difference,
    bounded_mean,
    chance_not_positive,
    make_units,
    mean_above,
    mean_differs,
    paired_difference,
)
from graftwork.evaluate.statistics.significance import mcnemar, units_for_power

grades = st.sampled_from([0.0, 1.0])
sides = st.sampled_from(["two", "lower", "upper"])


@settings(max_examples=60, deadline=None)
@given(st.lists(grades, min_size=1, max_size=80), sides)
def test_a_rate_with_one_case_a_session_is_clopper_and_pearsons(scores, sided):
    ours = bounded_mean(scores, range(len(scores)), sided=sided)
    assert ours == pytest.approx(clopper_pearson(sum(scores), n=len(scores), sided=sided), abs=2e-6)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 40))
def test_wins_and_losses_are_tested_by_mcnemars_exact_test(wins, losses, ties):
    units = make_units([1.0] * wins + [-1.0] * losses + [0.0] * ties)
    assert mean_differs(units) == pytest.approx(mcnemar(wins, losses=losses), rel=1e-6, abs=1e-9)
    if wins + losses:
        theirs = stats.binomtest(wins, wins + losses, alternative="greater").pvalue
        assert mean_above(units, 0.0) == pytest.approx(theirs, rel=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-1, 1), min_size=1, max_size=12), st.integers(0, 99))
def test_the_chance_is_that_of_random_exponential_weights(values, seed):
    weights = np.random.default_rng(seed).exponential(size=(40_000, len(values) + 1))
    often = float(((weights * np.array([*values, -1.0])).sum(1) <= 0).mean())
    assert mean_above(make_units(values), 0.0) == pytest.approx(often, abs=0.012)


def test_two_weights_have_the_chance_of_the_formula():
    """P(a X <= b Y) of two exponentials is b / (a + b)."""
    rows = np.array([[a, -b] for a in (0.01, 0.5, 1.0, 7.0) for b in (0.02, 1.0, 30.0)])
    assert chance_not_positive(rows) == pytest.approx(-rows[:, 1] / (rows[:, 0] - rows[:, 1]), abs=2e-6)
    assert chance_not_positive(np.array([[0.0, 0.0], [1.0, 2.0], [-1.0, 0.0]])).tolist() == [1.0, 0.0, 1.0]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 9)), min_size=2, max_size=60))
def test_an_interval_holds_the_mean_mirrors_and_agrees_with_the_test(pairs):
    scores, sessions = zip(*pairs, strict=True)
    low, high = bounded_mean(scores, sessions)
    mean = sum(scores) / len(scores)
    assert -1e-9 <= low <= mean + 1e-9
    assert mean - 1e-9 <= high <= 1 + 1e-9
    mirrored = bounded_mean([1 - score for score in scores], sessions)
    assert (1 - high, 1 - low) == pytest.approx(mirrored, abs=1e-6)
    if low > 1e-6:
        assert mean_above(make_units(scores, sessions), low, lowest=0.0) == pytest.approx(0.025, rel=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(grades, st.integers(0, 9)), min_size=2, max_size=60))
def test_sessions_never_make_the_interval_of_a_rate_narrower_where_all_is_right(pairs):
    _, sessions = zip(*pairs, strict=True)
    scores = [1.0] * len(sessions)
    assert bounded_mean(scores, sessions).low <= clopper_pearson(len(scores), n=len(scores)).low + 1e-9


def test_whole_sessions_that_agree_are_worth_one_case_each():
    sessions = [i // 25 for i in range(400)]
    low = bounded_mean([1.0] * 400, sessions).low
    assert low == pytest.approx(clopper_pearson(16, n=16).low, abs=1e-6)
    assert bounded_mean([1.0] * 50, ["s"] * 50) == pytest.approx(clopper_pearson(1, n=1), abs=1e-5)


def test_one_more_success_never_lowers_the_bound():
    sessions = [i // 2 for i in range(120)]
    bounds = [bounded_mean([0.0] * wrong + [1.0] * (120 - wrong), sessions).low for wrong in range(6)]
    assert bounds == sorted(bounds, reverse=True)


def test_hardly_any_variation_proves_no_more_than_a_rate_does():
    low = bounded_mean([1.0] * 30 + [0.9]).low
    assert low == pytest.approx(clopper_pearson(31, n=31).low, abs=0.01)
    # Continuous grades near 1 say as little about failures that were not seen.
    draw = random.Random(1)
    assert bounded_mean([0.99 + 0.01 * draw.random() for _ in range(31)]).low < 0.89
    same = bounded_difference([0.5] * 31, [0.5] * 31)
    assert same.low < -0.05 < 0.05 < same.high


@given(st.integers(0, 40), st.integers(0, 40), st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_the_interval_of_a_difference_excludes_0_just_where_mcnemar_decides(wins, losses, ties):
    low, high = paired_difference(wins, losses=losses, n=wins + losses + ties)
    p = mcnemar(wins, losses=losses)
    if abs(p - 0.05) > 1e-6:
        assert (low > 0 or high < 0) == (p < 0.05)
    assert (-high, -low) == pytest.approx(
        paired_difference(losses, losses=wins, n=wins + losses + ties), abs=1e-6
    )


def test_all_ties_keep_a_margin_of_2_points_from_149_pairs_on():
    """0.98 to the 149th is the first power under 5 %; a score interval promised it with 133."""
    assert paired_difference(0, losses=0, n=149, sided="lower").low > -0.02
    assert paired_difference(0, losses=0, n=148, sided="lower").low < -0.02


def test_no_cases_say_nothing():
    assert bounded_mean([]) == (0.0, 1.0)
    assert paired_difference(0, losses=0, n=0) == (-1.0, 1.0)
    assert mean_differs(make_units([])) == 1.0


@pytest.mark.parametrize(
    ("units", "limit", "lowest", "count"),
    [
        (make_units([1.0] * 31), 0.98, 0.0, 183),
        (make_units([1.0] * 400, [i // 25 for i in range(400)]), 0.8, 0.0, 17),
        (make_units([1.0] * 125, [i // 25 for i in range(125)]), 0.0, -1.0, 6),
    ],
    ids=["31 of 31", "16 sessions all right", "5 sessions all won"],
)
def test_units_that_do_not_vary_need_as_many_as_the_formula_says(units, limit, lowest, count):
    assert units_for_power(units, limit=limit, lowest=lowest, tail=0.025) == count


def test_a_mean_under_the_limit_needs_no_number_of_units():
    assert units_for_power(make_units([1.0, 0.0]), limit=0.5, lowest=0.0, tail=0.025) is None


@pytest.mark.parametrize("size", [1, 4], ids=["single cases", "sessions of four"])
def test_the_number_of_units_has_the_power_that_was_asked_for(size):
    draw = np.random.default_rng(5)
    seen = draw.choice([1.0, 0.0, -1.0], p=[0.25, 0.65, 0.1], size=60)
    units = make_units(seen.tolist(), [i // size for i in range(60)])
    count = units_for_power(units, limit=0.0, lowest=-1.0, tail=0.025)
    totals, shown = np.array(units.totals), 0
    for _ in range(600):
        drawn = draw.choice(totals, size=count)
        shown += chance_not_positive(np.append(drawn, -size)[None, :])[0] < 0.025
    assert 0.75 <= shown / 600 <= 0.9


@given(right=st.integers(1, 3000), wrong=st.integers(0, 4000), limit=st.floats(0.005, 0.995))
@example(right=188, wrong=2525, limit=0.3078894265632005)
def test_the_chance_of_two_weights_is_that_of_a_beta_distribution(right, wrong, limit):
    chance = chance_not_positive(np.array([[1 - limit, -limit, -limit]]), np.array([[right, wrong, 1.0]]))
    assert chance == pytest.approx(stats.beta.cdf(limit, right, wrong + 1), abs=1e-4)


@given(right=st.integers(1, 400), wrong=st.integers(0, 4000), limit=st.floats(0.01, 0.99))
@example(right=29, wrong=71, limit=0.09)
@example(right=285, wrong=715, limit=0.09)
@example(right=1, wrong=1, limit=1 / 3)
def test_the_approximate_chance_is_within_a_hundredth_of_the_exact_one(right, wrong, limit):
    weights = np.array([[1 - limit, -limit, -limit]])
    counts = np.array([[right, wrong, 1.0]])
    exact = chance_not_positive(weights, counts)
    assert abs(approximate_chance(weights, counts) - exact) < 0.01
