"""Generated components: pass rates by stage, score cards with their gates, the way of each component."""

import shlex
from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graftwork.api import components
from graftwork.api.components import ComponentLine, GenerationGlance
from graftwork.web.rendering import address, project_of, render, text_in

SECTION = "/components"
FIGURES = (
    "atomicity",
    "adherence",
    "compliance",
    "supervision",
    "integration",
    "performance",
    "quality",
    "coverage",
    "mutation",
    "consistency",
)


def index(request: Request) -> Response:
    return render(
        request,
        "components.html.jinja",
        title="Components",
        section=SECTION,
        found=components.list_generations(project_of(request)),
        link=_link,
    )


def generation(request: Request) -> Response:
    """One generation; `?against=` names an earlier one, such as that of the model before training."""
    project, name, against = project_of(request), text_in(request, "folder"), text_in(request, "against")
    glance, lines, compared = components.read_generation(project, name, against=against)
    return render(
        request,
        "generation.html.jinja",
        title=f"Components in {name}",
        section=SECTION,
        glance=glance,
        lines=lines,
        compared=compared,
        figures=[figure for figure in FIGURES if _differs(lines, figure)],
        full=[figure for figure in FIGURES if _is_full(lines, figure)],
        score=_score,
        against=against,
        others=[each.name for each in components.list_generations(project) if each.name != name],
        link=_link,
        commands_shown=list_commands(glance, against),
    )


def component(request: Request) -> Response:
    name, identifier = text_in(request, "folder"), request.path_params["component"]
    view = components.read_component(project_of(request), name, identifier)
    return render(
        request,
        "component.html.jinja",
        title=f"Component {identifier}",
        section=SECTION,
        view=view,
        line=view.line,
        card=view.line.card,
        folder=name,
        link=_link,
    )


def _score(card: components.ScoreCard | None, figure: str) -> float | None:
    return card.scores.get(figure) if card is not None else None


def _differs(lines: Sequence[ComponentLine], figure: str) -> bool:
    """Whether a component is below 1: a column with 1 everywhere is left out."""
    return any(value is not None and value < 1 for value in _scores(lines, figure))


def _is_full(lines: Sequence[ComponentLine], figure: str) -> bool:
    known = [value for value in _scores(lines, figure) if value is not None]
    return bool(known) and not _differs(lines, figure)


def _scores(lines: Sequence[ComponentLine], figure: str) -> list[float | None]:
    return [_score(line.card, figure) for line in lines]


def _link(name: str, component: str = "", **query: object) -> str:
    path = f"/components/of/{component}" if component else "/components/in"
    return address(path, folder=name, **query)


def list_commands(glance: GenerationGlance, against: str) -> list[str]:
    """List the same commands for the command line."""
    report = ["graft", "generate", "report", glance.name, *(["--against", against] if against else [])]
    return [shlex.join(report), shlex.join(["graft", "generate", "verify", glance.name])]


ROUTES = [
    Route("/components", index),
    Route("/components/in", generation),
    Route("/components/of/{component}", component),
]
