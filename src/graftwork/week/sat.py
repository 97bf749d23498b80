"""A week as a CP-SAT model: solved by value first, then made cheaper, then fairer.

Input: the problem of one scenario, a plan to start from. Output: sessions, and a bound that no plan with as
many sessions exceeds. Each cell has variables for a few sessions that may or may not take place. What they
are worth is bounded by tangents that lie above the curves, and rounding goes up: the bound holds for the
curves. A model that may move to its parent's adapter has two tracks: it stays at the base, or it trains
there, loses a part of that, and continues from the parent's adapter.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from graftwork.records.errors import needs_extra
from graftwork.records.week import Session
from graftwork.week.problem import (
    POINTS,
    STEP,
    OpenWindow,
    WeekCell,
    WeekModel,
    WeekPlace,
    WeekProblem,
    WeekState,
    open_place_of,
    own_hours,
    spent_so_far,
    start_spans,
)

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpSolver, IntVar

MOST_SESSIONS = 8
"""Sessions of one cell."""
USUAL_SESSION = 1440
"""Minutes, if a place limits neither session nor time: it bounds the sessions of a cell."""
SPEED_UNITS = 1000
"""Speeds are whole thousandths."""
VALUE_UNITS = 10**7
"""Solver units per point."""
COST_UNITS = 10_000
"""Solver units per dollar."""
PER_HOUR = 60 // STEP * SPEED_UNITS
"""Units of training in a reference hour."""
FINER = 1000
TANGENTS = 24
HALVES = 8
"""Half-lives of the remaining gain that the tangents cover."""
COST_SHARE = 0.001
"""Value that may be given up for a cheaper plan, and then for a fairer one."""
HINT_SECONDS = 2.0
"""Time limit for the variables that follow from the sessions of a hint."""


class SearchLimits(NamedTuple):
    seconds: float
    workers: int = 2
    enough: float = 0.0
    seed: int = 0
    keep: bool = False
    """Keep the model of each session of the hint: only times, lengths and further sessions are free."""


class Solved(NamedTuple):
    sessions: tuple[Session, ...] | None
    """None if no plan was found."""
    bound: float
    """No plan with at most as many sessions in a cell as the model has exceeds it; without such a plan, no
    plan at all."""


def solve(
    problem: WeekProblem,
    state: WeekState,
    *,
    rounds: Mapping[str, tuple[int, ...]],
    hint: Sequence[Session] | None,
    limits: SearchLimits,
) -> Solved:
    """The best plan by value, and a bound."""
    week = SatWeek(problem, state, rounds, hint or (), keep=limits.keep)
    week.model.maximize(week.value)
    if hint:
        week.complete_hint(limits)
    solver, status = week.run(limits)
    if status == "INFEASIBLE":
        return Solved(None, POINTS)
    bound = solver.best_objective_bound / VALUE_UNITS
    if bound <= 0:
        bound = POINTS  # the search ended before its first bound
    sessions = week.read(solver) if status in ("OPTIMAL", "FEASIBLE") else None
    return Solved(sessions, min(POINTS, bound))


def refine(
    problem: WeekProblem,
    state: WeekState,
    *,
    rounds: Mapping[str, tuple[int, ...]],
    plan: Sequence[Session],
    limits: SearchLimits,
) -> tuple[Session, ...]:
    """A plan that is cheaper, then fairer, and gives up next to no value."""
    week = SatWeek(problem, state, rounds, plan)
    week.model.maximize(week.value)
    solver = week.complete_hint(limits)
    if solver is None:
        return tuple(plan)
    best = tuple(plan)
    goals = [week.fairness] if week.cost is None else [-week.cost, week.fairness]
    floor = week.value
    for goal in goals:
        reached = solver.value(floor)
        week.model.add(floor >= math.floor(reached - COST_SHARE * max(reached, 0)))
        week.model.maximize(goal)
        solver, status = week.run(limits._replace(seconds=limits.seconds / len(goals)))
        if status not in ("OPTIMAL", "FEASIBLE"):
            break
        best = week.read(solver)
        week.hint_from(solver)
        floor = goal
    return best


class RoundTask(NamedTuple):
    """A round of a model. `moves`: on the track that leaves the base for the parent's adapter."""

    model: str
    round: int
    moves: bool = False


class _Position(NamedTuple):
    """An optional session. If it is absent, its variables have one value only."""

    cell: WeekCell
    start: "IntVar"
    end: "IntVar"
    size: "IntVar"
    present: "IntVar"


