"""Serving from start to end: the gateway, the engine under it, the captures beside it.

In: settings, the engine's job, a sink, and where aliases point. Out: an endpoint until `stop` is
set or a signal comes; then what runs is finished, captures are flushed and the engine is gone.
"""

import asyncio
import errno
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from graftwork.files.disk import make_folder
from graftwork.records.errors import Busy, GraftError, UserMistake
from graftwork.serve.capture import CaptureWriter
from graftwork.serve.gateway import Gateway
from graftwork.serve.http import Server
from graftwork.serve.jobs import EngineJob
from graftwork.serve.ports import CaptureSink, FeedbackBook
from graftwork.serve.protocol import BASE
from graftwork.serve.routes import Routes, move_aliases
from graftwork.serve.settings import ServeSettings, SplitSettings, find_api_key
from graftwork.serve.supervise import Supervisor

log = logging.getLogger(__name__)

T = TypeVar("T")

ResolveAlias = Callable[[], dict[str, str]]
"""Where each alias points now: alias to release id. Called in a thread; may read a database."""

FindAdapter = Callable[[str], str | None]
"""The adapter folder of a release that is not loaded yet; None where it is not for this endpoint. Called in a
thread. A GraftError says that it cannot be had now."""

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds until a release that could not be loaded is tried again: doubled each time it fails, except while
the store is busy. Each try reads every byte of it."""


async def serve(
    settings: ServeSettings,
    *,
    engine_job: EngineJob,
    sink: CaptureSink | None,
    resolve_alias: ResolveAlias,
    on_ready: Callable[[str], None] = lambda _url: None,
    stop: asyncio.Event | None = None,
    find_adapter: FindAdapter = lambda _release: None,
    engine_module: str = "graftwork.serve.engine",
    feedback: FeedbackBook | None = None,
) -> None:
    """Serve until `stop` is set, or SIGTERM or SIGINT comes. `on_ready` gets the URL once it answers."""
    api_key = find_api_key(settings)
    stop = stop or asyncio.Event()
    make_folder(Path(engine_job.folder))
    engine = Supervisor(_fit_job(engine_job, settings), module=engine_module)
    book = AliasBook(engine, resolve_alias=resolve_alias, find_adapter=find_adapter, split=settings.split)
    captures = _open_captures(sink, settings)
    gateway = Gateway(
        engine,
        settings=settings,
        routes=lambda: book.routes,
        captures=captures,
        api_key=api_key,
        feedback=feedback,
    )
    server = gateway.open_server()
    with _stopping_on_signals(stop):
        try:
            port = await _listen(server, settings)
            if not await _unless_stopped(engine.start(), stop):
                return
            await book.refresh()
            on_ready(_url(settings.host, port))
            await _unless_stopped(book.follow(settings.alias_refresh_seconds), stop)
        finally:
            # In this order: answers end, then they are kept, and the engine stays until nobody asks.
            await server.close(drain_seconds=settings.drain_seconds)
            await engine.stop()
            if captures is not None:
                await asyncio.to_thread(captures.close)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where it is installed: half the time a request."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


class PutOff(NamedTuple):
    """When a release that could not be loaded is tried again, and how long that is after the failure."""

    pause: float
    until: float


class AliasBook:
    """Follows the aliases. A release that an alias moves to is loaded before the alias moves here."""

    def __init__(
        self,
        engine: Supervisor,
        *,
        resolve_alias: ResolveAlias,
        find_adapter: FindAdapter,
        split: SplitSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._split = split
        self._resolve = resolve_alias
        self._find = find_adapter
        self._clock = clock
        self._put_off: dict[str, PutOff] = {}
        self.routes = Routes(loaded=False)

    async def refresh(self) -> None:
        aliases = await asyncio.to_thread(self._resolve)
        missing = set(aliases.values()) - set(self._engine.models)
        # A release that no alias points at any more starts afresh when one does again.
        self._put_off = {release: put for release, put in self._put_off.items() if release in missing}
        for release in sorted(missing):
            if release not in self._put_off or self._clock() >= self._put_off[release].until:
                await self._load(release)
        releases = frozenset(self._engine.models) - {BASE}
        new = move_aliases(self.routes, aliases=aliases, releases=releases, split=self._split)
        if (new.deal, new.no_deal) != (self.routes.deal, self.routes.no_deal):
            _tell_split(new)
        self.routes = new

    async def follow(self, seconds: float) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.refresh()
            except Exception:
                # The database may be busy or gone for a while; the routes we have stay good.
                log.exception("aliases: they could not be read; the last known ones stay")

    async def _load(self, release: str) -> None:
        """Load it, or try again later: the other aliases do not wait for it."""
        if self._engine.state != "ready":
            return
        try:
            folder = await asyncio.to_thread(self._find, release)
            if folder is not None:
                await self._engine.load_adapter(release, folder)
        except (GraftError, OSError) as error:
            before = self._put_off.get(release)
            pause = FIRST_PAUSE
            if before is not None and not isinstance(error, Busy):
                pause = min(2 * before.pause, LONGEST_PAUSE)
            self._put_off[release] = PutOff(pause, until=self._clock() + pause)
            why = f" ({error.why})" if isinstance(error, GraftError) and error.why else ""
            log.warning("aliases: %s is not loaded: %s%s; next try in %g s", release, error, why, pause)


def _tell_split(routes: Routes) -> None:
    deal = routes.deal
    if deal is not None:
        shown = (deal.experiment, 100 * deal.share, deal.alias, deal.challenger[:12])
        log.info("split: experiment %s: %g %% of the sessions that ask for %s go to %s", *shown)
    else:
        log.warning("split: no experiment, the champion answers all: %s", routes.no_deal)


def _fit_job(job: EngineJob, settings: ServeSettings) -> EngineJob:
    """The job with the limits that the settings name."""
    return job.model_copy(
        update={
            "batch_size": settings.batch_size,
            "batch_wait_ms": settings.batch_wait_ms,
            "queue_limit": settings.queue_limit,
            "threads": settings.threads,
        }
    )


def _open_captures(sink: CaptureSink | None, settings: ServeSettings) -> CaptureWriter | None:
    if sink is None or not settings.capture:
        return None
    captures = CaptureWriter(sink, queue_size=settings.capture_queue)
    captures.start()
    return captures


async def _listen(server: Server, settings: ServeSettings) -> int:
    try:
        return await server.listen(host=settings.host, port=settings.port)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
            raise
        raise UserMistake(
            f"{settings.host}:{settings.port} cannot be listened on",
            why=error.strerror or str(error),
            fix="stop what listens there, or set `serve.port` to another one (0 takes any free one)",
            where="serve.port",
        ) from error


async def _unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Wait for the work, or for the stop: Ctrl-C must not wait until a model is loaded."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        return False
    finally:
        stopping.cancel()
        working.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


@contextmanager
def _stopping_on_signals(stop: asyncio.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)
    return f"http://{shown}:{port}"
