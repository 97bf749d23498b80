"""What runs next to the gateway: watching keys and certificates, the admin listener, access log and spans.

In: the settings and a gateway. Out: a context that has all of it running, and ends it.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from graftwork.serve.gateway import Gateway
from graftwork.serve.http_server import Server
from graftwork.serve.key_usage import UsageFile
from graftwork.serve.keys import KeyRing, LoadKeys, follow_keys, is_usable
from graftwork.serve.request_log import AccessLog, log_as_json
from graftwork.serve.settings import ServeSettings, find_api_key
from graftwork.serve.spans import SpanExporter, read_headers
from graftwork.serve.tls import CertificateFiles, follow_certificate, open_tls

_CERTIFICATE_SECONDS = 1.0


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


def list_listeners(gateway: Gateway, settings: ServeSettings) -> list[Listener]:
    """The public listener first."""
    listeners = [Listener(gateway.open_server(), settings.host, settings.port)]
    if settings.admin_port is not None:
        host = settings.admin_host or "127.0.0.1"
        listeners.append(Listener(gateway.open_admin_server(), host, settings.admin_port))
    return listeners


class Operations:
    """`tls` is the context of the listeners; None without TLS."""

    def __init__(self, settings: ServeSettings) -> None:
        self._settings = settings
        self._files: CertificateFiles | None = None
        self.tls = None
        if settings.tls_certificate is not None and settings.tls_key is not None:
            self._files = CertificateFiles(Path(settings.tls_certificate), Path(settings.tls_key))
            self._known = self._files.state()
            self.tls = open_tls(self._files)

    @asynccontextmanager
    async def running(
        self, gateway: Gateway, keys: KeyRing, load: LoadKeys, *, folder: Path
    ) -> AsyncIterator[None]:
        """`folder` is where the gateway keeps what a restart must not forget."""
        settings = self._settings
        escalations = None if gateway.escalator is None else gateway.escalator.budget
        usage = UsageFile(folder, keys, escalations)
        usage.restore()
        async with AsyncExitStack() as stack:
            if settings.log_format == "json":
                stack.enter_context(log_as_json())
            observers: list[AccessLog | SpanExporter] = []
            if settings.access_log:
                observers.append(AccessLog(as_json=settings.log_format == "json"))
            if settings.spans is not None:
                headers = read_headers(settings.spans.headers_env)
                observers.append(
                    SpanExporter(settings.spans.url, service=settings.spans.service, headers=headers)
                )
            for observer in observers:
                observer.start()
                stack.push_async_callback(asyncio.to_thread, observer.close)
            gateway.observers = tuple(observers)
            stack.push_async_callback(usage.save)
            watching = [follow_keys(keys, load, seconds=settings.key_refresh_seconds), usage.follow()]
            if self.tls is not None and self._files is not None:
                watching.append(
                    follow_certificate(self.tls, self._files, known=self._known, seconds=_CERTIFICATE_SECONDS)
                )
            for work in watching:
                stack.callback(asyncio.create_task(work).cancel)
            yield
