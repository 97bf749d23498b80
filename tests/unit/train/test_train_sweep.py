"""Successive halving: what is tried, on how many rows, and who goes on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.train.sweep import (
    SearchSpace,
    SweepSettings,
    advance,
    choose_trials,
    count_rungs,
    default_space,
    plan_rungs,
)

NOW = SweepSettings(learning_rate=5e-4, rank=8, batch_size=8)


def test_the_present_settings_are_tried_first_and_once():
    trials = choose_trials(default_space(NOW), NOW, most=9, seed=1)
    assert trials[0] == NOW
    assert len(set(trials)) == len(trials) == 9


def test_the_same_seed_gives_the_same_trials():
    space = default_space(NOW)
    assert choose_trials(space, NOW, most=9, seed=1) == choose_trials(space, NOW, most=9, seed=1)


def test_a_space_of_one_value_has_one_trial():
    space = SearchSpace((5e-4,), (8,), (8,))
    assert choose_trials(space, NOW, most=9, seed=1) == (NOW,)


@pytest.mark.parametrize(("trials", "counts"), [(9, (9, 3, 1)), (2, (2, 1)), (10, (10, 4, 2, 1)), (1, (1,))])
def test_a_third_of_the_trials_goes_on(trials, counts):
    assert count_rungs(trials) == counts


@given(
    st.integers(2, 30),
    st.integers(1, 5000),
    st.integers(1, 64),
    st.floats(0.1, 1e6),
    st.floats(0, 5),
    st.floats(0.001, 2),
)
def test_the_rungs_cost_no_more_than_the_budget(trials, rows, least, budget, fixed, slope):
    def cost(count):
        return fixed + slope * count

    rungs = plan_rungs(trials, rows=rows, least=least, budget=budget, cost=cost)
    assert sum(rung.trials * cost(rung.rows) for rung in rungs) <= budget
    assert all(rung.rows <= rows for rung in rungs)
    assert [rung.rows for rung in rungs] == sorted({rung.rows for rung in rungs})
    if rungs:
        assert rungs[0].rows >= min(least, rows)


def test_a_budget_for_every_row_has_no_second_rung():
    rungs = plan_rungs(9, rows=100, least=10, budget=1e9, cost=float)
    assert [(rung.trials, rung.rows) for rung in rungs] == [(9, 100)]


def test_a_budget_that_pays_for_no_two_trials_gives_no_rungs():
    assert plan_rungs(9, rows=100, least=10, budget=15, cost=float) == ()


def test_the_best_by_loss_go_on_and_of_equal_ones_the_first():
    others = [NOW.model_copy(update={"rank": rank}) for rank in (2, 4, 16)]
    losses = [(NOW, 1.0), (others[0], 0.5), (others[1], 1.0), (others[2], 2.0)]
    assert advance(losses, 2) == (others[0], NOW)
