"""Runs an endpoint: gateway, engine and captures, from start to graceful stop."""

import asyncio
import errno
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from graftwork.process.worker import hold_lock
from graftwork.records.errors import UserMistake
from graftwork.serve.captures import CaptureSink, CaptureWriter, FeedbackSink
from graftwork.serve.engine_protocol import EngineJob
from graftwork.serve.engines import EngineSet
from graftwork.serve.escalation import AnswerChecks, Escalator
from graftwork.serve.fallbacks import Fallbacks
from graftwork.serve.family import Family
from graftwork.serve.gateway import Gateway
from graftwork.serve.http_server import Server
from graftwork.serve.otlp import TracedCalls
from graftwork.serve.reloader import RELOAD_SIGNAL, ReadSettings, SettingsReloader, gateway_folder
from graftwork.serve.routing import AliasWatcher, FindAdapter, ResolveAliases
from graftwork.serve.settings import ServeSettings, find_api_key

T = TypeVar("T")

_FLUSH_SECONDS = 2.0
"""How long clients may take to read the end of answers that are complete."""


@dataclass(frozen=True, kw_only=True)
class ServedProject:
    """What an endpoint needs from the project that it serves."""

    resolve_aliases: ResolveAliases
    find_adapter: FindAdapter = lambda _release: None
    captures: CaptureSink | None = None
    feedback: FeedbackSink | None = None
    read_traces: Callable[[dict[str, Any]], TracedCalls] | None = None
    read_settings: ReadSettings | None = None
    """What a reload applies; None reads the aliases only."""
    family: Family | None = None
    checks: AnswerChecks | None = None
    """Checks of `serve.escalate`."""


async def serve(
    settings: ServeSettings,
    *,
    engine_job: EngineJob,
    project: ServedProject,
    on_ready: Callable[[str], None] = lambda _url: None,
    stop: asyncio.Event | None = None,
    engine_module: str | None = None,
) -> None:
    """Serve until `stop` is set, or SIGTERM or SIGINT arrives. `on_ready` gets the URL once it answers."""
    api_key = find_api_key(settings)
    stop = stop or asyncio.Event()
    engines = EngineSet(engine_job, settings, module=engine_module)
    folder = gateway_folder(Path(engine_job.folder))
    watcher = AliasWatcher(
        engines.pool,
        resolve_aliases=project.resolve_aliases,
        find_adapter=project.find_adapter,
        split=settings.split,
        family=project.family,
    )
    captures = _open_captures(project.captures, settings)
    gateway = Gateway(
        engines.pool,
        settings=settings,
        routes=lambda: watcher.routes,
        captures=captures,
        api_key=api_key,
        feedback=project.feedback,
        read_traces=project.read_traces,
    )
    gateway.fallbacks = Fallbacks(
        settings.failover.fallback, engine=engines.pool, endpoints=engines.endpoints
    )
    if settings.escalate is not None and project.checks is not None:
        gateway.escalator = Escalator(settings.escalate, checks=project.checks, clock=time.monotonic)
    reloader = SettingsReloader(
        settings,
        read=project.read_settings,
        gateway=gateway,
        engines=engines,
        watcher=watcher,
        folder=folder,
    )
    server = gateway.open_server()
    with hold_lock(folder), _handling_signals(stop, reloader.asked):
        try:
            port = await _listen(server, settings)
            if not await _unless_stopped(engines.start(), stop):
                return
            await watcher.refresh()
            on_ready(_url(settings.host, port))
            reloading = asyncio.create_task(reloader.follow())
            await _unless_stopped(watcher.follow(settings.alias_refresh_seconds), stop)
            reloading.cancel()
        finally:
            # In this order: finish the answers, stop the engine, then flush the captures.
            await gateway.drain(reloader.settings.drain_seconds)
            await server.close(drain_seconds=_FLUSH_SECONDS)
            await engines.stop()
            if captures is not None:
                await asyncio.to_thread(captures.close)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop if it is installed: a request takes half the time."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


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
            f"cannot listen on {settings.host}:{settings.port}",
            why=error.strerror or str(error),
            fix="stop the process that listens there, or set `serve.port` (0 takes any free port)",
            where="serve.port",
        ) from error


async def _unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Wait for the work or the stop: Ctrl-C must not wait until a model is loaded."""
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
def _handling_signals(stop: asyncio.Event, reload: asyncio.Event) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    events = {signal.SIGTERM: stop, signal.SIGINT: stop, RELOAD_SIGNAL: reload}
    if not sys.stdin.isatty():
        events[signal.SIGHUP] = reload  # at a terminal it means that the terminal is closed
    for number, event in events.items():
        loop.add_signal_handler(number, event.set)
    try:
        yield
    finally:
        for number in events:
            loop.remove_signal_handler(number)


def _url(host: str, port: int) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)
    return f"http://{shown}:{port}"
