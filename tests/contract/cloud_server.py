"""What the stand-ins of cloud providers share: HTTP, the faults of the simulated provider, running a job.

A stand-in keeps jobs as machines of a `SimulatedProvider`, so that every scripted fault happens to its
requests. A job that a test starts is really run: with the command and the files that the place sent.
"""

import json
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from fleet_simulator import SimulatedProvider

from graftwork.fleet.place import PlaceUnreachable, Refused

SOURCES = Path(__file__).parents[2] / "src"


@dataclass
class Request:
    method: str
    path: str
    query: dict
    headers: dict
    raw: bytes
    body: object = None


@dataclass
class Answer:
    status: int = 200
    content: object = None
    headers: dict = field(default_factory=dict)


class Denied(Exception):
    """The login is wrong."""


class CloudStandIn:
    """One account at a provider."""

    def __init__(self, provider: SimulatedProvider, root: Path) -> None:
        self.provider, self.root = provider, root
        self.url = ""
        self.raw: list[bytes] = []
        self.lock = threading.RLock()
        self.processes: dict[str, subprocess.Popen] = {}
        self.log_files: dict[str, Path] = {}
        self.creations = 0

    # What a subclass answers with.

    def answer(self, request: Request) -> Answer:
        raise NotImplementedError

    def decide(self, request: Request) -> Answer:
        """The answer, or the error that the simulated provider makes of it."""
        try:
            return self.answer(request)
        except Denied as denied:
            return self.error(401, str(denied))
        except Refused as refused:
            return self.error(400, refused.what)
        except PlaceUnreachable as error:
            status = 429 if "429" in error.what else 504 if "no answer" in error.what else 500
            return self.error(status, error.what)

    def error(self, status: int, message: str) -> Answer:
        return Answer(status, {"error": message, "message": message})

    def command(self, label: str) -> tuple[list[str], dict[str, str], Path]:
        """The words, the environment and the folder of a job, as the provider would have them."""
        raise NotImplementedError

    # Jobs.

    def machine(self, label):
        """The first machine of this name that was made."""
        found = [machine for machine in self.provider.machines if machine.label == label]
        return found[0] if found else None

    def one_of_a_name(self, name):
        """A name is there once: what the provider made twice is one job."""
        for other in [machine for machine in self.provider.machines if machine.label == name][1:]:
            other.ended_at = other.created_at

    def start(self, label) -> None:
        words, environment, folder = self.command(label)
        folder.mkdir(parents=True, exist_ok=True)
        keep = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "TMPDIR") if name in os.environ}
        log = (folder / "output.log").open("wb")
        self.processes[label] = subprocess.Popen(
            words, env={**keep, **environment}, cwd=folder, stdout=log, stderr=subprocess.STDOUT
        )
        log.close()
        self.log_files[label] = folder / "output.log"

    def finish(self, label) -> int:
        code = self.processes[label].wait(timeout=300)
        for machine in self.provider.machines:
            if machine.label == label and machine.ended_at is None:
                machine.ended_at = self.provider.now
        return code

    def wait_for_checkpoint(self, label) -> None:
        """Until the running job has written one."""
        pause = threading.Event()
        while not has_checkpoint(self.root):
            assert self.processes[label].poll() is None, self.output(label)
            pause.wait(0.05)

    def run(self, label) -> int:
        """Let the machine boot and the job run to its end."""
        self.provider.advance(120)
        self.start(label)
        return self.finish(label)

    def output(self, label) -> str:
        path = self.log_files.get(label)
        return path.read_text(errors="replace") if path else ""

    def phase(self, machine) -> str:
        """waiting, running, done (by its own end), or ended (by the provider)."""
        now = self.provider.now
        process = self.processes.get(machine.label)
        if process is not None:
            if process.poll() is not None:
                return "done"
            return "running" if machine.ended_at is None else "ended"
        done = machine.done_at
        if (
            machine.ended_at is not None
            and machine.ended_at <= now
            and (done is None or machine.ended_at < done)
        ):
            return "ended"
        if machine.boots_at is None or now < machine.boots_at:
            return "waiting"
        return "done" if done is not None and now >= done else "running"

    def simulated_exit(self, machine) -> dict:
        """What a job that was only simulated leaves."""
        whole = machine.work_seconds <= machine.seconds
        return {"code": 0 if whole else 75, "reason": "done" if whole else "its time is over", "at": 0}


@contextmanager
def serving(stand_in: CloudStandIn):
    """The stand-in on a free port of loopback."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def respond(self):
            raw = read_body(self)
            parts = urlsplit(self.path)
            request = Request(
                self.command,
                parts.path,
                dict(parse_qsl(parts.query, True)),
                {name.title(): value for name, value in self.headers.items()},
                raw,
            )
            stand_in.raw.append(f"{self.command} {self.path} {self.headers}".encode() + raw)
            with stand_in.lock:
                answer = stand_in.decide(request)
            body = answer.content
            if not isinstance(body, bytes):
                body = json.dumps(body).encode() if body is not None else b""
                answer.headers.setdefault("Content-Type", "application/json")
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if "Content-Length" not in answer.headers:
                self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = do_PATCH = respond  # noqa: N815

        def log_message(self, *_arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    stand_in.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield stand_in
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        for process in stand_in.processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()


def has_checkpoint(root: Path) -> bool:
    """Whether a job below has written one. `rglob` would fail when a folder goes meanwhile."""
    return any(name.startswith("step-0") for _, folders, _ in os.walk(root) for name in folders)


def read_body(handler) -> bytes:
    if handler.headers.get("Transfer-Encoding", "").lower() != "chunked":
        return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
    parts = []
    while size := int(handler.rfile.readline().split(b";")[0], 16):
        parts.append(handler.rfile.read(size))
        handler.rfile.readline()
    handler.rfile.readline()
    return b"".join(parts)


def python_path(*folders) -> str:
    return os.pathsep.join(map(str, folders))


PYTHON = sys.executable
