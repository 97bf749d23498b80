"""Autoscaling with the real engines: load comes and goes, and idle replicas are counted.

Run: python benchmarks/autoscale.py [--engine embedded] [--engine llamacpp]. SmolLM2-135M as `base` behind the
real endpoint, one replica to two. Three phases: one client, many clients, nobody. Written down are failed
requests, replicas over time, what idle ones took in seconds, dollars and memory, and the throughput of each
phase. On one machine replicas share its cores, so the throughput says how little that buys there.
"""

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml
from results import save_results
from seven_models import Served

from graftwork.pipeline.ask_endpoint import read_health
from graftwork.serve.http_client import Client

JSON = (("content-type", "application/json"),)
USD_PER_HOUR = 0.4
"""An assumed price of a replica: the machine of the benchmark has none."""
TOKENS = 32
AUTOSCALE = {
    "min": 1,
    "max": 2,
    "queue": 3,
    "up_seconds": 2,
    "idle_seconds": 15,
    "usd_per_hour": USD_PER_HOUR,
}
LOG = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def write_project(root: Path, kind: str) -> None:
    settings = {
        "project": "autoscale",
        "base": "smollm2-135m-instruct",
        "data": {"logs": ["log.jsonl"]},
        "serve": {
            "default_model": "base",
            "threads": 1,
            "request_timeout_seconds": 900,
            "engine": {"kind": kind, "autoscale": AUTOSCALE},
        },
    }
    (root / "graft.yaml").write_text(yaml.safe_dump(settings))
    (root / "log.jsonl").write_text(json.dumps(LOG) + "\n")


async def ask_for(port: int, clients: int, seconds: float) -> dict[str, Any]:
    """`clients` ask again and again; the replicas are read every second."""
    until, statuses, tokens, seen = time.monotonic() + seconds, [], [0], []

    async def keep_asking() -> None:
        client = Client(port=port)
        body = {
            "model": "base",
            "messages": [{"role": "user", "content": "Tell me of the sea."}],
            "max_tokens": TOKENS,
        }
        while time.monotonic() < until:
            reply = await client.send(
                "POST", "/v1/chat/completions", body=json.dumps(body).encode(), headers=JSON
            )
            data = json.loads(await reply.read())
            statuses.append(reply.status)
            tokens[0] += data.get("usage", {}).get("completion_tokens", 0)
        client.close()

    async def watch() -> None:
        while time.monotonic() < until:
            seen.append((await asyncio.to_thread(read_health, f"http://127.0.0.1:{port}"))["autoscale"])
            await asyncio.sleep(1.0)

    started = time.monotonic()
    await asyncio.gather(watch(), *(keep_asking() for _ in range(clients)))
    took = time.monotonic() - started
    return {
        "clients": clients,
        "seconds": round(took, 1),
        "requests": len(statuses),
        "failed": sum(status != 200 for status in statuses),
        "tokens_per_second": round(tokens[0] / took, 1),
        "replicas": [found["replicas"] for found in seen],
        "idle_memory_gib_most": max((found["idle_memory_gib"] or 0.0 for found in seen), default=0.0),
    }


def measure(kind: str, *, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="autoscale-") as folder:
        write_project(Path(folder), kind)
        served = Served(Path(folder))
        try:
            phases = [asyncio.run(ask_for(served.port, clients, seconds)) for clients in (1, 8, 0)]
            ended = read_health(served.url)["autoscale"]
        finally:
            served.stop()
    return {"settings": AUTOSCALE, "phases": phases, "at_the_end": ended}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", action="append", choices=("embedded", "llamacpp"))
    parser.add_argument("--seconds", type=float, default=60.0, help="Length of each phase.")
    asked = parser.parse_args()
    figures = {}
    for kind in asked.engine or ("llamacpp", "embedded"):
        figures[kind] = measure(kind, seconds=asked.seconds)
        print(kind, json.dumps(figures[kind]), flush=True)
        print(save_results("autoscale", figures), flush=True)


if __name__ == "__main__":
    main()
