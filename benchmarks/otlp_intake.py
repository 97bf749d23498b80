"""What traces that other programs send to `graft serve` add to its chat requests, in processor time.

One gateway over its stand-in engine, with captures. A client asks blocks of chat questions; with some blocks
an exporter sends batches of OTLP at the same time, a fixed number of traced calls for each chat request. The
blocks of a round come in random order, and the gateway counts its own processor time, so what else runs on
the machine slows all blocks alike and is not counted. Each block with traces is compared with the one without
in its round; the interval is a bootstrap over rounds. A block with no traces is compared as well: it shows
the noise. The stand-in answers at once, so all is compared with the gateway's own work, which is less than
that of any model.

    python benchmarks/otlp_intake.py [--rounds 100] [--requests 128] [--calls 16] [--save]

The time of the event loop is that of the thread which answers chat requests: traces are decoded and redacted
in other threads.
"""

import argparse
import asyncio
import gzip
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple

from gateway import CHAT, JSON, RELEASE
from results import save_results
from trace_formats import batch, conversations, genai

from graftwork.evaluate.statistics.means import bootstrap_mean
from graftwork.pipeline.trace_intake import read_traces
from graftwork.records.interaction import Capture
from graftwork.serve.engine_protocol import EngineJob
from graftwork.serve.http_client import Client
from graftwork.serve.run import ServedProject, run, serve
from graftwork.serve.settings import ServeSettings

PACKED = (("content-type", "application/json"), ("content-encoding", "gzip"))
SHARES = (0.0, 1 / 8, 1.0)
"""Traced calls for each chat request. The first is the control."""
WITHOUT = "without"


class CountingSink:
    """Captures are made and redacted, and only counted."""

    kept = 0

    def add_many(self, captures: list[Capture]) -> None:
        self.kept += len(captures)


def run_gateway(folder: str) -> None:
    sink = CountingSink()
    job = EngineJob(
        folder=folder, base_folder="none", adapters={RELEASE: "none"}, socket=str(Path(folder) / "e.sock")
    )
    project = ServedProject(
        resolve_aliases=lambda: {"champion": RELEASE}, captures=sink, read_traces=read_traces
    )
    serving = serve(
        ServeSettings(port=0),
        engine_job=job,
        project=project,
        on_ready=lambda url: print(url.rpartition(":")[2], flush=True),
        engine_module="graftwork.serve.stub_engine",
    )
    loop_clock = time.pthread_getcpuclockid(threading.get_ident())

    def report() -> None:
        for _ in sys.stdin:
            print(sink.kept, time.process_time(), time.clock_gettime(loop_clock), flush=True)

    threading.Thread(target=report, daemon=True).start()
    run(serving)


class Work(NamedTuple):
    """Processor seconds: of the gateway, and of its event loop."""

    process: float
    loop: float


