"""What the gateway adds to a request, next to a plain proxy on asyncio streams and json.

Processes: our gateway over its stand-in engine, without captures, with them, and with everything: a key to
check, captures, two replicas, and a fallback chain; and the peer, which relays to the
same engine and checks, routes, counts and captures nothing. One client asks all of them in turn over kept
connections, in rounds, so that a busy machine is equally unfair to each. Requests share their system prompt;
each has a question of its own. CPU is user and system time of all threads of the process, by the kernel's
count; the figure is the median of the rounds, with their range.
Run: `python benchmarks/gateway.py [--requests N] [--json] [--save]`.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import stub
from results import save_results

from graftwork.engines.protocol import EngineJob
from graftwork.http.client import Client
from graftwork.records.interaction import Capture
from graftwork.serve.run import ServedProject, run, serve
from graftwork.serve.settings import ServeSettings

RELEASE = "a1b2c3d4e5f60718"
MESSAGES = [
    {"role": "system", "content": "Answer from the sources, as JSON. " * 30},
    {"role": "user", "content": "What does the second source say about the harvest? " * 10},
]
CHAT = json.dumps({"model": "champion", "messages": MESSAGES}).encode()
DIRECT = json.dumps({"model": RELEASE, "messages": MESSAGES, "max_tokens": 256}).encode()
_QUESTION = b"What does"
JSON = (("content-type", "application/json"),)


class NoSink:
    """Captures are made and redacted, and kept nowhere."""

    def add_many(self, captures: list[Capture]) -> None:
        del captures


KEY = "benchmark-key-0123456789"
ARMED = {
    "api_key_env": "GRAFT_BENCHMARK_KEY",
    "engine": {"replicas": 2},
    "failover": {"fallback": {"champion": [RELEASE, "base"]}},
}


def run_gateway(folder: str, *, captures: bool, armed: bool = False) -> None:
    os.environ["GRAFT_BENCHMARK_KEY"] = KEY
    job = EngineJob(
        folder=folder, base_folder="none", adapters={RELEASE: "none"}, socket=str(Path(folder) / "e.sock")
    )
    serving = serve(
        ServeSettings.model_validate({"port": 0, **(ARMED if armed else {})}),
        engine_job=job,
        project=ServedProject(
            resolve_aliases=lambda: {"champion": RELEASE}, captures=NoSink() if captures else None
        ),
        on_ready=lambda url: print(url.rpartition(":")[2], flush=True),
        engine_module=stub.MODULE,
    )
    run(serving)


def run_peer(folder: str) -> None:
    asyncio.run(_serve_peer(str(Path(folder) / "e.sock")))


async def _serve_peer(socket: str) -> None:
    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_unix_connection(socket)
        try:
            while True:
                call = json.loads(await _read_message(reader))
                body = {"model": RELEASE, "messages": call["messages"], "max_tokens": 256}
                up_writer.write(_encode("POST /generate HTTP/1.1", body))
                piece = json.loads(await _read_message(up_reader))
                message = {"role": "assistant", "content": piece["text"]}
                choice = {"index": 0, "message": message, "finish_reason": piece["finish_reason"]}
                answer = {"id": "x", "object": "chat.completion", "model": "champion", "choices": [choice]}
                writer.write(_encode("HTTP/1.1 200 OK", answer))
                await writer.drain()
        except asyncio.IncompleteReadError:
            writer.close()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def _encode(first: str, value: object) -> bytes:
    body = json.dumps(value).encode()
    head = f"{first}\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def _read_message(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").lower().split("\r\n")
    length = next(int(line.partition(":")[2]) for line in lines if line.startswith("content-length:"))
    return await reader.readexactly(length)


@dataclass
class Target:
    name: str
    client: Client
    path: str
    body: bytes
    pid: int | None = None
    headers: tuple[tuple[str, str], ...] = JSON
    times: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """Milliseconds a request, of each round."""
    asked: int = 0

    async def ask(self, count: int) -> None:
        before = _cpu_seconds(self.pid)
        for _ in range(count):
            self.asked += 1
            body = self.body.replace(_QUESTION, b"%06d does" % self.asked, 1)
            began = time.perf_counter()
            reply = await self.client.send("POST", self.path, body=body, headers=self.headers)
            await reply.read()
            self.times.append(time.perf_counter() - began)
            assert reply.status == 200
        await asyncio.sleep(_SETTLE_SECONDS)
        self.cpu.append(1000 * (_cpu_seconds(self.pid) - before) / count)

    def summary(self) -> dict[str, float]:
        ordered = sorted(self.times)
        return {
            "median_ms": 1000 * statistics.median(ordered),
            "p99_ms": 1000 * ordered[int(len(ordered) * 0.99)],
            "cpu_ms": statistics.median(self.cpu),
            "cpu_ms_least": min(self.cpu),
            "cpu_ms_most": max(self.cpu),
        }


_SETTLE_SECONDS = 0.15
"""After a round: the captures of its last requests are redacted a little later."""


def _cpu_seconds(pid: int | None) -> float:
    """User and system time of all threads of a process, to the nanosecond where the kernel counts them."""
    if pid is None or not Path(f"/proc/{pid}").exists():
        return 0.0
    counts = [task / "schedstat" for task in Path(f"/proc/{pid}/task").iterdir()]
    if all(count.exists() for count in counts):
        return sum(int(count.read_text().split()[0]) for count in counts) / 1e9
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(targets: list[Target], *, requests: int, rounds: int) -> None:
    for target in targets:
        await target.ask(50)
        target.times.clear()
        target.cpu.clear()
    for _ in range(rounds):
        for target in targets:
            await target.ask(requests // rounds)


def compare(requests: int) -> dict[str, Any]:
    """Start them all, ask them, and say what each adds to the engine's own time."""
    with ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="graft-")) for _ in range(3)]
        plain = stack.enter_context(_started("gateway", folders[0]))
        capturing = stack.enter_context(_started("capturing", folders[1]))
        armed = stack.enter_context(_started("armed", folders[2]))
        peer = stack.enter_context(_started("peer", folders[0]))
        targets = run(_ask_all(folders[0], [plain, capturing, armed, peer], requests=requests))
    rows = [target.summary() for target in targets]
    base = rows[0]["median_ms"]
    for row in rows:
        row["added_ms"] = row["median_ms"] - base
        row["ratio_to_peer"] = row["added_ms"] / (rows[-1]["median_ms"] - base)
    names = [target.name for target in targets]
    rounded = [{key: round(value, 3) for key, value in row.items()} for row in rows]
    return {
        "requests": requests,
        "body_bytes": len(CHAT),
        "load": round(os.getloadavg()[0], 1),
        "rows": dict(zip(names, rounded, strict=True)),
    }


