"""The search for one scenario: greedy plans first, then plans rounded from the linear program of the bound.

In: a problem, a scenario, limits. Out: the best plan that keeps every rule, with a bound. Where models build
on another, the week is divided by the moment of the hand-over: each part has a bound and a rounded plan of
its own, and the part with the largest bound is divided again. The best plans are improved step by step.
"""

import heapq
import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

from graftwork.plan.week.bound import Relaxed, relax
from graftwork.plan.week.checker import check_week
from graftwork.plan.week.climb import climb
from graftwork.plan.week.greedy import plan_greedily
from graftwork.plan.week.problem import (
    STEP,
    HandoverPart,
    WeekProblem,
    WeekState,
    as_scenario,
    in_rounds,
    rounds_of,
)
from graftwork.plan.week.rounding import round_solution
from graftwork.plan.week.score import WeekScore, score
from graftwork.plan.week.solver import SearchLimits, refine, solve
from graftwork.plan.week.timing import SessionTiming
from graftwork.records.week import Scenario, ScenarioResult, Session, share_missed

PART = 1440
"""Minutes of a part of the search."""
SMALLEST_PART = 60
GREEDY = 0.15
"""Of the time, for greedy plans at most."""
BOUNDING = 0.35
"""Of the time, for the bound and the plans rounded from it."""
CLIMBING, CLIMBED = 0.3, 3
"""Of the time, for improving so many plans."""
REFINING = 0.1
"""Of the time, for a cheaper and fairer plan of the same value."""
LEAST_FOR_SOLVER = 0.3
"""Seconds."""
WHOLE = 0.01
"""A share that is nearer to 0 or 1 is 0 or 1."""


class Found(NamedTuple):
    """The best plan of one scenario."""

    problem: WeekProblem
    sessions: tuple[Session, ...]
    score: WeekScore
    result: ScenarioResult


def find_plan(
    problem: WeekProblem,
    state: WeekState,
    scenario: Scenario,
    limits: SearchLimits,
    others: Sequence[tuple[Session, ...]] = (),
) -> Found | None:
    """The best plan that was found; `others` are plans to start from, as far as they fit."""
    begun = time.monotonic()
    rounds = rounds_of(problem, scenario)
    state = in_rounds(state, rounds)
    search = _Search(as_scenario(problem, scenario), state, rounds, limits, begun)
    greedy = []
    for plan in plan_greedily(search.problem, state, search.rounds):
        greedy.append(plan.score.value)
        search.greedy = max(greedy)
        search.offer(plan.sessions)
        if search.left < limits.seconds * (1 - REFINING - GREEDY):
            break
    for other in others:
        search.adopt(other)
    search.run()
    if search.best is None:
        return None
    made = score(search.problem, search.best)
    return Found(
        search.problem,
        search.best,
        made,
        ScenarioResult(
            scenario=scenario,
            value=made.value,
            bound=max(search.bound, made.value),
            cost_usd=made.cost_usd,
            greedy_value=max(greedy, default=None),
            first_seconds=search.first or 0.0,
            seconds=time.monotonic() - begun,
            gap=share_missed(made.value, search.bound),
            optimal=search.optimal,
        ),
    )


