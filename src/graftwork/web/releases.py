"""Releases: the list, one with its lineage as a graph, two compared, and the report page of a release."""

from pathlib import Path

from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from graftwork.api import releases
from graftwork.api.releases import LineageGraph, LineageNode
from graftwork.views.charts import drawing, element, label, path
from graftwork.web.actions import export_command, promote_command, rollback_command
from graftwork.web.rendering import number_in, project_of, render, text_in

COLUMN_OF = {
    "lines": 0,
    "file": 1,
    "dataset": 2,
    "base": 2,
    "plan": 3,
    "run": 3,
    "report": 4,
    "verdict": 4,
    "release": 5,
}
NAMES = {
    "lines": "log lines",
    "file": "log file",
    "dataset": "dataset",
    "base": "base model",
    "plan": "plan",
    "run": "run",
    "report": "evaluation",
    "verdict": "verdict",
    "release": "release",
}
WIDTH, HEIGHT, GAP_X, GAP_Y = 148.0, 44.0, 34.0, 14.0
MOST_ROWS = 6
ROWS = 3
ROW_OF = {"verdict": 0, "report": 2, "run": 1, "plan": 2, "release": 1, "dataset": 1, "base": 0}


def draw_lineage(graph: LineageGraph) -> Markup:
    """The release itself and what it was made from; earlier releases are in the table below it."""
    top = graph.nodes[0]
    shown = [node for node in graph.nodes if node.kind != "release" or node is top]
    inside = {node.id for node in _reach(graph, top)}
    columns: dict[int, list[LineageNode]] = {}
    for node in shown:
        if node.id in inside:
            columns.setdefault(COLUMN_OF[node.kind], []).append(node)
    columns = {column: nodes[:MOST_ROWS] for column, nodes in columns.items()}
    places = _place(columns)
    height = max((y for _, y in places.values()), default=0) + HEIGHT + 8
    width = (max(columns) + 1) * (WIDTH + GAP_X) + WIDTH + 4
    parts: list[Markup] = []
    for edge in graph.edges:
        if edge.made in places and edge.of in places:
            parts.append(_draw_edge(places[edge.of], places[edge.made]))
    for node in shown:
        if node.id in places:
            parts += _draw_node(node, *places[node.id])
    aliases = top.facts.get("aliases", "")
    x, y = places[top.id]
    end = x + WIDTH + GAP_X
    parts.append(_draw_edge((x, y), (end, y)))
    parts += _draw_box(end, y, "alias", aliases or "none", strong=bool(aliases))
    described = ", ".join(f"{NAMES[node.kind]} {node.name}" for node in shown if node.id in places)
    return drawing(
        *parts,
        width=width,
        height=height,
        title="Lineage",
        description=f"{described}; aliases: {aliases or 'none'}",
        class_="lineage",
    )


def _reach(graph: LineageGraph, top: LineageNode) -> list[LineageNode]:
    """The nodes below a release, without those of its predecessors."""
    known = {node.id: node for node in graph.nodes}
    found, waiting = {top.id: top}, [top.id]
    while waiting:
        at = waiting.pop()
        for edge in graph.edges:
            if edge.made == at and edge.of not in found and known[edge.of].kind != "release":
                found[edge.of] = known[edge.of]
                waiting.append(edge.of)
    return list(found.values())


def _place(columns: dict[int, list[LineageNode]]) -> dict[str, tuple[float, float]]:
    """Kinds that occur once have a row of their own, so that no line crosses a box; others are centred."""
    places = {}
    for column, nodes in columns.items():
        first = max((ROWS - len(nodes)) / 2, 0.0)
        for place, node in enumerate(nodes):
            row = ROW_OF.get(node.kind, first + place)
            places[node.id] = (column * (WIDTH + GAP_X) + 1, row * (HEIGHT + GAP_Y) + 2)
    return places


def _draw_edge(start: tuple[float, float], end: tuple[float, float]) -> Markup:
    x1, y1 = start[0] + WIDTH, start[1] + HEIGHT / 2
    x2, y2 = end[0], end[1] + HEIGHT / 2
    if start[0] >= end[0]:
        # In one column: down the side.
        x1, x2 = start[0] + WIDTH / 2, end[0] + WIDTH / 2
        y1, y2 = (start[1], end[1] + HEIGHT) if start[1] > end[1] else (start[1] + HEIGHT, end[1])
    return path([(x1, y1), (x2, y2)], class_="edge")


def _draw_node(node: LineageNode, x: float, y: float) -> list[Markup]:
    return _draw_box(x, y, NAMES[node.kind], _short(node), strong=node.kind == "release")


def _draw_box(x: float, y: float, kind: str, name: str, *, strong: bool) -> list[Markup]:
    return [
        element(
            "rect", x=x, y=y, width=WIDTH, height=HEIGHT, rx=8, class_="node strong" if strong else "node"
        ),
        label(kind, x=x + 10, y=y + 17, class_="tick"),
        label(_cut(name), x=x + 10, y=y + 34, class_="name"),
    ]


def _short(node: LineageNode) -> str:
    if node.kind == "lines":
        return f"{node.facts.get('count', '?')} {node.facts.get('split', '')}"
    if node.kind == "verdict":
        return node.facts.get("decision", node.name)
    return node.name


def _cut(name: str, longest: int = 15) -> str:
    return (
        name
        if len(name) <= longest
        else f"…{name[-longest + 1 :]}"
        if "/" in name
        else f"{name[: longest - 1]}…"
    )


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
    """The report of the last run; where several models have one, the list of them."""
    found = project_of(request).folder.reports
    if len(found) > 1:
        return render(request, "reports.html.jinja", title="Reports", section=SECTION, models=list(found))
    return _send_page(next(iter(found.values()), None))


def report_of_model(request: Request) -> Response:
    return _send_page(project_of(request).folder.reports.get(request.path_params["model"]))


def report_of_release(request: Request) -> Response:
    return _send_page(Path(releases.read_release(project_of(request), request.path_params["release"]).page))


def _send_page(path: Path | None) -> Response:
    """A page as it is on disk, shut in."""
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
