"""What clients notice when an upstream dies, an alias moves, or they leave: failed requests, p99, cancels.

Processes: two stand-in OpenAI servers that answer after a fixed time, and our gateway in front of them with
its engine processes. 50 clients ask on and on.

- killed: the first server is killed with SIGKILL; the fallback chain names the second one.
- replica: one of two engine processes is killed; there is no fallback.
- aliases: an alias moves 100 times; every answer must come from the release that its header names.
- disconnect: clients leave before the first token; how long until the server notices.

Run: `python benchmarks/staying_up.py [--clients N] [--json]`.
"""

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graftwork.model.base import EMBEDDED, find_base
from graftwork.serve.engine_protocol import EngineJob
from graftwork.serve.http_client import Client
from graftwork.serve.http_messages import Answer, Request, StreamResponse, json_response
from graftwork.serve.http_server import Server
from graftwork.serve.run import ServedProject, run, serve
from graftwork.serve.settings import ServeSettings

JSON = (("content-type", "application/json"),)
SYSTEM = {"role": "system", "content": "Answer from the sources, as JSON. " * 30}


# -- the stand-in server -------------------------------------------------------------------------


def run_upstream(name: str, *, port: int, seconds: float) -> None:
    asyncio.run(_serve_upstream(name, port, seconds))


async def _serve_upstream(name: str, port: int, seconds: float) -> None:
    async def handle(request: Request) -> Answer:
        if request.path.endswith("/models"):
            return json_response({"data": [{"id": name}]})
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            print(f"cancelled {time.monotonic()}", flush=True)
            raise
        return StreamResponse(200, events(), (("content-type", "text/event-stream"),))

    async def events() -> Any:
        choice: dict[str, Any] = {"delta": {"content": f"[{name}]"}, "finish_reason": None}
        yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        choice = {"delta": {}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 9, "completion_tokens": 1}
        yield b"data: " + json.dumps({"choices": [choice], "usage": usage}).encode() + b"\n\ndata: [DONE]\n\n"

    server = Server(handle)
    print(await server.listen(port=port), flush=True)
    await asyncio.Event().wait()


@dataclass
class Upstream:
    process: subprocess.Popen[str]
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


@contextmanager
def upstream(name: str, *, seconds: float, port: int = 0) -> Iterator[Upstream]:
    command = [sys.executable, __file__, "--upstream", name, "--port", str(port), "--seconds", str(seconds)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Upstream(process, int(process.stdout.readline()))
        finally:
            process.kill()


# -- the gateway and its clients -----------------------------------------------------------------


@asynccontextmanager
async def endpoint(
    settings: dict[str, Any], *, aliases: dict[str, str], base: str = "none", module: str | None = None
) -> AsyncIterator[Client]:
    ready, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
    with tempfile.TemporaryDirectory(prefix="graft-") as folder:
        task = asyncio.create_task(
            serve(
                ServeSettings.model_validate({"port": 0, "alias_refresh_seconds": 0.02, **settings}),
                engine_job=EngineJob(folder=f"{folder}/engine", base_folder=base),
                project=ServedProject(
                    resolve_aliases=lambda: dict(aliases), find_adapter=lambda _release: folder
                ),
                on_ready=ready.set_result,
                stop=stop,
                engine_module=module,
            )
        )
        await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        client = Client(port=int(ready.result().rpartition(":")[2]), keep=256)
        yield client
        client.close()
        stop.set()
        await task


@dataclass
class Load:
    """Clients that ask on and on, and what they saw."""

    http: Client
    model: str
    answers: list[tuple[float, float, str]] = field(default_factory=list)
    """When each one was asked for, how long it took, and who answered."""
    failed: list[str] = field(default_factory=list)
    untrue: int = 0
    going: bool = True

    async def ask(self) -> str:
        messages = [SYSTEM, {"role": "user", "content": "hello"}]
        body = json.dumps({"model": self.model, "messages": messages}).encode()
        began = time.perf_counter()
        try:
            reply = await self.http.send("POST", "/v1/chat/completions", body=body, headers=JSON)
            answer = json.loads(await reply.read())
        except OSError as error:
            self.failed.append(repr(error))
            return ""
        if reply.status != 200:
            self.failed.append(f"{reply.status} {answer['error']['code']}")
            return ""
        release = reply.headers["x-graft-release"]
        text = answer["choices"][0]["message"]["content"]
        self.untrue += not text.startswith(f"[{release}]")
        self.answers.append((began, time.perf_counter() - began, text))
        return release

    @asynccontextmanager
    async def run(self, clients: int) -> AsyncIterator["Load"]:
        async def client() -> None:
            while self.going:
                await self.ask()

        tasks = [asyncio.create_task(client()) for _ in range(clients)]
        yield self
        self.going = False
        await asyncio.gather(*tasks)

    def summarize(self, *, since: float, until: float = float("inf")) -> dict[str, float]:
        """Answers that were complete in this time."""
        taken = sorted(took for began, took, _ in self.answers if since <= began + took < until)
        return {
            "requests": len(taken),
            "p50_ms": 1000 * statistics.median(taken),
            "p99_ms": 1000 * taken[int(0.99 * len(taken))],
        }


async def health(http: Client) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await http.fetch("GET", "/health"))[1])
    return found


# -- the figures ---------------------------------------------------------------------------------


