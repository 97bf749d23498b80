"""The week as a problem: places with their rules, models with their curves, what has happened so far.

Input: values; times are minutes since the start of the week. Output: frozen records, checked against each
other; the cells in which sessions can be: spans of a place that no reset divides, with what is left of the
quotas, on the grid of the planners, so that a session that would run across a reset is two; the curves of
models, fitted to the losses of runs; and what sessions are worth: hours of each model, hours it inherits,
points of the objective, cost.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from difflib import get_close_matches
from itertools import pairwise
from statistics import StatisticsError, fmean, linear_regression
from typing import Literal, NamedTuple, Self

from pydantic import Field, model_validator

from graftwork.records.base import Record
from graftwork.records.errors import UserError
from graftwork.records.week import Scenario, ScenarioResult, Session
from graftwork.week.calendar import Span, clip, cut_at, overlap, subtract

STEP = 5
"""Minutes: sessions begin and end at multiples of this."""


class GainCurve(Record):
    """Diminishing returns: each `half_hours` gain half of the remaining gain."""

    half_hours: float = Field(gt=0)
    source: str = "default"

    def learned(self, hours: float) -> float:
        return 1 - 2 ** (-hours / self.half_hours)

    def slope(self, hours: float) -> float:
        """Slope of `learned`, per hour."""
        return math.log(2) / self.half_hours * 2 ** (-hours / self.half_hours)


class QuotaPeriod(Record):
    """At most this many minutes of sessions between two resets."""

    start: int
    end: int
    minutes: int


class RollingQuota(Record):
    """At most this many minutes of sessions in any window of this length."""

    window: int
    minutes: int


class WeekPlace(Record):
    """A place: its speed, times and price."""

    name: str
    speed: float = 1.0
    """Training per hour, in hours of the reference place."""
    speeds: dict[str, float] = {}
    """The same for single models; 0: not at this place."""
    lanes: int = 1
    """Parallel sessions."""
    open: tuple[Span, ...]
    """A session lies within one of these."""
    starts: tuple[Span, ...] | None = None
    """A session begins within one of these; None: any time."""
    periods: tuple[tuple[QuotaPeriod, ...], ...] = ()
    """One tuple for each quota."""
    rolling: tuple[RollingQuota, ...] = ()
    longest: int | None = None
    """Longest session, with setup and transfer."""
    shortest: int = 60
    """Shortest training in a session."""
    setup: int = 0
    transfer: int = 0
    """Time to fetch the checkpoint, and again to save it."""
    usd_per_hour: float = 0.0
    by_hand: bool = False

    @model_validator(mode="after")
    def _is_on_the_grid(self) -> Self:
        if any(minutes % STEP for minutes in (self.setup, self.transfer, self.shortest)):
            raise ValueError(f"set-up, transfer and shortest training are multiples of {STEP} minutes")
        return self

    @property
    def overhead(self) -> int:
        return self.setup + 2 * self.transfer

    def speed_of(self, model: str) -> float:
        """On the planners' grid: thousandths."""
        return round(self.speeds.get(model, self.speed), 3)


class WeekModel(Record):
    """A model: its value, its curve, its dependencies."""

    name: str
    weight: float = Field(1.0, gt=0)
    curve: GainCurve
    done_hours: float = 0.0
    """Reference hours before this week."""
    least_hours: float = 0.0
    most_hours: float | None = None
    deadline: int | None = None
    """Its last session and gate end by then."""
    after: tuple[str, ...] = ()
    """Models that must have been trained, and gated, first."""
    gate: int = 0
    """Minutes from the last session until others may depend on the model."""
    inherits: str | None = None
    """The model whose adapter it starts from."""
    share: float = 0.0
    """Share of the other model's hours that counts for this one; at most as many as it trains from there on.
    """
    carry: float = 1.0
    """Share of its own earlier hours that counts after it has moved to the other model's next adapter."""


