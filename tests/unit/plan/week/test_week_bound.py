"""The bound of a week, which no plan exceeds, and plans that are rounded from it and improved."""

import itertools

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from week_samples import DAY, model, place, session, small_week, states, week, weeks

from graftwork.plan.week.bound import most_value, relax
from graftwork.plan.week.checker import check_week
from graftwork.plan.week.climb import climb
from graftwork.plan.week.greedy import plan_greedily
from graftwork.plan.week.problem import (
    GainCurve,
    HandoverPart,
    RollingQuota,
    WeekState,
    as_scenario,
    in_rounds,
    rounds_of,
    scenarios_of,
)
from graftwork.plan.week.rounding import round_solution
from graftwork.plan.week.score import score
from graftwork.plan.week.solver import SearchLimits, solve
from graftwork.plan.week.timing import SessionTiming

SLOW_INPUT = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
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
    bound = most_value(problem, NOW, rounds)
    assert score(problem, solved.sessions).value >= best - 1e-6
    assert score(problem, solved.sessions).value <= min(bound, solved.bound) + 1e-6


def handover_of(problem, rounds, state, plan):
    """When the main model's first round and its gate are over."""
    main = problem.model("main")
    ends = [s.end for s in (*state.fixed, *plan) if s.model == "main" and s.round == rounds["main"][0]]
    return max([state.now, *(end + main.gate for end in ends)])


@given(st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=SLOW_INPUT)
def test_no_plan_of_a_random_week_exceeds_the_bound_of_the_part_with_its_handover(data):
    problem = data.draw(weeks())
    scenario = data.draw(st.sampled_from(scenarios_of(problem)))
    rounds = rounds_of(problem, scenario)
    own = as_scenario(problem, scenario)
    state = in_rounds(data.draw(st.one_of(st.just(NOW), states(problem))), rounds)
    plans = itertools.islice(plan_greedily(own, state, rounds), 12)
    best = max(plans, key=lambda plan: plan.score.value).sessions
    tries = iter(range(20))
    improved = climb(SessionTiming(own, state), best, until=lambda: next(tries, None) is None)
    assert check_week(own, state, improved) == []
    value = score(own, improved).value
    assert value >= score(own, best).value - 1e-9
    assert value <= most_value(own, state, rounds) + 1e-9
    at = handover_of(own, rounds, state, improved)
    narrow = HandoverPart("main", max(state.now, at // 60 * 60), at // 60 * 60 + 60)
    assert value <= most_value(own, state, rounds, narrow) + 1e-9


def test_a_narrower_part_has_no_higher_bound_than_what_it_is_a_part_of():
    problem = small_week()
    rounds = rounds_of(problem, "iterative")
    bounds = [
        most_value(problem, NOW, rounds, part)
        for part in (None, HandoverPart("main", 0, 2 * DAY), HandoverPart("main", DAY, DAY + 360))
    ]
    assert bounds == sorted(bounds, reverse=True)


@pytest.mark.parametrize("scenario", ["parallel", "sequential", "iterative"])
def test_a_plan_rounded_from_the_bound_keeps_every_rule_and_comes_near_it(scenario):
    problem = as_scenario(small_week(), scenario)
    rounds = rounds_of(problem, scenario)
    part = None if scenario == "parallel" else HandoverPart("main", 2 * DAY, 2 * DAY + 360)
    relaxed = relax(problem, NOW, rounds, part, {"reads": True, "writes": True})
    plan = round_solution(SessionTiming(problem, NOW), relaxed.used)
    assert check_week(problem, NOW, plan) == []
    assert 0.9 * relaxed.points < score(problem, plan).value <= relaxed.points


def test_fitted_times_fill_the_night_and_share_it_between_models_of_equal_worth():
    card = place("card", open=((60, 660),), setup=10)
    problem = week([card], [model("main"), model("other")])
    made = SessionTiming(problem, NOW).fit(
        [session("card", "main", 70, 130), session("card", "other", 200, 260)]
    )
    assert (made[0].start, made[0].end, made[1].end) == (60, made[1].start, 660)
    even = [session("card", name, at, at + 300, train=290) for name, at in (("main", 60), ("other", 360))]
    assert score(problem, made).value == pytest.approx(score(problem, even).value, rel=0.01)


def test_sessions_that_cannot_be_fitted_have_no_times():
    card = place("card", open=((0, 100),), setup=10)
    problem = week([card], [model("main")])
    both = [session("card", "main", 0, 60), session("card", "main", 60, 120)]
    assert SessionTiming(problem, NOW).fit(both) is None
    assert SessionTiming(problem, NOW).fit(both[:1]) is not None


def test_fitted_sessions_of_a_rolling_quota_are_a_window_apart():
    lab = place("lab", rolling=(RollingQuota(window=DAY, minutes=240),), longest=240)
    problem = week([lab], [model("main")])
    made = SessionTiming(problem, NOW).fit(
        [session("lab", "main", n * 1300, n * 1300 + 60) for n in range(4)]
    )
    assert [s.end - s.start for s in made] == [240] * 4
    assert all(later.start - earlier.start >= DAY for earlier, later in itertools.pairwise(made))