async def measure_kill(clients: int, seconds: float, answer_seconds: float) -> dict[str, Any]:
    """The upstream is killed and stays dead; then it is started again."""
    base = find_base(EMBEDDED, project_folder=Path()).folder
    async with AsyncExitStack() as stack:
        first = stack.enter_context(upstream("base", seconds=answer_seconds))
        second = stack.enter_context(upstream("remote", seconds=answer_seconds))
        failover = {
            "fallback": {"base": ["remote"]},
            "endpoints": {"remote": {"url": second.url, "model": "remote"}},
        }
        engine = {"kind": "endpoint", "url": first.url, "model": "base"}
        http = await stack.enter_async_context(
            endpoint({"engine": engine, "failover": failover}, aliases={}, base=base)
        )
        while not (await Load(http, "base").ask()):
            await asyncio.sleep(0.1)
        await asyncio.sleep(seconds)  # the process of the remote endpoint starts in the background
        load = await stack.enter_async_context(Load(http, "base").run(clients))
        await asyncio.sleep(1.0)
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        killed = time.perf_counter()
        first.process.kill()
        await asyncio.sleep(seconds)
        ended = time.perf_counter()
        stack.enter_context(upstream("base", seconds=answer_seconds, port=first.port))
        async with asyncio.timeout(60):
            while not any(text == "[base]" and at > ended for at, _, text in load.answers):
                await asyncio.sleep(0.1)
        back = time.perf_counter() - ended
        load.going = False
    normal, after = load.summarize(since=began, until=killed), load.summarize(since=killed, until=ended)
    return {
        "failed": len(load.failed),
        "errors": sorted(set(load.failed)),
        "normal": normal,
        "after the kill": after,
        "p99_ratio": after["p99_ms"] / normal["p99_ms"],
        "back_seconds": back,
    }


async def measure_replica(clients: int, seconds: float) -> dict[str, Any]:
    """One of two engine processes is killed."""
    settings = {"engine": {"replicas": 2}}
    async with endpoint(settings, aliases={}, module="graftwork.serve.stub_engine") as http:
        while (engine := (await health(http))["engine"]) and any(
            replica["state"] != "ready" for replica in engine["replicas"]
        ):
            await asyncio.sleep(0.1)
        async with Load(http, "base").run(clients) as load:
            await asyncio.sleep(1.0)
            began = time.perf_counter()
            await asyncio.sleep(seconds)
            killed = time.perf_counter()
            os.kill(engine["replicas"][0]["pid"], signal.SIGKILL)
            await asyncio.sleep(seconds)
            ended = time.perf_counter()
        restarts = (await health(http))["engine"]["restarts"]
    normal, after = load.summarize(since=began, until=killed), load.summarize(since=killed, until=ended)
    return {
        "failed": len(load.failed),
        "errors": sorted(set(load.failed)),
        "restarts": restarts,
        "normal": normal,
        "after the kill": after,
        "p99_ratio": after["p99_ms"] / normal["p99_ms"],
    }


async def measure_aliases(clients: int, moves: int) -> dict[str, Any]:
    aliases = {"champion": "base"}
    async with endpoint({}, aliases=aliases, module="graftwork.serve.stub_engine") as http:
        aliases["champion"] = "0" * 16
        async with asyncio.timeout(60):
            while not await Load(http, "champion").ask():
                await asyncio.sleep(0.05)
        async with Load(http, "champion").run(clients) as load:
            for number in range(1, moves + 1):
                aliases["champion"] = release = f"{number:016x}"
                while await load.ask() != release:
                    pass
    return {
        "moves": moves,
        "answers": len(load.answers),
        "failed": len(load.failed),
        "errors": sorted(set(load.failed)),
        "untrue_headers": load.untrue,
    }


async def measure_disconnect(times: int) -> dict[str, Any]:
    """Clients leave before the first token; the server prints when it noticed."""
    base = find_base(EMBEDDED, project_folder=Path()).folder
    taken = []
    with upstream("base", seconds=60.0) as server:
        engine = {"kind": "endpoint", "url": server.url, "model": "base"}
        async with endpoint({"engine": engine}, aliases={}, base=base) as http:
            output = server.process.stdout
            assert output is not None
            for number in range(times):
                messages = [{"role": "user", "content": "hello"}]
                body = json.dumps({"model": "base", "messages": messages, "stream": number % 2 == 0}).encode()
                asking = asyncio.create_task(
                    http.send("POST", "/v1/chat/completions", body=body, headers=JSON)
                )
                await asyncio.sleep(0.1)
                left = time.monotonic()
                asking.cancel()
                line = await asyncio.wait_for(asyncio.to_thread(output.readline), 30)
                taken.append(1000 * (float(line.split()[1]) - left))
    taken.sort()
    return {"times": times, "p50_ms": statistics.median(taken), "max_ms": taken[-1]}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    figures = {
        "killed": lambda: measure_kill(options.clients, options.window, options.seconds),
        "replica": lambda: measure_replica(options.clients, options.window),
        "aliases": lambda: measure_aliases(options.clients, options.moves),
        "disconnect": lambda: measure_disconnect(options.disconnects),
    }
    return {name: run(make()) for name, make in figures.items() if not options.only or name in options.only}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--window", type=float, default=5.0, help="seconds before and after a kill")
    parser.add_argument("--moves", type=int, default=100)
    parser.add_argument("--disconnects", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=0.25, help="how long the server takes to answer")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--upstream", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.upstream:
        run_upstream(options.upstream, port=options.port, seconds=options.seconds)
        return
    result = measure(options)
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for name, figures in result.items():
        print(f"{name}: {json.dumps(figures, default=str)}")


if __name__ == "__main__":
    main()
