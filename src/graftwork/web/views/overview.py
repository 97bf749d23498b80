"""The first screen: what is live, what runs, what failed last, the steps, and what to do."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graftwork.api.endpoint import read_endpoint_counts
from graftwork.api.overview import (
    Freshness,
    StepGlance,
    check_endpoint,
    check_freshness,
    read_overview,
)
from graftwork.records.report import Verdict
from graftwork.web.actions import rollback_command
from graftwork.web.rendering import project_of, render

ShownState = Literal["fresh", "done", "stale", "running", "refused", "missing", "waiting"]

SIGNS: dict[ShownState, str] = {
    "fresh": "✓",
    "done": "✓",
    "stale": "↻",
    "running": "▶",
    "refused": "✗",
    "missing": "○",
    "waiting": "…",
}
WORDS: dict[ShownState, str] = {
    "fresh": "up to date",
    "done": "done",
    "stale": "out of date",
    "running": "running",
    "refused": "refused",
    "missing": "not done yet",
    "waiting": "not due",
}


class ShownStep(NamedTuple):
    step: str
    title: str
    state: ShownState
    sign: str
    words: str
    because: str
    is_cause: bool
    """Whether `because` is a cause of its own, not only an earlier step that is out of date."""
    finished_at: str | None
    seconds: float | None


def draw_steps(
    glances: Sequence[StepGlance], verdict: Verdict | None, fresh: Freshness | None
) -> list[ShownStep]:
    """Without `fresh` it is only known which steps were done."""
    known = {state.step: state for state in fresh.steps} if fresh is not None else {}
    shown = []
    open_steps = {state.step for state in known.values() if state.state in ("running", "stale", "missing")}
    for glance in glances:
        state: ShownState = "done" if glance.finished_at else "missing"
        because, is_cause = "", False
        examined = known.get(glance.step)
        if examined is not None:
            state = "waiting" if examined.state == "not_due" else examined.state
            before = [f"`{name}`" for name in glance.needs if name in open_steps]
            is_cause = state == "stale" and not before
            because = "; ".join(examined.because)
            if before and state == "stale":
                because = f"needs {' and '.join(before)} first"
        elif glance.only_after_deploy and not glance.finished_at:
            state = "waiting"
        if glance.step == "gate" and state in ("fresh", "done") and verdict and verdict.decision != "deploy":
            state, because = "refused", f"{verdict.decision.replace('_', ' ')}: {verdict.reason}"
        shown.append(
            ShownStep(
                glance.step,
                glance.title,
                state,
                SIGNS[state],
                WORDS[state],
                because,
                is_cause,
                glance.finished_at,
                glance.seconds,
            )
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
    """`?check=1` compares the steps with their inputs at once, for browsers without script."""
    project = project_of(request)
    found = read_overview(project)
    fresh = check_freshness(project) if request.query_params.get("check") else None
    running = next((run for run in found.runs if run.state == "running"), None)
    return render(
        request,
        "overview.html.jinja",
        title=found.project,
        section="/",
        overview=found,
        running=running,
        steps=draw_steps(found.steps, found.verdict, fresh),
        fresh=fresh,
        where=WHERE,
        rollback_command=rollback_command,
        empty=not any(step.finished_at for step in found.steps),
    )


def freshness(request: Request) -> Response:
    """The steps once more, compared with their inputs: a part of the page."""
    project = project_of(request)
    found, fresh = read_overview(project), check_freshness(project_of(request))
    return render(
        request,
        "part_steps.html.jinja",
        title="Steps",
        overview=found,
        steps=draw_steps(found.steps, found.verdict, fresh),
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


ROUTES = [
    Route("/", overview),
    Route("/parts/steps", freshness),
    Route("/parts/endpoint", endpoint),
]
