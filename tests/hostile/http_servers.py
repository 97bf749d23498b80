"""Compare HTTP servers under the gateway: ours, uvicorn, granian and hypercorn.

Each server runs the same gateway over the same stand-in engine. Measured for each: processor time a
request, and what attacks by a client without a key, held to half a core, do to its memory and to
`/health`. The peers are not dependencies; install them apart and name the folder:

    pip install --target .peers uvicorn granian hypercorn
    PYTHONPATH=.peers python tests/hostile/http_servers.py [--requests N] [--seconds S]
"""

import argparse
import asyncio
import importlib.util
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from graftwork.http.client import Client
from graftwork.http.messages import ApiError, Request, Response, error_response
from graftwork.http.server import Server
from graftwork.serve.answers import AnswerService
from graftwork.serve.gateway import Gateway
from graftwork.serve.keys import KeyRing
from graftwork.serve.routing import Routes
from graftwork.serve.run import run
from graftwork.serve.settings import ServeSettings

RELEASE = "a1b2c3d4e5f60718"
KEY = "the-key-of-the-benchmark"
CHAT = (
    b'{"model":"champion","messages":[{"role":"system","content":"'
    + b"Answer from the sources, as JSON. " * 30
    + b'"},{"role":"user","content":"'
    + b"What does the second source say about the harvest? " * 10
    + b'"}]}'
)
HEADERS = (("content-type", "application/json"), ("authorization", f"Bearer {KEY}"))
PEERS = ("graftwork", "uvicorn", "granian", "hypercorn")


# -- the servers ---------------------------------------------------------------------------------


@dataclass
class OneEngine:
    client: Client

    def describe(self) -> dict[str, Any]:
        return {"state": "ready", "reason": "", "restarts": 0}


def make_gateway(engine: Client) -> Gateway:
    routes = Routes(releases=frozenset({RELEASE}), aliases={"champion": RELEASE})
    answers = AnswerService(OneEngine(engine), settings=ServeSettings(), routes=lambda: routes, captures=None)
    return Gateway(answers, keys=KeyRing(KEY))


class AsgiApp:
    """The gateway as an ASGI application, so that any ASGI server can run it."""

    def __init__(self, engine_socket: str) -> None:
        self._socket = engine_socket
        self._server: Server | None = None

    async def __call__(
        self, scope: dict[str, Any], receive: Callable[[], Any], send: Callable[..., Any]
    ) -> None:
        if scope["type"] == "lifespan":
            while (await receive())["type"] != "lifespan.shutdown":
                await send({"type": "lifespan.startup.complete"})
            await send({"type": "lifespan.shutdown.complete"})
            return
        if self._server is None:
            self._server = make_gateway(Client(path=self._socket)).open_server()
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        body, more = bytearray(), True
        try:
            assert self._server.admit is not None
            self._server.admit(Request(scope["method"], scope["path"], headers=headers))
            while more:
                message = await receive()
                body += message.get("body", b"")
                more = message.get("more_body", False)
            request = Request(scope["method"], scope["path"], headers=headers, body=bytes(body))
            answer = await self._server.handler(request)
        except ApiError as error:
            answer = error_response(error)
        head = [(name.encode(), value.encode()) for name, value in answer.headers]
        if isinstance(answer, Response):
            head.append((b"content-length", str(len(answer.body)).encode()))
            await send({"type": "http.response.start", "status": answer.status, "headers": head})
            await send({"type": "http.response.body", "body": answer.body})
            return
        await send({"type": "http.response.start", "status": answer.status, "headers": head})
        chunks: AsyncGenerator[bytes, None] = answer.chunks
        async for chunk in chunks:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


app = AsgiApp(os.environ.get("GRAFT_BENCH_ENGINE", ""))


def serve_ours(engine_socket: str, port: int) -> None:
    async def main() -> None:
        gateway = make_gateway(Client(path=engine_socket))
        await gateway.open_server().listen(port=port)
        await asyncio.Event().wait()

    run(main())


def serve_engine(path: str) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins"))
    from stub_engine import StubEngine

    from graftwork.engines.process import PromptReleases, make_handler
    from graftwork.http.server import Server

    async def main() -> None:
        await Server(make_handler(StubEngine([RELEASE]), PromptReleases())).listen_unix(path)
        await asyncio.Event().wait()

    run(main())


