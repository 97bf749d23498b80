"""What is left of a test set that candidates were chosen on."""

import pytest
from gate_samples import simple
from hypothesis import given, settings
from hypothesis import strategies as st

from graftwork.evaluate.comparison import (
    confidence_at,
    describe_wear,
    gain_beyond_chance,
    more_cases,
    share_of_look,
)
from graftwork.evaluate.gate.decide import decide
from graftwork.evaluate.gate.settings import GateRule, GateSettings
from graftwork.evaluate.statistics.significance import mcnemar
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


def test_evaluations_share_the_error_and_later_ones_spend_at_most_a_quarter():
    shares = [share_of_look(look) for look in range(1, 2000)]
    assert shares[0] == 1.0
    assert shares == sorted(shares, reverse=True)
    assert 1.249 < sum(shares) < 1.25
    assert confidence_at(0.95, look=2) == pytest.approx(1 - 0.05 / 8)


def test_the_fourteenth_evaluation_wears_a_test_set_out_and_the_sentence_says_so():
    wear = describe_wear(14, candidates=14, look=14, comparison=make_pair(31))
    assert wear.worn
    assert wear.confidence == pytest.approx(1 - 0.05 * 0.25 / 182)
    assert (wear.fresh_gain, wear.chance_gain) == (6 / 31, 15 / 31)
    assert "looked at 14 times, and this is evaluation 14 on its questions" in wear.sentence
    assert "a gain under 48.4 points may be chance" in wear.sentence
    assert "times as many cases as a fresh set" in wear.sentence
    assert "hold out new rows" in wear.sentence


def test_repeated_evaluation_of_one_candidate_wears_nothing():
    wear = describe_wear(30, candidates=1, look=1, comparison=make_pair(31))
    assert not wear.worn
    assert wear.confidence == pytest.approx(0.95)
    assert wear.chance_gain == wear.fresh_gain
    assert wear.sentence == "This test set was looked at 30 times, always with the same candidate."


def test_a_test_set_is_worn_when_it_takes_twice_the_cases_of_a_fresh_one():
    assert [describe_wear(k, candidates=k, look=k).worn for k in range(1, 6)] == [
        False,
        False,
        False,
        True,
        True,
    ]
    assert more_cases(1) == 1.0


def test_too_few_cases_prove_nothing_after_many_evaluations():
    wear = describe_wear(20, candidates=20, look=20, comparison=make_pair(8))
    assert wear.chance_gain is None
    assert wear.fresh_gain is not None
    assert "no gain on 8 cases is beyond chance any more" in wear.sentence


def test_the_gain_by_chance_is_larger_where_sessions_hold_several_cases():
    steps = [1.0] * 6 + [0.0] * 26
    alone = describe_wear(1, candidates=1, look=1, comparison=make_pair(32, wins=6))
    sessions = [f"s{i // 4}" for i in range(32)]
    together = describe_wear(
        1, candidates=1, look=1, comparison=make_pair(32, wins=6), differences=steps, clusters=sessions
    )
    assert together.chance_gain > 2 * alone.chance_gain


def test_a_later_evaluation_needs_a_clearer_result_or_fresh_cases():
    settings = GateSettings(rules=(GateRule(metric="json_valid", over=0.1),), primary="json_valid")
    before, after = [0] * 12 + [1] * 3 + [1] * 16, [1] * 12 + [0] * 3 + [1] * 16
    fresh = simple(before, after)
    again = fresh.model_copy(update={"wear": describe_wear(3, candidates=3, look=3)})
    assert decide(fresh, settings).decision == "deploy"
    verdict = decide(again, settings)
    assert verdict.decision == "not_enough_evidence"
    assert verdict.reason.startswith("Evaluation 3 on the same questions")
    assert f"Confirm it on about {verdict.cases_needed} fresh cases, such as captures" in verdict.reason
    assert "On fresh cases this would be enough" in verdict.rules[1].sentence
    # What is clear enough deploys at any look, and a set that grows needs more than a fresh one.
    clear = simple([0] * 40 + [1] * 20, [1] * 60)
    worn = clear.model_copy(update={"wear": describe_wear(9, candidates=9, look=9)})
    assert decide(worn, settings).decision == "deploy"
    assert verdict.rules[1].cases_with_these > verdict.rules[1].cases_to_decide


@given(st.integers(1, 200), st.integers(0, 30), st.integers(1, 40))
@settings(max_examples=60)
def test_the_gain_is_the_smallest_one_that_is_beyond_chance_and_grows_with_evaluations(n, losses, tried):
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
