"""What the endpoint served: traffic, latency, who answered, drift, and captures page by page."""

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graftwork.api import endpoint
from graftwork.api.endpoint import Traffic
from graftwork.views.charts import draw_both, draw_nothing, draw_stacks
from graftwork.web.rendering import address, number_in, project_of, render, text_in

SECTION = "/captures"


def index(request: Request) -> Response:
    project = project_of(request)
    text, release = text_in(request, "text"), text_in(request, "release")
    traffic = endpoint.read_traffic(project)
    found, by_release = endpoint.list_captures(
        project, text=text, release=release, page=number_in(request, "page")
    )
    return render(
        request,
        "captures.html.jinja",
        title="Captures",
        section=SECTION,
        found=found,
        by_release=by_release,
        traffic=traffic,
        figure=draw_both(lambda width: draw_days(traffic, width=width), wide=860),
        totals=endpoint.read_capture_totals(project),
        text=text,
        release=release,
        serve=project.settings.serve,
    )


def capture(request: Request) -> Response:
    shown, feedback = endpoint.read_capture(project_of(request), request.path_params["capture"])
    asked = shown.request.get("messages")
    turns = [
        (str(turn.get("role", "")), _text_of(turn.get("content")))
        for turn in (asked if isinstance(asked, list) else [])
        if isinstance(turn, dict)
    ]
    return render(
        request,
        "capture.html.jinja",
        title=f"Capture {shown.id[:12]}",
        section=SECTION,
        capture=shown,
        feedback=feedback,
        turns=turns,
        back=address(
            SECTION,
            text=text_in(request, "text"),
            release=text_in(request, "release"),
            page=text_in(request, "page"),
        ),
    )


def _text_of(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content
        )
    return "" if content is None else str(content)


def drift(request: Request) -> Response:
    """A part of the page: measuring reads the dataset and the captures."""
    return render(request, "part_drift.html.jinja", title="Drift", drift=project_of(request).drift())


def draw_days(traffic: Traffic, *, width: float) -> Markup:
    """Exchanges by day."""
    days = list(traffic.by_day.items())[-30:]
    if not days:
        return draw_nothing("Exchanges by day", width)
    every = max(len(days) // 6, 1) if len(days) > 10 else 1
    return draw_stacks(
        {"exchanges": [count for _, count in days]},
        {place + 0.5: day[5:] for place, (day, _) in enumerate(days) if place % every == 0},
        title="Exchanges by day",
        description=f"{days[0][0]} to {days[-1][0]}, at most {max(count for _, count in days)} a day",
        width=width,
    )


ROUTES = [
    Route("/captures", index),
    Route("/captures/{capture}", capture),
    Route("/parts/drift", drift),
]
