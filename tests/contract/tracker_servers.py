"""A real MLflow server and a real trackio server on this machine, and a wire that can be cut between.

Each server is a process group of its own on a free port, with its state in a folder: killed and started again
in the same folder, it goes on.
"""

import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from free_ports import free_port

TRACKIO = """
import sys, trackio
at = {"host": "127.0.0.1", "server_port": int(sys.argv[1]), "share": False}
trackio.show(open_browser=False, block_thread=False, **at)
sys.stdin.read()
"""


class Server:
    """A program that listens on a port, with all its children."""

    def __init__(self, folder: Path, command: list[str], *, port: int, more: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port, self.log = folder, port, folder / "server.log"
        self._command = command
        self._environment = {**os.environ, **more, "DO_NOT_TRACK": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
        self._environment["PYTHONPATH"] = whole_python_path()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 180
        while not self._answers():
            assert self._process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline, "the server is not responding"
            time.sleep(0.2)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            return False
        return True


def whole_python_path() -> str:
    """The same where a process stands in another folder."""
    found = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(str(Path(item).absolute()) for item in found if item)


@contextmanager
def running(server: Server) -> Iterator[Server]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


def mlflow_server(folder: Path, *words: str, **more: str) -> Server:
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db", *words]
    # Jobs are for what a registry has no part in; without them it starts in half the time.
    more = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", **more}
    return Server(folder, command, port=port, more=more)


def trackio_server(folder: Path, *, token: str) -> Server:
    port = free_port()
    more = {"TRACKIO_DIR": str(folder), "TRACKIO_WRITE_TOKEN": token}
    return Server(folder, [sys.executable, "-c", TRACKIO, str(port)], port=port, more=more)


@contextmanager
def wire_to(server: Server, *, is_cut: Callable[[str, str], bool]) -> Iterator[str]:
    """An address that leads to the server, until a request for which `is_cut` says so.

    Of that request the server gets the first half, and is killed with it in its hands.
    """

    class Handler(BaseHTTPRequestHandler):
        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            if is_cut(self.command, self.path):
                self._send_half(body)
                server.kill()
            try:
                line = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
                line.request(self.command, self.path, body=body, headers=dict(self.headers))
                answer = line.getresponse()
                content = answer.read()
            except OSError:
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _send_half(self, body: bytes) -> None:
            with socket.create_connection(("127.0.0.1", server.port)) as line:
                head = f"{self.command} {self.path} HTTP/1.1\r\n{self.headers}".replace("\n\n", "\n")
                line.sendall(head.encode() + b"\r\n" + body[: len(body) // 2])

        def __getattr__(self, name: str) -> Callable[[], None]:
            if name.startswith("do_"):
                return self._pass_on
            raise AttributeError(name)

        def log_message(self, *_words: object) -> None:
            pass

    wire = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=wire.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{wire.server_address[1]}"
    finally:
        wire.shutdown()
        wire.server_close()