class _Option(NamedTuple):
    """A task that a session may train."""

    position: _Position
    task: RoundTask
    takes: "IntVar"
    train: "IntVar"


class SatWeek:
    """Sessions and their value as variables."""

    def __init__(
        self,
        problem: WeekProblem,
        state: WeekState,
        rounds: Mapping[str, tuple[int, ...]],
        hint: Sequence[Session],
        *,
        keep: bool = False,
    ) -> None:
        with needs_extra("week", why="the week is planned by OR-tools CP-SAT"):
            from ortools.sat.python import cp_model
        self.problem, self.state, self.rounds, self.hint = problem, state, rounds, hint
        self.model = cp_model.CpModel()
        self.horizon = problem.length // STEP
        self.tasks = {model.name: self._tasks_of(model) for model in problem.models}
        self.positions: list[_Position] = []
        self.options: dict[RoundTask, list[_Option]] = defaultdict(list)
        self.moved: dict[str, Any] = {}
        self.over: dict[tuple[tuple[RoundTask, ...], int], IntVar] = {}
        for provider in problem.places:
            self._add_place(provider, keep=keep)
        for model in problem.models:
            self._add_chain(model)
            self._add_rounds(model)
            for name in model.after:
                parent, heirs = problem.model(name), self.tasks[model.name]
                self._start_after(self._over(self.tasks[name], gate=parent.gate), heirs)
                self._require_trained(parent, heirs, self.tasks[name], first=True)
        self.cost = self._add_money()
        past = own_hours(problem, state.fixed)
        self.past = {key: math.floor(hours * PER_HOUR) for key, hours in past.items()}
        self.fairness = self.model.new_int_var(0, VALUE_UNITS, "")
        self.value: Any = sum(self._add_value(model) for model in problem.models)

    def run(self, limits: SearchLimits, *, only_hint: bool = False) -> "tuple[CpSolver, str]":
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
        solver.parameters.fix_variables_to_their_hinted_value = only_hint
        status = solver.solve(self.model)
        return solver, str(solver.status_name(status))

    def complete_hint(self, limits: SearchLimits) -> "CpSolver | None":
        """All other variables derived from the sessions of the hint; None if it breaks a rule."""
        brief = limits._replace(seconds=min(limits.seconds, HINT_SECONDS), workers=1, enough=0.0)
        solver, status = self.run(brief, only_hint=True)
        if status not in ("OPTIMAL", "FEASIBLE"):
            return None
        self.hint_from(solver)
        return solver

    def hint_from(self, solver: "CpSolver") -> None:
        self.model.clear_hints()  # type: ignore[no-untyped-call]
        for number in range(len(self.model.proto.variables)):
            variable = self.model.get_int_var_from_proto_index(number)
            self.model.add_hint(variable, solver.value(variable))

    def read(self, solver: "CpSolver") -> tuple[Session, ...]:
        planned = [
            Session(
                place=position.cell.place.name,
                model=task.model,
                start=solver.value(position.start) * STEP,
                end=solver.value(position.end) * STEP,
                train=solver.value(train) * STEP,
                lane=position.cell.lane,
                round=task.round,
            )
            for position, task, takes, train in self._options_of(self.options)
            if solver.value(takes)
        ]
        return tuple(sorted((*self.state.fixed, *planned), key=lambda s: (s.start, s.place, s.lane)))

    def _tasks_of(self, model: WeekModel) -> list[RoundTask]:
        """The rounds of a model; the first one twice if the model may move later."""
        rounds = self.rounds[model.name]
        if len(rounds) > 1 and model.inherits is not None:
            return [
                RoundTask(model.name, rounds[0]),
                *(RoundTask(model.name, number, True) for number in rounds),
            ]
        return [RoundTask(model.name, number) for number in rounds]

    def _may_move(self, name: str) -> bool:
        return any(task.moves for task in self.tasks[name])

    def _options_of(self, tasks: Iterable[RoundTask]) -> list[_Option]:
        return [option for task in tasks for option in self.options[task]]

    def _task_in_hint(self, session: Session) -> RoundTask:
        first = self.rounds[session.model][0]
        moves = self._may_move(session.model) and any(
            hinted.model == session.model and hinted.round > first for hinted in self.hint
        )
        return RoundTask(session.model, session.round, moves)

    def _add_place(self, provider: WeekPlace, *, keep: bool) -> None:
        opened = open_place_of(self.problem, self.state, provider)
        positions: list[_Position] = []
        hinted = [s for s in self.hint if s.place == provider.name and not s.fixed]
        for cell in opened.cells:
            inside = sorted(
                (s for s in hinted if s.lane == cell.lane and cell.start <= s.start < cell.end),
                key=lambda s: s.start,
            )
            before: _Position | None = None
            longest = min(provider.longest or USUAL_SESSION, cell.usable)
            fitting = cell.usable // (provider.overhead + max(provider.shortest, STEP))
            usual = max(1, min(math.ceil(cell.usable / longest) + 1, fitting, MOST_SESSIONS))
            count = max(usual, len(inside))
            for number in range(count):
                hinted_session = inside[number] if number < len(inside) else None
                position = self._add_position(cell, hinted_session, keep=keep)
                if position is None:
                    break
                if before is not None:
                    self.model.add(position.start >= before.end)
                    self.model.add_implication(position.present, before.present)
                before = position
                positions.append(position)
        for quota in opened.quotas:
            for period in quota:
                within = [p.size for p in positions if period.start <= p.cell.start < period.end]
                if within:
                    self.model.add(sum(within) <= period.minutes // STEP)
        for window in opened.windows:
            self._add_window(provider, positions, window)
        self.positions += positions

    def _add_position(self, cell: WeekCell, hinted: Session | None, *, keep: bool) -> _Position | None:
        from ortools.sat.python import cp_model

        model, provider = self.model, cell.place
        spans = start_spans(cell)
        low, high = cell.start // STEP, cell.end // STEP
        overhead = provider.overhead // STEP
        longest = min(cell.usable, provider.longest or cell.usable) // STEP - overhead
        shortest = max(1, provider.shortest // STEP)
        tasks = [
            t for model_tasks in self.tasks.values() for t in model_tasks if provider.speed_of(t.model) > 0
        ]
        if not spans or longest < shortest or not tasks:
            return None
        ranges = [[opens // STEP, (end - 1) // STEP] for opens, end in spans]
        start = model.new_int_var_from_domain(cp_model.Domain.from_intervals([*ranges, [high, high]]), "")
        end = model.new_int_var(low, high, "")
        size = model.new_int_var(0, longest + overhead, "")
        present = model.new_bool_var("")
        position = _Position(cell, start, end, size, present)
        options = []
        for task in tasks:
            takes, train = model.new_bool_var(""), model.new_int_var(0, longest, "")
            model.add(train <= longest * takes)
            model.add(train >= shortest * takes)
            options.append(_Option(position, task, takes, train))
            is_hinted = hinted is not None and task == self._task_in_hint(hinted)
            model.add_hint(takes, is_hinted)
            model.add_hint(train, hinted.train // STEP if hinted is not None and is_hinted else 0)
            if keep and is_hinted:
                model.add(takes == 1)
        model.add_exactly_one([*(option.takes for option in options), present.negated()])
        model.add(size == sum(option.train for option in options) + overhead * present)
        model.add(end == start + size)
        # One way only to leave a session out.
        model.add(start == high).only_enforce_if(present.negated())
        model.add(start <= high - overhead - shortest).only_enforce_if(present)
        model.add_hint(start, hinted.start // STEP if hinted is not None else high)
        for option in options:
            self.options[option.task].append(option)
        return position

    def _add_window(self, provider: WeekPlace, here: list[_Position], quota: OpenWindow) -> None:
        """With one lane, sessions that start a whole window later share none of a window."""
        intervals: list[Any] = []
        demands: list[Any] = []
        length = quota.window // STEP
        for position in here:
            single_lane = provider.lanes == 1
            reach = length if single_lane else position.size + length
            leaves = (position.start if single_lane else position.end) + length
            intervals.append(
                self.model.new_optional_interval_var(position.start, reach, leaves, position.present, "")
            )
            demands.append(position.size)
        for start, end in quota.used:
            until = -(-(start if provider.lanes == 1 else end) // STEP) + length
            if until > max(self.state.now, quota.blocked_until) // STEP:
                used = self.model.new_fixed_size_interval_var(start // STEP, until - start // STEP, "")
                intervals.append(used)
                demands.append(-(-(end - start) // STEP))
        if here:
            self.model.add_cumulative(intervals, demands, quota.minutes // STEP)
            whole = -(-(self.horizon - self.state.now // STEP) // length)
            self.model.add(sum(position.size for position in here) <= whole * (quota.minutes // STEP))

    def _add_chain(self, model: WeekModel) -> None:
        """A model is trained by one session at a time: each continues from the checkpoint of the last."""
        intervals = [
            self.model.new_optional_interval_var(position.start, position.size, position.end, takes, "")
            for position, _, takes, _ in self._options_of(self.tasks[model.name])
        ]
        for session in self.state.fixed:
            if session.model == model.name and session.end > self.state.now:
                start, until = session.start // STEP, -(-session.end // STEP)
                intervals.append(self.model.new_fixed_size_interval_var(start, until - start, ""))
        self.model.add_no_overlap(intervals)

    def _add_rounds(self, model: WeekModel) -> None:
        """The rounds of a model follow each other; those of an heir come after the parent's gate."""
        tasks = self.tasks[model.name]
        last_round = max((s.round for s in self.state.fixed if s.model == model.name), default=0)
        for _, _, takes, _ in self._options_of(task for task in tasks if task.round < last_round):
            self.model.add(takes == 0)
        for number in self.rounds[model.name][:-1]:
            earlier = [task for task in tasks if task.round <= number]
            self._start_after(self._over(earlier, gate=0), [task for task in tasks if task.round > number])
        if model.inherits is None:
            return
        parent = self.problem.model(model.inherits)
        for number in self.rounds[model.name]:
            before = [task for task in self.tasks[parent.name] if task.round < number]
            heirs = [task for task in tasks if task.round == number]
            if before:
                self._start_after(self._over(before, gate=parent.gate), heirs)
                self._require_trained(parent, heirs, before, first=False)
        if self._may_move(model.name):
            moved = self.moved[model.name] = self.model.new_bool_var("")
            if any(s.model == model.name and s.round > tasks[0].round for s in self.state.fixed):
                self.model.add(moved == 1)
            for _, task, takes, _ in self._options_of(tasks):
                self.model.add(takes <= moved if task.moves else takes <= 1 - moved)

    def _over(self, tasks: Sequence[RoundTask], *, gate: int) -> "IntVar":
        """When all sessions of these rounds and the gate have ended; one variable for all heirs."""
        key = (tuple(tasks), gate)
        if key in self.over:
            return self.over[key]
        steps = -(-gate // STEP)
        rounds = {(task.model, task.round) for task in tasks}
        past = [-(-s.end // STEP) + steps for s in self.state.fixed if (s.model, s.round) in rounds]
        over = self.over[key] = self.model.new_int_var(max([0, *past]), self.horizon + steps, "")
        for position, _, takes, _ in self._options_of(tasks):
            self.model.add(over >= position.end + steps).only_enforce_if(takes)
        return over

    def _start_after(self, over: "IntVar", tasks: Iterable[RoundTask]) -> None:
        for position, _, takes, _ in self._options_of(tasks):
            self.model.add(position.start >= over).only_enforce_if(takes)

    def _require_trained(
        self, parent: WeekModel, heirs: Iterable[RoundTask], tasks: Sequence[RoundTask], *, first: bool
    ) -> None:
        """A dependent model needs a session of its parent: the first, or one since it failed its gate."""
        failed = self.state.failed_gates.get(parent.name)
        if failed is None and (not first or parent.done_hours > 0):
            return
        since = -math.inf if failed is None else failed
        rounds = {(task.model, task.round) for task in tasks}
        if any((s.model, s.round) in rounds and s.end > since for s in self.state.fixed):
            return
        ways = [option.takes for option in self._options_of(tasks)]
        for _, _, takes, _ in self._options_of(heirs):
            self.model.add_bool_or([*ways, takes.negated()])

    def _add_money(self) -> Any:
        """The cost of the sessions; None if no place costs anything."""
        paid = [p for p in self.positions if p.cell.place.usd_per_hour > 0]
        if not paid:
            return None
        cost = sum(math.ceil(p.cell.place.usd_per_hour * STEP / 60 * COST_UNITS) * p.size for p in paid)
        if self.problem.cap_usd is not None:
            spent = spent_so_far(self.problem, self.state)
            self.model.add(cost <= max(0, math.floor((self.problem.cap_usd - spent) * COST_UNITS)))
        return cost

    def _hours(self, tasks: Iterable[RoundTask]) -> Any:
        """In steps of reference training times SPEED_UNITS."""
        return sum(
            _speed(position.cell.place, task.model) * train
            for position, task, _, train in self._options_of(tasks)
        )

    def _add_value(self, model: WeekModel) -> "IntVar":
        """Points by tangents of the curve, rounded up; no model has learned less than the fairness
        variable.
        """
        tasks = self.tasks[model.name]
        done = sum(hours for (name, _), hours in self.past.items() if name == model.name)
        model_hours = self._hours(tasks) + done
        if model.least_hours > 0:
            self.model.add(model_hours >= math.ceil(model.least_hours * PER_HOUR - 1e-6))
        if model.most_hours is not None:
            self.model.add(model_hours <= max(math.floor(model.most_hours * PER_HOUR + 1e-6), done))
        if model.deadline is not None:
            last = (model.deadline - model.gate) // STEP
            for position, _, takes, _ in self._options_of(tasks):
                self.model.add(position.end <= last).only_enforce_if(takes)
        weight = POINTS * model.weight / self.problem.total_weight
        before = model.curve.learned(model.done_hours)
        most = 2 * self.horizon * max([_speed(p, model.name) for p in self.problem.places] + [1])
        hours = self.model.new_int_var(0, most, "")
        # Thousandths, rounded up: the bound stays a bound.
        self.model.add(1000 * hours <= self._kept_hours(model) + 1000 * self._inherited(model, most) + 999)
        value = self.model.new_int_var(0, math.ceil(weight * VALUE_UNITS), "")
        for number in range(TANGENTS + 1):
            # Closer where the curve bends most.
            tangent_hours = model.curve.half_hours * HALVES * (number / TANGENTS) ** 1.5
            slope = model.curve.slope(model.done_hours + tangent_hours)
            height = model.curve.learned(model.done_hours + tangent_hours) - slope * tangent_hours
            for variable, scale, zero in (
                (value, weight * VALUE_UNITS, before),
                (self.fairness, float(VALUE_UNITS), 0.0),
            ):
                # Coefficients are multiplied so that rounding them up costs little.
                tilt = math.ceil(scale * slope / PER_HOUR * FINER)
                offset = math.ceil(scale * (height - zero) * FINER)
                self.model.add(FINER * variable <= tilt * hours + offset)
        return value

    def _kept_hours(self, model: WeekModel) -> Any:
        """Thousandths of own hours; a part of those before a move is lost with it."""
        carry = math.ceil(model.carry * 1000)
        first = self.rounds[model.name][0]
        kept_hours: Any = 0
        for task in self.tasks[model.name]:
            kept_hours += (carry if task.moves and task.round == first else 1000) * self._hours([task])
        for (name, number), done in self.past.items():
            if name == model.name:
                kept_hours += 1000 * done
                if number == first and name in self.moved:
                    kept_hours -= (1000 - carry) * done * self.moved[name]
        return kept_hours

    def _inherited(self, model: WeekModel, most: int) -> Any:
        """At most a share of the parent's earlier hours, and as many as are trained from there on."""
        if model.inherits is None or model.share <= 0:
            return 0
        share = math.ceil(model.share * 1000)
        parent_speed = max(_speed(provider, model.inherits) for provider in self.problem.places)
        parent_past = sum(done for (name, _), done in self.past.items() if name == model.inherits)
        # The parent is trained by one session at a time.
        parent_most = max(0, self.horizon - self.state.now // STEP) * parent_speed + parent_past
        parts: list[Any] = []
        trained: Any = 0
        for number in sorted((n for n in self.rounds[model.name] if n > 0), reverse=True):
            own_tasks = [task for task in self.tasks[model.name] if task.round == number]
            before = [task for task in self.tasks[model.inherits] if task.round == number - 1]
            parent_hours = self._hours(before) + self.past.get((model.inherits, number - 1), 0)
            part = self.model.new_int_var(0, most, "")
            parts.append(part)
            trained += self._hours(own_tasks) + self.past.get((model.name, number), 0)
            self.model.add(1000 * part <= share * parent_hours)
            self.model.add(sum(parts) <= trained)
            if model.name in self.moved:
                self.model.add(part <= (share * parent_most // 1000 + 1) * self.moved[model.name])
        return sum(parts)


def _speed(provider: WeekPlace, model: str) -> int:
    return round(provider.speed_of(model) * SPEED_UNITS)
