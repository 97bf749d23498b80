"""The week: which sessions run where and when, and the same week under other terms."""

import math
import shlex
from collections.abc import Sequence
from datetime import timedelta

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graftwork.api.week import (
    WEEK_FILE,
    GanttSession,
    GanttWeek,
    WeekDial,
    WeekTerms,
    list_terms,
    read_week,
    try_terms,
)
from graftwork.records.errors import GraftError, UserMistake
from graftwork.records.week import Scenario, WeekSchedule
from graftwork.report.svg import Scale, drawing, element, label, line
from graftwork.web.rendering import project_of, render
from graftwork.web.views.forms import text_in

SECTION = "/week"
SCENARIO_NAMES: tuple[Scenario, ...] = ("sequential", "parallel", "iterative")
SCENARIOS = ("", *SCENARIO_NAMES)
LANE, LEFT, TOP = 34.0, 130.0, 26.0
USUAL_SECONDS = 3.0


def index(request: Request) -> Response:
    week = read_week(project_of(request))
    scenario, seconds = text_in(request, "scenario"), text_in(request, "seconds")
    command = ["graft", "plan", "week", "--out", WEEK_FILE]
    command += ["--scenario", scenario] if scenario in SCENARIOS[1:] else []
    command += ["--seconds", seconds] if seconds.isdecimal() else []
    return render(
        request,
        "week.html.jinja",
        title="Week",
        section=SECTION,
        week=week,
        figure=draw_week(week) if week else None,
        narrow=draw_week(week, width=420) if week else None,
        command=shlex.join(command),
        scenario=scenario,
        scenarios=SCENARIOS,
        seconds=seconds,
    )


def attempt(request: Request) -> Response:
    """The sliders; with `?try=1`, the week planned again under the terms in the address."""
    project = project_of(request)
    trial, error, dials = None, None, tuple[WeekDial, ...]()
    try:
        dials = list_terms(project)
    except GraftError as refused:
        error = refused
    texts = {dial.name: text_in(request, dial.name) for dial in dials}
    seconds, scenario = text_in(request, "seconds"), text_in(request, "scenario")
    if error is None and request.query_params.get("try"):
        try:
            trial = try_terms(
                project,
                read_terms(dials, texts),
                seconds=_number(seconds, "Seconds of search") if seconds else USUAL_SECONDS,
                scenario=_scenario(scenario),
            )
        except GraftError as refused:
            error = refused
    shown = trial.after or trial.before if trial else None
    return render(
        request,
        "week_try.html.jinja",
        title="What if",
        section=SECTION,
        dials=[(dial, texts[dial.name] or f"{dial.now:g}") for dial in dials],
        trial=trial,
        shown=shown,
        rows=compare_models(trial.before, shown) if trial and shown else [],
        figure=draw_week(_as_gantt(shown)) if shown else None,
        narrow=draw_week(_as_gantt(shown), width=420) if shown else None,
        error=error,
        scenario=scenario,
        scenarios=SCENARIOS,
        seconds=seconds or f"{USUAL_SECONDS:g}",
    )


def read_terms(dials: Sequence[WeekDial], texts: dict[str, str]) -> WeekTerms:
    """What differs from the week as it is. Zero is a value like others."""
    found: dict[str, float] = {}
    for dial in dials:
        if texts[dial.name]:
            value = _number(texts[dial.name], dial.label)
            if value < dial.least:
                raise UserMistake(
                    f"{dial.label} is {value:g}",
                    why=f"it is {dial.least:g} or more",
                    fix=f"enter {dial.least:g} or more",
                )
            if not math.isclose(value, dial.now, rel_tol=1e-6, abs_tol=1e-6):
                found[dial.name] = value
    parts: dict[str, dict[str, float]] = {kind: {} for kind in ("hours", "priority")}
    for name, value in found.items():
        kind, dot, which = name.partition(".")
        if dot:
            parts[kind][which] = value
    return WeekTerms(
        spend_usd=found.get("spend"),
        gate_minutes=found.get("gate"),
        hours=parts["hours"],
        priority=parts["priority"],
    )


def _number(text: str, label: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserMistake(f"{label} is {text!r}", why="it must be a number", fix="enter a number")
    return value


def _scenario(name: str) -> Scenario | None:
    return next((known for known in SCENARIO_NAMES if known == name), None)


def compare_models(before: WeekSchedule, after: WeekSchedule) -> list[tuple[str, float, float, float]]:
    """Hours of each model before and after, and how much of what can be gained it has learned then."""
    hours = {model.model: model.hours for model in before.models}
    return [(m.model, hours.get(m.model, 0.0), m.hours, m.learned_after) for m in after.models]


def _as_gantt(schedule: WeekSchedule) -> GanttWeek:
    return GanttWeek.model_validate(schedule.model_dump())


def draw_week(week: GanttWeek, *, width: float = 980) -> Markup:
    """A row for each lane of a place, a bar for each session."""
    places = list(dict.fromkeys(session.place for session in week.sessions))
    lanes = sorted(
        {(session.place, session.lane) for session in week.sessions},
        key=lambda lane: (places.index(lane[0]), lane[1]),
    )
    left = LEFT if width > 600 else 84.0
    height = TOP + LANE * max(len(lanes), 1) + 8
    x = Scale(week.start.timestamp(), week.end.timestamp(), left, width - 4)
    parts = _draw_days(week, x, height=height, short=width < 600)
    models = list(dict.fromkeys(session.model for session in week.sessions))
    for row, (place, lane) in enumerate(lanes):
        y = TOP + row * LANE
        name = place if lane == 0 else f"{place} {lane + 1}"
        parts.append(label(_cut(name, 18 if width > 600 else 11), x=0, y=y + 21, class_="name"))
        parts.append(line(left, y + LANE, width - 4, y + LANE, class_="grid"))
        for session in week.sessions:
            if (session.place, session.lane) == (place, lane):
                parts += _draw_session(session, models, x, y)
    described = f"{len(week.sessions)} sessions at {len(places)} places"
    return drawing(
        *parts, width=width, height=height, title="The week", description=described, class_="gantt"
    )


def _draw_days(week: GanttWeek, x: Scale, *, height: float, short: bool) -> list[Markup]:
    parts, day = [], week.start
    while day <= week.end:
        at = x(day.timestamp())
        parts.append(line(at, TOP - 4, at, height - 6, class_="grid"))
        if day < week.end:
            parts.append(label(day.strftime("%a")[: 2 if short else 3], x=at + 4, y=14, class_="tick"))
        day += timedelta(days=1)
    return parts


def _draw_session(session: GanttSession, models: Sequence[str], x: Scale, y: float) -> list[Markup]:
    start, end = x(session.starts_at.timestamp()), x(session.ends_at.timestamp())
    shade = f"s{models.index(session.model) % 3}"
    bar = element(
        "rect",
        element("title", f"{session.model}: {session.starts_at:%a %H:%M} to {session.ends_at:%a %H:%M}"),
        x=start,
        y=y + 6,
        width=max(end - start, 2.0),
        height=LANE - 12,
        rx=4,
        class_=f"{shade} by-hand" if session.by_hand else shade,
    )
    return [bar]


def _cut(name: str, longest: int) -> str:
    return name if len(name) <= longest else f"{name[: longest - 1]}…"


ROUTES = [Route("/week", index), Route("/week/try", attempt)]