class WeekProblem(Record):
    """Everything that a plan depends on, except past events."""

    start: datetime
    length: int
    timezone: str = "UTC"
    places: tuple[WeekPlace, ...]
    models: tuple[WeekModel, ...]
    cap_usd: float | None = None
    reference: str = ""
    """The place that hours of training refer to."""
    assumptions: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _names_are_known(self) -> Self:
        models = [model.name for model in self.models]
        for model in self.models:
            for name in (*model.after, *((model.inherits,) if model.inherits else ())):
                require_name(name, models, kind="model", where=f"plan.week.models.{model.name}")
        for provider in self.places:
            for name in provider.speeds:
                require_name(name, models, kind="model", where=f"fleet.places.{provider.name}")
        # Models that wait for each other could never start.
        waits = {model.name: {*model.after, *filter(None, (model.inherits,))} for model in self.models}
        while ready := [name for name, needed in waits.items() if not needed & waits.keys()]:
            for name in ready:
                del waits[name]
        if waits:
            raise UserError(
                f"these models wait for each other: {', '.join(sorted(waits))}",
                why="each would have to be trained before the other",
                fix="remove one of their `after` or `starts_from`",
                where="plan.week.models",
            )
        return self

    def place(self, name: str) -> WeekPlace:
        for provider in self.places:
            if provider.name == name:
                return provider
        raise unknown_name(name, [provider.name for provider in self.places], kind="place", where=name)

    def model(self, name: str) -> WeekModel:
        for model in self.models:
            if model.name == name:
                return model
        raise unknown_name(name, [model.name for model in self.models], kind="model", where=name)

    @property
    def total_weight(self) -> float:
        return sum(model.weight for model in self.models)


def require_name(name: str, names: Iterable[str], *, kind: str, where: str) -> None:
    """Refuse an unknown name, and suggest the nearest known one."""
    listed = list(names)
    if name not in listed:
        raise unknown_name(name, listed, kind=kind, where=where)


def unknown_name(name: str, names: Sequence[str], *, kind: str, where: str) -> UserError:
    near = get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names) or 'none'}"
    return UserError(f"there is no {kind} {name!r}", fix=hint, where=where)


class QuotaReading(Record):
    """The place's own figure for its quota: used since the last reset, or within its window."""

    place: str
    at: int
    used: int
    """Minutes."""


class WeekState(Record):
    """State of the week at this time."""

    now: int = 0
    fixed: tuple[Session, ...] = ()
    """Past and running sessions, with their actual or expected ends."""
    readings: tuple[QuotaReading, ...] = ()
    closed: dict[str, tuple[Span, ...]] = {}
    """Times when places cannot be used, besides those in their settings."""
    failed_gates: dict[str, int] = {}
    """Models that failed their gate: what depends on them waits for another session of theirs."""
    complete: frozenset[str] = frozenset()
    """Models whose run is complete: no hour is planned for them."""
    spent_usd: float = 0.0
    """By the ledger, since the start of the week; sessions outside of the plan count too."""


class Effort(Record):
    """How long to search."""

    seconds: float = Field(30.0, gt=0)
    workers: int = Field(2, ge=1)
    scenario: Scenario | Literal["auto"] = "auto"
    what_if: bool = True
    """Also solve with an hour or some dollars more, and with other curves."""
    enough: float = Field(0.005, ge=0)
    """Stop at this gap."""
    seed: int = 0


def as_scenario(problem: WeekProblem, scenario: Scenario) -> WeekProblem:
    """The problem of one strategy: parallel models start from the base and inherit nothing."""
    if scenario != "parallel":
        return problem
    return with_models(problem, lambda _: {"inherits": None, "share": 0.0})


def with_models(problem: WeekProblem, change: Callable[[WeekModel], dict[str, object]]) -> WeekProblem:
    """The problem with each model changed by `change`."""
    models = tuple(model.model_copy(update=change(model)) for model in problem.models)
    return problem.model_copy(update={"models": models})


def without_complete(problem: WeekProblem, state: WeekState) -> WeekProblem:
    """Models with a complete run get no further hours."""
    none: dict[str, object] = {"least_hours": 0.0, "most_hours": 0.0}
    return with_models(problem, lambda model: none if model.name in state.complete else {})