@dataclass(frozen=True)
class Child:
    pid: int
    port: int


@contextmanager
def _started(role: str, folder: str) -> Iterator[Child]:
    command = [sys.executable, __file__, "--role", role, "--folder", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Child(process.pid, int(process.stdout.readline()))
        finally:
            process.terminate()


async def _ask_all(folder: str, children: list[Child], *, requests: int) -> list[Target]:
    chat = "/v1/chat/completions"
    plain, capturing, armed, peer = children
    with_key = (*JSON, ("authorization", f"Bearer {KEY}"))
    targets = [
        Target("engine alone", Client(path=str(Path(folder) / "e.sock")), "/generate", DIRECT),
        Target("graftwork, no captures", Client(port=plain.port), chat, CHAT, plain.pid),
        Target("graftwork, captures", Client(port=capturing.port), chat, CHAT, capturing.pid),
        Target("graftwork, everything", Client(port=armed.port), chat, CHAT, armed.pid, with_key),
        Target("asyncio streams + json", Client(port=peer.port), chat, CHAT, peer.pid),
    ]
    await measure(targets, requests=requests, rounds=20)
    return targets


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/gateway.json")
    parser.add_argument("--role", choices=("gateway", "capturing", "armed", "peer"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "peer":
        run_peer(arguments.folder)
    elif arguments.role is not None:
        role = arguments.role
        run_gateway(arguments.folder, captures=role != "gateway", armed=role == "armed")
    else:
        found = compare(arguments.requests)
        if arguments.save:
            save_results("gateway", found)
        show(found, as_json=arguments.json)


def show(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    asked, load = result["requests"], result["load"]
    print(f"{asked} requests each, {result['body_bytes']} bytes, one client, times in ms, load {load}")
    print(f"{'':<26}{'median':>9}{'p99':>9}{'CPU':>9}{'range':>15}{'added':>9}{'to peer':>9}")
    for name, row in result["rows"].items():
        figures = "".join(f"{row[k]:>9.3f}" for k in ("median_ms", "p99_ms", "cpu_ms"))
        span = f"{row['cpu_ms_least']:.3f}–{row['cpu_ms_most']:.3f}"
        print(f"{name:<26}{figures}{span:>15}{row['added_ms']:>9.3f}{row['ratio_to_peer']:>8.2f}x")


if __name__ == "__main__":
    main()
