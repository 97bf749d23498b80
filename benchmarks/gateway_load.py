"""The gateway under load: streams, idle connections and a soak.

Run: python benchmarks/gateway_load.py {streams,idle,soak} [--seconds N] [--connections N] [--most-cpu X]
[--save]. Each server is a process of its own; CPU and memory are those that the kernel counts for it.
`--most-cpu` limits the rate of the soak so that the gateway takes at most this share of a core.
"""

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gateway import CHAT, JSON, MESSAGES, RELEASE, NoSink, _cpu_seconds
from results import save_results

from graftwork.model.base import EMBEDDED, find_base
from graftwork.serve.engine_protocol import EngineJob
from graftwork.serve.failover.settings import FailoverSettings
from graftwork.serve.http_client import Client
from graftwork.serve.http_messages import Answer, Headers, Request, StreamResponse, json_response
from graftwork.serve.http_server import HttpLimits, Server
from graftwork.serve.run import ServedProject, run, serve
from graftwork.serve.settings import EngineSettings, ServeSettings

PATH = "/v1/chat/completions"
STREAM = json.dumps(
    {
        "model": "champion",
        "stream": True,
        "messages": [MESSAGES[0], {"role": "user", "content": " ".join(["word"] * 99)}],
    }
).encode()
"""The stand-in engine answers with its name and the words, one piece each: 100 pieces."""


KEY_VARIABLE = "GRAFT_BENCHMARK_KEY"


def run_gateway(folder: str, upstream: str) -> None:
    """Over the stand-in engine, or over a server at `upstream`, then with a fallback chain."""
    settings = ServeSettings(
        port=0,
        max_connections=20_000,
        queue_limit=20_000,
        api_key_env=KEY_VARIABLE if os.environ.get(KEY_VARIABLE) else None,
    )
    base, aliases, module = "none", {"champion": RELEASE}, "graftwork.serve.stub_engine"
    if upstream:
        engine = EngineSettings(kind="endpoint", url=upstream, model="mock")
        failover = FailoverSettings(fallback={"base": ("champion",)})
        settings = settings.model_copy(update={"engine": engine, "failover": failover})
        base, aliases, module = find_base(EMBEDDED, project_folder=Path()).folder, {}, None
    job = EngineJob(
        folder=folder,
        base_folder=base,
        adapters={} if upstream else {RELEASE: "none"},
        socket=str(Path(folder) / "e.sock"),
    )
    project = ServedProject(resolve_aliases=lambda: aliases, captures=NoSink())
    run(serve(settings, engine_job=job, project=project, on_ready=_print_port, engine_module=module))


def _print_port(url: str) -> None:
    print(url.rpartition(":")[2], flush=True)


def run_mock() -> None:
    run(_mock())


async def _mock() -> None:
    async def answer(request: Request) -> Answer:
        if request.method == "GET":
            return json_response({"object": "list", "data": [{"id": "mock"}]})
        asked = json.loads(request.body)
        if not asked.get("stream"):
            message = {"role": "assistant", "content": "It says so."}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
            head = {"id": "x", "object": "chat.completion", "created": 1, "model": "mock"}
            return json_response({**head, "choices": [choice], "usage": usage})

        async def events() -> Any:
            head = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "mock"}
            choice = {"index": 0, "delta": {"content": "It says so."}, "finish_reason": "stop"}
            yield b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"

        return StreamResponse(200, events(), (("content-type", "text/event-stream"),))

    server = Server(answer, limits=HttpLimits(max_connections=20_000))
    print(await server.listen(host="127.0.0.1", port=0), flush=True)
    await asyncio.Event().wait()


@contextmanager
def started(role: str, folder: str = "", upstream: str = "", key: str = "") -> Iterator[tuple[int, int]]:
    """(pid, port) of a process of this file."""
    command = [sys.executable, __file__, "serve", "--role", role, "--folder", folder, "--upstream", upstream]
    environment = {**os.environ, KEY_VARIABLE: key}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.terminate()


async def _ask(client: Client, body: bytes, headers: Headers = JSON) -> None:
    reply = await client.send("POST", PATH, body=body, headers=headers)
    answer = await reply.read()
    assert reply.status == 200, answer[:500]


