"""What is left of a test set that candidates were chosen on."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.evaluate.statistics import mcnemar
from graftwork.evaluate.wear import gain_beyond_chance, tell_wear
from graftwork.records.report import Comparison


def make_pair(n, wins=0, losses=0):
    return Comparison(
        metric="task_success",
        baseline="base",
        candidate="adapter",
        n=n,
        wins=wins,
        losses=losses,
        difference=0,
        low=0,
        high=0,
        p_value=1,
    )


def test_six_wins_without_a_loss_are_the_least_that_31_cases_prove_at_first():
    # Exact McNemar: 6 of 6 gives p 0.031; with 14 candidates 0.05 / 14 asks for 10 of 10.
    assert gain_beyond_chance(31, losses=0, alpha=0.05) == 6 / 31
    assert gain_beyond_chance(31, losses=0, alpha=0.05 / 14) == 10 / 31


def test_fourteen_candidates_wear_a_test_set_out_and_the_sentence_says_so():
    wear = tell_wear(14, candidates=14, comparison=make_pair(31))
    assert wear.worn
    assert wear.confidence == pytest.approx(0.30)
    assert (wear.fresh_gain, wear.chance_gain) == (6 / 31, 10 / 31)
    assert "looked at 14 times, with 14 different candidates" in wear.sentence
    assert "a gain under 32.3 points may be chance" in wear.sentence
    assert "hold out new rows" in wear.sentence


def test_the_same_candidate_looked_at_often_wears_nothing():
    wear = tell_wear(30, candidates=1, comparison=make_pair(31))
    assert not wear.worn
    assert wear.confidence == pytest.approx(0.95)
    assert wear.chance_gain == wear.fresh_gain
    assert wear.sentence == "This test set was looked at 30 times, always with the same candidate."


@pytest.mark.parametrize(("confidence", "first_worn"), [(0.95, 10), (0.9, 5), (0.99, 50)])
def test_it_is_worn_when_luck_alone_would_as_likely_as_not_pass_one(confidence, first_worn):
    assert not tell_wear(first_worn - 1, candidates=first_worn - 1, confidence=confidence).worn
    assert tell_wear(first_worn, candidates=first_worn, confidence=confidence).worn


def test_too_few_cases_for_so_many_candidates_prove_nothing_any_more():
    wear = tell_wear(20, candidates=20, comparison=make_pair(8))
    assert wear.chance_gain is None
    assert wear.fresh_gain is not None
    assert "no gain on 8 cases is beyond chance any more" in wear.sentence
    assert "promise nothing together" in wear.sentence


@given(st.integers(1, 200), st.integers(0, 30), st.integers(1, 40))
@settings(max_examples=60)
def test_the_gain_is_the_smallest_one_that_is_beyond_chance_and_grows_with_looks(n, losses, tried):
    alpha = 0.05 / tried
    gain = gain_beyond_chance(n, losses=losses, alpha=alpha)
    if gain is None:
        assert n - losses <= losses or mcnemar(n - losses, losses=losses) > alpha
        return
    wins = round(gain * n) + losses
    assert wins + losses <= n
    assert mcnemar(wins, losses=losses) <= alpha
    assert wins == losses + 1 or mcnemar(wins - 1, losses=losses) > alpha
    fresh = gain_beyond_chance(n, losses=losses, alpha=0.05)
    assert fresh is not None
    assert fresh <= gain
