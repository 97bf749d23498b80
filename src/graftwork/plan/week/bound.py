"""How much a week can be worth at most: a linear program over time slices, without sessions as a whole.

In: the problem of one scenario and, where models build on another, a span in which that one's first sessions
and gate are over. Out: points that no plan exceeds, and where each model trains in that solution. Hours of
each model in each slice of each place are continuous; set-up is charged at the rate of the longest session.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product
from typing import NamedTuple

from graftwork.plan.week.calendar import Span, clip, cut_at, union
from graftwork.plan.week.cells import OpenPlace, WeekCell, open_place_of
from graftwork.plan.week.linear import Expression, LinearProgram, total, value_of
from graftwork.plan.week.problem import (
    HandoverPart,
    WeekModel,
    WeekProblem,
    WeekState,
    own_hours,
)
from graftwork.plan.week.score import POINTS, spent_so_far
from graftwork.plan.week.tasks import RoundTask, TaskTable, tangent_points

SLICE = 1440
"""Minutes: a model is at one place at a time in each slice."""
MOST_EDGES = 48
"""Slices also end where a place opens or closes, unless there were more of them than this."""
LEAST_USE = 1.0
"""Minutes of a slice that count as used."""


class RelaxedUse(NamedTuple):
    """Minutes of a place, set-up included, that a task uses between two moments."""

    cell: WeekCell
    start: int
    end: int
    task: RoundTask
    minutes: float


class Relaxed(NamedTuple):
    """The best solution of the linear program."""

    points: float
    """No plan exceeds them."""
    used: tuple[RelaxedUse, ...]
    moved: dict[str, float]
    """The share of each model that moves to its parent's adapter, where it may."""


def relax(
    problem: WeekProblem,
    state: WeekState,
    rounds: Mapping[str, tuple[int, ...]],
    part: HandoverPart | None = None,
    moves: Mapping[str, bool] | None = None,
) -> Relaxed | None:
    """The relaxed week of this part; None: the part is empty. `moves` decides which models move."""
    made = _Relaxation(problem, state, TaskTable(problem, rounds), part, moves or {})
    points = made.most_points()
    return None if points is None else Relaxed(points, made.read(), made.read_moves())


def most_value(
    problem: WeekProblem,
    state: WeekState,
    rounds: Mapping[str, tuple[int, ...]],
    part: HandoverPart | None = None,
) -> float | None:
    """Points that no plan of this part exceeds; None: the part is empty."""
    found = relax(problem, state, rounds, part)
    return None if found is None else found.points


class _Slice(NamedTuple):
    cell: WeekCell
    start: int
    end: int


class _Use(NamedTuple):
    """A task in a slice: minutes of the place, set-up included, and reference hours of training."""

    piece: _Slice
    load: Expression
    hours: Expression

    def is_within(self, span: Span) -> bool:
        return span[0] <= self.piece.start and self.piece.end <= span[1]


