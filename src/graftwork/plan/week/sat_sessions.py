"""The sessions of a week as CP-SAT variables: place in time, model, length; quotas, chains, rounds, money.

In: the problem of one scenario and a plan as a hint. Out: a model without an objective, and sessions read
from a solution. Where a session is left out, its variables have one value only.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graftwork.plan.week.cells import OpenWindow, WeekCell, open_place_of, start_spans
from graftwork.plan.week.problem import STEP, WeekModel, WeekPlace, WeekProblem, WeekState
from graftwork.plan.week.score import spent_so_far
from graftwork.plan.week.tasks import RoundTask, TaskTable
from graftwork.records.week import Session

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, CpSolver, IntVar

MOST_SESSIONS = 8
"""In one cell."""
USUAL_SESSION = 1440
"""Minutes, where a place limits neither session nor time: how many sessions a cell may hold."""


@dataclass
class _Position:
    """A session that may or may not take place."""

    cell: WeekCell
    start: Any
    end: Any
    size: Any
    present: Any
    takes: "dict[RoundTask, IntVar]" = field(default_factory=dict)
    trains: "dict[RoundTask, IntVar]" = field(default_factory=dict)


@dataclass
class SessionModel:
    problem: WeekProblem
    state: WeekState
    table: TaskTable
    model: "CpModel"
    hint: Sequence[Session]
    positions: list[_Position] = field(default_factory=list)
    cost: Any = 0
    is_paid: bool = False
    handovers: "dict[tuple[str, int], Any]" = field(default_factory=dict)
    moved: "dict[str, Any]" = field(default_factory=dict)
    known: "dict[int, tuple[Any, int]]" = field(default_factory=dict)
    """The hint: variables by their index, with a value each."""
    has_all_sessions: bool = True
    """No cell could hold more sessions than it has variables for."""

    @property
    def horizon(self) -> int:
        return self.problem.length // STEP

    def _know(self, variable: Any, value: int) -> None:
        self.known[variable.index] = (variable, value)

    def _hinted(self, variable: Any) -> int:
        return self.known[variable.index][1]

    def _add_place(self, place: WeekPlace, *, keep: bool) -> None:
        opened = open_place_of(self.problem, self.state, place)
        mine = []
        hinted = [s for s in self.hint if s.place == place.name and not s.fixed]
        for cell in opened.cells:
            inside = sorted(
                (s for s in hinted if s.lane == cell.lane and cell.start <= s.start < cell.end),
                key=lambda s: s.start,
            )
            before: _Position | None = None
            count = max(_most_sessions(cell), len(inside))
            self.has_all_sessions &= count >= _fitting_sessions(cell)
            for number in range(count):
                known = inside[number] if number < len(inside) else None
                position = self._add_position(cell, known, keep=keep)
                if position is None:
                    break
                if before is not None:
                    self.model.add(position.start >= before.end)
                    self.model.add_implication(position.present, before.present)
                before = position
                mine.append(position)
        for quota in opened.quotas:
            for period in quota:
                within = [p.size for p in mine if period.start <= p.cell.start < period.end]
                if within:
                    self.model.add(sum(within) <= period.minutes // STEP)
        for window in opened.windows:
            self._add_window(place, mine, window)
        self.positions += mine

    def _add_position(self, cell: WeekCell, known: Session | None, *, keep: bool) -> _Position | None:
        from ortools.sat.python import cp_model

        model, place = self.model, cell.place
        spans = start_spans(cell)
        low, high = cell.start // STEP, cell.end // STEP
        overhead = place.overhead // STEP
        longest = min(cell.usable, place.longest or cell.usable) // STEP - overhead
        shortest = max(1, place.shortest // STEP)
        if not spans or longest < shortest:
            return None
        ranges = [[begin // STEP, (end - 1) // STEP] for begin, end in spans]
        start = model.new_int_var_from_domain(cp_model.Domain.from_intervals([*ranges, [high, high]]), "")
        end = model.new_int_var(low, high, "")
        size = model.new_int_var(0, longest + overhead, "")
        present = model.new_bool_var("")
        model.new_optional_interval_var(start, size, end, present, "")
        made = _Position(cell, start, end, size, present)
        for week_model in self.problem.models:
            if place.speed_of(week_model.name) <= 0:
                continue
            for task in self.table.tasks_of(week_model.name):
                takes = model.new_bool_var("")
                trains = model.new_int_var(0, longest, "")
                model.add(trains <= longest * takes)
                model.add(trains >= shortest * takes)
                made.takes[task], made.trains[task] = takes, trains
        if not made.takes:
            return None
        model.add_exactly_one([*made.takes.values(), present.negated()])
        model.add(size == sum(made.trains.values()) + overhead * present)
        model.add(end == start + size)
        # One way only to leave a session out.
        model.add(start == high).only_enforce_if(present.negated())
        model.add(start <= high - overhead - shortest).only_enforce_if(present)
        self._hint_position(made, known, keep=keep)
        return made

    def _hint_position(self, made: _Position, known: Session | None, *, keep: bool) -> None:
        high = made.cell.end // STEP
        start, end = (known.start // STEP, known.end // STEP) if known else (high, high)
        self._know(made.start, start)
        self._know(made.end, end)
        self._know(made.size, end - start)
        self._know(made.present, int(known is not None))
        for task, takes in made.takes.items():
            taken = known is not None and task == self.table.task_of(known, self.hint)
            self._know(takes, int(taken))
            self._know(made.trains[task], known.train // STEP if known and taken else 0)
            if keep and taken:
                self.model.add(takes == 1)

    def _add_window(self, place: WeekPlace, mine: list[_Position], quota: OpenWindow) -> None:
        """With one lane, what starts a whole window later never shares too much of a window."""
        intervals, demands = [], []
        length = quota.window // STEP
        for position in mine:
            one = place.lanes == 1
            reach = length if one else position.size + length
            end = (position.start if one else position.end) + length
            made = self.model.new_optional_interval_var(position.start, reach, end, position.present, "")
            intervals.append(made)
            demands.append(position.size)
        for begin, end in quota.used:
            until = -(-(begin if place.lanes == 1 else end) // STEP) + length
            if until > max(self.state.now, quota.blocked_until) // STEP:
                made = self.model.new_fixed_size_interval_var(begin // STEP, until - begin // STEP, "")
                intervals.append(made)
                demands.append(-(-(end - begin) // STEP))
        if mine:
            self.model.add_cumulative(intervals, demands, quota.minutes // STEP)
            whole = -(-(self.horizon - self.state.now // STEP) // length)
            self.model.add(sum(position.size for position in mine) <= whole * (quota.minutes // STEP))

    def _add_chains(self) -> None:
        """A model is trained by one session at a time: each goes on from the checkpoint of the last."""
        for week_model in self.problem.models:
            intervals = []
            for position in self.positions:
                taken = [
                    position.takes[task]
                    for task in self.table.tasks_of(week_model.name)
                    if task in position.takes
                ]
                if taken:
                    there = taken[0]
                    if len(taken) > 1:
                        there = self.model.new_bool_var("")
                        self.model.add(sum(taken) == there)
                        self._know(there, sum(self._hinted(variable) for variable in taken))
                    intervals.append(
                        self.model.new_optional_interval_var(
                            position.start, position.size, position.end, there, ""
                        )
                    )
            for session in self.state.fixed:
                if session.model == week_model.name and session.end > self.state.now:
                    begin, until = session.start // STEP, -(-session.end // STEP)
                    intervals.append(self.model.new_fixed_size_interval_var(begin, until - begin, ""))
            self.model.add_no_overlap(intervals)

    def _add_rounds(self) -> None:
        """The rounds of a model follow each other; those of an heir come after the parent's gate."""
        for week_model in self.problem.models:
            tasks = self.table.tasks_of(week_model.name)
            begun = max((s.round for s in self.state.fixed if s.model == week_model.name), default=0)
            for position in self.positions:
                for task in tasks:
                    if task.round < begun and task in position.takes:
                        self.model.add(position.takes[task] == 0)
            for number in self.table.rounds[week_model.name][:-1]:
                earlier = [task for task in tasks if task.round <= number]
                over = self._over(earlier, gate=0)
                self._start_after(over, [task for task in tasks if task.round > number])
            if week_model.inherits is None:
                continue
            parent = self.problem.model(week_model.inherits)
            for number in self.table.rounds[week_model.name]:
                earlier = [other for other in self.table.tasks_of(parent.name) if other.round < number]
                heirs = [task for task in tasks if task.round == number]
                if earlier:
                    self._start_after(self._handover(parent, earlier), heirs)
                    self._require_trained(parent, heirs, earlier, first=False)
            if self.table.may_move(week_model.name):
                self._add_move(week_model, tasks)

    def _handover(self, parent: WeekModel, tasks: Sequence[RoundTask]) -> Any:
        """When the parent's earlier rounds and gate are over; one variable for all heirs."""
        key = (parent.name, len(tasks))
        if key not in self.handovers:
            self.handovers[key] = self._over(tasks, gate=parent.gate)
        return self.handovers[key]

    def _add_move(self, week_model: WeekModel, tasks: Sequence[RoundTask]) -> None:
        moved = self.model.new_bool_var("")
        self.moved[week_model.name] = moved
        later = [s for s in self.state.fixed if s.model == week_model.name and s.round > tasks[0].round]
        if later:
            self.model.add(moved == 1)
        hinted = bool(later)
        for position in self.positions:
            for task in tasks:
                if task in position.takes:
                    takes = position.takes[task]
                    self.model.add(takes <= moved if task.moves else takes <= 1 - moved)
                    hinted = hinted or (task.moves and bool(self._hinted(takes)))
        self._know(moved, int(hinted))

    def _add_waits(self) -> None:
        for week_model in self.problem.models:
            for name in week_model.after:
                parent, heirs = self.problem.model(name), self.table.tasks_of(week_model.name)
                self._start_after(self._over(self.table.tasks_of(name), gate=parent.gate), heirs)
                self._require_trained(parent, heirs, self.table.tasks_of(name), first=True)

    def _over(self, tasks: Sequence[RoundTask], *, gate: int) -> Any:
        """When all sessions of these rounds of a model, and the gate, are over."""
        steps = -(-gate // STEP)
        rounds = {(task.model, task.round) for task in tasks}
        past = [-(-s.end // STEP) + steps for s in self.state.fixed if (s.model, s.round) in rounds]
        over = self.model.new_int_var(max([0, *past]), self.horizon + steps, "")
        latest = max([0, *past])
        for position in self.positions:
            for task in tasks:
                if task in position.takes:
                    self.model.add(over >= position.end + steps).only_enforce_if(position.takes[task])
                    if self._hinted(position.takes[task]):
                        latest = max(latest, self._hinted(position.end) + steps)
        self._know(over, latest)
        return over

    def _start_after(self, over: Any, tasks: Iterable[RoundTask]) -> None:
        for position in self.positions:
            for task in tasks:
                if task in position.takes:
                    self.model.add(position.start >= over).only_enforce_if(position.takes[task])

    def _require_trained(
        self, parent: WeekModel, heirs: Iterable[RoundTask], tasks: Sequence[RoundTask], *, first: bool
    ) -> None:
        """What builds on a model needs a session of it: the first, or one since it failed its gate."""
        failed = self.state.failed_gates.get(parent.name)
        if failed is None and (not first or parent.done_hours > 0):
            return
        since = -math.inf if failed is None else failed
        rounds = {(task.model, task.round) for task in tasks}
        if any((s.model, s.round) in rounds and s.end > since for s in self.state.fixed):
            return
        ways = [p.takes[task] for p in self.positions for task in tasks if task in p.takes]
        for position in self.positions:
            for task in heirs:
                if task in position.takes:
                    self.model.add_bool_or([*ways, position.takes[task].negated()])

    def _add_cap(self) -> None:
        units = 10_000
        paid = [p for p in self.positions if p.cell.place.usd_per_hour > 0]
        self.is_paid = bool(paid)
        self.cost = sum(math.ceil(p.cell.place.usd_per_hour * STEP / 60 * units) * p.size for p in paid)
        if paid and self.problem.cap_usd is not None:
            spent = spent_so_far(self.problem, self.state)
            self.model.add(self.cost <= max(0, math.floor((self.problem.cap_usd - spent) * units)))

    def hint_from(self, solver: "CpSolver") -> None:
        for variable, _ in self.known.values():
            self.model.add_hint(variable, solver.value(variable))

    def read(self, solver: "CpSolver") -> tuple[Session, ...]:
        found = list(self.state.fixed)
        for position in self.positions:
            for task, takes in position.takes.items():
                if solver.value(takes):
                    found.append(
                        Session(
                            place=position.cell.place.name,
                            model=task.model,
                            start=solver.value(position.start) * STEP,
                            end=solver.value(position.end) * STEP,
                            train=solver.value(position.trains[task]) * STEP,
                            lane=position.cell.lane,
                            round=task.round,
                        )
                    )
        return tuple(sorted(found, key=lambda s: (s.start, s.place, s.lane)))


def _fitting_sessions(cell: WeekCell) -> int:
    return cell.usable // (cell.place.overhead + max(cell.place.shortest, STEP))


def _most_sessions(cell: WeekCell) -> int:
    longest = min(cell.place.longest or USUAL_SESSION, cell.usable)
    count = math.ceil(cell.usable / longest) + 1
    return max(1, min(count, _fitting_sessions(cell), MOST_SESSIONS))
