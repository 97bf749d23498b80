"""What the endpoint served: traffic, latency, who answered, drift, and captures page by page."""

from markupsafe import Markup
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from graftwork.api import captures
from graftwork.api.captures import Traffic
from graftwork.views.svg import (
    Scale,
    draw_both,
    draw_nothing,
    drawing,
    element,
    label,
    line,
    round_ticks,
    tick_text,
)
from graftwork.web.rendering import address, number_in, project_of, render, text_in

SECTION = "/captures"


def index(request: Request) -> Response:
    project = project_of(request)
    text, release = text_in(request, "text"), text_in(request, "release")
    traffic = captures.read_traffic(project)
    found, by_release = captures.list_captures(
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
        totals=captures.read_capture_totals(project),
        text=text,
        release=release,
        serve=project.settings.serve,
    )


def capture(request: Request) -> Response:
    shown, feedback = captures.read_capture(project_of(request), request.path_params["capture"])
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
    height, left, bottom = 150.0, 40.0, 24.0
    marks = [mark for mark in round_ticks(0, max(count for _, count in days), count=3) if mark == int(mark)]
    y = Scale(0, marks[-1] or 1, height - bottom, 8)
    step = min((width - left) / len(days), 70.0)
    parts = [line(left, y(mark), width, y(mark), class_="grid" if mark else "axis") for mark in marks]
    parts += [label(tick_text(m, marks), x=left - 6, y=y(m) + 4, class_="tick", anchor="end") for m in marks]
    for place, (day, count) in enumerate(days):
        x = left + place * step + step * 0.15
        bar_width = min(step * 0.7, 60.0)
        parts.append(
            element("rect", x=x, y=y(count), width=bar_width, height=y(0) - y(count), rx=2, class_="s0")
        )
        if len(days) <= 10 or place % (len(days) // 6) == 0:
            parts.append(label(day[5:], x=x + bar_width / 2, y=height - 6, class_="tick", anchor="middle"))
    described = f"{days[0][0]} to {days[-1][0]}, at most {max(count for _, count in days)} a day"
    return drawing(*parts, width=width, height=height, title="Exchanges by day", description=described)


ROUTES = [
    Route("/captures", index),
    Route("/captures/{capture}", capture),
    Route("/parts/drift", drift),
]
