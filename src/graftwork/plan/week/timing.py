"""The best times and lengths of sessions whose places, models and order are given: a linear program.

In: the problem of one scenario and sessions, whose times are only an estimate that says what comes before
what. Out: sessions that keep every rule, or None. Rounding all moments down to the grid keeps every
difference of whole steps; what sums of lengths exceed by rounding is cut off.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from graftwork.plan.week.cells import OpenPlace, OpenWindow, WeekCell, open_place_of, start_spans
from graftwork.plan.week.checker import check_week
from graftwork.plan.week.linear import Expression, LinearProgram, total, value_of
from graftwork.plan.week.problem import STEP, WeekModel, WeekProblem, WeekState, own_hours
from graftwork.plan.week.score import POINTS, spent_so_far
from graftwork.plan.week.tasks import tangent_points
from graftwork.records.week import Session

APART = 0.75
"""Of the window of a rolling quota: sessions estimated to start so far apart are in different windows."""
Hours = Mapping[tuple[str, int], Expression]
"""Of each model and round."""


class _Timed(NamedTuple):
    """A session, its cell, and the variables of its start and its training, in steps."""

    session: Session
    cell: WeekCell
    start: Expression
    train: Expression

    @property
    def overhead(self) -> int:
        return self.cell.place.overhead // STEP

    @property
    def size(self) -> Expression:
        return self.train.plus(Expression(constant=self.overhead))

    @property
    def end(self) -> Expression:
        return self.start.plus(self.size)

    @property
    def hours(self) -> Expression:
        return self.train.times(self.cell.place.speed_of(self.session.model) * STEP / 60)


class _TrainingLimit(NamedTuple):
    """A sum of training that rounding may exceed."""

    weights: dict[int, float]
    """By the number of the session."""
    limit: float


@dataclass
class SessionTiming:
    """The week's rules for sessions in a given order; one object serves many sequences."""

    problem: WeekProblem
    state: WeekState
    opened: dict[str, OpenPlace] = field(init=False)

    def __post_init__(self) -> None:
        self.opened = {
            place.name: open_place_of(self.problem, self.state, place) for place in self.problem.places
        }

    def cell_at(self, place: str, lane: int, at: int) -> WeekCell | None:
        """The cell that holds this moment, or the next one."""
        cells = [cell for cell in self.opened[place].cells if cell.lane == lane and cell.end > at]
        return min(cells, key=lambda cell: cell.start, default=None)

    def fit(self, plan: Iterable[Session], *, above: float = 0.0) -> tuple[Session, ...] | None:
        """The best times for these sessions; None if there are none that are worth more than `above`."""
        planned = sorted((s for s in plan if not s.fixed), key=lambda s: (s.start, s.place, s.lane))
        tries = (APART, 1.0) if any(place.rolling for place in self.problem.places) else (1.0,)
        for apart in tries:
            made = _Sequence(self, apart, above).solve(planned)
            if made is not None and not check_week(self.problem, self.state, made):
                return made
        return None


