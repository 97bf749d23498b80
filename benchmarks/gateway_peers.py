"""The gateway next to LiteLLM's proxy and vllm-router, all in front of one mock of OpenAI's API, in turn.

Run: python benchmarks/gateway_peers.py --litellm FOLDER --vllm-router FOLDER [--rounds 5] [--save].
FOLDER is where `pip install --target FOLDER PACKAGE` put `litellm[proxy]` or `vllm-router`; a peer without a
folder is left out. Each is one worker that checks a key. Ours captures with redaction and has a fallback
chain; its CPU is that of the gateway and of the process that asks the upstream. Rounds alternate, so that
other load on the machine hits all alike.
"""

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gateway import MESSAGES, _cpu_seconds
from gateway_load import ask_many, child_of, memory_mib, started
from results import save_results

from graftwork.serve.run import run

KEY = "sk-" + secrets.token_hex(24)
START_SECONDS = 240.0


class Peer(NamedTuple):
    """A proxy that runs: its processes, its port, and the name of the model there."""

    pids: list[int]
    port: int
    model: str
    requests: int
    """How many it is asked in a round: about a second's worth."""

    @property
    def body(self) -> bytes:
        return json.dumps({"model": self.model, "messages": MESSAGES}).encode()

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        return (("content-type", "application/json"), ("authorization", f"Bearer {KEY}"))

    async def ask(self, clients: int) -> float:
        """Requests a second."""
        asked = {"requests": self.requests, "clients": clients}
        return await ask_many(self.port, self.body, **asked, headers=self.headers)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started_peer(command: list[str], folder: str, log: Path, peer: Peer) -> Iterator[Peer]:
    """Start it with its own packages, and wait until it answers."""
    environment = {**os.environ, "PYTHONPATH": folder, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment, cwd=log.parent) as process,
    ):
        try:
            until = time.monotonic() + START_SECONDS
            while True:
                try:
                    run(ask_many(peer.port, peer.body, requests=1, clients=1, headers=peer.headers))
                    break
                except (OSError, AssertionError):
                    if time.monotonic() > until or process.poll() is not None:
                        raise SystemExit(f"it did not start: {log.read_text()[-800:]}") from None
                    time.sleep(1)
            yield peer._replace(pids=[process.pid])
        finally:
            process.terminate()


def start_litellm(packages: str, folder: Path, upstream: int) -> Any:
    asked = {"model": "openai/mock", "api_base": f"http://127.0.0.1:{upstream}/v1", "api_key": "x"}
    settings = {
        "model_list": [{"model_name": "base", "litellm_params": asked}],
        "general_settings": {"master_key": KEY},
    }
    file = folder / "litellm.yaml"
    file.write_text(json.dumps(settings))
    port = free_port()
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
    return started_peer(command, packages, folder / "litellm.log", Peer([], port, "base", 60))


def start_router(packages: str, folder: Path, upstream: int) -> Any:
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
        *("--worker-urls", f"http://127.0.0.1:{upstream}", "--policy", "round_robin", "--api-key", KEY),
        *("--prometheus-port", str(free_port()), "--log-level", "error"),
    ]
    return started_peer(command, packages, folder / "router.log", Peer([], port, "mock", 1500))


PEERS: dict[str, Callable[..., Any]] = {"litellm": start_litellm, "vllm_router": start_router}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, dict[str, list[float]]] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="graft-")))
        _, mock = stack.enter_context(started("mock"))
        url = f"http://127.0.0.1:{mock}/v1"
        pid, port = stack.enter_context(started("gateway", str(folder), url, key=KEY))
        peers = {"graftwork": Peer([pid, child_of(pid)], port, "base", 1000)}
        for name, start in PEERS.items():
            if packages := getattr(options, name):
                peers[name] = stack.enter_context(start(packages, folder, mock))
        for number in range(options.rounds + 1):
            for name, peer in peers.items():
                before = sum(map(_cpu_seconds, peer.pids))
                rate = run(peer.ask(options.clients))
                time.sleep(0.3)
                cpu = 1000 * (sum(map(_cpu_seconds, peer.pids)) - before) / peer.requests
                if number:  # the first round warms up
                    row = found.setdefault(name, {"requests_a_second": [], "cpu_ms": []})
                    row["requests_a_second"].append(rate)
                    row["cpu_ms"].append(cpu)
                print(f"{number} {name}: {rate:.0f} requests/s, {cpu:.3f} ms", file=sys.stderr, flush=True)
        memory = {name: sum(map(memory_mib, peer.pids)) for name, peer in peers.items()}
    return {"clients": options.clients, "rounds": options.rounds, **summarize(found, memory)}


def summarize(found: dict[str, dict[str, list[float]]], memory: dict[str, float]) -> dict[str, Any]:
    """Medians with their ranges, and each peer's against ours."""
    figures: dict[str, Any] = {}
    for name, row in found.items():
        figures[name] = {key: round(statistics.median(values), 3) for key, values in row.items()}
        figures[name] |= {f"{key}_range": [round(f(v), 3) for f in (min, max)] for key, v in row.items()}
        figures[name]["mib"] = round(memory[name], 1)
        if name != "graftwork":
            pairs = zip(found["graftwork"]["requests_a_second"], row["requests_a_second"], strict=True)
            figures[name]["times_the_requests"] = round(statistics.median(a / b for a, b in pairs), 2)
            pairs = zip(row["cpu_ms"], found["graftwork"]["cpu_ms"], strict=True)
            figures[name]["times_less_cpu"] = round(statistics.median(a / b for a, b in pairs), 2)
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--litellm", metavar="FOLDER")
    parser.add_argument("--vllm-router", metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/gateway_peers.json")
    arguments = parser.parse_args()
    result = {**measure(arguments), "load": round(os.getloadavg()[0], 1)}
    if arguments.save:
        save_results("gateway_peers", result)
    print(json.dumps(result, indent=2))
