"""Solve a week by CP-SAT: by value first, then by cost, then by fairness.

In: the problem of one scenario, a plan to start from. Out: sessions, and a bound that no plan exceeds.
"""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from graftwork.plan.week.problem import WeekProblem, WeekState
from graftwork.plan.week.sat_value import VALUE_UNITS, WeekSatModel
from graftwork.plan.week.score import POINTS
from graftwork.plan.week.tasks import TaskTable
from graftwork.records.errors import needs_extra
from graftwork.records.week import Session

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver

COST_SHARE = 0.001
"""Value that may be given up for a cheaper plan, and then for a fairer one."""


class Solved(NamedTuple):
    sessions: tuple[Session, ...] | None
    """None if no plan was found."""
    bound: float
    """No plan exceeds it; that of any week where a cell could hold more sessions than the model has."""
    impossible: bool
    """There is no plan."""


class SearchLimits(NamedTuple):
    seconds: float
    workers: int = 2
    enough: float = 0.0
    seed: int = 0
    keep: bool = False
    """Keep which model each session of the hint trains: only times, lengths and further sessions are free."""


def solve(
    problem: WeekProblem,
    state: WeekState,
    *,
    rounds: Mapping[str, tuple[int, ...]],
    hint: Sequence[Session] | None,
    limits: SearchLimits,
) -> Solved:
    """The best plan by value, and a bound."""
    with needs_extra("week", why="the week is planned by OR-tools CP-SAT"):
        from ortools.sat.python import cp_model
    build = WeekSatModel(problem, state, TaskTable(problem, rounds), cp_model.CpModel(), hint or ())
    build.add_all(keep=limits.keep)
    build.model.maximize(build.value)
    solver, status = _run(build.model, limits)
    if status == "INFEASIBLE":
        return Solved(None, 0.0, True)
    bound = solver.best_objective_bound / VALUE_UNITS
    if not build.has_all_sessions or bound <= 0:
        # A search that ended before its first bound reports none.
        bound = POINTS
    found = build.read(solver) if status in ("OPTIMAL", "FEASIBLE") else None
    return Solved(found, min(POINTS, bound), False)


def refine(
    problem: WeekProblem,
    state: WeekState,
    *,
    rounds: Mapping[str, tuple[int, ...]],
    plan: Sequence[Session],
    limits: SearchLimits,
) -> tuple[Session, ...]:
    """A plan that is cheaper, then fairer, and gives up next to no value."""
    from ortools.sat.python import cp_model

    build = WeekSatModel(problem, state, TaskTable(problem, rounds), cp_model.CpModel(), plan)
    build.add_all(keep=False)
    best = tuple(plan)
    floor, reached = build.value, build.hinted_value
    goals = [*([-build.cost] if build.is_paid else []), build.fairness]
    for goal in goals:
        build.model.add(floor >= math.floor(reached - COST_SHARE * max(reached, 0)))
        build.model.maximize(goal)
        solver, status = _run(build.model, limits._replace(seconds=limits.seconds / len(goals)))
        if status not in ("OPTIMAL", "FEASIBLE"):
            break
        best = build.read(solver)
        build.model.clear_hints()  # type: ignore[no-untyped-call]
        build.hint_from(solver)
        floor, reached = goal, round(solver.objective_value)
    return best


def _run(model: "CpModel", limits: SearchLimits) -> "tuple[CpSolver, str]":
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(limits.seconds, 0.05)
    solver.parameters.num_workers = limits.workers
    solver.parameters.random_seed = limits.seed
    solver.parameters.relative_gap_limit = limits.enough
    solver.parameters.linearization_level = 2
    # What breaks symmetries would also break the hint.
    solver.parameters.symmetry_level = 0
    solver.parameters.cp_model_probing_level = 0
    solver.parameters.max_presolve_iterations = 1
    status = solver.solve(model)
    return solver, str(solver.status_name(status))
