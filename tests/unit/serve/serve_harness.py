"""A gateway on a real port over a stand-in engine on a real unix socket, in one event loop."""

import asyncio
import tempfile
import threading
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from stub_engine import StubEngine

from graftwork.engines.process import PromptReleases, make_handler
from graftwork.http.server import Server
from graftwork.serve.answers import AnswerService
from graftwork.serve.captures import CaptureWriter
from graftwork.serve.gateway import Gateway
from graftwork.serve.keys import KeyRing
from graftwork.serve.routing import Routes
from graftwork.serve.settings import ServeSettings
from graftwork.serve.supervisor import EngineClient

RELEASE = "a1b2c3d4e5f60718"
OTHER = "a1b2c3d4ffffffff"
DEADLINE = 100.0


class ListSink:
    def __init__(self):
        self.captures = []

    def add_many(self, captures):
        self.captures.extend(captures)


class BrokenSink:
    def __init__(self):
        self.asked = threading.Event()

    def add_many(self, captures):
        self.asked.set()
        raise OSError("the disk is full")


@dataclass
class FixedEngine:
    """An engine that another process runs."""

    client: EngineClient | None
    status: dict = field(default_factory=lambda: {"state": "ready", "reason": "", "restarts": 0})

    @property
    def state(self):
        return "down" if self.client is None else "ready"

    def describe(self):
        return self.status

    async def complete(self, call, *, model):
        return await self.client.complete(call, model=model)

    async def stream(self, call, *, model):
        return await self.client.stream(call, model=model)


@dataclass
class House:
    url: str
    port: int
    stub: StubEngine
    engine: FixedEngine
    gateway: Gateway
    captures: CaptureWriter | None
    server: Server
    engine_server: Server

    @property
    def answers(self):
        return self.gateway.answers

    def cut_engine(self):
        """As if the engine had been killed: every connection to it breaks."""
        for connection in list(self.engine_server.connections):
            connection.abort()

    async def close_captures(self):
        await asyncio.to_thread(self.captures.close)


@asynccontextmanager
async def open_house(
    sink=None,
    *,
    settings=None,
    api_key=None,
    routes=None,
    queue_size=64,
    feedback=None,
    read_traces=None,
    backend=None,
    keys=None,
    capture_folder=None,
    prompts=None,
):
    settings = settings or ServeSettings()
    routes = routes or Routes(releases=frozenset({RELEASE, OTHER}), aliases={"champion": RELEASE})
    with tempfile.TemporaryDirectory(prefix="graft-") as folder:
        stub = backend or StubEngine([RELEASE, OTHER])
        engine_server = Server(make_handler(stub, prompts or PromptReleases()))
        path = str(Path(folder) / "e.sock")
        await engine_server.listen_unix(path)
        engine = FixedEngine(EngineClient(path=path))
        captures = None
        if sink is not None:
            captures = CaptureWriter(sink, queue=queue_size, folder=capture_folder)
            captures.start()
        answers = AnswerService(engine, settings=settings, routes=lambda: routes, captures=captures)
        gateway = Gateway(answers, feedback=feedback, read_traces=read_traces, keys=keys or KeyRing(api_key))
        server = gateway.open_server()
        port = await server.listen()
        try:
            yield House(
                f"http://127.0.0.1:{port}", port, stub, engine, gateway, captures, server, engine_server
            )
        finally:
            await server.close()
            engine.client and engine.client.close()
            await engine_server.close()


async def raw(port, data):
    """Send bytes as they are; give back all that comes until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        return await asyncio.wait_for(reader.read(-1), DEADLINE)
    finally:
        writer.close()
