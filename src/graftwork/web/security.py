"""Who may see the page, and what the browser may do with it.

Input: requests. Output: the same for a signed-in browser, a short page that says how to sign in for any
other. A token from the terminal is good for one sign-in; the cookie that it gives survives a restart of the
server. Every POST must come from the page itself.
"""

import hashlib
import hmac
import os
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graftwork.files.disk import make_folder, write_atomic
from graftwork.records.errors import EnvironmentFailure

TOKEN_SECONDS = 900.0
SESSION_SECONDS = 30 * 24 * 3600
KEY_FILE = "key"
KEY_BYTES = 32
ALIVE = "/alive"
OPEN_PATHS = ("/static/", ALIVE)
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # `no-referrer` would take the Origin from forms, which is checked.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True)
class SignIn:
    """Signs tokens and cookies with the user's key for the project. `boot` names this start of the server."""

    key: bytes
    boot: str
    used: set[str] = field(default_factory=set)

    def make_token(self, *, now: float | None = None) -> str:
        """Valid once, for a quarter of an hour, until the server restarts."""
        until = int((time.time() if now is None else now) + TOKEN_SECONDS)
        body = f"{secrets.token_urlsafe(9)}.{until}"
        return f"{body}.{self._sign('token', self.boot, body)}"

    def use_token(self, token: str, *, now: float | None = None) -> bool:
        body, _, signature = token.rpartition(".")
        if not self._holds(signature, "token", self.boot, body) or body in self.used:
            return False
        if int(body.partition(".")[2] or 0) < (time.time() if now is None else now):
            return False
        self.used.add(body)
        return True

    def make_cookie(self, *, now: float | None = None) -> str:
        until = int((time.time() if now is None else now) + SESSION_SECONDS)
        body = f"{secrets.token_urlsafe(9)}.{until}"
        return f"{body}.{self._sign('cookie', body)}"

    def accepts_cookie(self, cookie: str, *, now: float | None = None) -> bool:
        body, _, signature = cookie.rpartition(".")
        if not self._holds(signature, "cookie", body):
            return False
        return int(body.partition(".")[2] or 0) >= (time.time() if now is None else now)

    @property
    def cookie_name(self) -> str:
        """Browsers share cookies between the ports of a host: each project has its own."""
        return f"graft_ui_{hashlib.sha256(self.key).hexdigest()[:8]}"

    def _sign(self, *parts: str) -> str:
        return hmac.new(self.key, "\n".join(parts).encode(), hashlib.sha256).hexdigest()[:40]

    def _holds(self, signature: str, *parts: str) -> bool:
        return hmac.compare_digest(signature.encode(), self._sign(*parts).encode())


def sign_in_folder(root: Path) -> Path:
    """Where the user's key for a project's page is stored, and the address of its server. Outside the
    project: files of a clone or an archive must neither sign a session nor name a server.
    """
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    project = hashlib.sha256(str(root.resolve()).encode()).hexdigest()[:16]
    return Path(state) / "graftwork" / "web" / project


def load_key(folder: Path) -> bytes:
    """Load the key in the folder, creating it if missing; readable only by its owner."""
    path = folder / KEY_FILE
    try:
        key = bytes.fromhex(path.read_text())
        if len(key) == KEY_BYTES:
            return key
    except (OSError, ValueError):
        pass
    make_private_folder(folder)
    key = secrets.token_bytes(KEY_BYTES)
    write_atomic(path, key.hex(), private=True)
    return key


def make_private_folder(folder: Path) -> None:
    try:
        make_folder(folder.parent)
        folder.mkdir(0o700, exist_ok=True)
    except OSError as error:
        raise EnvironmentFailure(
            f"the folder for the key of the page cannot be made: {error.strerror}",
            why="the key that signs sessions is kept outside the project",
            fix="set XDG_STATE_HOME to a folder that you may write",
            where=str(folder),
        ) from error


