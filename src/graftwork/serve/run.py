"""Runs an endpoint from start to graceful stop: gateway, engine, captures, and what runs next to them.

Next to the gateway run the watching of keys, the admin listener, TLS and the access log. On SIGHUP or `graft
serve --reload` the endpoint takes over new settings, and no request is dropped. `plan_reload` says which of
them take effect at once, and which need a restart.
"""

import asyncio
import errno
import logging
import os
import signal
import ssl
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from graftwork.engines.protocol import EngineJob
from graftwork.files.disk import write_atomic
from graftwork.http.server import Server
from graftwork.process.worker import hold_lock
from graftwork.records.errors import GraftError, UserError
from graftwork.serve.answers import AnswerService
from graftwork.serve.captures import CaptureSink, CaptureWriter
from graftwork.serve.escalation import AnswerChecks
from graftwork.serve.family import Family
from graftwork.serve.feedback import FeedbackSink
from graftwork.serve.gateway import Gateway
from graftwork.serve.keys import KeyRing, LoadKeys, UsageFile, follow_keys, is_usable
from graftwork.serve.otlp import TracedCalls
from graftwork.serve.own_endpoint import RELOAD_SIGNAL, RESULT_FILE, ReloadResult, gateway_folder
from graftwork.serve.replicas import DRAIN_SECONDS, EngineSet
from graftwork.serve.request_log import AccessLog, log_as_json
from graftwork.serve.routing import (
    AliasWatcher,
    Fallbacks,
    FindAdapter,
    FindCanary,
    FindPrices,
    ResolveAliases,
    Routes,
)
from graftwork.serve.settings import ServeSettings, is_loopback

log = logging.getLogger(__name__)

T = TypeVar("T")

_SWITCH_SECONDS = 0.0005
"""How long a thread that redacts or decodes keeps the interpreter's lock when a request wants it. A request
takes it several times; Python's own 5 ms would add up."""
_FLUSH_SECONDS = 2.0
"""How long clients may take to read the end of answers that are complete."""
RELOADED = frozenset(
    {
        "default_model",
        "failover",
        "max_new_tokens",
        "max_new_tokens_limit",
        "models",
        "queue_limit",
        "request_timeout_seconds",
        "split",
    }
)
"""Settings of `serve` that a running endpoint takes over."""
_ENGINE_TIMES = ("frozen_seconds", "start_seconds")
"""Settings of `serve.failover` that an engine gets when it starts."""

ReadSettings = Callable[[], ServeSettings]
"""The settings as they are now. Called in a thread. Raises GraftError if they are not valid."""


class Listener(NamedTuple):
    """A server and where it listens."""

    server: Server
    host: str
    port: int


async def open_keys(settings: ServeSettings, load: LoadKeys) -> KeyRing:
    stored = await asyncio.to_thread(load)
    ring = KeyRing(find_api_key(settings, has_keys=any(is_usable(key) for key in stored)))
    ring.replace(stored)
    return ring


def find_api_key(settings: ServeSettings, *, has_keys: bool) -> str | None:
    """The key of the environment, or None if there are others or only this machine can ask."""
    if settings.api_key_env is None:
        hosts = {"serve.host": settings.host}
        if settings.admin_port is not None and settings.admin_host is not None:
            hosts["serve.admin_host"] = settings.admin_host
        where, host = next(((w, h) for w, h in hosts.items() if not is_loopback(h)), ("", ""))
        if has_keys or not where:
            return None
        raise UserError(
            f"serving on {host} needs a key",
            why="anyone who can reach this machine could use the model and fill the captures",
            fix="run `graft serve keys create NAME`, or export GRAFT_API_KEY=… and set `serve.api_key_env: "
            "GRAFT_API_KEY`, or serve on 127.0.0.1",
            where=where,
        )
    key = os.environ.get(settings.api_key_env, "").strip()
    if not key:
        raise UserError(
            f"the environment variable {settings.api_key_env} is not set",
            why="it should hold the key that clients must present",
            fix=f"export {settings.api_key_env}=… before `graft serve`",
            where="serve.api_key_env",
        )
    return key


def list_listeners(gateway: Gateway, settings: ServeSettings) -> list[Listener]:
    """The public listener first."""
    listeners = [Listener(gateway.open_server(), settings.host, settings.port)]
    if settings.admin_port is not None:
        host = settings.admin_host or "127.0.0.1"
        listeners.append(Listener(gateway.open_admin_server(), host, settings.admin_port))
    return listeners


