"""Starts the page: finds a port, prints the address with a token, opens the browser, serves until a signal.

Input: the folder of a project and the options of `graft ui`. Output: nothing; it runs until it is stopped. A
second start in the same project finds the first one and prints another link to it.
"""

import asyncio
import json
import secrets
import socket
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import h11
import uvicorn
from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.h11_impl import H11Protocol

from graftwork.files.disk import write_atomic
from graftwork.process.http_client import HttpClient, NoAnswer
from graftwork.records.errors import EnvironmentFailure, UserError
from graftwork.web.security import ALIVE, SignIn, load_key, sign_in_folder

if TYPE_CHECKING:
    pass


LONGEST_WAIT_SECONDS = 1.0
"""Timeout of a locked database or a busy machine, so that the server keeps responding."""
DEFAULT_PORT = 8910
TRIED_PORTS = 20
SERVER_FILE = "server.json"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
STOP_SECONDS = 2
ALIVE_SECONDS = 10.0
"""Timeout for a page on a busy machine; if none listens, that is known at once."""


@dataclass(frozen=True)
class PageAddress:
    """Address of the page, and the link that signs in once."""

    url: str
    link: str
    already_running: bool = False


def find_running(root: Path) -> PageAddress | None:
    """Find a running page of the project in this folder, with a new link to it."""
    folder = sign_in_folder(root)
    try:
        known = json.loads((folder / SERVER_FILE).read_text())
        url, boot = str(known["url"]), str(known["boot"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not is_on_this_machine(url):
        return None
    try:
        asked = urllib.request.Request(url + ALIVE)
        with HttpClient(proxies=False).send(asked, seconds=ALIVE_SECONDS) as reply:
            if reply.status != 200 or reply.read(most=200).decode(errors="replace") != boot:
                return None
    except NoAnswer:
        return None
    sign_in = SignIn(load_key(folder), boot)
    return PageAddress(url=url, link=f"{url}/?token={sign_in.make_token()}", already_running=True)


def serve_page(
    root: Path,
    *,
    host: str = "127.0.0.1",
    port: int | None = None,
    allow_actions: bool = False,
    on_ready: Callable[[PageAddress], None] = lambda _address: None,
) -> None:
    """Serve until SIGINT or SIGTERM. A folder without a project gets a page that creates one."""
    listener = open_socket(host, port)
    with listener:
        number = listener.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        url = f"http://{shown}:{number}"
        state = sign_in_folder(root)
        sign_in = SignIn(load_key(state), secrets.token_hex(8))
        write_server_file(state / SERVER_FILE, url, sign_in.boot)
        # The socket listens already: a browser that is quicker than the imports below waits for its page.
        on_ready(PageAddress(url, f"{url}/?token={sign_in.make_token()}"))
        from graftwork.web.app import make_app

        app = make_app(
            root,
            sign_in,
            allow_actions=allow_actions,
            hosts=accepted_hosts(host, number),
        )
        config = uvicorn.Config(
            app,
            http=TimedConnection,
            log_level="critical",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        # Before the server takes requests: next to a visitor's request it would only slow that one down.
        warm_up(app, host=url.partition("//")[2], cookie=f"{sign_in.cookie_name}={sign_in.make_cookie()}")
        uvicorn.Server(config).run(sockets=[listener])


def accepted_hosts(host: str, port: int) -> frozenset[str]:
    """Values of the Host header on this machine's own address; any if others may reach it."""
    if host not in LOOPBACK:
        return frozenset()
    return frozenset(f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]"))


def is_on_this_machine(url: str) -> bool:
    """Whether a token may go to this address: plain HTTP, on an address that this machine could listen on."""
    try:
        parts = urlsplit(url)
        host = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname or ""
        address = ip_address(host)
        with socket.socket(socket.AF_INET6 if address.version == 6 else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except (OSError, ValueError):
        return False
    return parts.scheme == "http" and url == f"http://{parts.netloc}" and "@" not in url


def write_server_file(path: Path, url: str, boot: str) -> None:
    write_atomic(path, json.dumps({"url": url, "boot": boot, "at": time.time()}), private=True)


def open_socket(host: str, port: int | None) -> socket.socket:
    """Open the requested port, or the first free one from the default: addresses stay the same."""
    wanted = [port] if port is not None else range(DEFAULT_PORT, DEFAULT_PORT + TRIED_PORTS)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    error: OSError | None = None
    for number in wanted:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
        except OSError as failed:
            listener.close()
            error = failed
            continue
        listener.listen(128)
        return listener
    reason = error.strerror if error is not None else ""
    if port is not None:
        raise UserError(
            f"port {port} cannot be used",
            why=reason or "",
            fix="use another --port, or leave it out",
            where="--port",
        )
    raise EnvironmentFailure(
        f"no port from {DEFAULT_PORT} to {DEFAULT_PORT + TRIED_PORTS - 1} is free",
        why=reason or "",
        fix="use --port 0",
    )


class TimedConnection(H11Protocol):
    """Ends a connection whose next request is not complete in time. Responses may take any time. uvicorn
    waits for the rest of headers or a body forever, so partial requests would hold their connections.
    """

    receive_seconds = 15.0
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def _expect_request(self) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            self._limit = self.loop.call_later(self.receive_seconds, self._end_if_receiving)

    def _stop_waiting(self) -> None:
        if self._limit is not None:
            self._limit.cancel()

    def _end_if_receiving(self) -> None:
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self.transport.abort()


def warm_up(app: ASGIApp, *, host: str, cookie: str, seconds: float = LONGEST_WAIT_SECONDS) -> None:
    """Open the first screen once inside the server, so that no visitor waits for imports, schemas and
    templates. Returns when the view was made, or after `seconds`."""
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/",
        "raw_path": b"/",
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", host.encode()), (b"cookie", cookie.encode())],
        "client": None,
        "server": None,
    }

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(_message: Message) -> None:
        """Discard what the view reads."""

    async def visit() -> None:
        # What goes wrong here goes wrong for the visitor too, who gets a page that says so.
        with suppress(Exception):
            await app(scope, receive, send)

    thread = threading.Thread(target=lambda: asyncio.run(visit()), daemon=True)
    thread.start()
    thread.join(seconds)