@dataclass
class _Sequence:
    timing: SessionTiming
    apart: float
    above: float
    program: LinearProgram = field(default_factory=LinearProgram)
    timed: list[_Timed] = field(default_factory=list)
    limits: list[_TrainingLimit] = field(default_factory=list)

    @property
    def problem(self) -> WeekProblem:
        return self.timing.problem

    @property
    def state(self) -> WeekState:
        return self.timing.state

    def solve(self, planned: Sequence[Session]) -> tuple[Session, ...] | None:
        if not all(self._add_session(session) for session in planned):
            return None
        self._add_order()
        for opened in self.timing.opened.values():
            self._add_quotas(opened)
        self._add_money()
        self._add_value()
        if not self.program.solve() or self.program.best <= self.above:
            return None
        return self._read()

    def _add_session(self, session: Session) -> bool:
        cell = self.timing.cell_at(session.place, session.lane, session.start)
        spans = start_spans(cell) if cell is not None else ()
        if cell is None or not spans or cell.place.speed_of(session.model) <= 0:
            return False
        low, high = min(spans, key=lambda span: max(span[0] - session.start, session.start - span[1], 0))
        longest = min(cell.usable, cell.place.longest or cell.usable) - cell.place.overhead
        shortest = max(STEP, cell.place.shortest)
        if longest < shortest:
            return False
        start = self.program.variable(low // STEP, (high - 1) // STEP)
        train = self.program.variable(shortest // STEP, longest // STEP)
        made = _Timed(session, cell, start, train)
        last = cell.end
        model = self.problem.model(session.model)
        if model.deadline is not None:
            last = min(last, model.deadline - model.gate)
        self.program.at_most(made.end, last // STEP)
        self.timed.append(made)
        return True

    def _follows(self, later: _Timed, earlier: Expression, wait: int = 0) -> None:
        """It starts so many minutes after the other moment."""
        self.program.at_most(earlier.minus(later.start), -math.ceil(wait / STEP))

    def _not_before(self, later: _Timed, minute: int) -> None:
        self.program.at_most(later.start.times(-1), -math.ceil(minute / STEP))

    def _limit(self, group: Sequence[_Timed], weights: Sequence[float], limit: float) -> None:
        """A limit on a sum of training."""
        if group:
            summed = total(timed.train.times(weight) for timed, weight in zip(group, weights, strict=True))
            self.program.at_most(summed, limit)
            numbers = [self.timed.index(timed) for timed in group]
            self.limits.append(_TrainingLimit(dict(zip(numbers, weights, strict=True)), limit))

    def _limit_sizes(self, group: Sequence[_Timed], minutes: int) -> None:
        overheads = sum(timed.overhead for timed in group)
        self._limit(group, [1.0] * len(group), minutes // STEP - overheads)

    def _add_order(self) -> None:
        lanes: dict[tuple[str, int], list[_Timed]] = {}
        models: dict[str, list[_Timed]] = {model.name: [] for model in self.problem.models}
        for timed in self.timed:
            lanes.setdefault((timed.session.place, timed.session.lane), []).append(timed)
            models[timed.session.model].append(timed)
        for listed in (*lanes.values(), *models.values()):
            for earlier, later in pairwise(listed):
                self._follows(later, earlier.end)
        for model in self.problem.models:
            mine = models[model.name]
            for past in self.state.fixed:
                if past.model == model.name and past.end > self.state.now and mine:
                    self._not_before(mine[0], past.end)
            for name in model.after:
                self._add_wait(mine[:1], self.problem.model(name), models[name], math.inf)
            if model.inherits is not None:
                parent = self.problem.model(model.inherits)
                for timed in mine:
                    self._add_wait([timed], parent, models[parent.name], timed.session.round)

    def _add_wait(
        self, heirs: Sequence[_Timed], parent: WeekModel, theirs: Sequence[_Timed], before: float
    ) -> None:
        """The parent's sessions of the rounds before, and its gate, are over."""
        needed = [timed for timed in theirs if timed.session.round < before]
        past = [s.end for s in self.state.fixed if s.model == parent.name and s.round < before]
        for heir in heirs:
            if needed:
                self._follows(heir, needed[-1].end, parent.gate)
            if past:
                self._not_before(heir, max(past) + parent.gate)

    def _add_quotas(self, opened: OpenPlace) -> None:
        here = [timed for timed in self.timed if timed.session.place == opened.place.name]
        for quota in opened.quotas:
            for period in quota:
                inside = [timed for timed in here if period.start <= timed.cell.start < period.end]
                self._limit_sizes(inside, period.minutes)
        for window in opened.windows:
            self._add_window(window, here, one_lane=opened.place.lanes == 1)

    def _add_window(self, quota: OpenWindow, here: Sequence[_Timed], *, one_lane: bool) -> None:
        """Each session shares the quota with those before it that its estimate is not a window behind."""
        for number, timed in enumerate(here):
            shared, used = [timed], 0
            for earlier in here[:number]:
                since = earlier.session.start if one_lane else earlier.session.end
                if since + self.apart * quota.window > timed.session.start:
                    shared.append(earlier)
                else:
                    self._follows(timed, earlier.start if one_lane else earlier.end, quota.window)
            for begin, end in quota.used:
                until = (begin if one_lane else end) + quota.window
                if until > timed.session.start:
                    used += end - begin
                else:
                    self._not_before(timed, until)
            self._limit_sizes(shared, quota.minutes - used)

    def _add_money(self) -> None:
        if self.problem.cap_usd is None:
            return
        paid = [timed for timed in self.timed if timed.cell.place.usd_per_hour > 0]
        prices = [timed.cell.place.usd_per_hour * STEP / 60 for timed in paid]
        left = self.problem.cap_usd - spent_so_far(self.problem, self.state)
        overheads = sum(price * timed.overhead for price, timed in zip(prices, paid, strict=True))
        self._limit(paid, prices, left - overheads)

    def _add_value(self) -> None:
        hours: dict[tuple[str, int], Expression] = {}
        for (name, number), past in own_hours(self.problem, self.state.fixed).items():
            hours[name, number] = Expression(constant=past)
        for timed in self.timed:
            key = (timed.session.model, timed.session.round)
            hours[key] = hours.get(key, Expression()).plus(timed.hours)
        self.program.maximize(total(self._value(model, hours) for model in self.problem.models))

    def _value(self, model: WeekModel, hours: Hours) -> Expression:
        rounds = sorted(number for name, number in hours if name == model.name)
        self._limit_hours(model, total(hours[model.name, number] for number in rounds))
        weight = POINTS * model.weight / self.problem.total_weight
        before = model.curve.learned(model.done_hours)
        counted = self._inherited(model, rounds, hours)
        for number in rounds:
            counted = counted.plus(
                hours[model.name, number].times(1.0 if number == rounds[-1] else model.carry)
            )
        counted = self.program.named_sum(counted)
        value = self.program.variable(0, weight * (1 - before))
        for at in tangent_points(model):
            slope = model.curve.slope(model.done_hours + at)
            height = model.curve.learned(model.done_hours + at) - before - slope * at
            self.program.at_most(value.minus(counted.times(weight * slope)), weight * height)
        return value

    def _limit_hours(self, model: WeekModel, own: Expression) -> None:
        mine = [timed for timed in self.timed if timed.session.model == model.name]
        steps = [timed.cell.place.speed_of(model.name) * STEP / 60 for timed in mine]
        if model.least_hours > 0:
            # Rounding may cost each session a step.
            self.program.at_most(own.times(-1), -model.least_hours - sum(steps))
        if model.most_hours is not None:
            self._limit(mine, steps, max(0.0, model.most_hours - own.constant))

    def _inherited(self, model: WeekModel, rounds: Sequence[int], hours: Hours) -> Expression:
        taken = trained = Expression()
        if model.inherits is None or model.share <= 0:
            return taken
        for number in range(max(rounds, default=0), 0, -1):
            part = self.program.variable()
            taken = taken.plus(part)
            trained = trained.plus(hours.get((model.name, number), Expression()))
            theirs = hours.get((model.inherits, number - 1), Expression())
            self.program.at_most(part, theirs.times(model.share))
            self.program.at_most(taken, trained)
        return taken

    def _read(self) -> tuple[Session, ...]:
        made = []
        for timed in self.timed:
            start, end = (math.floor(value_of(at) + 1e-6) for at in (timed.start, timed.end))
            train = end - start - timed.overhead
            times = {"start": start * STEP, "end": end * STEP, "train": train * STEP}
            made.append(timed.session.model_copy(update=times))
        self._trim(made)
        return tuple(sorted((*self.state.fixed, *made), key=lambda s: (s.start, s.place, s.lane)))

    def _trim(self, made: list[Session]) -> None:
        """Cut off what sums exceed by rounding: a step of the longest session each."""
        for weights, limit in self.limits:
            while sum(weight * made[n].train / STEP for n, weight in weights.items()) > limit + 1e-9:
                longest = max(weights, key=lambda n: made[n].train)
                cut = made[longest]
                if cut.train - STEP < self.problem.place(cut.place).shortest:
                    break
                made[longest] = cut.model_copy(update={"end": cut.end - STEP, "train": cut.train - STEP})
