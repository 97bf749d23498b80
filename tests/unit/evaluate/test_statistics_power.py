"""How much so many cases can show: exact sums against scipy and the known figures."""

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from graftwork.evaluate.comparison import what_cases_show
from graftwork.evaluate.statistics import significance as power_module
from graftwork.evaluate.statistics.significance import (
    cases_for_difference,
    detectable_difference,
    mcnemar,
    mcnemar_power,
)
from graftwork.records.report import Comparison


@pytest.mark.parametrize(
    ("n", "win", "loss", "percent"),
    [(31, 0.15, 0.05, 11), (31, 0.25, 0.05, 42), (100, 0.15, 0.05, 54), (100, 0.25, 0.05, 96)],
)
def test_power_is_the_known_one(n, win, loss, percent):
    assert round(100 * mcnemar_power(n, win_rate=win, loss_rate=loss)) == percent


@settings(max_examples=40)
@given(
    st.integers(1, 60),
    st.integers(0, 50).map(lambda x: x / 100),
    st.integers(0, 50).map(lambda x: x / 100),
    st.sampled_from([0.9, 0.95, 0.99]),
)
def test_power_is_the_sum_over_every_outcome(n, win, loss, confidence):
    expected = 0.0
    for wins in range(n + 1):
        for losses in range(n - wins + 1):
            if wins > losses and mcnemar(wins, losses=losses) <= 1 - confidence:
                expected += stats.multinomial.pmf(
                    [wins, losses, n - wins - losses], n, [win, loss, 1 - win - loss]
                )
    found = mcnemar_power(n, win_rate=win, loss_rate=loss, confidence=confidence)
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("loss_rate", [0.0, 0.02, 0.05, 0.2])
@pytest.mark.parametrize("difference", [0.5, 0.25, 0.05, 0.02])
def test_the_cases_for_a_difference_are_just_enough(difference, loss_rate):
    n = cases_for_difference(difference, loss_rate=loss_rate)
    rates = {"win_rate": loss_rate + difference, "loss_rate": loss_rate}
    assert mcnemar_power(n, **rates) >= 0.8 > mcnemar_power(n - 1, **rates)


@pytest.mark.parametrize("n", [10, 31, 100, 400])
@pytest.mark.parametrize("loss_rate", [0.0, 0.05])
def test_the_detectable_difference_is_detected(n, loss_rate):
    gain = detectable_difference(n, loss_rate=loss_rate)
    assert mcnemar_power(n, win_rate=loss_rate + gain + 1e-6, loss_rate=loss_rate) >= 0.8
    assert mcnemar_power(n, win_rate=loss_rate + gain - 1e-3, loss_rate=loss_rate) < 0.8


def test_31_cases_see_a_quarter_at_best():
    """With no loss at all: 6 wins of 31 in four evaluations of five."""
    assert detectable_difference(31, loss_rate=0.0) == pytest.approx(0.25, abs=0.01)
    assert cases_for_difference(0.25, loss_rate=0.0) == 31


def test_five_cases_see_nothing():
    assert detectable_difference(5) == math.inf
    assert mcnemar_power(5, win_rate=1.0, loss_rate=0.0) == 0.0
    assert mcnemar_power(6, win_rate=1.0, loss_rate=0.0) == pytest.approx(1.0)


def test_the_approximation_takes_over_where_it_is_good(monkeypatch):
    monkeypatch.setattr(power_module, "FEW_ENOUGH_TO_SUM", 10**9)
    exact = cases_for_difference(0.004)
    monkeypatch.setattr(power_module, "FEW_ENOUGH_TO_SUM", 1000)
    assert cases_for_difference(0.004) == pytest.approx(exact, rel=0.01)


def test_a_report_does_not_wait_for_its_power():
    start = time.thread_time()
    what_cases_show(400)
    detectable_difference(3000)
    cases_for_difference(0.01)
    assert time.thread_time() - start < 1.0


@pytest.mark.parametrize("difference", [0, -0.1, 5])
def test_a_difference_that_cannot_be_is_refused(difference):
    with pytest.raises(ValueError, match=r"0\.05 is 5 points"):
        cases_for_difference(difference)


def test_the_sentence_says_what_the_cases_show_and_what_they_do_not():
    power = what_cases_show(31)
    assert power.needed == cases_for_difference(0.05)
    assert power.sentence == (
        "With 31 cases you can see a difference of 33 points; to see 5 points you need about 500 "
        "(with 80 % power, if 5 % of the cases get worse)."
    )


def test_the_sentence_uses_the_losses_that_were_seen():
    seen = Comparison(
        metric="m",
        baseline="a",
        candidate="b",
        n=31,
        wins=3,
        losses=0,
        difference=0.1,
        low=0,
        high=1,
        p_value=1,
    )
    power = what_cases_show(31, comparison=seen)
    assert power.loss_rate == pytest.approx(1 / 33)
    assert power.needed < what_cases_show(31).needed


def test_sessions_cost_cases():
    alone, together = what_cases_show(60), what_cases_show(60, effective=20.0)
    assert together.detectable > alone.detectable
    assert together.needed == pytest.approx(3 * alone.needed, abs=3)
    assert "60 cases, worth 20 independent ones," in together.sentence


def test_too_few_and_more_than_enough_are_reported():
    assert what_cases_show(4).detectable is None
    assert "4 cases cannot show any difference" in what_cases_show(4).sentence
    assert "these are enough" in what_cases_show(1000).sentence


def seen_pairs(wins, losses, *, n=8, p_value=1.0):
    return Comparison(
        metric="answer_match",
        baseline="a",
        candidate="b",
        n=n,
        wins=wins,
        losses=losses,
        difference=(wins - losses) / n,
        low=-1,
        high=1,
        p_value=p_value,
    )


def test_cases_that_show_a_difference_are_not_reported_to_show_none():
    lost = what_cases_show(8, comparison=seen_pairs(0, 8, p_value=mcnemar(0, losses=8)))
    assert lost.sentence.startswith(
        "8 cases show the difference in Answer match (p = 0.0078), and hardly a smaller one; to see 5 points"
    )
    # What was lost is the difference itself, not what goes against it.
    assert lost.loss_rate == pytest.approx(0.1)
    assert lost.sentence.endswith("if 10 % of the cases go the other way).")
    won = what_cases_show(8, comparison=seen_pairs(8, 0, p_value=mcnemar(8, losses=0)))
    assert "show the difference in Answer match" in won.sentence
    assert won.sentence.endswith("if 10 % of the cases get worse).")


@pytest.mark.parametrize("confidence", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("n", range(1, 12))
def test_cases_cannot_show_a_difference_only_where_no_outcome_would(n, confidence):
    possible = mcnemar(n, losses=0) <= 1 - confidence
    output = what_cases_show(n, comparison=seen_pairs(0, 0, n=n), confidence=confidence).sentence
    assert ("cannot show any difference" in output) == (not possible)


def test_the_best_that_few_cases_can_show_is_reported():
    output = what_cases_show(8, comparison=seen_pairs(0, 0)).sentence
    assert output.startswith(
        "8 cases show a difference only if 6 or more change, and nearly all the same way;"
    )


def test_the_effective_number_of_cases_names_the_metric_it_was_estimated_on():
    output = what_cases_show(8, comparison=seen_pairs(1, 1), effective=3.0).sentence
    assert "worth 3 independent ones, cannot show any difference in Answer match, however large" in output