def command_of(server: str, port: int, engine_socket: str) -> list[str]:
    python = sys.executable
    name = f"{Path(__file__).stem}:app"
    return {
        "graftwork": [python, __file__, "--role", "ours", "--socket", engine_socket, "--port", str(port)],
        "uvicorn": [
            python, "-m", "uvicorn", name, "--port", str(port), "--loop", "uvloop", "--http", "httptools",
            "--log-level", "error", "--no-access-log",
        ],
        "granian": [
            python, "-m", "granian", "--interface", "asgi", "--port", str(port), "--loop", "uvloop",
            "--log-level", "error", name,
        ],
        "hypercorn": [
            python, "-m", "hypercorn", "--bind", f"127.0.0.1:{port}", "--worker-class", "uvloop",
            "--log-level", "error", name,
        ],
    }[server]  # fmt: skip


# -- what is measured ----------------------------------------------------------------------------


class Running:
    """A server with all processes that it started."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.port = port

    def _tree(self) -> list[psutil.Process]:
        top = psutil.Process(self.process.pid)
        return [top, *top.children(recursive=True)]

    def cpu_seconds(self) -> float:
        return sum(sum(p.cpu_times()[:2]) for p in self._tree())

    def memory(self) -> int:
        return sum(p.memory_info().rss for p in self._tree())


@contextmanager
def started(server: str, engine_socket: str) -> Iterator[Running]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "GRAFT_BENCH_ENGINE": engine_socket}
    folder = Path(__file__).parent
    with subprocess.Popen(command_of(server, port, engine_socket), cwd=folder, env=environment) as process:
        try:
            _wait_for(port)
            yield Running(process, port)
        finally:
            for child in psutil.Process(process.pid).children(recursive=True):
                child.terminate()
            process.terminate()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return


async def cpu_per_request(server: Running, requests: int) -> tuple[float, float]:
    """Processor and median wall time a request, in milliseconds."""
    client = Client(port=server.port)

    async def ask(count: int) -> list[float]:
        times = []
        for _ in range(count):
            began = time.perf_counter()
            reply = await client.send("POST", "/v1/chat/completions", body=CHAT, headers=HEADERS)
            await reply.read()
            assert reply.status == 200, reply.status
            times.append(time.perf_counter() - began)
        return times

    await ask(100)
    before = server.cpu_seconds()
    times = await ask(requests)
    cpu = server.cpu_seconds() - before
    client.close()
    return 1000 * cpu / requests, 1000 * statistics.median(times)


@dataclass(frozen=True)
class Attack:
    """What a client without a key sends: the opening once a connection, then the piece again and again."""

    connections: int
    opening: bytes
    piece: bytes
    pause: float = 0.001
    reconnect: bool = False
    """Leave after one piece and come back."""


HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
ATTACKS = {
    "endless trailer": Attack(3, HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\nx: ", b"a" * 65536),
    "pipelined, unread": Attack(20, b"", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 500),
    "bodies without a key": Attack(150, HEAD + b"content-length: 4000000\r\n\r\n", b"a" * 65536),
    "endless head": Attack(20, b"GET /health HTTP/1.1\r\nhost: x\r\nx: ", b"a" * 16384),
    "open and close": Attack(100, HEAD + b"content-length: 4000000\r\n\r\n", b"a" * 65536, reconnect=True),
    "slow heads": Attack(200, b"GET /health HTTP/1.1\r\nhost: x\r\nx: ", b"a", pause=0.5),
    "more than the cap": Attack(1500, b"GET /health HTTP/1.1\r\n", b"x: y\r\n", pause=1.0),
}


async def _flood(port: int, attack: Attack, until: float) -> None:
    """Send without reading until the time is over. A cut connection is opened again, after a pause."""
    while time.monotonic() < until:
        with socket.socket() as sock:
            sock.setblocking(False)
            try:
                await _send(sock, port, attack, until)
            except (OSError, TimeoutError):
                await asyncio.sleep(min(0.2, max(0.0, until - time.monotonic())))


async def _send(sock: socket.socket, port: int, attack: Attack, until: float) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", port))
    await loop.sock_sendall(sock, attack.opening)
    while time.monotonic() < until:
        await asyncio.wait_for(loop.sock_sendall(sock, attack.piece), max(0.01, until - time.monotonic()))
        if attack.reconnect:
            return
        await asyncio.sleep(min(attack.pause, max(0.0, until - time.monotonic())))


async def _health(port: int, until: float) -> list[float]:
    times = []
    while time.monotonic() < until:
        began = time.perf_counter()
        client = Client(port=port)
        try:
            await asyncio.wait_for(client.fetch("GET", "/health"), 4)
            times.append(time.perf_counter() - began)
        except (OSError, TimeoutError):
            times.append(4.0)
        client.close()
        await asyncio.sleep(0.05)
    return times


def attack_from_child(port: int, name: str, seconds: float) -> None:
    attack = ATTACKS[name]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    async def main() -> None:
        until = time.monotonic() + seconds
        await asyncio.gather(*(_flood(port, attack, until) for _ in range(attack.connections)))

    asyncio.run(main())


def under_attack(server: Running, name: str, seconds: float) -> dict[str, float]:
    before = server.memory()
    command = [sys.executable, __file__, "--role", "attacker", "--port", str(server.port)]
    with subprocess.Popen([*command, "--attack", name, "--seconds", str(seconds)]) as attacker:
        limit = [sys.executable, "-c", _HALF_A_CORE, str(attacker.pid)]
        with subprocess.Popen(limit) as governor:
            peak = before
            times: list[float] = []
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                times += asyncio.run(_health(server.port, min(until, time.monotonic() + 0.5)))
                peak = max(peak, server.memory())
            attacker.wait()
            governor.terminate()
    asyncio.run(_health(server.port, time.monotonic() + 1))
    ordered = sorted(times)
    return {
        "before_mib": before / 2**20,
        "peak_mib": peak / 2**20,
        "after_mib": server.memory() / 2**20,
        "health_p99_ms": 1000 * ordered[int(0.99 * (len(ordered) - 1))],
    }


# Stops and continues a process so that it gets half of one core.
_HALF_A_CORE = """
import os, signal, sys, time
pid = int(sys.argv[1])
try:
    while True:
        os.kill(pid, signal.SIGSTOP); time.sleep(0.01); os.kill(pid, signal.SIGCONT); time.sleep(0.01)
