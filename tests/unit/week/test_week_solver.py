"""The solver of a week: the best plan of weeks that are small enough to list every plan, and a bound."""

import itertools

import pytest
from week_samples import model, place, session, week

from graftwork.week.checker import check_week
from graftwork.week.problem import POINTS, GainCurve, WeekState, as_scenario, rounds_of, score
from graftwork.week.sat import SearchLimits, solve

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