class Gatekeeper:
    """Admits signed-in browsers, checks the origin of a POST, and sets the headers of every response."""

    def __init__(self, app: ASGIApp, *, sign_in: SignIn, hosts: frozenset[str]) -> None:
        self._app, self._sign_in, self._hosts = app, sign_in, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        refused = self._refuse(request)
        if refused is not None:
            await refused(scope, receive, _with_headers(send))
            return
        await self._app(scope, receive, _with_headers(send))

    def _refuse(self, request: Request) -> Response | None:
        if self._hosts and request.headers.get("host", "") not in self._hosts:
            # Another name that leads to this machine: a page elsewhere may have arranged that.
            return _page("Unknown host", "Use the address that graft ui printed.", 421)
        if request.url.path.startswith(OPEN_PATHS):
            return None
        token = request.query_params.get("token")
        if token is not None and request.method == "GET":
            return self._sign_in_with(token)
        return self._refuse_visitor(request)

    def _refuse_visitor(self, request: Request) -> Response | None:
        cookie = request.cookies.get(self._sign_in.cookie_name, "")
        if not self._sign_in.accepts_cookie(cookie):
            if request.headers.get("sec-fetch-site") == "cross-site" and request.method == "GET":
                # A link from another site comes without the cookie. A person decides whether to follow it:
                # following by itself would lend the cookie to the other site.
                return _page(
                    "A link from another site",
                    "Continue if you meant to open this page.",
                    200,
                    link=own_address(request),
                )
            return _page(
                "Sign in",
                "This page needs the address that graft ui printed in the terminal. "
                "Run `graft ui --link` in the project to get another one.",
                401,
            )
        if request.method not in ("GET", "HEAD") and not _is_own(request):
            return _page("Refused", "The request came from another page.", 403)
        return None

    def _sign_in_with(self, token: str) -> Response:
        if not self._sign_in.use_token(token):
            return _page(
                "This link was used already",
                "Each link signs in one browser, within 15 minutes. Run `graft ui --link` in the project "
                "to get another one.",
                401,
            )
        # Not a redirect: after one, browsers would hold back the cookie where the link came from another
        # site.
        answer = _page("Signed in", "Opening the page.", 200, go_to="/")
        answer.set_cookie(
            self._sign_in.cookie_name,
            self._sign_in.make_cookie(),
            max_age=SESSION_SECONDS,
            httponly=True,
            samesite="strict",
            path="/",
        )
        return answer


def _is_own(request: Request) -> bool:
    """Whether the page itself sent the request, by the headers that scripts cannot set."""
    origin = request.headers.get("origin")
    if origin is not None:
        return urlsplit(origin).netloc == request.headers.get("host", "")
    return request.headers.get("sec-fetch-site") == "same-origin"


def own_path(path: str) -> str:
    """Return the path such that no browser parses its start as a host, as in `//host` and `/\\host`."""
    return "/" + quote(path.lstrip("/\\ \t\r\n"))


def own_address(request: Request) -> str:
    """The requested address, on this server."""
    query = request.scope["query_string"].decode("latin-1")
    return own_path(request.scope["path"]) + (f"?{query}" if query else "")


def _page(title: str, text: str, status: int, *, go_to: str = "", link: str = "") -> HTMLResponse:
    """`go_to` is opened at once, `link` on a click."""
    from html import escape

    refresh = f'<meta http-equiv="refresh" content="0;url={escape(go_to)}">' if go_to else ""
    target = go_to or link
    anchor = f'<p><a href="{escape(target)}">Continue</a></p>' if target else ""
    return HTMLResponse(
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">{refresh}'
        '<link rel="icon" href="data:,">'
        '<link rel="stylesheet" href="/static/page.css"><link rel="stylesheet" href="/static/app.css"></head>'
        f'<body class="plain"><main><h1>{escape(title)}</h1><p>{escape(text)}</p>{anchor}</main>'
        "</body></html>",
        status_code=status,
        headers={"cache-control": "no-store"},
    )


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                if name not in headers:
                    headers[name] = value
        await send(message)

    return send_with_headers
