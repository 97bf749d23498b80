"""The week of a project: its settings as a problem, planned, with the earlier plan and events kept.

Input: an open project, `plan.week`, `fleet.places`, past runs. Output: a `WeekSchedule`; its page and
calendar; what a proposal by hand or the week under other terms is worth. Speeds are the planner's where a
place names a GPU; terms that are not set come from the catalog's place of the same name; how fast models
learn, from the losses of the project's own runs; what the week may cost, from its own limit and the caps of
the fleet.
"""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import NamedTuple
from zoneinfo import ZoneInfo

from pydantic import Field, ValidationError

from graftwork.files.disk import write_atomic
from graftwork.fleet.control import Safety, month_of
from graftwork.fleet.places.manual import ManualPlace
from graftwork.fleet.settings import CapSettings, FleetSettings, PlaceCalendarSettings, QuotaSettings
from graftwork.plan.catalog.prices import list_places
from graftwork.plan.cost import fit_in_brief
from graftwork.plan.fit.project import FitRequest, question_of
from graftwork.plan.settings import WeekModelSettings, WeekSettings
from graftwork.project.folder import ProjectFolder
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.project.settings import FROM_MAIN, ProjectSettings
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, UserError
from graftwork.records.hardware import PlaceTerms
from graftwork.records.run import TrainStep
from graftwork.records.week import (
    DAYS,
    MINUTES_PER_DAY,
    Scenario,
    Session,
    WeekSchedule,
    parse_moment,
    parse_window,
)
from graftwork.store.runs import RunEntry
from graftwork.text.wording import explain_error
from graftwork.train.run_folder import read_steps
from graftwork.views.html import page
from graftwork.views.plan import view_week
from graftwork.week.calendar import (
    Span,
    calendar_text,
    clip,
    intersect,
    minutes_since,
    periods_of,
    spans_of,
    week_end,
    week_start,
)
from graftwork.week.checker import check_week
from graftwork.week.plan import plan_week
from graftwork.week.problem import (
    STEP,
    Effort,
    GainCurve,
    QuotaPeriod,
    RollingQuota,
    WeekModel,
    WeekPlace,
    WeekProblem,
    WeekState,
    as_scenario,
    bin_losses,
    fit_half_hours,
    require_name,
    scenarios_of,
    score,
)
from graftwork.week.replan import WeekEvent, sessions_ahead, state_after

PaidJob = tuple[datetime, float]
"""When a job of the ledger was created, and its dollars as the caps count them."""


class WeekMoney(NamedTuple):
    cap_usd: float
    paid_from: int = 0
    """Minutes: paid places are used from then on."""
    notes: tuple[str, ...] = ()


def list_paid_jobs(project: ProjectFolder) -> tuple[PaidJob, ...]:
    """Creates nothing: a project without a state has no jobs."""
    if not project.state.is_dir():
        return ()
    with use_project(project, NullReporter()) as work:
        return tuple(
            (datetime.fromtimestamp(job.created_at, UTC), job.counted_usd)
            for job in work.jobs.list()
            if job.counted_usd > 0
        )


def week_money(
    caps: CapSettings, limit: float | None, jobs: Sequence[PaidJob], *, start: datetime, length: int
) -> WeekMoney:
    """Dollars for the week. What was spent in it is not subtracted: it counts against them."""
    before = [(created_at, usd) for created_at, usd in jobs if created_at < start]
    project = None if caps.project_usd is None else caps.project_usd - sum(usd for _, usd in before)
    most = min(value for value in (limit, project, caps.month_usd) if value is not None)
    last = start.astimezone(UTC) + timedelta(minutes=length - 1)
    month = month_of(start.timestamp())
    spent = sum(usd for created_at, usd in before if month_of(created_at.timestamp()) == month)
    budget_left = caps.month_usd - spent
    if budget_left >= most:
        return WeekMoney(max(0.0, most))
    note = (
        f"${max(0.0, budget_left):.2f} of fleet.caps.month_usd are left in {month}: "
        f"${spent:.2f} are spent or reserved"
    )
    if month == month_of(last.timestamp()):
        return WeekMoney(max(0.0, budget_left), notes=(note,))
    # The week ends in another month, which has its whole cap.
    turn = minutes_since(start, last.replace(day=1, hour=0, minute=0, second=0, microsecond=0))
    if budget_left >= most * (length - turn) / length:
        return WeekMoney(max(0.0, budget_left), notes=(note,))
    return WeekMoney(max(0.0, most), turn, (f"{note}; paid places are used from {last:%Y-%m}-01 on",))