def rounds_of(problem: WeekProblem, scenario: Scenario) -> dict[str, tuple[int, ...]]:
    """The rounds of each model: a session builds on the parent's sessions of earlier rounds. In sequence,
    each model has the round after its parent's. Iterative models have two: heirs begin at the base and move
    to the parent's adapter once.
    """
    depth: dict[str, int] = {}
    while len(depth) < len(problem.models):
        for model in problem.models:
            if model.inherits is None:
                depth[model.name] = 0
            elif model.inherits in depth:
                depth[model.name] = depth[model.inherits] + 1
    if scenario == "parallel":
        return dict.fromkeys(depth, (0,))
    if scenario == "sequential":
        return {name: (level,) for name, level in depth.items()}
    return dict.fromkeys(depth, (0, 1))


def in_rounds(state: WeekState, rounds: Mapping[str, tuple[int, ...]]) -> WeekState:
    """Past sessions in the rounds of the scenario: they may have been planned in another one."""
    fixed = tuple(
        session.model_copy(
            update={"round": min(max(session.round, rounds[session.model][0]), rounds[session.model][-1])}
        )
        for session in state.fixed
    )
    return state.model_copy(update={"fixed": fixed})


def scenarios_of(problem: WeekProblem) -> tuple[Scenario, ...]:
    """If no model starts from another, there is only one strategy."""
    if not any(model.inherits for model in problem.models):
        return ("parallel",)
    return ("parallel", "sequential", "iterative")


def quota_left(
    provider: WeekPlace, state: WeekState
) -> tuple[tuple[tuple[QuotaPeriod, ...], ...], list[str]]:
    """The quotas less usage, and notes on readings that contradict each other. A reading replaces what is
    known of sessions before it. One that is lower than an earlier one of the same period is rejected: hours
    are never returned.
    """
    notes: list[str] = []
    fixed = [session for session in state.fixed if session.place == provider.name]
    readings = sorted((r for r in state.readings if r.place == provider.name), key=lambda r: r.at)
    quotas = []
    for quota in provider.periods:
        remaining = []
        for period in quota:
            used, since = 0, -math.inf
            for reading in readings:
                if period.start <= reading.at < period.end:
                    if reading.used < used:
                        notes.append(
                            f"{provider.name}: a quota reading of {reading.used / 60:.1f} h comes after one "
                            f"of {used / 60:.1f} h in the same period; the larger one counts"
                        )
                    used, since = max(used, reading.used), reading.at
            for session in fixed:
                counted_from = max(session.start, period.start, since)
                used += max(0, math.ceil(min(session.end, period.end) - counted_from))
            remaining.append(period.model_copy(update={"minutes": max(0, period.minutes - used)}))
        quotas.append(tuple(remaining))
    return tuple(quotas), notes


def _believed(provider: WeekPlace, state: WeekState) -> tuple[list[QuotaReading], list[str]]:
    """Plausible readings of a rolling quota: one does not fall faster than time leaves the window."""
    believed: list[QuotaReading] = []
    notes: list[str] = []
    for reading in sorted((r for r in state.readings if r.place == provider.name), key=lambda r: r.at):
        least = believed[-1].used - provider.lanes * (reading.at - believed[-1].at) if believed else 0
        if reading.used < least:
            notes.append(
                f"{provider.name}: a quota reading of {reading.used / 60:.1f} h comes too soon after one of "
                f"{believed[-1].used / 60:.1f} h: at least {least / 60:.1f} h count"
            )
        believed.append(reading.model_copy(update={"used": max(reading.used, least)}))
    return believed, notes


def reading_notes(provider: WeekPlace, state: WeekState) -> list[str]:
    """Notes on readings that contradict each other."""
    return [*quota_left(provider, state)[1], *(_believed(provider, state)[1] if provider.rolling else ())]


def window_use(provider: WeekPlace, state: WeekState, window: int) -> tuple[Span, ...]:
    """Usage of a rolling quota, as spans of time. A reading replaces what is known of the time before it. If
    it exceeds the known sessions, the excess was used at an unknown time: it counts as used just before the
    reading, which is when it counts longest. If it is lower, the earliest sessions did not count.
    """
    spans = [(s.start, s.end) for s in state.fixed if s.place == provider.name]
    for reading in _believed(provider, state)[0]:
        later = clip(spans, (reading.at, max((end for _, end in spans), default=reading.at)))
        unexplained, used_spans = reading.used, []
        for start, end in sorted(clip(spans, (reading.at - window, reading.at)), reverse=True):
            size = min(end - start, unexplained)
            unexplained -= size
            used_spans.append((end - size, end))
        spans = [*(span for span in used_spans if span[1] > span[0]), *later]
        if unexplained > 0:
            spans.append((reading.at - unexplained, reading.at))
    return tuple(sorted(spans))