@asynccontextmanager
async def operating(
    answers: AnswerService, keys: KeyRing, load: LoadKeys, *, folder: Path
) -> AsyncIterator[None]:
    """Logs, keys and their usage while the block runs; what a restart must not forget is in `folder`."""
    settings = answers.settings
    escalations = None if answers.escalator is None else answers.escalator.budget
    usage = UsageFile(folder, keys, escalations)
    usage.restore()
    async with AsyncExitStack() as stack:
        if settings.log_format == "json":
            stack.enter_context(log_as_json())
        if settings.access_log:
            access_log = AccessLog(as_json=settings.log_format == "json")
            access_log.start()
            stack.push_async_callback(asyncio.to_thread, access_log.close)
            answers.observe = access_log.note
        stack.push_async_callback(usage.save)
        for work in (follow_keys(keys, load), usage.follow()):
            stack.callback(asyncio.create_task(work).cancel)
        yield


def open_tls(certificate: str, key: str) -> ssl.SSLContext:
    """The context of a server with the PEM files of a certificate and its key."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise UserError(
            "the TLS certificate cannot be used",
            why=getattr(error, "reason", None) or error.strerror or str(error),
            fix="specify the PEM files of a certificate chain and of its key, without a passphrase",
            where=certificate,
        ) from error
    return context


def plan_reload(
    old: ServeSettings, new: ServeSettings
) -> tuple[ServeSettings, tuple[str, ...], tuple[str, ...]]:
    """The settings to continue with, the names of those that take effect now, and of those that differ and
    keep their old value until the endpoint is started again.

    An engine may change its replicas; everything else about it needs a restart, and the gate.
    """
    names = [name for name in type(old).model_fields if getattr(old, name) != getattr(new, name)]
    update = {name: getattr(new, name) for name in names if name in RELOADED}
    changed, restart = sorted(update), sorted(set(names) - RELOADED)
    if "engine" in restart and old.engine.model_copy(update={"replicas": new.engine.replicas}) == new.engine:
        update["engine"] = new.engine
        changed.append("engine.replicas")
        restart.remove("engine")
    if "failover" in update:
        engine_times = {name: getattr(old.failover, name) for name in _ENGINE_TIMES}
        restart += [
            f"failover.{name}" for name in _ENGINE_TIMES if getattr(new.failover, name) != engine_times[name]
        ]
        update["failover"] = new.failover.model_copy(update=engine_times)
        if update["failover"] == old.failover:
            changed.remove("failover")
    return old.model_copy(update=update), tuple(changed), tuple(restart)


class SettingsReloader:
    """Set `asked` to reload; `follow` does the work."""

    def __init__(
        self,
        settings: ServeSettings,
        *,
        read: ReadSettings | None,
        gateway: Gateway,
        engines: EngineSet,
        watcher: AliasWatcher,
        folder: Path,
    ) -> None:
        self.settings = settings
        self.asked = asyncio.Event()
        self.number = 0
        self._read, self._gateway, self._engines, self._watcher = read, gateway, engines, watcher
        self._folder = folder

    async def follow(self) -> None:
        (self._folder / RESULT_FILE).unlink(missing_ok=True)
        while True:
            await self.asked.wait()
            self.asked.clear()
            try:
                result = await self.reload()
                await asyncio.to_thread(write_atomic, self._folder / RESULT_FILE, result.to_json())
            except Exception:
                log.exception("reload failed; the endpoint keeps its settings")

    async def reload(self) -> ReloadResult:
        """Take over the settings and read the aliases. Invalid settings change nothing."""
        self.number += 1
        try:
            new = self.settings if self._read is None else await asyncio.to_thread(self._read)
            settings, changed, restart = plan_reload(self.settings, new)
            self._engines.revise(settings)
        except (GraftError, OSError) as error:
            log.warning("reload: nothing changed: %s", error)
            return ReloadResult(number=self.number, error=str(error))
        self.settings = settings
        self._gateway.revise(settings)
        self._watcher.revise(settings.split, models=settings.models)
        try:
            await self._watcher.refresh()
        except Exception:
            log.exception("reload: cannot read the aliases; they are read again soon")
        log.info("reload: changed %s", ", ".join(changed) or "nothing")
        if restart:
            log.warning("reload: these need a restart: %s", ", ".join(restart))
        return ReloadResult(number=self.number, changed=changed, restart=restart)


@dataclass(frozen=True, kw_only=True)
class ServedProject:
    """What an endpoint needs from its project."""

    resolve_aliases: ResolveAliases
    find_adapter: FindAdapter = lambda _release: None
    find_canary: FindCanary = lambda: None
    refresh_seconds: float = 1.0
    """Seconds until a moved alias takes effect."""
    captures: CaptureSink | None = None
    prune_captures: Callable[[], object] | None = None
    """Deletes captures that are too old or too many. Called in a thread."""
    feedback: FeedbackSink | None = None
    read_traces: Callable[[dict[str, Any]], TracedCalls] | None = None
    load_keys: LoadKeys = tuple
    read_settings: ReadSettings | None = None
    """What a reload applies; None reads the aliases only."""
    family: Family | None = None
    checks: AnswerChecks | None = None
    """Checks of `serve.escalate`."""
    chain_checks: Mapping[str, AnswerChecks] = field(default_factory=dict)
    """Checks that conditions of `serve.chains` name."""
    find_prices: FindPrices = lambda _settings: {}


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
    keys = await open_keys(settings, project.load_keys)
    tls = None
    if settings.tls_certificate is not None and settings.tls_key is not None:
        tls = open_tls(settings.tls_certificate, settings.tls_key)
    stop = stop or asyncio.Event()
    engines = EngineSet(engine_job, settings, module=engine_module)
    folder = gateway_folder(Path(engine_job.folder))
    watcher = AliasWatcher(
        engines.pool,
        resolve_aliases=project.resolve_aliases,
        find_adapter=project.find_adapter,
        split=settings.split,
        names=Routes(
            loaded=False,
            family=project.family,
            chains=tuple(settings.chains),
            models=settings.models,
            has_base=engines.has_base,
        ),
        find_canary=project.find_canary,
    )
    captures = None
    if project.captures is not None and settings.capture:
        captures = CaptureWriter(
            project.captures, folder=Path(engine_job.folder), prune=project.prune_captures
        )
        captures.start()
    answers = AnswerService(
        engines.pool,
        settings=settings,
        routes=lambda: watcher.routes,
        captures=captures,
        fallbacks=Fallbacks(
            {}, engine=engines.pool, endpoints=engines.endpoints, find_prices=project.find_prices
        ),
        checks=project.checks,
        chain_checks=project.chain_checks,
    )
    gateway = Gateway(answers, feedback=project.feedback, read_traces=project.read_traces, keys=keys)
    reloader = SettingsReloader(
        settings,
        read=project.read_settings,
        gateway=gateway,
        engines=engines,
        watcher=watcher,
        folder=folder,
    )
    listeners = list_listeners(gateway, settings)
    reloading: asyncio.Task[None] | None = None
    with hold_lock(folder), _handling_signals(stop, reloader.asked):
        async with operating(answers, keys, project.load_keys, folder=folder):
            try:
                port, *_ = [await _listen(listener, tls) for listener in listeners]
                if not await _unless_stopped(engines.start(), stop):
                    return
                await watcher.refresh()
                on_ready(_url(settings.host, port, tls=tls is not None))
                reloading = asyncio.create_task(reloader.follow())
                await _unless_stopped(watcher.follow(project.refresh_seconds), stop)
            finally:
                if reloading is not None:
                    reloading.cancel()
                    await asyncio.gather(reloading, return_exceptions=True)
                # In this order: finish the answers, stop the engine, flush the captures, stop the servers.
                await answers.drain(DRAIN_SECONDS)
                if answers.shadow is not None:
                    await answers.shadow.close()
                for listener in listeners:
                    await listener.server.close(drain_seconds=_FLUSH_SECONDS)
                await engines.stop()
                if captures is not None:
                    await asyncio.to_thread(captures.close)


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop if it is installed: a request takes half the time."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def _listen(listener: Listener, tls: ssl.SSLContext | None) -> int:
    try:
        return await listener.server.listen(host=listener.host, port=listener.port, tls=tls)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
            raise
        raise UserError(
            f"cannot listen on {listener.host}:{listener.port}",
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
    if not os.isatty(0):
        events[signal.SIGHUP] = reload  # at a terminal it means that the terminal is closed
    for number, event in events.items():
        loop.add_signal_handler(number, event.set)
    try:
        yield
    finally:
        for number in events:
            loop.remove_signal_handler(number)


def _url(host: str, port: int, *, tls: bool) -> str:
    address = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(host, host)
    return f"{'https' if tls else 'http'}://{address}:{port}"
