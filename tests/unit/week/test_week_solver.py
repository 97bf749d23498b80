"""Random and tiny weeks: no plan breaks a rule, is behind the greedy one, or exceeds its bound."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from week_samples import model, place, session, states, week, weeks

from graftwork.week.checker import check_week
from graftwork.week.greedy import plan_greedily
from graftwork.week.plan import find_plan
from graftwork.week.problem import (
    POINTS,
    GainCurve,
    WeekState,
    as_scenario,
    in_rounds,
    rounds_of,
    scenarios_of,
    score,
)
from graftwork.week.sat import SearchLimits, solve

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


NOW = WeekState()


def tiny_week(**given):
    """Two places open for a few hours, one model that starts from the other: every plan can be listed."""
    first = place("first", open=((0, 240),), setup=10, shortest=60)
    second = place("second", speed=2.0, open=((120, 360),), shortest=60, **given)
    heir = model("heir", inherits="main", share=0.5, carry=0.5, curve=GainCurve(half_hours=3))
    return week([first, second], [model("main", weight=2, gate=30, curve=GainCurve(half_hours=5)), heir])


def every_plan(problem, rounds):
    """All plans of at most two sessions a place, on a grid of an hour."""
    kinds = [(m.name, number) for m in problem.models for number in rounds[m.name]]
    choices = []
    for used in problem.places:
        (begin, end), over = used.open[0], used.overhead
        singles = [
            session(used.name, name, start, stop, train=stop - start - over, round=number)
            for start in range(begin, end, 60)
            for stop in range(start + over + used.shortest, end + 1, 60)
            for name, number in kinds
        ]
        pairs = [
            (early, late) for early, late in itertools.product(singles, singles)
            if early.end <= late.start and (early.model, early.round) != (late.model, late.round)
        ]  # fmt: skip
        choices.append([(), *((single,) for single in singles), *pairs])
    for first, second in itertools.product(*choices):
        yield (*first, *second)


@pytest.mark.parametrize("scenario", ["parallel", "sequential", "iterative"])
def test_no_plan_of_a_tiny_week_exceeds_the_bound_and_the_solver_finds_the_best(scenario):
    problem = as_scenario(tiny_week(), scenario)
    rounds = rounds_of(problem, scenario)
    best = max(
        score(problem, plan).value
        for plan in every_plan(problem, rounds)
        if not check_week(problem, NOW, plan)
    )
    solved = solve(problem, NOW, rounds=rounds, hint=None, limits=SearchLimits(20, workers=1))
    assert score(problem, solved.sessions).value >= best - 1e-6
    assert score(problem, solved.sessions).value <= solved.bound + 1e-6


def test_a_week_without_a_plan_proves_no_other_plan_optimal():
    """A greedy plan with more sessions than the solver has may still be there."""
    problem = week([place("first", open=((0, 60),))], [model("main", least_hours=50)])
    rounds = rounds_of(problem, "parallel")
    solved = solve(problem, NOW, rounds=rounds, hint=None, limits=SearchLimits(5, workers=1))
    assert solved.sessions is None
    assert solved.bound == POINTS
