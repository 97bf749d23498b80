"""Server-sent events: one stream a page, which says that the project has changed.

In: a mark of the project, read once a second for all streams together. Out: `graft:change` with the mark as
its id; a browser that comes back with another mark gets an event at once. What changed is in the page, which
the browser asks for again.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from graftwork.web.rendering import read_mark
from graftwork.web.security import WebOptions

WATCH_SECONDS = 1.0
QUIET_SECONDS = 15.0
"""After so long without an event a comment is sent, so that proxies keep the connection."""
MOST_STREAMS = 200


class ChangeFeed:
    """Reads the mark while somebody listens. Streams wait for the next one."""

    def __init__(self, read_mark: Callable[[], str], *, every: float = WATCH_SECONDS) -> None:
        self._read_mark, self._every = read_mark, every
        self._mark = ""
        self._changed: asyncio.Condition | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.streams = 0

    async def follow(self, since: str) -> AsyncIterator[str | None]:
        """Marks other than the last one; None where nothing changed for a while."""
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


def make_feed(options: WebOptions) -> ChangeFeed:
    return ChangeFeed(lambda: read_mark(options.root))


async def events(request: Request) -> Response:
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
