"""Engines on a base, behind a gateway with OpenAI's client."""

import asyncio
from contextlib import asynccontextmanager
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


@asynccontextmanager
async def serve_with(engine, base: Path, sink=None):
    async with (
        engine(base) as backend,
        open_house(sink, backend=backend, routes=Routes()) as house,
        AsyncOpenAI(base_url=f"{house.url}/v1", api_key="x", max_retries=0, timeout=DEADLINE) as client,
    ):
        yield house, client
