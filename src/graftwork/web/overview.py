"""The first screen: what is live, what runs, what failed last, the steps, and what to do."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from graftwork.api.endpoint import read_endpoint_counts
from graftwork.api.evaluations import read_savings
from graftwork.api.overview import (
    NEEDED_STEPS,
    StepState,
    check_endpoint,
    check_freshness,
    read_overview,
)
from graftwork.api.project import has_project
from graftwork.records.report import Verdict
from graftwork.views.evaluation import view_savings
from graftwork.web.actions import rollback_command
from graftwork.web.rendering import project_of, render

ShownState = Literal["fresh", "done", "stale", "running", "refused", "missing", "waiting"]

LOOKS: dict[ShownState, tuple[str, str]] = {
    "fresh": ("✓", "up to date"),
    "done": ("✓", "done"),
    "stale": ("↻", "out of date"),
    "running": ("▶", "running"),
    "refused": ("✗", "refused"),
    "missing": ("○", "not done yet"),
    "waiting": ("…", "not due"),
}
"""The symbol and the words for a state."""


class ShownStep(NamedTuple):
    step: str
    title: str
    state: ShownState
    sign: str
    words: str
    because: str
    is_cause: bool
    """Whether `because` is its own cause, not only an earlier step that is out of date."""
    finished_at: str | None
    seconds: float | None


def draw_steps(steps: Sequence[StepState], verdict: Verdict | None) -> list[ShownStep]:
    shown = []
    open_steps = {step.step for step in steps if step.state in ("running", "stale", "missing")}
    for step in steps:
        state: ShownState = "waiting" if step.state == "not_due" else step.state
        before = [f"`{name}`" for name in NEEDED_STEPS[step.step] if name in open_steps]
        is_cause = state == "stale" and not before
        because = "; ".join(step.because)
        if before and state == "stale":
            because = f"needs {' and '.join(before)} first"
        if step.step == "gate" and state in ("fresh", "done") and verdict and verdict.decision != "deploy":
            state, because = "refused", f"{verdict.decision.replace('_', ' ')}: {verdict.reason}"
        sign, words = LOOKS[state]
        finished_at, seconds = step.finished_at, step.seconds
        shown.append(
            ShownStep(step.step, step.title, state, sign, words, because, is_cause, finished_at, seconds)
        )
    return shown


WHERE = {
    "audit": "/data",
    "prepare": "/data/sets/latest",
    "plan": "/plan",
    "train": "/runs",
    "evaluate": "/evaluation",
    "gate": "/evaluation#gate",
    "release": "/releases",
    "try": "/captures",
    "report": "/releases",
}


def overview(request: Request) -> Response:
    """`?check=1` compares the steps with their inputs at once, for browsers without JavaScript."""
    if not has_project(request.app.state.root):
        return RedirectResponse("/start", status_code=303)
    project = project_of(request)
    found = read_overview(project)
    steps, fresh = check_freshness(project) if request.query_params.get("check") else (found.steps, None)
    running = next((run for run in found.runs if run.state == "running"), None)
    return render(
        request,
        "overview.html.jinja",
        title=found.project,
        section="/",
        overview=found,
        running=running,
        steps=draw_steps(steps, found.verdict),
        fresh=fresh,
        where=WHERE,
        rollback_command=rollback_command,
        empty=not any(step.finished_at for step in found.steps),
    )


def freshness(request: Request) -> Response:
    """The steps once more, compared with their inputs: a part of the page."""
    project = project_of(request)
    found, (steps, fresh) = read_overview(project), check_freshness(project)
    return render(
        request,
        "part_steps.html.jinja",
        title="Steps",
        overview=found,
        steps=draw_steps(steps, found.verdict),
        fresh=fresh,
        where=WHERE,
    )


def endpoint(request: Request) -> Response:
    """Whether the endpoint answers, with its errors and fallbacks: a part of the page."""
    project = project_of(request)
    found = check_endpoint(project)
    return render(
        request,
        "part_endpoint.html.jinja",
        title="Endpoint",
        endpoint=found,
        counts=read_endpoint_counts(project) if found.state not in ("off", "unknown") else None,
    )


def savings(request: Request) -> Response:
    """What the small model saves a month: a part of the page, because hosting is planned for it."""
    saved = read_savings(project_of(request))
    return render(
        request,
        "part_savings.html.jinja",
        title="Savings",
        savings=None if saved is None else view_savings(saved),
    )


ROUTES = [
    Route("/", overview),
    Route("/parts/steps", freshness),
    Route("/parts/endpoint", endpoint),
    Route("/parts/savings", savings),
]
