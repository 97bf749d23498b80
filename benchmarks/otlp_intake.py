"""What traces that other programs send to `graft serve` add to its chat requests.

One gateway over its stand-in engine, with captures. A client asks chat questions without a pause, in rounds:
in every second round an exporter sends batches of OTLP at the same time. The stand-in answers at once, so
what is added is compared with the gateway's own time, which is less than that of any model.

    python benchmarks/otlp_intake.py [--calls 32] [--rounds 20] [--seconds 2]

`--calls` is how many calls of models the exporter sends each second, in one batch, about two kilobytes each.
"""

import argparse
import asyncio
import gzip
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from gateway import CHAT, JSON, RELEASE, NoSink, _cpu_seconds
from trace_formats import batch, conversations, genai

from graftwork.pipeline.trace_intake import read_traces
from graftwork.serve.engine_protocol import EngineJob
from graftwork.serve.http_client import Client
from graftwork.serve.run import ServedProject, run, serve
from graftwork.serve.settings import ServeSettings

PACKED = (("content-type", "application/json"), ("content-encoding", "gzip"))


def run_gateway(folder: str) -> None:
    job = EngineJob(
        folder=folder, base_folder="none", adapters={RELEASE: "none"}, socket=str(Path(folder) / "e.sock")
    )
    project = ServedProject(
        resolve_aliases=lambda: {"champion": RELEASE}, captures=NoSink(), read_traces=read_traces
    )
    serving = serve(
        ServeSettings(port=0),
        engine_job=job,
        project=project,
        on_ready=lambda url: print(url.rpartition(":")[2], flush=True),
        engine_module="graftwork.serve.stub_engine",
    )
    run(serving)


async def export(client: Client, bodies: list[bytes], sent: list[int]) -> None:
    """Send a batch each second, as exporters do, until it is cancelled."""
    number = 0
    while True:
        began = time.perf_counter()
        reply = await client.send("POST", "/v1/traces", body=bodies[number % len(bodies)], headers=PACKED)
        await reply.read()
        assert reply.status == 200, reply.status
        number += 1
        sent.append(1)
        await asyncio.sleep(max(1.0 - (time.perf_counter() - began), 0))


class Measured(NamedTuple):
    """Seconds of each chat request, processor seconds of the gateway, batches sent."""

    times: dict[bool, list[float]]
    cpu: dict[bool, float]
    batches: int


async def measure(port: int, pid: int, options: argparse.Namespace) -> Measured:
    source = conversations(random.Random(0))
    bodies = []
    for number in range(4):
        spans = [genai(number * 1000 + place, *next(source)) for place in range(options.calls)]
        bodies.append(gzip.compress(json.dumps(batch(spans)).encode()))
    chat, traces = Client(port=port), Client(port=port)
    times: dict[bool, list[float]] = {False: [], True: []}
    cpu = {False: 0.0, True: 0.0}
    sent: list[int] = []

    async def ask(seconds: float, kept: list[float]) -> None:
        until = time.perf_counter() + seconds
        while (began := time.perf_counter()) < until:
            reply = await chat.send("POST", "/v1/chat/completions", body=CHAT, headers=JSON)
            await reply.read()
            assert reply.status == 200
            kept.append(time.perf_counter() - began)

    await ask(1.0, [])
    for number in range(2 * options.rounds):
        with_traces = number % 2 == 1
        exporter = asyncio.create_task(export(traces, bodies, sent)) if with_traces else None
        before = _cpu_seconds(pid)
        await ask(options.seconds, times[with_traces])
        cpu[with_traces] += _cpu_seconds(pid) - before
        if exporter is not None:
            exporter.cancel()
            await asyncio.gather(exporter, return_exceptions=True)
            traces = Client(port=port)
    return Measured(times, cpu, len(sent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.folder:
        run_gateway(options.folder)
        return
    with tempfile.TemporaryDirectory(prefix="graft-") as folder:
        command = [sys.executable, __file__, "--folder", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            try:
                found = run(measure(int(process.stdout.readline()), process.pid, options))
            finally:
                process.terminate()
    plain, loaded = found.times[False], found.times[True]
    print(
        f"{len(plain):,} and {len(loaded):,} chat requests, {found.batches} batches of {options.calls} calls"
    )
    for name, figure in (
        ("mean", statistics.mean),
        ("median", statistics.median),
        ("p99", lambda found: sorted(found)[int(len(found) * 0.99)]),
    ):
        without, with_traces = figure(plain) * 1000, figure(loaded) * 1000
        change = 100 * (with_traces / without - 1)
        print(f"{name:<8}{without:8.3f} ms without traces {with_traces:8.3f} ms with them  {change:+6.1f} %")
    # Times depend on what else the machine does; the processor time of the gateway hardly does.
    of_chat = found.cpu[False] / len(plain)
    added = (found.cpu[True] - of_chat * len(loaded)) / max(found.batches, 1)
    print(f"processor: {1000 * of_chat:.3f} ms a chat request, {1000 * added:.1f} ms a batch")


if __name__ == "__main__":
    main()