def own_hours(problem: WeekProblem, sessions: Iterable[Session]) -> Mapping[tuple[str, int], float]:
    """Reference hours of each model and round."""
    hours: dict[tuple[str, int], float] = {}
    for session in sessions:
        speed = problem.place(session.place).speed_of(session.model)
        key = (session.model, session.round)
        hours[key] = hours.get(key, 0.0) + session.train * speed / 60
    return hours


class WeekCell(NamedTuple):
    place: WeekPlace
    lane: int
    start: int
    end: int
    periods: tuple[QuotaPeriod, ...]
    """Period of each quota that contains the cell."""

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
        """If more was used than the quota allows, nothing is planned until it has left the window."""
        until = 0
        for _, last in self.used:
            if self.used_within((last - self.window, last)) > self.minutes:
                until = max(until, last + self.window)
        return until

    def used_within(self, span: Span) -> int:
        return sum(overlap(used, span) for used in self.used)


class OpenPlace(NamedTuple):
    """A place with its remaining capacity."""

    place: WeekPlace
    quotas: tuple[tuple[QuotaPeriod, ...], ...]
    windows: tuple[OpenWindow, ...]
    cells: tuple[WeekCell, ...]


def open_place_of(problem: WeekProblem, state: WeekState, provider: WeekPlace) -> OpenPlace:
    quotas, _ = quota_left(provider, state)
    windows = tuple(
        OpenWindow(rolling.window, rolling.minutes, window_use(provider, state, rolling.window))
        for rolling in provider.rolling
    )
    free = subtract(clip(provider.open, (state.now, problem.length)), state.closed.get(provider.name, ()))
    for window in windows:
        free = clip(free, (window.blocked_until, problem.length))
    resets = [edge for quota in quotas for period in quota for edge in (period.start, period.end)]
    cells = []
    for lane in range(provider.lanes):
        busy = [(s.start, s.end) for s in state.fixed if s.place == provider.name and s.lane == lane]
        for opens, end in cut_at(subtract(free, busy), resets):
            start, stop = -(-opens // STEP) * STEP, end // STEP * STEP
            periods = tuple(
                period for quota in quotas for period in quota if period.start <= opens < period.end
            )
            cell = WeekCell(provider, lane, start, stop, periods)
            if len(periods) == len(quotas) and cell.usable >= provider.overhead + provider.shortest:
                cells.append(cell)
    return OpenPlace(provider, quotas, windows, tuple(cells))


def start_spans(cell: WeekCell) -> tuple[Span, ...]:
    """Times when a session of the cell may begin: when somebody is present, if it is started by hand."""
    last = cell.end - cell.place.overhead - cell.place.shortest
    whole = (cell.start, last + 1)
    spans = (whole,) if cell.place.starts is None else clip(cell.place.starts, whole)
    aligned = ((-(-opens // STEP) * STEP, (end - 1) // STEP * STEP + 1) for opens, end in spans)
    return tuple(span for span in aligned if span[1] > span[0])


POINTS = 100.0


class ModelScore(NamedTuple):
    own: float
    """Hours of training in the week."""
    kept: float
    """Those that count: some are lost with each move to another adapter."""
    inherited: float
    before: float
    """Share of the possible gain before the week."""
    after: float
    value: float

    @property
    def hours(self) -> float:
        return self.kept + self.inherited


class WeekScore(NamedTuple):
    value: float
    cost_usd: float
    models: dict[str, ModelScore]

    @property
    def least(self) -> float:
        """The share that the worst-off model has learned: fairness."""
        return min((model.after for model in self.models.values()), default=0.0)


class ScenarioPlan(NamedTuple):
    """The best plan of one scenario."""

    problem: WeekProblem
    sessions: tuple[Session, ...]
    score: WeekScore
    result: ScenarioResult


def score(problem: WeekProblem, sessions: Iterable[Session]) -> WeekScore:
    listed = list(sessions)
    hours = own_hours(problem, listed)
    models = {model.name: score_model(problem, model, hours) for model in problem.models}
    return WeekScore(
        value=sum(model.value for model in models.values()), cost_usd=cost_of(problem, listed), models=models
    )


def cost_of(problem: WeekProblem, sessions: Iterable[Session]) -> float:
    return sum(
        problem.place(session.place).usd_per_hour * (session.end - session.start) / 60 for session in sessions
    )


def spent_so_far(problem: WeekProblem, state: WeekState) -> float:
    """Dollars in the week: by past and running sessions, or by the ledger if that is more."""
    return max(cost_of(problem, state.fixed), state.spent_usd)


def score_model(problem: WeekProblem, model: WeekModel, hours: Mapping[tuple[str, int], float]) -> ModelScore:
    own_hours_by_round = {
        number: value for (name, number), value in hours.items() if name == model.name and value > 0
    }
    last = max(own_hours_by_round, default=0)
    kept_hours = sum(
        value if number == last else model.carry * value for number, value in own_hours_by_round.items()
    )
    inherited = inherited_hours(model, own_hours_by_round, hours)
    before = model.curve.learned(model.done_hours)
    after = model.curve.learned(model.done_hours + kept_hours + inherited)
    value = POINTS * model.weight / problem.total_weight * (after - before)
    return ModelScore(sum(own_hours_by_round.values()), kept_hours, inherited, before, after, value)


def inherited_hours(
    model: WeekModel, hours_by_round: Mapping[int, float], hours: Mapping[tuple[str, int], float]
) -> float:
    """A share of the parent's hours of each earlier round, at most as many as are trained from there on."""
    if model.inherits is None or model.share <= 0:
        return 0.0
    inherited = trained = 0.0
    for number in range(max(hours_by_round, default=0), 0, -1):
        trained += hours_by_round.get(number, 0.0)
        inherited += min(model.share * hours.get((model.inherits, number - 1), 0.0), trained - inherited)
    return inherited


def marginal(problem: WeekProblem, model: WeekModel, hours: float) -> float:
    """Points of one more reference hour."""
    weight = POINTS * model.weight / problem.total_weight
    return weight * model.curve.slope(model.done_hours + hours)


FEWEST_POINTS = 6
GRID = 60
BINS = 16


def bin_losses(hours: Sequence[float], losses: Sequence[float]) -> list[tuple[float, float]]:
    """Means of consecutive steps: single losses are noise."""
    count = len(hours)
    edges = [round(number * count / BINS) for number in range(BINS + 1)]
    return [(fmean(hours[a:b]), fmean(losses[a:b])) for a, b in pairwise(edges) if b > a]


def fit_half_hours(points: Sequence[tuple[float, float]], *, least: float = 0.5) -> float | None:
    """Least squares for `floor + drop * 2 ** (-hours / half)`; the drop must be positive. None if the curve
    explains less than this share of the variance of the losses.
    """
    usable = [(h, loss) for h, loss in points if math.isfinite(h) and math.isfinite(loss)]
    if len(usable) < FEWEST_POINTS:
        return None
    span = max(h for h, _ in usable) - min(h for h, _ in usable)
    mean = fmean(loss for _, loss in usable)
    spread = sum((loss - mean) ** 2 for _, loss in usable)
    if span <= 0 or spread <= 0:
        return None
    losses = [loss for _, loss in usable]
    best, explained = 0.0, -math.inf
    for number in range(GRID):
        half = span / 20 * 200 ** (number / (GRID - 1))
        fractions = [2 ** (-h / half) for h, _ in usable]
        try:
            slope, base = linear_regression(fractions, losses)
        except StatisticsError:
            continue
        if slope > 0:
            error = sum((y - base - slope * x) ** 2 for x, y in zip(fractions, losses, strict=True))
            if 1 - error / spread > explained:
                best, explained = half, 1 - error / spread
    return best if explained >= least else None