class GatewayProcess:
    """The gateway in a process of its own, which is asked for its processor time."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    async def work(self, captures: int) -> Work:
        """Return the processor time when this many captures are with the sink."""
        assert self._process.stdin is not None
        while True:
            self._process.stdin.write("\n")
            self._process.stdin.flush()
            kept, process, loop = self.line().split()
            if int(kept) >= captures:
                return Work(float(process), float(loop))
            await asyncio.sleep(0.02)


def make_bodies(calls: int) -> list[bytes]:
    source = conversations(random.Random(0))
    bodies = []
    for number in range(16):
        spans = [genai(number * 1000 + place, *next(source)) for place in range(calls)]
        bodies.append(gzip.compress(json.dumps(batch(spans)).encode()))
    return bodies


async def run_block(
    chat: Client, traces: Client, bodies: list[bytes], *, requests: int, batches: int
) -> None:
    """Ask chat questions one after another, with batches spread evenly over them."""

    async def send(body: bytes) -> None:
        reply = await traces.send("POST", "/v1/traces", body=body, headers=PACKED)
        await reply.read()
        assert reply.status == 200, reply.status

    sending: asyncio.Task[None] | None = None
    sent = 0
    for number in range(requests):
        if sent * requests < number * batches + batches:
            if sending is not None:
                await sending
            sending = asyncio.create_task(send(bodies[sent % len(bodies)]))
            sent += 1
        reply = await chat.send("POST", "/v1/chat/completions", body=CHAT, headers=JSON)
        await reply.read()
        assert reply.status == 200, reply.status
    if sending is not None:
        await sending
    assert sent == batches


async def measure(gateway: GatewayProcess, port: int, options: argparse.Namespace) -> list[dict[str, Work]]:
    bodies = make_bodies(options.calls)
    chat, traces = Client(port=port), Client(port=port)
    batches = {
        WITHOUT: 0,
        **{name(share): round(share * options.requests / options.calls) for share in SHARES},
    }
    dice = random.Random(0)
    await run_block(chat, traces, bodies, requests=options.requests, batches=1)
    captures = options.requests + options.calls
    rounds = []
    until = time.monotonic() + 60 * options.minutes
    while len(rounds) < options.rounds and time.monotonic() < until:
        found: dict[str, Work] = {}
        try:
            for kind in dice.sample(list(batches), len(batches)):
                before = await gateway.work(captures)
                await run_block(chat, traces, bodies, requests=options.requests, batches=batches[kind])
                captures += options.requests + batches[kind] * options.calls
                after = await gateway.work(captures)
                found[kind] = Work(after.process - before.process, after.loop - before.loop)
        except (AssertionError, OSError) as error:
            # A machine so busy that requests time out: what was measured before counts.
            print(f"ended by a failed request: {error!r}", file=sys.stderr, flush=True)
            break
        rounds.append(found)
        print(f"round {len(rounds)}", file=sys.stderr, flush=True)
    return rounds


def name(share: float) -> str:
    return f"{share:g}"


def compare(rounds: list[dict[str, Work]], kind: str, what: str) -> dict[str, float]:
    """The mean overhead over rounds in percent, and its 95 % interval."""
    added = [100 * (getattr(found[kind], what) / getattr(found[WITHOUT], what) - 1) for found in rounds]
    interval = bootstrap_mean(added, confidence=0.95)
    return {"mean": sum(added) / len(added), "low": interval.low, "high": interval.high}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=60, help="begin no round after so long")
    parser.add_argument("--requests", type=int, default=128, help="chat requests of a block")
    parser.add_argument("--calls", type=int, default=16, help="calls of a batch, about two kilobytes each")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/otlp_intake.json")
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        run_gateway(options.folder)
        return
    if options.requests % options.calls or any(share * options.requests % options.calls for share in SHARES):
        parser.error("the requests of a block must hold a whole number of batches for each share")
    with tempfile.TemporaryDirectory(prefix="graft-") as folder:
        command = [sys.executable, __file__, "--folder", folder]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            gateway = GatewayProcess(process)
            try:
                rounds = run(measure(gateway, int(gateway.line()), options))
            finally:
                process.terminate()
    report(rounds, options)


def report(rounds: list[dict[str, Work]], options: argparse.Namespace) -> None:
    asked = len(rounds) * options.requests
    plain = sum(found[WITHOUT].process for found in rounds) / asked
    loop = sum(found[WITHOUT].loop for found in rounds) / asked
    figures: dict[str, object] = {
        "rounds": len(rounds),
        "requests_of_a_block": options.requests,
        "calls_of_a_batch": options.calls,
        "chat_ms": round(1000 * plain, 4),
        "chat_loop_ms": round(1000 * loop, 4),
    }
    print(f"{len(rounds)} rounds with blocks of {options.requests} chat requests. Without traces:")
    print(f"  {1000 * plain:.3f} ms of the gateway for each, {1000 * loop:.3f} ms of it in the event loop")
    print("Added by traced calls, with 95 % intervals:")
    for share in SHARES:
        found = {what: compare(rounds, name(share), what) for what in Work._fields}
        figures[f"calls_per_request_{name(share)}"] = {
            what: {key: round(value, 2) for key, value in figure.items()} for what, figure in found.items()
        }
        texts = [
            f"{what} {f['mean']:+.1f} % ({f['low']:+.1f} to {f['high']:+.1f})" for what, f in found.items()
        ]
        print(f"  {share:6.3f} for each request: {', '.join(texts)}", flush=True)
    full = compare(rounds, name(1.0), "process")
    figures["calls_per_request_for_5_percent"] = round(5 / full["high"], 4)
    print(f"A traced call takes {full['mean'] / 100:.2f} of the gateway's time for a chat request:")
    print(f"5 % are added at one for {full['mean'] / 5:.0f} requests (upper end {full['high'] / 5:.0f}).")
    if options.save:
        print(save_results("otlp_intake", figures))


if __name__ == "__main__":
    main()