@dataclass
class _Search:
    problem: WeekProblem
    state: WeekState
    rounds: Mapping[str, tuple[int, ...]]
    limits: SearchLimits
    begun: float
    known: list[tuple[float, tuple[Session, ...]]] = field(default_factory=list)
    bound: float = 0.0
    optimal: bool = False
    impossible: bool = False
    first: float | None = None
    greedy: float = 0.0

    @cached_property
    def timing(self) -> SessionTiming:
        return SessionTiming(self.problem, self.state)

    @property
    def best(self) -> tuple[Session, ...] | None:
        return max(self.known, key=lambda item: item[0])[1] if self.known else None

    @property
    def value(self) -> float:
        return max((value for value, _ in self.known), default=0.0)

    @property
    def left(self) -> float:
        return self.limits.seconds * (1 - REFINING) - (time.monotonic() - self.begun)

    @property
    def is_done(self) -> bool:
        return self.bound <= self.value * (1 + self.limits.enough)

    def offer(self, plan: tuple[Session, ...]) -> None:
        if self.first is None:
            self.first = time.monotonic() - self.begun
        self.known.append((score(self.problem, plan).value, plan))

    def adopt(self, plan: Sequence[Session]) -> None:
        """A plan of another scenario, or of an earlier time: as it is, or at other times."""
        places = {place.name for place in self.problem.places}
        planned = [s for s in plan if not s.fixed and s.start >= self.state.now and s.place in places]
        if any(session.round not in self.rounds.get(session.model, ()) for session in planned):
            return
        known = (*self.state.fixed, *planned)
        made = known if not check_week(self.problem, self.state, known) else self.timing.fit(planned)
        if made is not None:
            self.offer(made)

    def run(self) -> None:
        self._find_bound()
        if not self.impossible:
            self._improve()
            self._solve()
        self.bound = max(self.bound, self.value)
        self.optimal = self.bound <= self.value * (1 + 1e-6)
        self._refine()

    def _find_bound(self) -> None:
        """The part with the largest bound comes first: a smaller part has a lower one, and a better plan."""
        ends = time.monotonic() + self.limits.seconds * BOUNDING
        whole = self._relax(None)
        if whole is None:
            self.impossible = True
            return
        self.bound = whole.points
        parts = self._parts()
        if not parts:
            self._round(whole)
            return
        count = itertools.count()
        # A part that was not relaxed yet has the bound of what it is a part of.
        heap = [(-whole.points, next(count), part, False) for part in parts]
        while heap and time.monotonic() < ends:
            bound, _, part, is_relaxed = heap[0]
            self.bound = -bound
            if self.is_done or (is_relaxed and part.end - part.start <= SMALLEST_PART):
                return
            heapq.heappop(heap)
            if is_relaxed:
                middle = (part.start + part.end) // 2 // STEP * STEP
                for half in (part._replace(end=middle), part._replace(start=middle)):
                    heapq.heappush(heap, (bound, next(count), half, False))
            elif (found := self._relax(part)) is not None:
                heapq.heappush(heap, (max(bound, -found.points), next(count), part, True))
                self._round(found, part)
        self.bound = max((-bound for bound, *_ in heap), default=0.0)

    def _relax(self, part: HandoverPart | None, moves: Mapping[str, bool] | None = None) -> Relaxed | None:
        return relax(self.problem, self.state, self.rounds, part, moves)

    def _round(self, found: Relaxed, part: HandoverPart | None = None) -> None:
        """The solution as a plan. Where a model moves in part, it is decided which ones move."""
        if any(WHOLE < share < 1 - WHOLE for share in found.moved.values()):
            names = sorted(found.moved, key=lambda name: -found.moved[name])
            count = round(sum(found.moved.values()))
            decided = self._relax(part, {name: number < count for number, name in enumerate(names)})
            if decided is None:
                return
            found = decided
        plan = round_solution(self.timing, found.used)
        if plan is not None:
            self.offer(plan)

    def _improve(self) -> None:
        """Climb from the best plans so far."""
        chosen: list[tuple[Session, ...]] = []
        for _, plan in sorted(self.known, key=lambda item: -item[0]):
            if plan not in chosen:
                chosen.append(plan)
        ends = time.monotonic() + self.limits.seconds * CLIMBING
        for number, plan in enumerate(chosen[:CLIMBED]):
            now = time.monotonic()
            if (number and self.is_done) or now >= ends:
                return
            turn = now + (ends - now) / (min(CLIMBED, len(chosen)) - number)
            better = climb(self.timing, plan, until=partial(_is_over, turn))
            self._require_valid(better)
            self.offer(better)

    def _solve(self) -> None:
        """The solver goes on from the best plan, or shows that there is none."""
        if self.known and (self.is_done or self.left < LEAST_FOR_SOLVER):
            return
        limits = self.limits._replace(seconds=max(LEAST_FOR_SOLVER, self.left))
        solved = solve(self.problem, self.state, rounds=self.rounds, hint=self.best, limits=limits)
        self.bound = min(self.bound, max(solved.bound, self.value))
        if solved.sessions is not None:
            self._require_valid(solved.sessions)
            self.offer(solved.sessions)

    def _require_valid(self, plan: Sequence[Session]) -> None:
        broken = check_week(self.problem, self.state, plan)
        if broken:
            raise RuntimeError(f"the solver's week breaks a rule: {broken[0]}")

    def _refine(self) -> None:
        if self.best is None:
            return
        floor = self.value
        seconds = max(0.3, self.limits.seconds - (time.monotonic() - self.begun))
        plan = refine(
            self.problem, self.state, rounds=self.rounds, plan=self.best,
            limits=self.limits._replace(seconds=min(seconds, self.limits.seconds * 2 * REFINING)),
        )  # fmt: skip
        self._require_valid(plan)
        value = score(self.problem, plan).value
        if value >= max(self.greedy, floor * 0.998):
            self.known = [(value, plan)]

    def _parts(self) -> list[HandoverPart]:
        parents = {model.inherits for model in self.problem.models if len(self.rounds[model.name]) > 1}
        parents |= {m.inherits for m in self.problem.models if self.rounds[m.name][0] > 0}
        names = [name for name in parents if name is not None]
        if len(names) != 1:
            return []
        edges = [*range(self.state.now, self.problem.length, PART), self.problem.length]
        gate = self.problem.model(names[0]).gate
        parts = [HandoverPart(names[0], a, b) for a, b in itertools.pairwise(edges)]
        # After the end of the week: nobody builds on it.
        return [*parts, HandoverPart(names[0], self.problem.length, self.problem.length + gate)]


def _is_over(ends: float) -> bool:
    return time.monotonic() > ends
