"""The first screen: what is live, what runs, what failed last and what to do."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graftwork.api.endpoint import read_endpoint_counts
from graftwork.api.overview import Freshness, Overview, check_endpoint, check_freshness, read_overview
from graftwork.web.actions import rollback_command
from graftwork.web.rendering import project_of, render
from graftwork.web.views.pipeline_diagram import draw_steps

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
        empty=_is_empty(found),
    )


def _is_empty(found: Overview) -> bool:
    return not any(step.finished_at for step in found.steps)


def freshness(request: Request) -> Response:
    """The steps once more, compared with their inputs: a part of the page."""
    project = project_of(request)
    found, fresh = read_overview(project), _check(request)
    return render(
        request,
        "part_steps.html.jinja",
        title="Steps",
        overview=found,
        steps=draw_steps(found.steps, found.verdict, fresh),
        fresh=fresh,
        where=WHERE,
    )


def _check(request: Request) -> Freshness:
    return check_freshness(project_of(request))


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