@dataclass
class _Relaxation:
    problem: WeekProblem
    state: WeekState
    table: TaskTable
    part: HandoverPart | None
    moves: Mapping[str, bool]
    program: LinearProgram = field(default_factory=LinearProgram)
    used: dict[RoundTask, list[_Use]] = field(default_factory=dict)
    moved: dict[str, Expression] = field(default_factory=dict)
    hours: dict[RoundTask, Expression] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)
    """Reference hours that the parent can have before the hand-over, at most."""
    solved: bool = False

    def most_points(self) -> float | None:
        self._add_resources()
        if self.part is not None:
            first = self.table.rounds[self.part.parent][0]
            most = self._solve(self._hours(self.part.parent, first), otherwise=math.inf)
            if most is None:
                return None
            if most < math.inf:
                self.most[self.part.parent] = most
        return self._solve(total(self._value(model) for model in self.problem.models), otherwise=POINTS)

    def _solve(self, goal: Expression, *, otherwise: float) -> float | None:
        self.program.maximize(goal)
        solved = self.program.solve()
        self.solved = bool(solved)
        if solved is None:
            return otherwise
        # Rounding of the linear program must not make the bound too low.
        return self.program.best * (1 + 1e-6) + 1e-6 if solved else None

    def read(self) -> tuple[RelaxedUse, ...]:
        """Where the solution trains; nothing if it was not solved."""
        if not self.solved:
            return ()
        found = (
            RelaxedUse(use.piece.cell, use.piece.start, use.piece.end, task, value_of(use.load))
            for task, uses in self.used.items()
            for use in uses
        )
        return tuple(use for use in found if use.minutes >= LEAST_USE)

    def read_moves(self) -> dict[str, float]:
        return {name: value_of(moved) for name, moved in self.moved.items()} if self.solved else {}

    def _add_resources(self) -> None:
        self._add_moves()
        opened = [open_place_of(self.problem, self.state, place) for place in self.problem.places]
        edges = self._edges(opened)
        for open_place in opened:
            self._add_place(open_place, edges)
        for task in self.table.tasks():
            trained = total(use.hours for use in self.used.get(task, ()))
            self.hours[task] = self.program.named_sum(trained)
        self._add_chains(edges)
        self._add_hours()
        self._add_money()

    def _edges(self, opened: Sequence[OpenPlace]) -> list[int]:
        start, end = self.state.now, self.problem.length
        spans = {span for found in opened for cell in found.cells for span in _reachable(cell)}
        natural = sorted({start, end, *(edge for span in spans for edge in span)})
        inner = set(range(start, end, SLICE))
        if len(natural) <= MOST_EDGES:
            inner = {*natural, *(at for a, b in pairwise(natural) for at in range(a, b, SLICE))}
        inner |= {model.deadline - model.gate for model in self.problem.models if model.deadline is not None}
        if self.part is not None:
            gate = self.problem.model(self.part.parent).gate
            inner |= {self.part.start, self.part.end - gate}
        return sorted({start, end, *(edge for edge in inner if start <= edge <= end)})

    def _add_moves(self) -> None:
        for model in self.problem.models:
            if self.table.may_move(model.name):
                moved = self.moved[model.name] = self.program.variable(0, 1)
                first = self.table.rounds[model.name][0]
                if any(s.model == model.name and s.round > first for s in self.state.fixed):
                    self.program.equal(moved, 1)
                elif model.name in self.moves:
                    self.program.equal(moved, int(self.moves[model.name]))

    def _share(self, name: str, *, moves: bool) -> Expression:
        """To which share a model is on this track."""
        if name not in self.moved:
            return Expression(constant=1.0)
        return self.moved[name] if moves else Expression(constant=1.0).minus(self.moved[name])

    def _add_place(self, opened: OpenPlace, edges: Sequence[int]) -> None:
        anchor = self.part.start if self.part is not None else self.state.now
        windows = {edge for found in opened.windows for edge in _rolling_edges(found.window, anchor, edges)}
        pieces = [
            _Slice(cell, begin, end)
            for cell in opened.cells
            for begin, end in cut_at(_reachable(cell), {*edges, *windows})
        ]
        used = [made for piece in pieces for made in self._add_slice(piece)]
        for quota in opened.quotas:
            for period in quota:
                self._limit(used, (period.start, period.end), period.minutes)
                self._limit_tracks(used, (period.start, period.end), period.minutes)
        for found in opened.windows:
            for span in pairwise(sorted({edges[0], *windows, edges[-1]})):
                self._limit(used, span, found.minutes)
                self._limit_tracks(used, span, found.minutes)
            for cut in sorted({*edges, *windows}):
                for span in ((cut, cut + found.window), (cut - found.window, cut)):
                    self._limit(used, span, max(0, found.minutes - found.used_within(span)))

    def _limit(self, used: Sequence[tuple[RoundTask, _Use]], span: Span, minutes: int) -> None:
        """At most so many minutes of sessions within the span."""
        self._at_most((use.load for _, use in used if use.is_within(span)), minutes)

    def _limit_tracks(self, used: Sequence[tuple[RoundTask, _Use]], span: Span, minutes: int) -> None:
        """The same of each track of a model, to the share that it is on it."""
        for name, moves in product(self.moved, (True, False)):
            loads = (
                use.load
                for task, use in used
                if task.model == name and task.moves == moves and use.is_within(span)
            )
            self._at_most(loads, self._share(name, moves=moves).times(minutes))

    def _at_most(self, loads: Iterable[Expression], limit: Expression | float) -> None:
        summed = total(loads)
        if summed.terms:
            self.program.at_most(summed, limit)

    def _add_slice(self, piece: _Slice) -> Iterator[tuple[RoundTask, _Use]]:
        place, length = piece.cell.place, piece.end - piece.start
        longest = min(place.longest or piece.cell.usable, piece.cell.usable)
        factor = longest / max(1, longest - place.overhead)
        made = []
        for task in self.table.tasks():
            speed = place.speed_of(task.model)
            if speed > 0 and self._allows(piece, task):
                minutes = self.program.variable(0, length)
                use = _Use(piece, minutes.times(factor), minutes.times(speed / 60))
                self.used.setdefault(task, []).append(use)
                made.append((task, use))
        self._at_most((use.load for _, use in made), length)
        yield from made

    def _allows(self, piece: _Slice, task: RoundTask) -> bool:
        model = self.problem.model(task.model)
        if any(s.model == task.model and s.round > task.round for s in self.state.fixed):
            return False
        if model.deadline is not None and piece.start >= model.deadline - model.gate:
            return False
        if self.part is None:
            return True
        parent = self.problem.model(self.part.parent)
        first = self.table.rounds[parent.name][0]
        if task.model == parent.name and task.round == first:
            return piece.end <= self.part.end - parent.gate
        if model.inherits == parent.name and task.round > first:
            return piece.start >= self.part.start
        return True

    def _add_chains(self, edges: Sequence[int]) -> None:
        """A model is at one place at a time; on one of its two tracks."""
        for model in self.problem.models:
            for span in pairwise(edges):
                both: list[Expression] = []
                for moves in (True, False):
                    tasks = [task for task in self.table.tasks_of(model.name) if task.moves == moves]
                    loads = [
                        use.load for task in tasks for use in self.used.get(task, ()) if use.is_within(span)
                    ]
                    both += loads
                    if model.name in self.moved:
                        self._at_most(loads, self._share(model.name, moves=moves).times(span[1] - span[0]))
                if model.name not in self.moved:
                    self._at_most(both, span[1] - span[0])

    def _add_hours(self) -> None:
        for model in self.problem.models:
            own = total(self._hours(model.name, number) for number in self.table.rounds[model.name])
            if model.least_hours > 0:
                self.program.at_most(own.times(-1), -model.least_hours)
            if model.most_hours is not None:
                past = sum(self._past(model.name, number) for number in self.table.rounds[model.name])
                self.program.at_most(own, max(model.most_hours, past))

    def _add_money(self) -> None:
        if self.problem.cap_usd is None:
            return
        left = self.problem.cap_usd - spent_so_far(self.problem, self.state)
        prices = {place.name: place.usd_per_hour / 60 for place in self.problem.places}
        paid = (
            use.load.times(prices[use.piece.cell.place.name])
            for found in self.used.values()
            for use in found
            if prices[use.piece.cell.place.name] > 0
        )
        self._at_most(paid, max(0.0, left))

    def _past(self, name: str, number: int) -> float:
        return own_hours(self.problem, self.state.fixed).get((name, number), 0.0)

    def _hours(self, name: str, number: int) -> Expression:
        tasks = (task for task in self.table.tasks_of(name) if task.round == number)
        return total(self.hours[task] for task in tasks).plus(Expression(constant=self._past(name, number)))

    def _value(self, model: WeekModel) -> Expression:
        """Points by tangents; a model that may move has a value for each of its tracks."""
        inherited = self._inherited(model)
        if model.name not in self.moved:
            return self._track_value(model, self._kept(model, moves=False).plus(inherited), moves=False)
        return self._track_value(model, self._kept(model, moves=False), moves=False).plus(
            self._track_value(model, self._kept(model, moves=True).plus(inherited), moves=True)
        )

    def _track_value(self, model: WeekModel, hours: Expression, *, moves: bool) -> Expression:
        weight = POINTS * model.weight / self.problem.total_weight
        before = model.curve.learned(model.done_hours)
        share = self._share(model.name, moves=moves)
        hours = self.program.named_sum(hours)
        value = self.program.variable(0, weight * (1 - before))
        self.program.at_most(value, share.times(weight * (1 - before)))
        for at in tangent_points(model):
            slope = model.curve.slope(model.done_hours + at)
            height = model.curve.learned(model.done_hours + at) - before - slope * at
            self.program.at_most(value, hours.times(weight * slope).plus(share.times(weight * height)))
        return value

    def _kept(self, model: WeekModel, *, moves: bool) -> Expression:
        """Own hours of a track; a part of those before a move is lost with it."""
        first = self.table.rounds[model.name][0]
        share = self._share(model.name, moves=moves)
        kept = Expression()
        for task in self.table.tasks_of(model.name):
            if task.moves == moves:
                kept = kept.plus(self.hours[task].times(model.carry if moves and task.round == first else 1))
        for number in self.table.rounds[model.name]:
            carried = model.carry if moves and number == first else 1.0
            kept = kept.plus(share.times(carried * self._past(model.name, number)))
        return kept

    def _inherited(self, model: WeekModel) -> Expression:
        taken = trained = Expression()
        if model.inherits is None or model.share <= 0:
            return taken
        for number in sorted((n for n in self.table.rounds[model.name] if n > 0), reverse=True):
            has_parent = number - 1 in self.table.rounds[model.inherits]
            part = self.program.variable(0, None if has_parent else 0)
            taken = taken.plus(part)
            trained = trained.plus(self._hours(model.name, number))
            if has_parent:
                self.program.at_most(part, self._hours(model.inherits, number - 1).times(model.share))
            self.program.at_most(taken, trained)
            most = self.most.get(model.inherits)
            if most is not None and model.name in self.moved:
                self.program.at_most(part, self.moved[model.name].times(model.share * most))
        return taken


def _reachable(cell: WeekCell) -> tuple[Span, ...]:
    """The parts of a cell that a session can be in: it must begin where somebody is there."""
    longest = cell.place.longest
    if cell.place.starts is None or longest is None:
        return ((cell.start, cell.end),)
    return clip(union((begin, end + longest) for begin, end in cell.place.starts), (cell.start, cell.end))


def _rolling_edges(window: int, anchor: int, edges: Sequence[int]) -> Iterator[int]:
    """Windows of this length that cover the week, one of them beginning at the anchor."""
    first = edges[0] + (anchor - edges[0]) % window
    yield from (at for at in range(first, edges[-1], window) if at > edges[0])
