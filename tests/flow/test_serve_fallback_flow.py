"""A fallback chain that ends at a remote API, and clients that leave before a token, by real processes."""

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager, suppress

from flows import DEADLINE, run_async, serving

from graftwork.engines.protocol import EngineJob
from graftwork.http.client import Client
from graftwork.http.messages import StreamResponse, json_response
from graftwork.http.server import Server
from graftwork.serve.run import ServedProject
from graftwork.serve.settings import ServeSettings

JSON = (("content-type", "application/json"),)


class RemoteApi:
    """An OpenAI-compatible server. Clear `open` to make it wait before its first token."""

    def __init__(self):
        self.open, self.asked, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.open.set()
        self.headers = {}

    async def handle(self, request):
        if request.path == "/v1/models":
            return json_response({"data": [{"id": "far"}]})
        self.headers = request.headers
        self.asked.set()
        try:
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return StreamResponse(200, self.events(), (("content-type", "text/event-stream"),))

    async def events(self):
        for delta, reason in (({"content": "from afar"}, None), ({}, "stop")):
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            yield b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
        yield b"data: [DONE]\n\n"

    @asynccontextmanager
    async def listening(self):
        server = Server(self.handle)
        port = await server.listen()
        yield f"http://127.0.0.1:{port}/v1"
        await server.close()


@asynccontextmanager
async def client_of(folder, base, module=None, **settings):
    job = EngineJob(folder=str(folder / "engine"), base_folder=str(base))
    served = serving(
        ServeSettings.model_validate({"port": 0, **settings}),
        job=job,
        project=ServedProject(resolve_aliases=dict),
        engine_module=module,
    )
    async with served as url:
        http = Client(port=int(url.rpartition(":")[2]))
        yield http
        http.close()


async def ask(http, *, headers=(), **more):
    body = json.dumps({"model": "base", "messages": [{"role": "user", "content": "hello"}], **more}).encode()
    reply = await http.send("POST", "/v1/chat/completions", body=body, headers=(*JSON, *headers))
    return reply.status, reply.headers, json.loads(await reply.read())


async def freeze_engine(http):
    """Stop the process of the engine; its own answer before."""
    while True:
        pid, answer = await find_engine(http)
        with suppress(ProcessLookupError):  # on a busy machine it may be killed for its silence already
            os.kill(pid, signal.SIGSTOP)
            return pid, answer


async def find_engine(http):
    """Its process and its own answer: on a busy machine it may count as frozen for a moment."""
    while True:
        status, headers, answer = await ask(http)
        pid = json.loads((await http.fetch("GET", "/health", seconds=DEADLINE))[1])["engine"]["pid"]
        if status == 200 and "x-graft-fallback" not in headers and pid is not None:
            return pid, answer
        await asyncio.sleep(0.05)


def test_a_remote_api_answers_while_the_engine_is_dead_and_the_engine_once_it_is_back(tmp_path, tiny_base):
    async def main():
        remote = RemoteApi()
        async with remote.listening() as url:
            failover = {
                "fallback": {"base": ["far"]},
                "endpoints": {"far": {"url": url, "model": "far"}},
                "frozen_seconds": 0.5,
            }
            stub = "stub_engine"
            async with client_of(tmp_path, tiny_base, module=stub, failover=failover) as http:
                async with asyncio.timeout(DEADLINE):
                    pid, answer = await freeze_engine(http)  # it restarts in a moment if it is killed
                assert answer["choices"][0]["message"]["content"] == "[base] hello"
                async with asyncio.timeout(DEADLINE):
                    while True:
                        seconds = (("x-request-timeout-ms", "500"),)
                        status, headers, answer = await ask(http, headers=seconds)
                        if status == 200 and "x-graft-fallback" in headers:
                            break
                        if status == 200:  # it was killed for its silence, and answers again
                            pid, _ = await freeze_engine(http)
                assert answer["choices"][0]["message"]["content"] == "from afar"
                assert headers["x-graft-release"] == "far"
                assert headers["x-graft-fallback"] == "from=base; why=engine_down"
                assert 0 < int(remote.headers["x-request-timeout-ms"]) <= 500
                with suppress(ProcessLookupError):  # it was killed for its silence
                    os.kill(pid, signal.SIGKILL)
                async with asyncio.timeout(DEADLINE):
                    while "x-graft-fallback" in (await ask(http))[1]:
                        await asyncio.sleep(0.05)
                metrics = (await http.fetch("GET", "/metrics", seconds=DEADLINE))[1].decode()
                assert 'graft_fallbacks_total{model="base",to="far",why="engine_down"}' in metrics

    run_async(main)


def test_a_client_that_leaves_before_the_first_token_cancels_the_server_behind_the_engine(
    tmp_path, tiny_base
):
    async def main():
        remote = RemoteApi()
        async with remote.listening() as url:
            engine = {"kind": "endpoint", "url": url, "model": "far"}
            async with client_of(tmp_path, tiny_base, engine=engine) as http:
                for stream in (False, True):
                    remote.open.clear()
                    remote.asked.clear()
                    remote.cancelled.clear()
                    asking = asyncio.create_task(ask(http, stream=stream))
                    await asyncio.wait_for(remote.asked.wait(), DEADLINE)
                    asking.cancel()
                    await asyncio.wait_for(remote.cancelled.wait(), DEADLINE)
                remote.open.set()
                assert (await ask(http))[0] == 200

    run_async(main)
