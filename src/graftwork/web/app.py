"""The application: addresses, errors as pages, static files.

In: the folder of a project and what visitors may do. Out: an ASGI application. Expected errors become pages
that say what is wrong and how to fix it; anything else is a bug, and the page says only that.
"""

import sys
import time
import traceback

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftwork.records.errors import Busy, Damaged, EnvironmentLacks, GraftError, UserMistake
from graftwork.web import actions, live
from graftwork.web.rendering import read_static, render
from graftwork.web.security import ALIVE, Gatekeeper, SignIn, WebOptions
from graftwork.web.views import (
    captures,
    components,
    cycle,
    data,
    evaluation,
    fleet,
    overview,
    plan,
    playground,
    releases,
    review,
    runs,
    week,
)

STATIC = {
    "app.css": "text/css",
    "app.js": "text/javascript",
    "page.css": "text/css",
    "vendor/htmx.min.js": "text/javascript",
    "vendor/hx-sse.min.js": "text/javascript",
    "vendor/uPlot.iife.min.js": "text/javascript",
    "vendor/uPlot.min.css": "text/css",
}


def make_app(options: WebOptions, sign_in: SignIn, *, hosts: frozenset[str] = frozenset()) -> ASGIApp:
    """`hosts` are the values of the Host header that are accepted; empty accepts all."""
    routes: list[BaseRoute] = [
        Route(ALIVE, _alive),
        Route("/static/{name:path}", _static),
        Route("/events", live.events),
        *overview.ROUTES,
        *data.ROUTES,
        *runs.ROUTES,
        *cycle.ROUTES,
        *evaluation.ROUTES,
        *review.ROUTES,
        *releases.ROUTES,
        *captures.ROUTES,
        *playground.ROUTES,
        *fleet.ROUTES,
        *week.ROUTES,
        *components.ROUTES,
        *plan.ROUTES,
        *actions.ROUTES,
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(ServerTiming)],
        exception_handlers={GraftError: _show_error, HTTPException: _show_http_error, Exception: _show_bug},
    )
    app.state.options, app.state.sign_in, app.state.feed = options, sign_in, live.make_feed(options)
    # Around everything, so that the page of a bug has the headers too.
    return Gatekeeper(app, sign_in=sign_in, hosts=hosts)


class ServerTiming:
    """States how long the server took, in the header that browsers show."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()

        async def send_with_timing(message: Message) -> None:
            if message["type"] == "http.response.start":
                spent = 1000 * (time.perf_counter() - began)
                message["headers"] = [
                    *message["headers"],
                    (b"server-timing", f"app;dur={spent:.1f}".encode()),
                ]
            await send(message)

        await self._app(scope, receive, send_with_timing)


async def _alive(request: Request) -> Response:
    return PlainTextResponse(request.app.state.sign_in.boot)


async def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in STATIC:
        raise HTTPException(404)
    fresh = "max-age=31536000, immutable" if "v" in request.query_params else "no-cache"
    return Response(read_static(name), media_type=STATIC[name], headers={"cache-control": fresh})


def _status_of(error: GraftError) -> int:
    if isinstance(error, Busy | Damaged | EnvironmentLacks):
        return 503
    return 404 if isinstance(error, UserMistake) else 409


async def _show_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, GraftError)
    return render(
        request, "error.html.jinja", title=error.what[:1].upper() + error.what[1:], code=_status_of(error),
        error=error,
    )  # fmt: skip


async def _show_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reasons = {404: "There is no such page", 405: "This address takes no such request"}
    what = reasons.get(error.status_code, error.detail)
    explained = UserMistake(what, why=f"nothing is at {request.url.path}", fix="use the navigation")
    return render(request, "error.html.jinja", title=what, code=error.status_code, error=explained)


async def _show_bug(request: Request, error: Exception) -> Response:
    """The traceback goes to the terminal of `graft ui`; the visitor sees none of it."""
    from graftwork.text.redact import publish_text

    sys.stderr.write(publish_text("".join(traceback.format_exception(error))))
    explained = EnvironmentLacks(
        "this page could not be made",
        why=f"an unexpected {type(error).__name__}; the terminal of `graft ui` shows where",
        fix="reload; if it stays, report it with the text in the terminal",
    )
    return render(request, "error.html.jinja", title="Unexpected error", code=500, error=explained)