def longest_paid_minutes(fleet: FleetSettings, usd_per_hour: float) -> int:
    """Longest session at this price whose job stays within fleet.caps.job_usd."""
    safety = Safety(boot_seconds=fleet.boot_minutes * 60, reconcile_seconds=fleet.reconcile_minutes * 60)
    seconds = fleet.caps.job_usd / usd_per_hour * 3600 - safety.reserve_seconds
    return max(0, int(seconds // 60))


Clock = Callable[[Sequence[TrainStep]], list[float]]
"""Reference hours at the end of each step."""


def fit_project_curves(project: ProjectFolder, clock: Clock) -> dict[str, float]:
    """Creates nothing: a project that never ran has no curves."""
    if not (project.state / "runs").is_dir():
        return {}
    halves: dict[str, list[float]] = defaultdict(list)
    with use_project(project, NullReporter()) as work:
        entry = work.ledger.get("prepare")
        folders = (entry.output or {}).get("folders", {}) if entry is not None else {}
        names = {Path(folder).name: model for model, folder in folders.items()}
        for run in work.runs.list():
            model = names.get(_dataset_of(run))
            if model is None or run.state != "done":
                continue
            steps = read_steps(Path(run.folder))
            half_hours = fit_half_hours(bin_losses(clock(steps), [step.loss for step in steps]))
            if half_hours is not None:
                halves[model].append(half_hours)
    return {model: median(fitted) for model, fitted in halves.items()}


def hours_by_tokens(tokens_per_hour: float) -> Clock:
    """Time on the reference place for the tokens of the steps."""

    def clock(steps: Sequence[TrainStep]) -> list[float]:
        return list(accumulate(step.tokens / tokens_per_hour for step in steps))

    return clock


def hours_as_run(steps: Sequence[TrainStep]) -> list[float]:
    """The run's own hours, if unknown how fast the reference place is."""
    return list(accumulate(step.seconds / 3600 for step in steps))


def _dataset_of(run: RunEntry) -> str:
    try:
        job = json.loads((Path(run.folder) / "job.json").read_text())
    except (OSError, ValueError):
        return ""
    return Path(str(job.get("dataset_folder", ""))).name


ROWS, TOKENS = 2000, 1024
"""Rows and tokens of the run whose hours compare the places."""
FROM_BASE = "base"


class WeekRequest(NamedTuple):
    """The user's request."""

    effort: Effort = Effort()
    start: date | None = None
    now: datetime | None = None
    earlier: WeekSchedule | None = None
    events: tuple[WeekEvent, ...] = ()
    only: tuple[str, ...] = ()
    """Places; empty: all."""
    paid: tuple[PaidJob, ...] = ()
    """What the ledger has spent or reserved."""


def plan_project_week(project: ProjectFolder, request: WeekRequest) -> WeekSchedule:
    problem, state = week_as_it_is(project, request)
    ahead = sessions_ahead(request.earlier, state) if request.earlier is not None else ()
    return plan_week(problem, state, request.effort, ahead)


def week_as_it_is(project: ProjectFolder, request: WeekRequest) -> tuple[WeekProblem, WeekState]:
    """The problem, and past events: from the plan so far, the events and the ledger."""
    request = request._replace(paid=list_paid_jobs(project))
    problem = week_problem(project, request)
    return problem, week_state(problem, request)


def week_state(problem: WeekProblem, request: WeekRequest) -> WeekState:
    spent = sum(usd for created_at, usd in request.paid if created_at >= problem.start)
    if request.now is None and request.earlier is None and not request.events:
        return WeekState(spent_usd=spent)
    zone = ZoneInfo(problem.timezone)
    # A reading of today counts for a week that begins later.
    now = request.now or max(datetime.now(tz=UTC), problem.start)
    local = now if now.tzinfo is not None else now.replace(tzinfo=zone)
    state = state_after(problem, request.earlier, request.events, local)
    return state.model_copy(update={"spent_usd": spent})


def week_problem(project: ProjectFolder, request: WeekRequest) -> WeekProblem:
    """The settings of the project as a problem."""
    settings = project.settings
    week = settings.plan.week
    _require_week(settings)
    zone = ZoneInfo(week.timezone)
    day = request.start
    if day is None and request.now is not None:
        now = request.now if request.now.tzinfo is not None else request.now.replace(tzinfo=zone)
        day = now.astimezone(zone).date()
    elif day is None:
        day = datetime.now(tz=zone).date() + timedelta(days=7)
    start = week_start(day, week.timezone, week.starts).astimezone(UTC)
    if request.earlier is not None and request.start is None:
        start = request.earlier.start.astimezone(UTC)
    length = minutes_since(start, week_end(start, week.timezone))
    terms = {provider.name: provider for provider in list_places()}
    reference, speeds, speed_notes = _speeds(project, settings)
    for name in request.only:
        require_name(name, settings.fleet.places, kind="place", where="--only")
    money = week_money(settings.fleet.caps, week.spend_usd, request.paid, start=start, length=length)
    providers = []
    for name, place_settings in settings.fleet.places.items():
        if request.only and name not in request.only:
            continue
        provider = _place(
            name,
            place_settings,
            week,
            terms.get(place_settings.catalog or name),
            speeds[name],
            (start, length),
        )
        if provider.usd_per_hour > 0:
            # A paid place as the caps allow it: no job costs more than one may, none begins too early.
            longest = longest_paid_minutes(settings.fleet, provider.usd_per_hour)
            last = max((end for _, end in provider.open), default=0)
            changes: dict[str, object] = {"open": ()}
            if longest >= provider.overhead + provider.shortest:
                opened = clip(provider.open, (money.paid_from, last))
                changes = {"longest": min(provider.longest or longest, longest), "open": opened}
            provider = provider.model_copy(update=changes)
        providers.append(provider)
    fitted = _fitted(project, settings)
    models = tuple(_model(name, settings, fitted, start) for name in settings.all_models)
    notes = money.notes if any(provider.usd_per_hour > 0 for provider in providers) else ()
    return WeekProblem(
        start=start,
        length=length,
        timezone=week.timezone,
        places=tuple(providers),
        models=models,
        cap_usd=money.cap_usd,
        reference=reference,
        assumptions=(
            *_assumptions(models, reference),
            *speed_notes,
            *_job_caps(settings, providers),
            *notes,
            *_before_the_week(providers, request),
        ),
    )


def _require_week(settings: ProjectSettings) -> None:
    if not settings.fleet.places:
        raise UserError(
            "no place has hours to plan",
            why="`graft plan week` divides the hours of the places under fleet.places",
            fix="add them, as examples/week/graft.yaml does",
            where="fleet.places",
        )
    for name, model in settings.plan.week.models.items():
        where = f"plan.week.models.{name}"
        require_name(name, settings.all_models, kind="model", where="plan.week.models")
        for needed in (*model.after, *(filter(None, [model.starts_from]))):
            if needed != FROM_BASE:
                require_name(needed, settings.all_models, kind="model", where=where)
    for name, provider in settings.fleet.places.items():
        for model_name in provider.models:
            require_name(model_name, settings.all_models, kind="model", where=f"fleet.places.{name}.models")


def _speeds(
    project: ProjectFolder, settings: ProjectSettings
) -> tuple[str, dict[str, dict[str, float]], list[str]]:
    """Hours of the same run at each place, by the planner, against those of the reference place.

    Returns the reference place, the speeds by place and model, and remarks.
    """
    providers = settings.fleet.places
    reference = next(iter(providers))
    bases = {name: _base(project, settings.of_model(name).base) for name in settings.all_models}
    notes: list[str] = []
    by_place: dict[str, dict[str, float]] = {}
    for name, provider in providers.items():
        speeds = {}
        for model, base in bases.items():
            if provider.models and model not in provider.models:
                speeds[model] = 0.0
            elif provider.speed is not None or not provider.gpu:
                speeds[model] = provider.speed or 1.0
            else:
                speeds[model] = _planned_speed(base, provider, providers[reference], settings, notes, name)
        by_place[name] = speeds
    gpu = providers[reference].gpu
    title = f"{reference} ({gpu})" if gpu else reference
    return title, by_place, notes


def _base(project: ProjectFolder, base: str) -> str:
    """A folder of the project, or a name of the catalog."""
    folder = project.root / base
    return str(folder) if (folder / "config.json").is_file() else base


def _planned_speed(
    base: str,
    provider: PlaceCalendarSettings,
    reference: PlaceCalendarSettings,
    settings: ProjectSettings,
    notes: list[str],
    name: str,
) -> float:
    if not reference.gpu:
        raise UserError(
            f"the speed of {name} cannot be compared",
            why="it names a GPU, and the reference place does not",
            fix="give the reference place a gpu too, or give both a speed",
            where=f"fleet.places.{name}",
        )
    own_hours = _hours(base, provider, settings, name)
    if own_hours is None:
        note = f"{base} does not fit {provider.gpu} at {name}: it is not trained there"
        if note not in notes:
            notes.append(note)
        return 0.0
    reference_hours = _hours(base, reference, settings, "the reference place")
    if reference_hours is None:
        raise UserError(
            f"{base} does not fit {reference.gpu} at the reference place",
            fix="put another place first under fleet.places: its hours are the reference hours",
            where="fleet.places",
        )
    return reference_hours / own_hours


def _hours(base: str, provider: PlaceCalendarSettings, settings: ProjectSettings, name: str) -> float | None:
    """Return the hours of a run of the project's method on this GPU; None if it does not fit."""
    train = settings.train
    request = FitRequest(
        model=base, gpu=provider.gpu, gpus=provider.gpus, rows=ROWS, seq=str(TOKENS), epochs=1.0,
        method=train.method, rank=train.rank,
    )  # fmt: skip
    try:
        brief = fit_in_brief(question_of(request))
    except GraftError as error:
        raise UserError(
            f"the speed of {name} cannot be computed: {error.what}",
            why=error.why,
            fix=f"{error.fix}; or set fleet.places.{name}.speed"
            if error.fix
            else f"set fleet.places.{name}.speed",
            where=f"fleet.places.{name}.gpu",
        ) from error
    return brief.hours.value if brief.fits else None


def _place(
    name: str,
    provider: PlaceCalendarSettings,
    week: WeekSettings,
    terms: PlaceTerms | None,
    speeds: Mapping[str, float],
    frame: tuple[datetime, int],
) -> WeekPlace:
    """`frame` is the start of the week and its minutes."""
    start, length = frame
    zone = provider.timezone or week.timezone
    people = spans_of(
        [parse_window(text) for text in week.people], start=start, length=length, zone=week.timezone
    )
    opened: tuple[Span, ...] = ((0, length),)
    if provider.windows:
        windows = [parse_window(text) for text in provider.windows]
        opened = spans_of(windows, start=start, length=length, zone=zone)
    needs_person = (provider.place or name) == ManualPlace.name or (terms and terms.driven_by == "by hand")
    by_hand = provider.by_hand or ("start" if needs_person else "no")
    if by_hand == "whole":
        opened = intersect(opened, people)
    quotas = provider.quotas or _catalog_quotas(terms)
    # Providers reset by UTC.
    resets = zone if provider.quotas else provider.timezone or "UTC"
    setup = (
        provider.setup_minutes
        if provider.setup_minutes is not None
        else (terms.setup_minutes if terms else 0.0)
    )
    session = provider.session_hours or (terms.session_hours if terms else None)
    return WeekPlace(
        name=name,
        speed=max(speeds.values(), default=1.0),
        speeds=dict(speeds),
        lanes=provider.at_once,
        open=opened,
        starts=people if by_hand == "start" else None,
        periods=tuple(_periods(quota, frame, resets) for quota in quotas if quota.per is not None),
        rolling=tuple(
            RollingQuota(window=round(quota.within_hours * 60), minutes=round(quota.hours * 60))
            for quota in quotas
            if quota.within_hours is not None
        ),
        longest=None if session is None else int(session * 60),
        setup=_on_grid(setup),
        transfer=_on_grid(provider.transfer_minutes),
        usd_per_hour=_price(name, provider, terms),
        by_hand=by_hand != "no",
    )


def _job_caps(settings: ProjectSettings, providers: Sequence[WeekPlace]) -> list[str]:
    """Sessions that would be longer without the cap of a job."""
    return [
        f"a session at {provider.name} has at most {provider.longest / 60:.1f} h: more could cost more than "
        f"fleet.caps.job_usd, ${settings.fleet.caps.job_usd:.2f}"
        for provider in providers
        if provider.usd_per_hour > 0
        and provider.longest == longest_paid_minutes(settings.fleet, provider.usd_per_hour)
    ] + [
        f"{provider.name} is not used: fleet.caps.job_usd, ${settings.fleet.caps.job_usd:.2f}, does not pay "
        "for its shortest session"
        for provider in providers
        if provider.usd_per_hour > 0 and not provider.open
    ]


RENTED = ("cloud", "managed")


def _price(name: str, provider: PlaceCalendarSettings, terms: PlaceTerms | None) -> float:
    """Free unless a price is stated; a rented place without a price is not free."""
    if provider.usd_per_hour is None and terms is not None and terms.kind in RENTED:
        raise UserError(
            f"the place {name} has no price",
            why=f"{terms.title} is rented by the hour; without a price a plan would use it for free",
            fix=f"set fleet.places.{name}.usd_per_hour; `graft plan compare` lists prices",
            where=f"fleet.places.{name}",
        )
    return provider.usd_per_hour or 0.0


def _on_grid(minutes: float) -> int:
    return math.ceil(minutes / STEP) * STEP


def _catalog_quotas(terms: PlaceTerms | None) -> tuple[QuotaSettings, ...]:
    if terms is None:
        return ()
    quotas = []
    if terms.free_hours_per_week is not None:
        quotas.append(QuotaSettings(hours=terms.free_hours_per_week, per="week", resets="sat 00:00"))
    if terms.free_hours_per_day is not None:
        quotas.append(QuotaSettings(hours=terms.free_hours_per_day, within_hours=24))
    return tuple(quotas)


def _periods(quota: QuotaSettings, frame: tuple[datetime, int], zone: str) -> tuple[QuotaPeriod, ...]:
    weekday, minute = parse_moment(quota.resets or ("mon 00:00" if quota.per == "week" else "00:00"))
    if quota.per == "week" and weekday is None:
        weekday = 0
    start, length = frame
    spans = periods_of(weekday, minute, start=start, length=length, zone=zone)
    return tuple(QuotaPeriod(start=a, end=b, minutes=round(quota.hours * 60)) for a, b in spans)


HALF_HOURS = 24.0
"""Reference hours until half of the possible gain is reached, for models without runs: an assumption."""
INHERIT = 0.25
"""Share of the main model's hours that counts for a model that starts from it; at most as many as it trains
from there on. An assumption."""
CARRY = 0.5
"""Share of a model's own hours that counts after it moves to the main model's adapter. An assumption."""


def _model(name: str, settings: ProjectSettings, fitted: Mapping[str, float], start: datetime) -> WeekModel:
    week = settings.plan.week
    model = week.models.get(name, WeekModelSettings())
    own_settings = settings.of_model(name)
    parent = model.starts_from
    if parent is None and own_settings.train.start_from == FROM_MAIN and name != settings.main_model:
        parent = settings.main_model
    if parent in (FROM_BASE, name):
        parent = None
    deadline = None
    if model.deadline is not None:
        moment = model.deadline
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=ZoneInfo(week.timezone))
        deadline = max(0, minutes_since(start, moment))
    if model.half_hours is not None:
        curve = GainCurve(half_hours=model.half_hours, source="declared")
    elif name in fitted:
        curve = GainCurve(half_hours=fitted[name], source="fitted from runs")
    else:
        curve = GainCurve(half_hours=HALF_HOURS, source="assumed")
    return WeekModel(
        name=name,
        weight=model.priority,
        curve=curve,
        done_hours=model.done_hours,
        least_hours=model.least_hours,
        most_hours=model.most_hours,
        deadline=deadline,
        after=model.after,
        gate=_on_grid(model.gate_minutes),
        inherits=parent,
        share=INHERIT if parent else 0.0,
        carry=CARRY if parent else 1.0,
    )


def _fitted(project: ProjectFolder, settings: ProjectSettings) -> dict[str, float]:
    """Hours until half is learned, from the project's own runs, for the models that have some."""
    if not (project.state / "runs").is_dir():
        return {}
    providers = settings.fleet.places
    name = next(iter(providers))
    if not providers[name].gpu:
        return fit_project_curves(project, hours_as_run)
    hours = _hours(_base(project, settings.base), providers[name], settings, name)
    return fit_project_curves(project, hours_by_tokens(ROWS * TOKENS / hours)) if hours else {}


def _assumptions(models: Sequence[WeekModel], reference: str) -> list[str]:
    assumptions = [f"an hour of training is an hour of {reference}; other places by the planner's times"]
    assumed = [model.name for model in models if model.curve.source == "assumed"]
    if assumed:
        assumptions.append(f"half of what can be gained is gained in {HALF_HOURS:g} h: {', '.join(assumed)}")
    if any(model.inherits for model in models):
        assumptions.append(
            f"a model that starts from another counts {100 * INHERIT:.0f} % of its hours, at most its "
            f"own from there on; moving there keeps {100 * CARRY:.0f} % of its own earlier hours"
        )
    return assumptions


def _before_the_week(providers: Sequence[WeekPlace], request: WeekRequest) -> list[str]:
    """Quotas that began before the week: what was used of them then is not known here."""
    metered = {event.place for event in request.events if event.kind == "quota"}
    return [
        f"nothing of {provider.name}'s quota was used before the week; --event with a reading says otherwise"
        for provider in providers
        if provider.name not in metered
        and (
            any(rolling.window > MINUTES_PER_DAY for rolling in provider.rolling)
            or any(period.start < 0 < period.end for quota in provider.periods for period in quota)
        )
    ]


def read_schedule(path: Path) -> WeekSchedule:
    """An earlier plan, as `--json` or `--out` wrote it."""
    try:
        return WeekSchedule.from_json(path.read_bytes())
    except OSError as error:
        raise UserError(
            f"{path.name} cannot be read", why=str(error), fix="plan the week again", where=str(path)
        ) from error
    except ValidationError as error:
        raise UserError(
            f"{path.name} is not a planned week",
            why=explain_error(error.errors(include_url=False, include_input=False)[0]),
            fix="specify a file that `graft plan week --out FILE` wrote",
            where=str(path),
        ) from error


EXAMPLE_EVENT = '{"kind": "quota", "at": "2026-11-18T09:00:00Z", "place": "kaggle", "used_hours": 9}'


def read_events(texts: Sequence[str]) -> tuple[WeekEvent, ...]:
    """Events as JSON, or files with one on each line (@events.jsonl)."""
    lines: list[str] = []
    for text in texts:
        if text.startswith("@"):
            try:
                lines += [line for line in Path(text[1:]).read_text().splitlines() if line.strip()]
            except OSError as error:
                raise UserError(
                    f"{text[1:]} cannot be read",
                    why=str(error),
                    fix="check the path and that you may read the file",
                    where="--event",
                ) from error
        else:
            lines.append(text)
    events = []
    for line in lines:
        try:
            events.append(WeekEvent.from_json(line))
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            key = ".".join(str(part) for part in first["loc"])
            raise UserError(
                f"an event cannot be read: {': '.join(filter(None, (key, first['msg'])))}",
                fix=f"write {EXAMPLE_EVENT}",
                where="--event",
            ) from error
    return tuple(events)


def write_schedule(path: Path, schedule: WeekSchedule) -> None:
    write_atomic(path, (json.dumps(schedule.model_dump(mode="json"), indent=2) + "\n").encode())


class ProposedSession(Record):
    """A session as people plan it: `mon 08:00`, four hours."""

    place: str
    model: str
    start: str
    hours: float


class WeekProposal(Record):
    title: str
    sessions: tuple[ProposedSession, ...]


class ComparedProposal(Record):
    """The proposal's value by the objective of the plan."""

    title: str
    sessions: int
    value: float
    cost_usd: float
    scenario: Scenario
    broken: tuple[str, ...]
    plan_value: float
    ahead: float
    """Advantage of the plan, as a share of the proposal."""


def write_files(schedule: WeekSchedule, *, out: Path | None, html: Path | None, ical: Path | None) -> None:
    if out is not None:
        write_schedule(out, schedule)
    if html is not None:
        write_atomic(html, page(view_week(schedule)))
    if ical is not None:
        write_atomic(ical, calendar_text(schedule))


def compare_proposal(
    project: ProjectFolder, request: WeekRequest, schedule: WeekSchedule, path: Path
) -> ComparedProposal:
    """The highest value of the proposal over the scenarios whose training order it follows."""
    try:
        proposal = WeekProposal.from_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(
            f"{path} is not a proposal",
            why=str(error).splitlines()[0],
            fix="write it as examples/week/proposal.json",
            where="--compare",
        ) from error
    problem, state = week_as_it_is(project, request)
    plain = [_session(problem, session) for session in proposal.sessions]
    best: ComparedProposal | None = None
    for scenario in scenarios_of(problem):
        scenario_problem = as_scenario(problem, scenario)
        later = scenario == "sequential"
        sessions = [
            session.model_copy(update={"round": 1})
            if later and scenario_problem.model(session.model).inherits is not None
            else session
            for session in plain
        ]
        worth = score(scenario_problem, sessions)
        compared = ComparedProposal(
            title=proposal.title,
            sessions=len(sessions),
            value=worth.value,
            cost_usd=worth.cost_usd,
            scenario=scenario,
            broken=tuple(check_week(scenario_problem, state, sessions)),
            plan_value=schedule.value,
            ahead=schedule.value / worth.value - 1 if worth.value > 0 else 0.0,
        )
        if best is None or (len(compared.broken), -compared.value) < (len(best.broken), -best.value):
            best = compared
    if best is None:
        raise UserError(
            f"{path} has no sessions",
            why="a schedule without sessions cannot be compared",
            fix='list them under "sessions"',
            where="--compare",
        )
    return best


def _session(problem: WeekProblem, proposed: ProposedSession) -> Session:
    provider = problem.place(proposed.place)
    problem.model(proposed.model)
    try:
        weekday, minute = parse_moment(proposed.start)
    except ValueError as error:
        raise UserError(str(error), fix="write it as `mon 08:00`", where="--compare") from error
    zone = ZoneInfo(problem.timezone)
    first = problem.start.astimezone(zone)
    day = first.date() + timedelta(days=((weekday or 0) - first.weekday()) % len(DAYS))
    local = datetime.combine(day, datetime.min.time(), tzinfo=zone) + timedelta(minutes=minute)
    start = minutes_since(problem.start, local)
    length = round(proposed.hours * 60)
    return Session(
        place=provider.name, model=proposed.model, start=start, end=start + length,
        train=max(0, length - provider.overhead),
    )  # fmt: skip


MOST_SECONDS = 20.0
LEAST_WEIGHT = 0.001
"""Weight of a model that does not count: with zero its hours would be left to chance."""


class WeekTerms(Record):
    """Terms to try. Terms that are not named stay unchanged."""

    spend_usd: float | None = Field(None, ge=0, description="Money for the week.")
    hours: dict[str, float] = Field({}, description="Hours a place has more, or fewer.")
    priority: dict[str, float] = Field({}, description="The weight of a model.")
    gate_minutes: float | None = Field(None, ge=0, description="The time that a gate takes.")

    @property
    def changes_value(self) -> bool:
        """Whether points change their meaning: then values cannot be compared."""
        return bool(self.priority)


class WeekDial(Record):
    """A term that can be varied: its current value and range."""

    name: str
    label: str
    unit: str
    now: float
    least: float
    most: float
    step: float


def list_dials(project: ProjectFolder) -> tuple[WeekDial, ...]:
    """Every term that this week can be tried with."""
    problem, _ = week_as_it_is(project, WeekRequest())
    dials = []
    if problem.cap_usd is not None and any(provider.usd_per_hour > 0 for provider in problem.places):
        most = max(20.0, 3 * problem.cap_usd)
        dials.append(
            WeekDial(
                name="spend",
                label="Money for the week",
                unit="USD",
                now=problem.cap_usd,
                least=0,
                most=most,
                step=_step(problem.cap_usd, 1.0),
            )
        )
    for provider in problem.places:
        # The smallest quota: fewer hours than none cannot be had.
        minutes = [part.minutes for quota in provider.periods for part in quota]
        minutes += [quota.minutes for quota in provider.rolling]
        if provider.periods or provider.rolling:
            dials.append(
                WeekDial(
                    name=f"hours.{provider.name}",
                    label=f"Hours at {provider.name}, more or fewer",
                    unit="h",
                    now=0,
                    least=-math.floor(min(minutes, default=0) / 60 / 0.5) * 0.5,
                    most=24,
                    step=0.5,
                )
            )
    gates = [model.gate for model in problem.models if model.gate]
    if gates:
        dials.append(
            WeekDial(
                name="gate", label="A gate takes", unit="min", now=max(gates), least=0, most=240, step=STEP
            )
        )
    if len(problem.models) > 1:
        dials += [
            WeekDial(
                name=f"priority.{model.name}",
                label=f"Importance of {model.name}",
                unit="",
                now=model.weight,
                least=0,
                most=max(5.0, 2 * model.weight),
                step=_step(model.weight, 0.5),
            )
            for model in problem.models
        ]
    return tuple(dials)


def _step(value: float, usual: float) -> float:
    """A grid that includes the present value: otherwise a slider would move it."""
    return usual if (value / usual).is_integer() else 0.01


def try_week(
    project: ProjectFolder, terms: WeekTerms, *, seconds: float, scenario: Scenario | None = None
) -> tuple[WeekSchedule, WeekSchedule | None]:
    """The week as graft.yaml has it, and under the terms if they change it; each takes `seconds` at most."""
    problem, _ = week_as_it_is(project, WeekRequest())
    effort = Effort(
        seconds=min(max(seconds, 1.0), MOST_SECONDS),
        workers=1,
        scenario=scenario or project.settings.plan.week.scenario,
        what_if=False,
    )
    before = _plan(problem.to_json(), effort.to_json())
    changed = change_terms(problem, terms)
    return before, _plan(changed.to_json(), effort.to_json()) if changed != problem else None


@lru_cache(maxsize=16)
def _plan(problem: str, effort: str) -> WeekSchedule:
    """Cached: sliders are moved back and forth."""
    return plan_week(WeekProblem.from_json(problem), effort=Effort.from_json(effort))


def change_terms(problem: WeekProblem, terms: WeekTerms) -> WeekProblem:
    """The problem under other terms. UserError for an unknown place or model."""
    for name in terms.hours:
        require_name(
            name, {provider.name: provider for provider in problem.places}, kind="place", where="hours"
        )
    for name in terms.priority:
        require_name(name, {model.name: model for model in problem.models}, kind="model", where="priority")
    providers = []
    for provider in problem.places:
        # More hours of every quota; a session may become as much longer.
        more_minutes = round(terms.hours.get(provider.name, 0.0) * 60)
        if more_minutes:
            periods = tuple(
                tuple(
                    part.model_copy(update={"minutes": max(0, part.minutes + more_minutes)}) for part in quota
                )
                for quota in provider.periods
            )
            rolling = tuple(
                quota.model_copy(update={"minutes": min(max(0, quota.minutes + more_minutes), quota.window)})
                for quota in provider.rolling
            )
            providers.append(provider.model_copy(update={"periods": periods, "rolling": rolling}))
        else:
            providers.append(provider)
    models = []
    for model in problem.models:
        weight = max(terms.priority.get(model.name, model.weight), LEAST_WEIGHT)
        gate = model.gate if terms.gate_minutes is None or not model.gate else _on_grid(terms.gate_minutes)
        models.append(model.model_copy(update={"weight": weight, "gate": gate}))
    cap_usd = problem.cap_usd if terms.spend_usd is None else terms.spend_usd
    return problem.model_copy(
        update={"cap_usd": cap_usd, "places": tuple(providers), "models": tuple(models)}
    )
