"""The training cycle: where it is, what waits for a person, what was decided, the last cycles; and the week.

The week is that of the planner: which sessions run where and when, and the same week under other terms.
"""

import shlex
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graftwork.api.cycle import (
    WEEK_FILE,
    WeekDial,
    WeekTerms,
    find_waiting_step,
    list_controls,
    list_terms,
    parse_number,
    read_cycle,
    read_terms,
    read_week,
    try_terms,
)
from graftwork.records.errors import GraftError
from graftwork.records.week import Scenario, WeekSchedule
from graftwork.views.cycle import list_cycles, list_facts
from graftwork.views.document import Document
from graftwork.views.html import body
from graftwork.views.plan import draw_week, list_sessions
from graftwork.web.rendering import project_of, render, text_in

CYCLE = "/cycle"
SIGNS = {"done": "✓", "running": "▶", "failed": "✗", "skipped": "–", "waiting": "·"}
STATES = {
    "done": "fresh",
    "running": "running",
    "failed": "refused",
    "skipped": "missing",
    "waiting": "waiting",
}
"""The style of a step, as in the pipeline on the overview."""


def cycle_page(request: Request) -> Response:
    project = project_of(request)
    status, settings = read_cycle(project), project.settings.cycle
    state = status.state
    return render(
        request,
        "cycle.html.jinja",
        title="Cycle",
        section=CYCLE,
        status=status,
        state=state,
        cycle=state.cycle,
        settings=settings,
        waits_for=find_waiting_step(state, settings),
        controls=list_controls(state),
        signs=SIGNS,
        states=STATES,
        facts_of=list_facts,
        history=Document("Last cycles", [list_cycles(status.history)]),
        begins=describe_triggers(settings),
        command=control_command,
    )


def describe_triggers(settings: Any) -> list[str]:
    """Describe when a cycle begins automatically."""
    found = []
    if settings.schedule:
        found.append(f"at the times of {settings.schedule} ({settings.timezone})")
    if settings.when.new_rows is not None:
        found.append(f"after {settings.when.new_rows:,} new rows")
    if settings.when.drift is not None:
        found.append(f"when {settings.when.drift:.0%} of the live prompts are unlike the training prompts")
    return found


def control_command(action: str, *arguments: str) -> str:
    return shlex.join(["graft", "up", action, *arguments, "--reason", "…"])


WEEK = "/week"
SCENARIO_NAMES: tuple[Scenario, ...] = ("sequential", "parallel", "iterative")
SCENARIOS = ("", *SCENARIO_NAMES)
USUAL_SECONDS = 3.0


def week_page(request: Request) -> Response:
    week = read_week(project_of(request))
    scenario, seconds = text_in(request, "scenario"), text_in(request, "seconds")
    command = ["graft", "plan", "week", "--out", WEEK_FILE]
    command += ["--scenario", scenario] if scenario in SCENARIOS[1:] else []
    command += ["--seconds", seconds] if seconds.isdecimal() else []
    return render(
        request,
        "week.html.jinja",
        title="Week",
        section=WEEK,
        week=week,
        figure=body(Document(parts=[draw_week(week)])) if week else None,
        sessions=body(Document("Sessions", [list_sessions(week)])) if week else None,
        command=shlex.join(command),
        scenario=scenario,
        scenarios=SCENARIOS,
        seconds=seconds,
    )


def try_week(request: Request) -> Response:
    """The sliders; with `?try=1`, the week planned again under the terms in the address."""
    project = project_of(request)
    before, after, error, dials = None, None, None, tuple[WeekDial, ...]()
    terms = WeekTerms()
    try:
        dials = list_terms(project)
    except GraftError as refused:
        error = refused
    texts = {dial.name: text_in(request, dial.name) for dial in dials}
    seconds, scenario = text_in(request, "seconds"), text_in(request, "scenario")
    if error is None and request.query_params.get("try"):
        try:
            terms = read_terms(dials, texts)
            before, after = try_terms(
                project,
                terms,
                seconds=parse_number(seconds, "Seconds of search") if seconds else USUAL_SECONDS,
                scenario=next((known for known in SCENARIO_NAMES if known == scenario), None),
            )
        except GraftError as refused:
            error = refused
    shown = after or before
    return render(
        request,
        "week_try.html.jinja",
        title="What if",
        section=WEEK,
        dials=[(dial, texts[dial.name] or f"{dial.now:g}") for dial in dials],
        before=before,
        after=after,
        comparable=not terms.changes_value,
        shown=shown,
        rows=compare_models(before, shown) if before and shown else [],
        figure=body(Document(parts=[draw_week(shown)])) if shown else None,
        error=error,
        scenario=scenario,
        scenarios=SCENARIOS,
        seconds=seconds or f"{USUAL_SECONDS:g}",
    )


def compare_models(before: WeekSchedule, after: WeekSchedule) -> list[tuple[str, float, float, float]]:
    """Hours of each model before and after, and its learned share of the possible gain."""
    hours = {model.model: model.hours for model in before.models}
    return [(m.model, hours.get(m.model, 0.0), m.hours, m.learned_after) for m in after.models]


ROUTES = [
    Route("/cycle", cycle_page),
    Route("/week", week_page),
    Route("/week/try", try_week),
]