except ProcessLookupError:
    pass
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--seconds", type=float, default=6.0, help="how long each attack takes")
    parser.add_argument("--only", choices=PEERS)
    parser.add_argument("--role", choices=("ours", "engine", "attacker"), help=argparse.SUPPRESS)
    parser.add_argument("--socket", default="", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--attack", default="", help=argparse.SUPPRESS)
    parser.add_argument("--attacks", nargs="*", choices=tuple(ATTACKS), help="all unless named")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.role == "ours":
        serve_ours(arguments.socket, arguments.port)
    elif arguments.role == "engine":
        serve_engine(arguments.socket)
    elif arguments.role == "attacker":
        attack_from_child(arguments.port, arguments.attack, arguments.seconds)
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="graft-") as folder:
        engine_socket = str(Path(folder) / "e.sock")
        with subprocess.Popen(
            [sys.executable, __file__, "--role", "engine", "--socket", engine_socket]
        ) as engine:
            while not Path(engine_socket).exists():
                time.sleep(0.05)
            for server in PEERS if arguments.only is None else (arguments.only,):
                if server == "graftwork" or importlib.util.find_spec(server) is not None:
                    rows[server] = measure(server, engine_socket, arguments)
                else:
                    print(f"{server}: not installed, passed over", file=sys.stderr)
            engine.terminate()
    if arguments.json:
        print(json.dumps(rows, indent=2))


def measure(server: str, engine_socket: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One server: processor time a request, then each attack."""
    out = sys.stderr if arguments.json else sys.stdout
    with started(server, engine_socket) as running:
        cpu, wall = run(cpu_per_request(running, arguments.requests))
        print(f"{server}: {cpu:.3f} ms processor time a request, {wall:.3f} ms median", file=out, flush=True)
        attacks = {}
        for name in arguments.attacks or ATTACKS:
            seen = attacks[name] = under_attack(running, name, arguments.seconds)
            print(
                f"  {name:<22} memory {seen['before_mib']:.0f} MiB, {seen['peak_mib']:.0f} at its peak, "
                f"{seen['after_mib']:.0f} after; /health p99 {seen['health_p99_ms']:.0f} ms",
                file=out,
                flush=True,
            )
    return {"cpu_ms": cpu, "median_ms": wall, "attacks": attacks}


if __name__ == "__main__":
    main()
