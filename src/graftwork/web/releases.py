"""Releases: the list, one with its lineage as a graph, two compared, and the report page of a release."""

from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from graftwork.api import releases
from graftwork.views.lineage import draw_lineage
from graftwork.web.actions import export_command, promote_command, rollback_command
from graftwork.web.rendering import number_in, project_of, render, text_in

SECTION = "/releases"
DECISIONS = ("deploy", "iterate", "abort", "not_enough_evidence")
REPORT_POLICY = (
    # The page names the hash of its own script. It may not reach the page around it: it has no origin.
    "sandbox allow-scripts; frame-ancestors 'none'"
)


def index(request: Request) -> Response:
    project = project_of(request)
    search, decision = text_in(request, "search"), text_in(request, "decision")
    found = releases.list_releases(project, search=search, decision=decision, page=number_in(request, "page"))
    return render(
        request,
        "releases.html.jinja",
        title="Releases",
        section=SECTION,
        found=found,
        live=releases.list_live(project),
        rollback_command=rollback_command,
        versions={entry.id: entry.version for entry in found.items},
        moves=releases.read_alias_log(project)[:20],
        search=search,
        decision=decision,
        decisions=DECISIONS,
        reports=list(project.folder.reports),
    )


def release(request: Request) -> Response:
    project, name = project_of(request), request.path_params["release"]
    view = releases.read_release(project, name)
    graph = releases.read_lineage(project, view.release.id)
    known = releases.list_releases(project).items
    return render(
        request,
        "release.html.jinja",
        title=f"Release {view.entry.version or view.release.id[:12]}",
        section=SECTION,
        view=view,
        graph=graph,
        drawing=draw_lineage(graph),
        alias=releases.name_alias(project.with_model(_model_of(project, view.release.model))),
        others=[entry for entry in known if entry.id != view.release.id],
        versions={entry.id: entry.version for entry in known},
        promote_command=promote_command,
        export_command=export_command(view.release.id),
        archive=releases.find_archive(project, view.release.id),
    )


def archive(request: Request) -> Response:
    """The archive that an export wrote, as a download."""
    path = releases.find_archive(project_of(request), request.path_params["release"])
    if path is None:
        raise HTTPException(404, "it was not exported yet")
    return FileResponse(
        path, media_type="application/x-tar", filename=path.name, headers={"cache-control": "no-store"}
    )


def _model_of(project: object, model: str) -> str | None:
    settings = project.settings  # type: ignore[attr-defined]
    return model if model in settings.all_models else None


def compare(request: Request) -> Response:
    """Differences only, unless `?all=1`."""
    project = project_of(request)
    a, b, everything = text_in(request, "a"), text_in(request, "b"), bool(text_in(request, "all"))
    found = releases.compare_releases(project, a, b) if a and b else None
    return render(
        request,
        "compare_releases.html.jinja",
        title="Compare releases",
        section=SECTION,
        a=a,
        b=b,
        everything=everything,
        found=found,
        rows=[row for row in found.rows if everything or not row.same] if found else [],
        same=sum(row.same for row in found.rows) if found else 0,
        releases=releases.list_releases(project).items,
    )


def report(request: Request) -> Response:
    """The report of the last run; if several models have one, the list of them."""
    found = project_of(request).folder.reports
    if len(found) > 1:
        return render(request, "reports.html.jinja", title="Reports", section=SECTION, models=list(found))
    return _send_page(next(iter(found.values()), None))


def report_of_model(request: Request) -> Response:
    return _send_page(project_of(request).folder.reports.get(request.path_params["model"]))


def report_of_release(request: Request) -> Response:
    return _send_page(Path(releases.read_release(project_of(request), request.path_params["release"]).page))


def _send_page(path: Path | None) -> Response:
    """A page from disk, isolated by its headers."""
    if path is None or not path.is_file():
        raise HTTPException(404, "there is no report yet; `graft run` writes it")
    return FileResponse(
        path,
        media_type="text/html",
        headers={"content-security-policy": REPORT_POLICY, "cache-control": "no-store"},
    )


ROUTES = [
    Route("/releases", index),
    Route("/releases/compare", compare),
    Route("/report", report),
    Route("/report/{model}", report_of_model),
    Route("/releases/{release}", release),
    Route("/releases/{release}/report", report_of_release),
    Route("/releases/{release}/archive", archive),
]
