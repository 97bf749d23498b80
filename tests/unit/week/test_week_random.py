"""Random weeks: no plan breaks a rule, none is behind the greedy one, and none exceeds its bound."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from week_samples import states, weeks

from graftwork.week.checker import check_week
from graftwork.week.greedy import plan_greedily
from graftwork.week.plan import find_plan
from graftwork.week.problem import WeekState, as_scenario, in_rounds, rounds_of, scenarios_of, score
from graftwork.week.sat import SearchLimits

SLOW_INPUT = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


def require_good(problem, state, scenario, seconds):
    found = find_plan(problem, state, scenario, SearchLimits(seconds, workers=1, enough=0.02))
    assert found is not None
    own = as_scenario(problem, scenario)
    state = in_rounds(state, rounds_of(problem, scenario))
    assert check_week(own, state, found.sessions) == []
    assert found.score.value == pytest.approx(score(own, found.sessions).value)
    for plan in plan_greedily(own, state, rounds_of(problem, scenario)):
        if not plan.broken and plan.score.value <= (found.result.greedy_value or 0.0):
            assert found.score.value >= plan.score.value - 1e-9
    assert found.result.greedy_value is None or found.score.value >= found.result.greedy_value - 1e-9
    assert found.score.value <= found.result.bound + 1e-6


@given(st.data())
@settings(max_examples=24, deadline=None, suppress_health_check=SLOW_INPUT)
def test_greedy_plans_of_random_weeks_keep_every_rule_from_any_moment(data):
    problem = data.draw(weeks())
    state = data.draw(states(problem))
    for scenario in scenarios_of(problem):
        own, rounds = as_scenario(problem, scenario), rounds_of(problem, scenario)
        past = in_rounds(state, rounds)
        plans = list(plan_greedily(own, past, rounds))
        assert all(list(plan.broken) == check_week(own, past, plan.sessions) for plan in plans)
        assert any(not plan.broken for plan in plans)


@given(st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=SLOW_INPUT)
def test_solved_random_weeks_keep_every_rule_and_are_never_behind_greedy(data):
    problem = data.draw(weeks())
    require_good(problem, WeekState(), data.draw(st.sampled_from(scenarios_of(problem))), 0.4)


@given(st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=SLOW_INPUT)
def test_replanned_random_weeks_keep_what_has_been_and_every_rule(data):
    problem = data.draw(weeks())
    state = data.draw(states(problem))
    require_good(problem, state, data.draw(st.sampled_from(scenarios_of(problem))), 0.4)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@given(st.data())
@settings(max_examples=500, deadline=None, suppress_health_check=SLOW_INPUT)
def test_500_random_weeks_keep_every_rule_and_are_never_behind_greedy(data):
    problem = data.draw(weeks())
    state = data.draw(st.one_of(st.just(WeekState()), states(problem)))
    require_good(problem, state, data.draw(st.sampled_from(scenarios_of(problem))), 1.0)
