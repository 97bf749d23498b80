"""What runs next to the gateway: watching keys, the admin listener, TLS, the access log.

In: the settings and a gateway. Out: a context that has all of it running, and ends it.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from graftwork.http.server import Server
from graftwork.records.errors import UserMistake
from graftwork.serve.gateway import Gateway
from graftwork.serve.key_usage import UsageFile
from graftwork.serve.keys import KeyRing, LoadKeys, follow_keys, is_usable
from graftwork.serve.request_log import AccessLog, log_as_json
from graftwork.serve.settings import ServeSettings, find_api_key


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
        self.tls = None
        if settings.tls_certificate is not None and settings.tls_key is not None:
            self.tls = open_tls(settings.tls_certificate, settings.tls_key)

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
            if settings.access_log:
                access_log = AccessLog(as_json=settings.log_format == "json")
                access_log.start()
                stack.push_async_callback(asyncio.to_thread, access_log.close)
                gateway.observe = access_log.note
            stack.push_async_callback(usage.save)
            for work in (follow_keys(keys, load, seconds=settings.key_refresh_seconds), usage.follow()):
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
        raise UserMistake(
            "the TLS certificate cannot be used",
            why=getattr(error, "reason", None) or error.strerror or str(error),
            fix="name the PEM files of a certificate chain and of its key, without a passphrase",
            where=certificate,
        ) from error
    return context
