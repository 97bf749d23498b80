"""Improve a plan step by step: leave a session out, give it to another model, exchange two, add one.

In: sessions that keep every rule. Out: sessions that keep every rule and are worth at least as much. After
each change, the best times and lengths of all sessions are found again.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise

from graftwork.plan.week.cells import WeekCell
from graftwork.plan.week.problem import STEP
from graftwork.plan.week.score import score
from graftwork.plan.week.timing import SessionTiming
from graftwork.records.week import Session

LEAST_GAIN = 1e-3
"""Points."""
NEAR = 1440
"""Minutes: sessions that start further apart are not exchanged."""


def climb(
    timing: SessionTiming, plan: Sequence[Session], *, until: Callable[[], bool]
) -> tuple[Session, ...]:
    """The plan after all changes that improve it, or at the end of the time."""
    best = tuple(plan)
    value = score(timing.problem, best).value
    improved = True
    while improved:
        improved = False
        for changed in _neighbours(timing, best):
            if until():
                return best
            made = timing.fit(changed, above=value + LEAST_GAIN)
            if made is not None and (worth := score(timing.problem, made).value) > value + LEAST_GAIN:
                best, value, improved = made, worth, True
                break
    return best


def _neighbours(timing: SessionTiming, plan: Sequence[Session]) -> Iterator[list[Session]]:
    """The plan as it is first: its times may not be the best ones yet."""
    planned = [session for session in plan if not session.fixed]
    yield planned
    shortest_first = sorted(planned, key=lambda session: session.train)
    for gone in shortest_first:
        yield [session for session in planned if session is not gone]
    kinds = sorted({(session.model, session.round) for session in plan})
    for first, second in combinations(planned, 2):
        if first.model != second.model and abs(first.start - second.start) <= NEAR:
            yield [_exchanged(session, first, second) for session in planned]
    for changed in shortest_first:
        for model, number in kinds:
            if model != changed.model:
                other = changed.model_copy(update={"model": model, "round": number})
                yield [other if session is changed else session for session in planned]
    for place, lane, cell, begin, end in _gaps(timing, planned):
        for model, number in kinds:
            middle = (begin + end) // 2 // STEP * STEP
            yield [
                *planned,
                Session(
                    place=place, model=model, start=middle, end=middle + cell.place.shortest,
                    train=cell.place.shortest, lane=lane, round=number,
                ),
            ]  # fmt: skip


def _exchanged(session: Session, first: Session, second: Session) -> Session:
    if session is first:
        return session.model_copy(update={"model": second.model, "round": second.round})
    if session is second:
        return session.model_copy(update={"model": first.model, "round": first.round})
    return session


def _gaps(timing: SessionTiming, planned: Sequence[Session]) -> Iterator[tuple[str, int, WeekCell, int, int]]:
    """Before, between and after the sessions of each cell; the longest gap first."""
    found = []
    for opened in timing.opened.values():
        for cell in opened.cells:
            inside = sorted(
                (s.start, s.end)
                for s in planned
                if s.place == cell.place.name and s.lane == cell.lane and cell.start <= s.start < cell.end
            )
            edges = [(cell.start, cell.start), *inside, (cell.end, cell.end)]
            for (_, begin), (end, _) in pairwise(edges):
                found.append((cell.place.name, cell.lane, cell, begin, end))
    yield from sorted(found, key=lambda gap: gap[3] - gap[4])
