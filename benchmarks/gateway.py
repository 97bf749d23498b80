"""What the gateway adds to a request, beside a plain proxy on asyncio streams and json.

Three processes: the stand-in engine, our gateway (with key, routes, metrics and captures) and the
peer (none of these). One client asks all of them in turn over kept connections, in rounds, so that
a busy machine is equally unfair to each. Run: `python benchmarks/gateway.py [--requests N] [--json]`.
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
from dataclasses import dataclass, field
from pathlib import Path

from graftwork.serve.client import Client
from graftwork.serve.jobs import EngineJob
from graftwork.serve.run import run, serve
from graftwork.serve.settings import ServeSettings

RELEASE = "a1b2c3d4e5f60718"
MESSAGES = [
    {"role": "system", "content": "Answer from the sources, as JSON. " * 30},
    {"role": "user", "content": "What does the second source say about the harvest? " * 10},
]
CHAT = json.dumps({"model": "champion", "messages": MESSAGES}).encode()
DIRECT = json.dumps({"model": RELEASE, "messages": MESSAGES, "max_tokens": 256}).encode()
JSON = (("content-type", "application/json"),)


class NoSink:
    """Captures are made and redacted, and kept nowhere."""

    def add_many(self, captures: list[object]) -> None:
        del captures


def run_gateway(folder: str) -> None:
    job = EngineJob(
        folder=folder, base_folder="none", adapters={RELEASE: "none"}, socket=str(Path(folder) / "e.sock")
    )
    serving = serve(
        ServeSettings(port=0),
        engine_job=job,
        sink=None if os.environ.get("NOCAP") else NoSink(),
        resolve_alias=lambda: {"champion": RELEASE},
        on_ready=lambda url: print(url.rpartition(":")[2], flush=True),
        engine_module="graftwork.serve.standin",
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
    times: list[float] = field(default_factory=list)
    cpu: float = 0.0

    async def ask(self, count: int) -> None:
        before = _cpu_seconds(self.pid)
        for _ in range(count):
            began = time.perf_counter()
            reply = await self.client.send("POST", self.path, body=self.body, headers=JSON)
            await reply.read()
            self.times.append(time.perf_counter() - began)
            assert reply.status == 200
        self.cpu += _cpu_seconds(self.pid) - before

    def summary(self) -> dict[str, float | str]:
        ordered = sorted(self.times)
        return {
            "name": self.name,
            "median_ms": 1000 * statistics.median(ordered),
            "p99_ms": 1000 * ordered[int(len(ordered) * 0.99)],
            "cpu_ms": 1000 * self.cpu / len(ordered),
        }


def _cpu_seconds(pid: int | None) -> float:
    stat = Path(f"/proc/{pid}/stat")
    if pid is None or not stat.exists():
        return 0.0
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(targets: list[Target], *, requests: int, rounds: int) -> None:
    for target in targets:
        await target.ask(50)
        target.times.clear()
        target.cpu = 0.0
    for _ in range(rounds):
        for target in targets:
            await target.ask(requests // rounds)


def compare(requests: int) -> dict[str, object]:
    """Start the three, ask them, and say what each adds to the engine's own time."""
    with tempfile.TemporaryDirectory(prefix="graft-") as folder:
        started = []
        try:
            ports = []
            for role in ("gateway", "peer"):
                command = [sys.executable, __file__, "--role", role, "--folder", folder]
                started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                assert started[-1].stdout is not None
                ports.append(int(started[-1].stdout.readline()))
            socket = str(Path(folder) / "e.sock")

            async def ask_all() -> list[Target]:
                chat = "/v1/chat/completions"
                targets = [
                    Target("engine alone", Client(path=socket), "/generate", DIRECT),
                    Target("graftwork gateway", Client(port=ports[0]), chat, CHAT, started[0].pid),
                    Target("asyncio streams + json", Client(port=ports[1]), chat, CHAT, started[1].pid),
                ]
                await measure(targets, requests=requests, rounds=20)
                return targets

            direct, ours, peer = [target.summary() for target in run(ask_all())]
        finally:
            for process in started:
                process.terminate()
                process.wait()
    base = float(direct["median_ms"])
    added = {"ours_ms": float(ours["median_ms"]) - base, "peer_ms": float(peer["median_ms"]) - base}
    return {
        "requests": requests,
        "body_bytes": len(CHAT),
        "targets": [direct, ours, peer],
        "added": added,
        "ratio_added_ours_to_peer": added["ours_ms"] / added["peer_ms"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--role", choices=("gateway", "peer"))
    parser.add_argument("--folder", default="")
    arguments = parser.parse_args()
    if arguments.role == "gateway":
        run_gateway(arguments.folder)
    elif arguments.role == "peer":
        run_peer(arguments.folder)
    else:
        result = compare(arguments.requests)
        if arguments.json:
            print(json.dumps(result, indent=2))
            return
        print(f"{result['requests']} requests each, {result['body_bytes']} bytes, one client")
        print(f"{'':<24}{'median ms':>10}{'p99 ms':>10}{'CPU ms':>10}")
        for row in result["targets"]:  # type: ignore[attr-defined]
            print(f"{row['name']:<24}{row['median_ms']:>10.3f}{row['p99_ms']:>10.3f}{row['cpu_ms']:>10.3f}")
        print(f"added to the median: {result['added']}")
        print(f"ours : peer = {result['ratio_added_ours_to_peer']:.2f} : 1")


if __name__ == "__main__":
    main()
