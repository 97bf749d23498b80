"""Rounds of models as the planners see them, and tangents of their curves.

In: a problem and the rounds of each model. Out: tasks. A model that may move to its parent's adapter has two
tracks: it stays at the base, or it trains there, loses a part of that, and goes on from the parent's adapter.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from graftwork.plan.week.problem import WeekModel, WeekProblem
from graftwork.records.week import Session

TANGENTS = 24
HALVES = 8
"""Half lives of what is left to gain that the tangents cover."""


class RoundTask(NamedTuple):
    """A round of a model. `moves`: on the track that leaves the base for the parent's adapter."""

    model: str
    round: int
    moves: bool = False


@dataclass(frozen=True)
class TaskTable:
    problem: WeekProblem
    rounds: Mapping[str, tuple[int, ...]]

    def may_move(self, name: str) -> bool:
        return len(self.rounds[name]) > 1 and self.problem.model(name).inherits is not None

    def tasks_of(self, name: str) -> list[RoundTask]:
        """The rounds of a model; the first one twice where it may or may not move later."""
        rounds = self.rounds[name]
        if self.may_move(name):
            return [RoundTask(name, rounds[0]), *(RoundTask(name, number, True) for number in rounds)]
        return [RoundTask(name, number) for number in rounds]

    def tasks(self) -> Iterator[RoundTask]:
        for model in self.problem.models:
            yield from self.tasks_of(model.name)

    def task_of(self, session: Session, sessions: Sequence[Session]) -> RoundTask:
        """The task of a session, given all sessions."""
        first = self.rounds[session.model][0]
        moves = self.may_move(session.model) and any(
            other.model == session.model and other.round > first for other in sessions
        )
        return RoundTask(session.model, session.round, moves)


def tangent_points(model: WeekModel) -> list[float]:
    """Hours at which the curve is approximated, closer where it bends most."""
    half = model.curve.half_hours
    return [half * HALVES * (number / TANGENTS) ** 1.5 for number in range(TANGENTS + 1)]
