"""A greedy plan: at each moment the place that is free next takes the model that gains most.

Input: the problem of one scenario. Output: sessions, and the rules that they break. It is the comparison for
the solver, and where the solver starts. Session lengths and the hours of the main model before others build
on it are tried in a few sizes; the best plan wins.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import product
from typing import NamedTuple

from graftwork.records.week import Session
from graftwork.week.calendar import Span
from graftwork.week.checker import check_week
from graftwork.week.problem import (
    STEP,
    OpenPlace,
    OpenWindow,
    WeekCell,
    WeekModel,
    WeekPlace,
    WeekProblem,
    WeekScore,
    WeekState,
    cost_of,
    open_place_of,
    score,
    score_model,
    spent_so_far,
    start_spans,
)

CHUNKS = (None, 480, 240, 120)
"""The longest sessions that are tried, in minutes; None: as long as the place allows."""
FIRST_SHARES = (0.25, 0.35, 0.4, 0.15, 0.3, 0.5, 0.08, 0.0)
PAID_SHARES = (0.0, 0.2, 0.4)
"""Share of the remaining time at which paid places may be used."""
STEP_SHARE = 0.06
"""Share of all reference hours of a model to schedule before the models that start from it begin."""


ROUNDS_OF_REFINEMENT = 3
MINUTES_PER_WEEK = 7 * 24 * 60
LEVELS = 3
"""Number of speed thresholds to try, below which a model that others wait for is not trained."""


class GreedyPlan(NamedTuple):
    sessions: tuple[Session, ...]
    score: WeekScore
    broken: tuple[str, ...]
    """Rules that it does not keep."""


def plan_greedily(
    problem: WeekProblem, state: WeekState, rounds: Mapping[str, tuple[int, ...]]
) -> Iterator[GreedyPlan]:
    """Greedy plans, with the rules that they break: sizes far apart first, then those near the best."""
    open_places = [open_place_of(problem, state, provider) for provider in problem.places]
    builds_on = any(len(model_rounds) > 1 or model_rounds[0] > 0 for model_rounds in rounds.values())
    offered = sum(hours_offered(opened, problem.cap_usd) for opened in open_places)
    tried: dict[_Choices, float] = {}

    def attempt(choices: _Choices) -> GreedyPlan | None:
        if choices in tried:
            return None
        sessions = _Greedy(problem, state, open_places, choices, rounds).run()
        broken = tuple(check_week(problem, state, sessions))
        plan = GreedyPlan(tuple(sessions), score(problem, sessions), broken)
        tried[choices] = -1.0 if broken else plan.score.value
        return plan

    firsts = [share * offered for share in FIRST_SHARES] if builds_on else [math.inf]
    orders = (False, True) if any(model.least_hours > 0 for model in problem.models) else (False,)
    levels = [0.0]
    if builds_on:
        # Speeds of places as shares of the fastest, the highest ones, and 0.
        speeds = sorted({provider.speed for provider in problem.places}, reverse=True)
        levels = [*(speed / speeds[0] for speed in speeds[1:LEVELS] if speeds[0] > 0), 0.0]
    is_paid = problem.cap_usd is not None and any(provider.usd_per_hour > 0 for provider in problem.places)
    remaining = problem.length - state.now
    paid = [
        state.now + round(share * remaining / STEP) * STEP for share in (PAID_SHARES if is_paid else (0.0,))
    ]
    for paid_from, chunk, first, slowest, owed_first in product(paid, CHUNKS[:2], firsts, levels, orders):
        if (plan := attempt(_Choices(chunk, first, slowest, owed_first, paid_from))) is not None:
            yield plan
    step = offered * STEP_SHARE
    for _ in range(ROUNDS_OF_REFINEMENT):
        best = max(tried, key=lambda choices: tried[choices])
        changes = (0.0, -step, -step / 2, step / 2, step) if builds_on else (0.0,)
        for change, chunk in product(changes, CHUNKS):
            choices = best._replace(first=max(0.0, best.first + change), chunk=chunk)
            if (plan := attempt(choices)) is not None:
                yield plan
        step /= 2


def hours_offered(opened: OpenPlace, cap_usd: float | None) -> float:
    """Reference hours that a place could give, roughly."""
    provider = opened.place
    minutes: float = sum(cell.end - cell.start for cell in opened.cells)
    for quota in opened.quotas:
        minutes = min(minutes, sum(period.minutes for period in quota))
    for rolling in provider.rolling:
        minutes = min(minutes, rolling.minutes * MINUTES_PER_WEEK / rolling.window)
    if provider.usd_per_hour > 0 and cap_usd is not None:
        minutes = min(minutes, cap_usd / provider.usd_per_hour * 60)
    return minutes * provider.speed / 60


class _Choices(NamedTuple):
    """Parameters that are varied."""

    chunk: int | None
    first: float
    slowest: float
    owed_first: bool
    """Models that lack hours come first; otherwise they get them by their gains, or the plan is dropped."""
    paid_from: int
    """The minute from which money is spent: it can wait, open hours of other places cannot."""


class _Slot(NamedTuple):
    """Where a session could begin, and the most minutes it could have."""

    cell: WeekCell
    start: int
    room: int

    @property
    def order(self) -> tuple[int, float, float]:
        """The earliest, the fastest, the cheapest."""
        return self.start, -self.cell.place.speed, self.cell.place.usd_per_hour


class _Greedy:
    """One plan as it grows."""

    def __init__(
        self,
        problem: WeekProblem,
        state: WeekState,
        open_places: list[OpenPlace],
        choices: _Choices,
        rounds: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.problem, self.state, self.places = problem, state, open_places
        self.choices, self.rounds = choices, rounds
        self.sessions: list[Session] = []
        self.hours: dict[tuple[str, int], float] = {}
        self.spent = spent_so_far(problem, state)
        self.at_place: dict[str, list[Session]] = defaultdict(list)
        self.of_model: dict[str, list[Session]] = defaultdict(list)
        for happened in state.fixed:
            self._add(happened)

    def run(self) -> list[Session]:
        cells = [cell for opened in self.places for cell in opened.cells]
        free = [cell.start for cell in cells]
        slots = [self._slot(cell, cell.start) for cell in cells]
        while True:
            waiting = [(number, slot) for number, slot in enumerate(slots) if slot is not None]
            if not waiting:
                return self.sessions
            number, slot = min(waiting, key=lambda item: item[1].order)
            session = self._choose(slot)
            if session is None:
                # The next moment at which a model is free again, or passes its gate.
                moments = [
                    -(-moment // STEP) * STEP
                    for past in self.sessions
                    for moment in (past.end, past.end + self.problem.model(past.model).gate)
                ]
                moments += [waiting_slot.start for _, waiting_slot in waiting]
                later = (moment for moment in moments if moment > slot.start)
                free[number] = min([*later, self.problem.length])
                slots[number] = self._slot(slot.cell, free[number])
                continue
            self._add(session)
            free[number] = session.end
            for index, cell in enumerate(cells):
                if cell.place.name == session.place or cell.place.usd_per_hour > 0:
                    slots[index] = self._slot(cell, free[index])

    def _add(self, session: Session) -> None:
        self.sessions.append(session)
        self.at_place[session.place].append(session)
        self.of_model[session.model].append(session)
        self.hours = self._hours_with(session)
        if not session.fixed:
            self.spent += cost_of(self.problem, [session])

    def _hours_with(self, session: Session) -> dict[tuple[str, int], float]:
        key = (session.model, session.round)
        added = session.train * self.problem.place(session.place).speed_of(session.model) / 60
        return {**self.hours, key: self.hours.get(key, 0.0) + added}

    def _slot(self, cell: WeekCell, earliest: int) -> _Slot | None:
        """The earliest session of this cell."""
        provider = cell.place
        for opens, end in start_spans(cell):
            start = max(opens, earliest, self.choices.paid_from if provider.usd_per_hour > 0 else 0)
            while start < end:
                room = min(cell.end - start, self._room(cell, start))
                if room >= provider.overhead + provider.shortest:
                    return _Slot(cell, start, room // STEP * STEP)
                later = self._rolling_change(provider, start)
                if later is None:
                    break
                start = later
        return None

    def _room(self, cell: WeekCell, start: int) -> int:
        provider = cell.place
        limits = [] if provider.longest is None else [provider.longest]
        at_place = self.at_place[provider.name]
        for period in cell.periods:
            inside = (s for s in at_place if not s.fixed and period.start <= s.start < period.end)
            limits.append(period.minutes - sum(s.end - s.start for s in inside))
        for quota, spans in self._windows(provider):
            overlapping = (s for s in spans if s[0] <= start and _until(provider, s, quota.window) > start)
            # A session that comes later, in another lane, shares its window too.
            ahead = (s for s in spans if start < s[0] < start + 2 * quota.window)
            limits.append(quota.minutes - sum(end - opens for opens, end in (*overlapping, *ahead)))
        if provider.usd_per_hour > 0 and self.problem.cap_usd is not None:
            limits.append(int((self.problem.cap_usd - self.spent) / provider.usd_per_hour * 60))
        return min(limits, default=self.problem.length)

    def _windows(self, provider: WeekPlace) -> Iterator[tuple[OpenWindow, list[Span]]]:
        """Rolling quotas, with all that uses them."""
        planned = [(s.start, s.end) for s in self.at_place[provider.name] if not s.fixed]
        for quota in next(opened.windows for opened in self.places if opened.place is provider):
            yield quota, [*quota.used, *planned]

    def _rolling_change(self, provider: WeekPlace, start: int) -> int | None:
        ends = [
            _until(provider, span, quota.window) for quota, spans in self._windows(provider) for span in spans
        ]
        return min((-(-end // STEP) * STEP for end in ends if end > start), default=None)

    def _choose(self, slot: _Slot) -> Session | None:
        candidates = [
            session
            for model in self.problem.models
            for number in self.rounds[model.name]
            if (session := self._session(slot, model, number)) is not None
        ]
        needy = [s for s in candidates if self.choices.owed_first and self._lacks(s.model)]
        return max(needy or candidates, key=self._rank, default=None)

    def _rank(self, session: Session) -> tuple[int, float]:
        """The earliest deadline of hours still required, then the gain per minute."""
        deadline = self.problem.model(session.model).deadline
        urgent = -deadline if deadline is not None and self._lacks(session.model) else -self.problem.length
        hours, gained = self._hours_with(session), 0.0
        for model in self.problem.models:
            if session.model in (model.name, model.inherits):
                gained += score_model(self.problem, model, hours).value
                gained -= score_model(self.problem, model, self.hours).value
        return urgent, gained / (session.end - session.start)

    def _session(self, slot: _Slot, model: WeekModel, number: int) -> Session | None:
        provider = slot.cell.place
        speed = provider.speed_of(model.name)
        if speed <= 0 or not self._may_start(model, slot.start, number):
            return None
        if not self._is_worth_moving(model, provider, number):
            return None
        waited_for = any(
            number < self.rounds[m.name][-1] for m in self.problem.models if m.inherits == model.name
        )
        fastest = max(rival.speed_of(model.name) for rival in self.problem.places)
        if waited_for and speed < self.choices.slowest * fastest:
            return None
        room = slot.room - provider.overhead
        if self.choices.owed_first and self._lacks(model.name):
            owed = math.ceil((model.least_hours - self._trained(model.name)) / speed * 60 / STEP) * STEP
            room = min(room, max(owed, provider.shortest))
        if self.choices.chunk is not None:
            room = min(room, max(self.choices.chunk, provider.shortest))
        if model.deadline is not None:
            room = min(room, model.deadline - model.gate - slot.start - provider.overhead)
        if model.most_hours is not None:
            room = min(room, int((model.most_hours - self._trained(model.name)) / speed * 60 + 1e-6))
        train = room // STEP * STEP
        if train < provider.shortest:
            return None
        end = slot.start + provider.overhead + train
        return Session(
            place=provider.name, model=model.name, start=slot.start, end=end, train=train,
            lane=slot.cell.lane, round=number,
        )  # fmt: skip

    def _trained(self, model: str) -> float:
        return sum(hours for (name, _), hours in self.hours.items() if name == model)

    def _lacks(self, model: str) -> bool:
        return self._trained(model) < self.problem.model(model).least_hours - 1e-9

    def _may_start(self, model: WeekModel, start: int, number: int) -> bool:
        if any(s.end > start or s.round > number for s in self.of_model[model.name]):
            return False
        waiting = [child.name for child in self.problem.models if model.name in child.after]
        if any(not s.fixed for name in waiting for s in self.of_model[name]):
            return False  # what others waited for is over
        return (
            self._is_first_over(model, number)
            and all(self._is_over(name, start) for name in model.after)
            and self._may_inherit(model, start, number)
        )

    def _is_first_over(self, model: WeekModel, number: int) -> bool:
        """A parent trains its first hours in its first round; then it leaves that to its heirs."""
        heirs = [child.name for child in self.problem.models if child.inherits == model.name]
        own_rounds = self.rounds[model.name]
        if not heirs or (len(own_rounds) == 1 and self.rounds[heirs[0]] == own_rounds):
            return True
        if any(s.round > number for name in heirs for s in self.of_model[name]):
            return False
        reached = self.hours.get(
            (model.name, own_rounds[0]), 0.0
        ) >= self.choices.first and not self._must_retrain(model)
        return (number > own_rounds[0]) == reached if len(own_rounds) > 1 else not reached

    def _may_inherit(self, model: WeekModel, start: int, number: int) -> bool:
        if model.inherits is None or number == 0:
            return True
        parent = self.problem.model(model.inherits)
        earlier = [s for s in self.of_model[parent.name] if s.round < number]
        reached = (
            sum(self.hours.get((parent.name, earlier_round), 0.0) for earlier_round in range(number))
            >= self.choices.first
        )
        return (
            reached and not self._must_retrain(parent) and all(s.end + parent.gate <= start for s in earlier)
        )

    def _is_worth_moving(self, model: WeekModel, provider: WeekPlace, number: int) -> bool:
        """Hours of an heir before it moves count less: it only uses time that is lost otherwise."""
        if model.inherits is None or number > 0 or len(self.rounds[model.name]) == 1:
            return True
        parent = self.rounds[model.inherits][0]
        reached = self.hours.get((model.inherits, parent), 0.0) >= self.choices.first
        scarce = provider.periods or provider.rolling or provider.usd_per_hour > 0
        return self.choices.first <= 0 or not (reached or scarce)

    def _is_over(self, name: str, start: int) -> bool:
        parent = self.problem.model(name)
        theirs = self.of_model[name]
        trained = bool(theirs) or parent.done_hours > 0
        ready = trained and not self._must_retrain(parent) and not self._lacks(name)
        return ready and all(s.end + parent.gate <= start for s in theirs)

    def _must_retrain(self, model: WeekModel) -> bool:
        failed = self.state.failed_gates.get(model.name)
        if failed is None:
            return False
        return max((s.end for s in self.of_model[model.name]), default=0) <= failed


def _until(provider: WeekPlace, span: Span, window: int) -> int:
    """How long a session counts in a rolling quota: from start to start, with one lane."""
    return (span[0] if provider.lanes == 1 else span[1]) + window
