"""A plan from the solution of the linear program of the bound: who is where, in which order.

In: minutes of tasks at places in time slices. Out: sessions that keep every rule, or None.
"""

from collections.abc import Sequence
from itertools import groupby

from graftwork.plan.week.bound import RelaxedUse
from graftwork.plan.week.problem import STEP
from graftwork.plan.week.timing import SessionTiming
from graftwork.records.week import Session

LEAST_SHARE = 0.35
"""Of the shortest session: what the solution uses less than that is left out."""
MOST_TRIES = 6
"""Each without another tenth of the sessions, the shortest ones."""


def round_solution(timing: SessionTiming, used: Sequence[RelaxedUse]) -> tuple[Session, ...] | None:
    """The best plan with the sessions of the solution, without a few that do not fit."""
    estimated = sorted(estimate_sessions(used), key=lambda session: session.start - session.end)
    for _ in range(MOST_TRIES):
        made = timing.fit(estimated)
        if made is not None or not estimated:
            return made
        del estimated[-max(1, len(estimated) // 10) :]
    return None


def estimate_sessions(used: Sequence[RelaxedUse]) -> list[Session]:
    """One session for each use, in the order that lets places and models wait least in each slice."""
    made: list[Session] = []
    free_place: dict[tuple[str, int], int] = {}
    free_model: dict[str, int] = {}
    kept = [use for use in used if use.minutes >= LEAST_SHARE * _shortest(use)]
    for _, group in groupby(sorted(kept, key=lambda use: use.start), key=lambda use: use.start):
        left = list(group)
        while left:
            use = min(
                left,
                key=lambda use: (
                    max(_ready(use, free_place, free_model), use.start),
                    not _goes_on(use, made),
                    -use.minutes,
                ),
            )
            left.remove(use)
            start = max(_ready(use, free_place, free_model), use.start) // STEP * STEP
            size = max(STEP, round(use.minutes / STEP) * STEP)
            place, lane, model = use.cell.place.name, use.cell.lane, use.task.model
            before = _before(use, made)
            if before is not None:
                made[made.index(before)] = before.model_copy(update={"end": start + size})
            else:
                made.append(
                    Session(
                        place=place,
                        model=model,
                        start=start,
                        end=start + size,
                        train=size,
                        lane=lane,
                        round=use.task.round,
                    )
                )
            free_place[place, lane] = free_model[model] = start + size
    return made


def _shortest(use: RelaxedUse) -> int:
    return use.cell.place.overhead + use.cell.place.shortest


def _ready(use: RelaxedUse, places: dict[tuple[str, int], int], models: dict[str, int]) -> int:
    return max(places.get((use.cell.place.name, use.cell.lane), 0), models.get(use.task.model, 0))


def _goes_on(use: RelaxedUse, made: Sequence[Session]) -> bool:
    return _before(use, made) is not None


def _before(use: RelaxedUse, made: Sequence[Session]) -> Session | None:
    """The last session at the place, if the use would only make it longer."""
    place = use.cell.place
    last = max(
        (s for s in made if s.place == place.name and s.lane == use.cell.lane),
        key=lambda s: s.end,
        default=None,
    )
    if last is None or (last.model, last.round) != (use.task.model, use.task.round):
        return None
    if last.start < use.cell.start or last.end < use.start - STEP:
        return None
    if max((s for s in made if s.model == last.model), key=lambda s: s.end) is not last:
        return None
    longest = place.longest or use.cell.usable
    return last if last.end - last.start + use.minutes <= longest else None
