"""Opens the first screen once inside the server, so that no visitor waits for imports, schemas and templates.

In: the application and a cookie that it accepts. Out: nothing; what the view reads is dropped.
"""

import asyncio
import threading
from contextlib import suppress

from starlette.types import ASGIApp, Message, Scope

LONGEST_WAIT_SECONDS = 1.0
"""A locked database or a busy machine does not keep the server from answering for longer."""


def warm_up(app: ASGIApp, *, host: str, cookie: str, seconds: float = LONGEST_WAIT_SECONDS) -> None:
    """Return when the view was made, or after `seconds`."""
    thread = threading.Thread(target=_open_once, args=(app, host, cookie), daemon=True)
    thread.start()
    thread.join(seconds)


def _open_once(app: ASGIApp, host: str, cookie: str) -> None:
    # What goes wrong here goes wrong for the visitor too, who gets a page that says so.
    with suppress(Exception):
        asyncio.run(_visit(app, _scope(host, cookie)))


async def _visit(app: ASGIApp, scope: Scope) -> None:
    await app(scope, _receive, _drop)


def _scope(host: str, cookie: str) -> Scope:
    return {
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


async def _receive() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def _drop(message: Message) -> None:
    return None
