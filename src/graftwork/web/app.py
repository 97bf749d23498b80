"""The application: addresses, errors as pages, static files, and the stream that reports changes to pages.

Expected errors become pages that say what is wrong and how to fix it; anything else is a bug, and the page
says only that. A mark of the project is read once a second for all streams together; a page whose mark is
another one gets `graft:change` and asks for its content again.
"""

import asyncio
import contextlib
import sys
import time
import traceback
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftwork.records.errors import Busy, Corrupted, EnvironmentFailure, GraftError, UserError
from graftwork.web import (
    actions,
    components,
    cycle,
    data,
    endpoint,
    evaluation,
    fleet,
    overview,
    plan,
    releases,
    runs,
    start,
)
from graftwork.web.rendering import read_mark, read_static, render
from graftwork.web.security import ALIVE, Gatekeeper, SignIn

STATIC = {
    "app.css": "text/css",
    "app.js": "text/javascript",
    "page.css": "text/css",
    "vendor/htmx.min.js": "text/javascript",
    "vendor/hx-sse.min.js": "text/javascript",
    "vendor/uPlot.iife.min.js": "text/javascript",
    "vendor/uPlot.min.css": "text/css",
}


def make_app(
    root: Path, sign_in: SignIn, *, allow_actions: bool = False, hosts: frozenset[str] = frozenset()
) -> ASGIApp:
    """`hosts` are the values of the Host header that are accepted; empty accepts all."""
    routes: list[BaseRoute] = [
        Route(ALIVE, _alive),
        Route("/static/{name:path}", _static),
        Route("/events", _events),
        *overview.ROUTES,
        *start.ROUTES,
        *data.ROUTES,
        *runs.ROUTES,
        *cycle.ROUTES,
        *evaluation.ROUTES,
        *releases.ROUTES,
        *endpoint.ROUTES,
        *fleet.ROUTES,
        *components.ROUTES,
        *plan.ROUTES,
        *actions.ROUTES,
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(ServerTiming)],
        exception_handlers={GraftError: _show_error, HTTPException: _show_http_error, Exception: _show_bug},
    )
    app.state.root, app.state.allow_actions, app.state.sign_in = root, allow_actions, sign_in
    app.state.feed = ChangeFeed(lambda: read_mark(root))
    # Around everything, so that the page of a bug has the headers too.
    return Gatekeeper(app, sign_in=sign_in, hosts=hosts)


class ServerTiming:
    """Reports the server's time in the header that browsers show."""

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
    if isinstance(error, Busy | Corrupted | EnvironmentFailure):
        return 503
    return 404 if isinstance(error, UserError) else 409


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
    explained = UserError(what, why=f"nothing is at {request.url.path}", fix="use the navigation")
    return render(request, "error.html.jinja", title=what, code=error.status_code, error=explained)


async def _show_bug(request: Request, error: Exception) -> Response:
    """The traceback goes to the terminal of `graft ui`; the visitor does not see it."""
    from graftwork.text.redact import publish_text

    sys.stderr.write(publish_text("".join(traceback.format_exception(error))))
    explained = EnvironmentFailure(
        "this page could not be made",
        why=f"an unexpected {type(error).__name__}; the terminal of `graft ui` shows where",
        fix="reload; if it persists, report it with the text in the terminal",
    )
    return render(request, "error.html.jinja", title="Unexpected error", code=500, error=explained)


WATCH_SECONDS = 1.0
QUIET_SECONDS = 15.0
"""After this long without an event a comment is sent, so that proxies keep the connection."""
MOST_STREAMS = 200


class ChangeFeed:
    """Reads the mark while there are listeners. Streams wait for the next one."""

    def __init__(self, read_mark: Callable[[], str], *, every: float = WATCH_SECONDS) -> None:
        self._read_mark, self._every = read_mark, every
        self._mark = ""
        self._changed: asyncio.Condition | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.streams = 0

    async def follow(self, since: str) -> AsyncIterator[str | None]:
        """Marks other than the last one; None if nothing changed for a while."""
        if self._changed is None:
            self._changed = asyncio.Condition()
        self.streams += 1
        try:
            await self._look()
            if self._watcher is None or self._watcher.done():
                self._watcher = asyncio.create_task(self._watch())
            seen = since or self._mark
            while True:
                if self._mark != seen:
                    seen = self._mark
                    yield seen
                else:
                    changed = await self._wait(seen)
                    if not changed:
                        yield None
        finally:
            self.streams -= 1

    async def _wait(self, seen: str) -> bool:
        assert self._changed is not None
        try:
            async with asyncio.timeout(QUIET_SECONDS):
                async with self._changed:
                    await self._changed.wait_for(lambda: self._mark != seen)
        except TimeoutError:
            return False
        return True

    async def _watch(self) -> None:
        while self.streams:
            await asyncio.sleep(self._every)
            await self._look()

    async def _look(self) -> None:
        assert self._changed is not None
        mark = await run_in_threadpool(self._read_mark)
        if mark != self._mark:
            self._mark = mark
            async with self._changed:
                self._changed.notify_all()


async def _events(request: Request) -> Response:
    feed: ChangeFeed = request.app.state.feed
    if feed.streams >= MOST_STREAMS:
        return Response("too many streams", status_code=503)
    # A browser that comes back names the last event; before the first one, its page names what it shows.
    since = _clean(request.headers.get("last-event-id", "") or request.query_params.get("mark", ""))

    async def stream() -> AsyncIterator[str]:
        yield "retry: 1000\n\n"
        marks: Any = feed.follow(since)
        with contextlib.suppress(asyncio.CancelledError):
            async with contextlib.aclosing(marks) as following:
                async for mark in following:
                    if await request.is_disconnected():
                        return
                    yield (
                        ": quiet\n\n"
                        if mark is None
                        else f"id: {_clean(mark)}\nevent: graft:change\ndata: changed\n\n"
                    )

    headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
    return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


def _clean(text: str) -> str:
    return "".join(character for character in text if character.isprintable())[:2000]
