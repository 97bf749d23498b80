"""Jobs at other places: the ledger against the caps, places, offers, one job with its log."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graftwork.api import fleet
from graftwork.api.fleet import FleetJobs, RunOffers
from graftwork.records.errors import GraftError
from graftwork.views.document import Document
from graftwork.views.job import view_jobs, view_offers, view_places
from graftwork.web.actions import ActionForm, log_action, read_form, require_allowed
from graftwork.web.rendering import project_of, render

SECTION = "/fleet"
OFFERS_COMMAND = "graft fleet offers --run"


def index(request: Request) -> Response:
    project = project_of(request)
    costs = fleet.read_costs(project)
    return render(
        request,
        "fleet.html.jinja",
        title="Fleet",
        section=SECTION,
        costs=costs,
        jobs=view_jobs(FleetJobs(jobs=costs.lines[::-1])) if costs.lines else Document(),
        places=view_places(fleet.ask_places(project)) if request.query_params.get("ask") else None,
        names=fleet.name_places(project),
        hosts=project.settings.fleet.hosts,
    )


def places(request: Request) -> Response:
    """A part of the page: asking places may take seconds."""
    found = view_places(fleet.ask_places(project_of(request)))
    return render(request, "part_places.html.jinja", title="Places", places=found)


def offers(request: Request) -> Response:
    """The form: submitting updates the pipeline up to the plan and queries every place."""
    return _show_offers(request, None)


async def ask_offers(request: Request) -> Response:
    form = await read_form(request)
    return await run_in_threadpool(lambda: _ask_offers(request, form))


def _ask_offers(request: Request, form: ActionForm) -> Response:
    require_allowed(request)
    try:
        found = fleet.ask_offers(form.project)
    except GraftError as error:
        log_action(form, "offers", OFFERS_COMMAND, outcome=f"refused: {error.what}")
        raise
    log_action(form, "offers", OFFERS_COMMAND, outcome=f"{len(found.quotes)} offers")
    return _show_offers(request, found)


def _show_offers(request: Request, found: RunOffers | None) -> Response:
    return render(
        request,
        "offers.html.jinja",
        title="Offers",
        section=SECTION,
        offers=found,
        viewed=view_offers(found) if found is not None else None,
        command=OFFERS_COMMAND,
    )


def job(request: Request) -> Response:
    view = fleet.read_job(project_of(request), request.path_params["job"])
    return render(
        request, "job.html.jinja", title=f"Job {view.job.id}", section=SECTION, view=view, job=view.job
    )


ROUTES = [
    Route("/fleet", index),
    Route("/parts/places", places),
    Route("/fleet/offers", offers),
    Route("/fleet/offers", ask_offers, methods=["POST"]),
    Route("/fleet/{job}", job),
]
