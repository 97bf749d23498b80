"""The benchmark of small functions compares its arms by case, over seeds."""

import sys
from pathlib import Path

import pytest
from scipy.stats import binomtest

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from small_functions import compare, flip_signs, mcnemar, sampled_rates


@pytest.mark.parametrize(("gained", "lost"), [(29, 17), (10, 2), (5, 5), (0, 4)])
def test_mcnemar_is_the_exact_binomial_test(gained, lost):
    expected = binomtest(gained, gained + lost).pvalue
    assert mcnemar(gained, lost) == pytest.approx(expected)


def test_signs_of_all_seeds_of_a_case_are_flipped_together():
    # Three seeds that agree are one piece of evidence and not three.
    together = flip_signs([3.0] * 5, flips=4000)
    apart = flip_signs([1.0] * 15, flips=4000)
    assert together == pytest.approx(2 / 2**5, abs=0.02)
    assert apart < 0.01
    assert flip_signs([1.0, -1.0, 0.0]) == pytest.approx(1.0)


def test_arms_are_compared_by_case_and_seed():
    solved = {
        "first": [{"a": 0.0, "b": 1.0}, {"a": 0.0, "b": 0.0}],
        "second": [{"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 0.0}],
    }
    found = compare("first", "second", solved)
    assert (found["gained"], found["lost"]) == (2, 1)
    assert found["points"] == 25.0
    assert found["points_by_seed"] == [0.0, 50.0]


def test_rates_of_sampled_answers_leave_the_greedy_one_out():
    assert sampled_rates([{"a": [1.0, 0.0, 0.0], "b": [0.0, 1.0, 0.0]}]) == {"pass@1": 0.25, "pass@2": 0.5}
