"""The gateway under load: streams, idle connections, a soak, and LiteLLM's proxy on the same upstream.

Run: python benchmarks/gateway_load.py {streams,idle,soak,litellm} [--seconds N] [--connections N] [--save].
Each server is a process of its own; CPU and memory are those that the kernel counts for it. `litellm` needs
litellm[proxy] on PYTHONPATH; both gateways then ask one mock of OpenAI's API.
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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gateway import CHAT, JSON, MESSAGES, RELEASE, NoSink, _cpu_seconds
from results import save_results

from graftwork.model.base import EMBEDDED, find_base
from graftwork.serve.engine_protocol import EngineJob
from graftwork.serve.http_client import Client
from graftwork.serve.http_messages import Answer, Request, StreamResponse, json_response
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


def run_gateway(folder: str, upstream: str) -> None:
    """Over the stand-in engine, or over a server at `upstream`."""
    settings = ServeSettings(port=0, max_connections=20_000, queue_limit=20_000)
    base, aliases, module = "none", {"champion": RELEASE}, "graftwork.serve.stub_engine"
    if upstream:
        engine = EngineSettings(kind="endpoint", url=upstream, model="mock")
        settings = settings.model_copy(update={"engine": engine})
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
def started(role: str, folder: str = "", upstream: str = "") -> Iterator[tuple[int, int]]:
    """(pid, port) of a process of this file."""
    command = [sys.executable, __file__, "serve", "--role", role, "--folder", folder, "--upstream", upstream]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.pid, int(process.stdout.readline())
        finally:
            process.terminate()


@contextmanager
def started_litellm(folder: str, upstream: str) -> Iterator[tuple[int, int]]:
    port = 18_471
    settings = {"model_name": "base", "litellm_params": {
        "model": "openai/mock", "api_base": upstream, "api_key": "x"}}  # fmt: skip
    file = Path(folder) / "config.yaml"
    file.write_text(json.dumps({"model_list": [settings]}))
    script = "from litellm.proxy.proxy_cli import run_server; run_server()"
    command = [
        sys.executable,
        "-c",
        script,
        "--config",
        str(file),
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]
    local = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with (
        Path(folder, "litellm.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=local) as process,
    ):
        try:
            until = time.monotonic() + 240
            while True:
                try:
                    asyncio.run(
                        _ask(
                            Client(port=port, keep=0),
                            json.dumps({"model": "base", "messages": MESSAGES}).encode(),
                        )
                    )
                    break
                except (OSError, AssertionError):
                    if time.monotonic() > until or process.poll() is not None:
                        raise
                    time.sleep(1.0)
            yield process.pid, port
        finally:
            process.terminate()


async def _ask(client: Client, body: bytes) -> None:
    reply = await client.send("POST", PATH, body=body, headers=JSON)
    answer = await reply.read()
    assert reply.status == 200, answer[:500]


async def ask_many(port: int, body: bytes, *, requests: int, clients: int) -> float:
    """Requests a second of so many clients."""

    async def work(client: Client, count: int) -> None:
        for _ in range(count):
            await _ask(client, body)

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


def measure_soak(options: argparse.Namespace) -> dict[str, Any]:
    """Memory over time at half of what the gateway can take, whole answers and streams in turn."""
    with tempfile.TemporaryDirectory(prefix="graft-") as folder, started("gateway", folder) as (pid, port):
        capacity = run(ask_many(port, CHAT, requests=4000, clients=16))
        samples, asked = run(_soak(pid, port, rate=capacity / 2, seconds=options.seconds))
    warm = statistics.median(samples[len(samples) // 10 : len(samples) // 5])
    last = statistics.median(samples[-len(samples) // 10 :])
    return {
        "seconds": options.seconds,
        "requests": asked,
        "requests_a_second": round(asked / options.seconds, 1),
        "capacity": round(capacity, 1),
        "mib_warm": round(warm, 1),
        "mib_at_the_end": round(last, 1),
        "growth": round(last / warm - 1, 4),
    }


async def _soak(pid: int, port: int, *, rate: float, seconds: float) -> tuple[list[float], int]:
    clients = [Client(port=port) for _ in range(16)]
    began, asked = time.monotonic(), 0
    samples: list[float] = []
    while (now := time.monotonic() - began) < seconds:
        if now * rate <= asked:
            await asyncio.sleep((asked + 1) / rate - now)
            continue
        await asyncio.gather(*(_ask(c, STREAM if n % 8 == 0 else CHAT) for n, c in enumerate(clients)))
        asked += len(clients)
        if len(samples) < now:
            samples.append(memory_mib(pid))
    return samples, asked


def measure_litellm(options: argparse.Namespace) -> dict[str, Any]:
    body = json.dumps({"model": "base", "messages": MESSAGES}).encode()
    found: dict[str, dict[str, list[float]]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="graft-") as folder,
        started("mock") as (_, mock),
        started("gateway", folder, f"http://127.0.0.1:{mock}/v1") as ours,
        started_litellm(folder, f"http://127.0.0.1:{mock}/v1") as theirs,
    ):
        engine = _child_of(ours[0])
        for number in range(options.rounds + 1):
            for name, (pid, port), count in (("graftwork", ours, 1000), ("litellm", theirs, 100)):
                pids = [pid, engine] if name == "graftwork" else [pid]
                before = sum(map(_cpu_seconds, pids))
                rate = run(ask_many(port, body, requests=count, clients=8))
                cpu = 1000 * (sum(map(_cpu_seconds, pids)) - before) / count
                if number:
                    row = found.setdefault(name, {"requests_a_second": [], "cpu_ms": []})
                    row["requests_a_second"].append(rate)
                    row["cpu_ms"].append(cpu)
    figures: dict[str, Any] = {
        name: {key: round(statistics.median(values), 2) for key, values in row.items()}
        for name, row in found.items()
    }
    ratio = figures["graftwork"]["requests_a_second"] / figures["litellm"]["requests_a_second"]
    cpu = figures["litellm"]["cpu_ms"] / figures["graftwork"]["cpu_ms"]
    return {**figures, "times_the_requests": round(ratio, 1), "times_less_cpu": round(cpu, 1)}


def _child_of(pid: int) -> int:
    """The engine's process: the gateway's only child."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


WAYS = {"streams": measure_streams, "idle": measure_idle, "soak": measure_soak, "litellm": measure_litellm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", nargs="?", default="streams", choices=[*WAYS, "serve"])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
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
