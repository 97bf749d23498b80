"""The page of a project served in a thread, and a visitor without script."""

import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

START_SECONDS = 300


class Visitor:
    """A signed-in browser without script."""

    def __init__(self, base: str, cookie: str) -> None:
        self.base, self.cookie = base, cookie

    def get(self, path: str, **headers: str) -> SimpleNamespace:
        return self._send(
            urllib.request.Request(self.base + path, headers={"cookie": self.cookie, **headers})
        )

    def post(self, path: str, *, origin: str | None = None, **fields: str) -> SimpleNamespace:
        request = urllib.request.Request(self.base + path, data=urllib.parse.urlencode(fields).encode())
        request.add_header("cookie", self.cookie)
        request.add_header("origin", self.base if origin is None else origin)
        return self._send(request)

    def _send(self, request: urllib.request.Request) -> SimpleNamespace:
        opener = urllib.request.build_opener(_NoRedirect)
        try:
            with opener.open(request, timeout=300) as answer:
                return SimpleNamespace(
                    status=answer.status, text=answer.read().decode(), headers=answer.headers
                )
        except urllib.error.HTTPError as error:
            return SimpleNamespace(status=error.code, text=error.read().decode(), headers=error.headers)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments):
        return None


@contextmanager
def serve(folder: Path, *, allow_actions: bool = False, port: int = 0):
    """The page of a project in a thread."""
    import uvicorn

    from graftwork.web.app import make_app
    from graftwork.web.security import SignIn, load_key, sign_in_folder
    from graftwork.web.serve import accepted_hosts, open_socket

    listener = open_socket("127.0.0.1", port)
    number = listener.getsockname()[1]
    sign_in = SignIn(load_key(sign_in_folder(folder)), f"boot-{number}-{time.monotonic_ns()}")
    app = make_app(folder, sign_in, allow_actions=allow_actions, hosts=accepted_hosts("127.0.0.1", number))
    config = uvicorn.Config(
        app, log_level="critical", lifespan="off", access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    base = f"http://127.0.0.1:{number}"
    _wait_until_up(base)
    cookie = f"{sign_in.cookie_name}={sign_in.make_cookie()}"
    try:
        yield SimpleNamespace(
            base=base,
            sign_in=sign_in,
            visitor=Visitor(base, cookie),
            cookie=cookie,
            port=number,
            thread=thread,
        )
    finally:
        server.should_exit = True
        thread.join(START_SECONDS)
        listener.close()


def _wait_until_up(base: str) -> None:
    until = time.monotonic() + START_SECONDS
    while True:
        try:
            urllib.request.urlopen(f"{base}/alive", timeout=30).read()
        except OSError:
            assert time.monotonic() < until
            threading.Event().wait(0.02)
        else:
            return
