"""Engines on a base, behind a gateway with OpenAI's client."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from serve_harness import DEADLINE, open_house

from graftwork.engines.embedded_process import EmbeddedBackend
from graftwork.engines.llamacpp_process import LlamaCppBackend
from graftwork.engines.protocol import EngineJob
from graftwork.engines.settings import EngineSettings
from graftwork.serve.routing import Routes


@asynccontextmanager
async def embedded(base: Path):
    backend = EmbeddedBackend(EngineJob(folder=str(base), base_folder=str(base), threads=1))
    backend.loop.start()
    try:
        yield backend
    finally:
        await asyncio.to_thread(backend.loop.close, seconds=5.0)


@asynccontextmanager
async def llamacpp(base: Path):
    pytest.importorskip("xllamacpp")
    exact = EngineSettings(kind="llamacpp", precision="f32", context=2048)
    backend = LlamaCppBackend(
        EngineJob(folder=str(base), base_folder=str(base), threads=1, batch_size=3, engine=exact)
    )
    try:
        yield backend
    finally:
        await backend.close()


def served_once(engine, sink):
    """Gives `run` and `serving` of an engine that is opened once a base, until the generator ends."""
    houses = {}
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()

        @asynccontextmanager
        async def serving(base: Path):
            if base not in houses:
                houses[base] = await stack.enter_async_context(serve_with(engine, base, sink))
            sink.captures.clear()
            yield houses[base]

        try:
            yield lambda main: runner.run(asyncio.wait_for(main(), 240)), serving
        finally:
            runner.run(stack.aclose())


async def captured(sink, count: int):
    """What was captured, as soon as there is so much."""
    while len(sink.captures) < count:
        await asyncio.sleep(0.005)
    return sink.captures


@asynccontextmanager
async def serve_with(engine, base: Path, sink=None):
    async with (
        engine(base) as backend,
        open_house(sink, backend=backend, routes=Routes()) as house,
        AsyncOpenAI(base_url=f"{house.url}/v1", api_key="x", max_retries=0, timeout=DEADLINE) as client,
    ):
        yield house, client
