"""Where sessions can be: spans of a place that no reset divides, with what is left of the quotas.

In: a problem and what has happened. Out: cells, on the grid of the planners. A session is within one cell,
so a session that would run across a reset is two.
"""

from typing import NamedTuple

from graftwork.plan.week.calendar import Span, clip, cut_at, overlap, subtract
from graftwork.plan.week.problem import (
    STEP,
    QuotaPeriod,
    WeekPlace,
    WeekProblem,
    WeekState,
    quota_left,
    window_use,
)


class WeekCell(NamedTuple):
    place: WeekPlace
    lane: int
    start: int
    end: int
    periods: tuple[QuotaPeriod, ...]
    """Of each quota, the period that holds the cell."""

    @property
    def usable(self) -> int:
        """The most minutes of sessions in it."""
        return min((self.end - self.start, *(period.minutes for period in self.periods)))


class OpenWindow(NamedTuple):
    """A rolling quota with what was used of it."""

    window: int
    minutes: int
    used: tuple[Span, ...]

    @property
    def blocked_until(self) -> int:
        """Where more was used than the quota allows, nothing is planned until it has left the window."""
        until = 0
        for _, last in self.used:
            if self.used_within((last - self.window, last)) > self.minutes:
                until = max(until, last + self.window)
        return until

    def used_within(self, span: Span) -> int:
        return sum(overlap(used, span) for used in self.used)


class OpenPlace(NamedTuple):
    """A place with what is left of it."""

    place: WeekPlace
    quotas: tuple[tuple[QuotaPeriod, ...], ...]
    windows: tuple[OpenWindow, ...]
    cells: tuple[WeekCell, ...]


def open_place_of(problem: WeekProblem, state: WeekState, place: WeekPlace) -> OpenPlace:
    quotas, _ = quota_left(place, state)
    windows = tuple(
        OpenWindow(rolling.window, rolling.minutes, window_use(place, state, rolling.window))
        for rolling in place.rolling
    )
    free = subtract(clip(place.open, (state.now, problem.length)), state.closed.get(place.name, ()))
    for window in windows:
        free = clip(free, (window.blocked_until, problem.length))
    resets = [edge for quota in quotas for period in quota for edge in (period.start, period.end)]
    cells = []
    for lane in range(place.lanes):
        busy = [(s.start, s.end) for s in state.fixed if s.place == place.name and s.lane == lane]
        for begin, end in cut_at(subtract(free, busy), resets):
            start, stop = -(-begin // STEP) * STEP, end // STEP * STEP
            periods = tuple(
                period for quota in quotas for period in quota if period.start <= begin < period.end
            )
            cell = WeekCell(place, lane, start, stop, periods)
            if len(periods) == len(quotas) and cell.usable >= place.overhead + place.shortest:
                cells.append(cell)
    return OpenPlace(place, quotas, windows, tuple(cells))


def start_spans(cell: WeekCell) -> tuple[Span, ...]:
    """When a session of the cell may begin: where somebody is there, if it is started by hand."""
    last = cell.end - cell.place.overhead - cell.place.shortest
    whole = (cell.start, last + 1)
    found = (whole,) if cell.place.starts is None else clip(cell.place.starts, whole)
    aligned = ((-(-begin // STEP) * STEP, (end - 1) // STEP * STEP + 1) for begin, end in found)
    return tuple(span for span in aligned if span[1] > span[0])