async def ask_many(port: int, body: bytes, *, requests: int, clients: int, headers: Headers = JSON) -> float:
    """Requests a second of so many clients."""

    async def work(client: Client, count: int) -> None:
        for _ in range(count):
            await _ask(client, body, headers)

    began = time.perf_counter()
    await asyncio.gather(*(work(Client(port=port), requests // clients) for _ in range(clients)))
    return requests // clients * clients / (time.perf_counter() - began)


def memory_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def measure_streams(options: argparse.Namespace) -> dict[str, Any]:
    """CPU of the gateway for an answer of 100 pieces, with captures."""
    with tempfile.TemporaryDirectory(prefix="graft-") as folder, started("gateway", folder) as (pid, port):
        run(ask_many(port, STREAM, requests=50, clients=1))
        found = []
        for _ in range(10):
            before = _cpu_seconds(pid)
            run(ask_many(port, STREAM, requests=100, clients=4))
            found.append(1000 * (_cpu_seconds(pid) - before) / 100)
    return {"streams": 1000, "pieces": 100, "cpu_ms_a_stream": round(statistics.median(found), 2)}


def measure_idle(options: argparse.Namespace) -> dict[str, Any]:
    """Memory of the gateway with idle connections: each has asked once."""
    most = options.connections
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    with tempfile.TemporaryDirectory(prefix="graft-") as folder, started("gateway", folder) as (pid, port):
        run(ask_many(port, CHAT, requests=400, clients=8))
        empty = memory_mib(pid)
        samples = run(_hold_idle(pid, port, most, seconds=options.seconds))
        after = memory_mib(pid)
    return {
        "connections": most,
        "seconds": options.seconds,
        "mib_before": round(empty, 1),
        "mib_open": round(samples[0], 1),
        "mib_at_the_end": round(samples[-1], 1),
        "growth_while_idle": round(samples[-1] / samples[0] - 1, 4),
        "kib_a_connection": round((samples[0] - empty) * 1024 / most, 2),
        "mib_after_closing": round(after, 1),
    }


async def _hold_idle(pid: int, port: int, most: int, *, seconds: float) -> list[float]:
    clients = [Client(port=port) for _ in range(most)]
    for start in range(0, most, 200):
        await asyncio.gather(*(_ask(client, CHAT) for client in clients[start : start + 200]))
    samples, until = [memory_mib(pid)], time.monotonic() + seconds
    while time.monotonic() < until:
        await asyncio.sleep(1.0)
        await _ask(clients[len(samples) % most], CHAT)
        samples.append(memory_mib(pid))
    for client in clients:
        client.close()
    await asyncio.sleep(1.0)
    return samples


class Soak:
    """Asks on and on, and keeps what came of it; `describe` may be called meanwhile."""

    def __init__(self, pid: int, port: int, *, rate: float) -> None:
        self._pid, self._rate = pid, rate
        self._clients = [Client(port=port) for _ in range(16)]
        self._samples: list[float] = []
        self._cpu = _cpu_seconds(pid)
        self.asked = self.failed = 0
        self.seconds = 0.0

    async def run(self, seconds: float, *, on_minutes: Callable[[], None] = lambda: None) -> None:
        began, saved = time.monotonic() - self.seconds, self.seconds
        until = self.seconds + seconds
        while (now := time.monotonic() - began) < until:
            self.seconds = now
            if now * self._rate <= self.asked:
                await asyncio.sleep((self.asked + 1) / self._rate - now)
                continue
            await self._ask_all()
            if len(self._samples) < now:
                self._samples.append(memory_mib(self._pid))
            if now - saved >= _SAVE_SECONDS:
                saved = now
                on_minutes()
        self.seconds = until

    async def _ask_all(self) -> None:
        question = b'"content": "%09d ' % self.asked  # each has a text of its own, which is redacted
        chat, stream = (body.replace(b'"content": "', question) for body in (CHAT, STREAM))
        sent = (_ask(c, stream if n % 8 == 0 else chat) for n, c in enumerate(self._clients))
        found = await asyncio.gather(*sent, return_exceptions=True)
        self.asked += len(self._clients)
        # On a machine that is starved of CPU the stand-in engine may be silent for seconds: that is a 503.
        self.failed += sum(isinstance(outcome, BaseException) for outcome in found)

    @property
    def cpu_a_request(self) -> float:
        return (_cpu_seconds(self._pid) - self._cpu) / self.asked

    def describe(self) -> dict[str, Any]:
        samples = self._samples
        warm = statistics.median(samples[len(samples) // 10 : len(samples) // 5])
        last = statistics.median(samples[-len(samples) // 10 :])
        return {
            "seconds": round(self.seconds),
            "requests": self.asked,
            "failed": self.failed,
            "requests_a_second": round(self.asked / self.seconds, 1),
            "share_of_a_core": round((_cpu_seconds(self._pid) - self._cpu) / self.seconds, 3),
            "mib_warm": round(warm, 2),
            "mib_at_the_end": round(last, 2),
            "mib_most": round(max(samples), 2),
            "growth": round(last / warm - 1, 4),
            "mib_each_tenth": [round(samples[len(samples) * n // 10], 2) for n in range(10)],
        }


def measure_soak(options: argparse.Namespace) -> dict[str, Any]:
    """Memory over time at half of what the gateway can take, whole answers and streams in turn."""
    with tempfile.TemporaryDirectory(prefix="graft-") as folder, started("gateway", folder) as (pid, port):
        capacity = run(ask_many(port, CHAT, requests=2000, clients=16))
        trial = Soak(pid, port, rate=capacity / 2)
        run(trial.run(5))
        soak = Soak(pid, port, rate=min(capacity / 2, options.most_cpu / trial.cpu_a_request))

        def describe() -> dict[str, Any]:
            return {"capacity": round(capacity, 1), **soak.describe()}

        def keep() -> None:
            if options.save:
                save_results("gateway_soak", {**describe(), "load": round(os.getloadavg()[0], 1)})

        run(soak.run(options.seconds, on_minutes=keep))
        return describe()


_SAVE_SECONDS = 240.0
"""How often a long soak writes down what it has so far."""


def child_of(pid: int) -> int:
    """The engine's process: the gateway's only child."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


WAYS = {"streams": measure_streams, "idle": measure_idle, "soak": measure_soak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", nargs="?", default="streams", choices=[*WAYS, "serve"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--most-cpu", type=float, default=1.0, metavar="X")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/gateway_WAY.json")
    parser.add_argument("--role", choices=("gateway", "mock"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("--upstream", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role == "mock":
        run_mock()
    elif options.role == "gateway":
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
        run_gateway(options.folder, options.upstream)
    else:
        figures = {**WAYS[options.way](options), "load": round(os.getloadavg()[0], 1)}
        if options.save:
            save_results(f"gateway_{options.way}", figures)
        print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
