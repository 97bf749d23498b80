"""Engines of other programs behind the gateway: llama.cpp in a process of its own."""

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from openai import AsyncOpenAI, BadRequestError, InternalServerError

from graftwork.engines.embedded import EmbeddedEngine
from graftwork.engines.interface import DecodingSettings, EngineSource
from graftwork.engines.protocol import EngineJob
from graftwork.engines.settings import EngineSettings
from graftwork.http.client import Client
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message
from graftwork.serve.run import ServedProject, serve
from graftwork.serve.settings import ServeSettings

pytest.importorskip("xllamacpp")

DEADLINE = 300.0
# On a busy machine an engine may be silent for a while; these tests kill it themselves.
PATIENT = {"frozen_seconds": DEADLINE, "restart_seconds": DEADLINE}
QUESTION = [{"role": "user", "content": "Where do swallows fly in winter?"}]
EXACT = EngineSettings(kind="llamacpp", precision="f32", context=512, max_adapters=1)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory, embedded_base):
    patch = pytest.MonkeyPatch()
    patch.setenv("GRAFT_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()


@pytest.fixture(scope="module")
def adapters(tiny_base, tmp_path_factory) -> dict[str, Path]:
    """Two adapters, each of which changes every answer."""
    import torch

    from graftwork.model.adapters.peft import AdapterShape, attach, save_adapter
    from graftwork.model.load import load_base

    shape = AdapterShape(rank=4, alpha=64.0, targets=("q_proj", "down_proj"), layers=(0, 1))
    folders = {}
    for seed, name in enumerate(("1" * 64, "2" * 64)):
        model = load_base(tiny_base)
        torch.manual_seed(seed)
        for parameter in attach(model, shape, seed=1):
            torch.nn.init.normal_(parameter.data, std=0.5)
        folders[name] = tmp_path_factory.mktemp("adapters") / "adapter"
        save_adapter(model, folders[name], shape=shape, base="tiny")
    return folders


@pytest.fixture(scope="module")
def expected(tiny_base, adapters):
    """The greedy answers that the weights give in the embedded engine."""
    engine = EmbeddedEngine(EngineSource(base_folder=tiny_base, adapters=adapters, threads=1))
    prompt = engine.render(tuple(Message(**message) for message in QUESTION))
    decoding = DecodingSettings(max_new_tokens=12)
    answers = {n or "base": engine.answer([prompt], decoding, adapter=n)[0].text for n in (None, *adapters)}
    engine.close()
    assert len(set(answers.values())) == 3
    return answers


@asynccontextmanager
async def serving(folder, base, *, aliases, adapters, engine=EXACT, fingerprint=None, **more):
    ready, stop = asyncio.get_running_loop().create_future(), asyncio.Event()
    job = EngineJob(folder=str(folder / "engine"), base_folder=str(base), template_fingerprint=fingerprint)
    settings = ServeSettings(port=0, threads=1, alias_refresh_seconds=0.05, engine=engine, failover=PATIENT)
    project = ServedProject(
        resolve_aliases=lambda: dict(aliases), find_adapter=lambda release: str(adapters[release])
    )
    task = asyncio.create_task(
        serve(settings, engine_job=job, project=project, on_ready=ready.set_result, stop=stop, **more)
    )
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE)
    if task.done():
        task.result()
    url = ready.result()
    try:
        async with AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE
        ) as client:
            yield client, Client(port=int(url.rpartition(":")[2]))
    finally:
        stop.set()
        await asyncio.wait_for(task, DEADLINE)


def run(main):
    asyncio.run(asyncio.wait_for(main(), 3 * DEADLINE))


async def ask(client, model="champion", **more):
    answer = await client.chat.completions.create(
        model=model, messages=QUESTION, **{"max_tokens": 12, **more}
    )
    return answer.choices[0].message.content


async def health(http):
    return json.loads((await http.fetch("GET", "/health", seconds=DEADLINE))[1])


def test_llama_cpp_serves_the_answers_of_the_evaluated_weights(tmp_path, tiny_base, adapters, expected):
    """Whole, streamed, in parallel, with a stop string, and after an alias moved under load and a crash."""
    first, second = adapters
    aliases = {"champion": first}

    async def main():
        async with serving(tmp_path, tiny_base, aliases=aliases, adapters=adapters) as (client, http):
            texts = await asyncio.gather(*[ask(client, m) for m in ("base", "champion") * 4])
            assert texts == [expected["base"], expected[first]] * 4
            stream = await client.chat.completions.create(
                model="champion", messages=QUESTION, max_tokens=12, stream=True
            )
            pieces = [c.choices[0].delta.content or "" async for c in stream]
            assert "".join(pieces) == expected[first]
            assert len([piece for piece in pieces if piece]) > 1
            stop = expected["base"][3:6]
            shown = expected["base"][: expected["base"].index(stop)]
            assert await ask(client, "base", stop=[stop]) == shown
            long = [{"role": "user", "content": "tree " * 3000}]
            with pytest.raises(BadRequestError, match="room for 512"):
                await client.chat.completions.create(model="base", messages=long)

            aliases["champion"] = second
            async with asyncio.timeout(DEADLINE):
                while (await health(http))["aliases"]["champion"] != second:
                    assert await ask(client) in (expected[first], expected[second])
            assert await ask(client) == expected[second]
            killed = (await health(http))["engine"]["pid"]
            os.kill(killed, signal.SIGKILL)
            async with asyncio.timeout(DEADLINE):
                while (await health(http))["engine"]["pid"] in (None, killed):
                    with suppress(InternalServerError):
                        await ask(client)
                    await asyncio.sleep(0.02)
            assert await ask(client) == expected[second]

    run(main)


def test_llama_cpp_refuses_a_base_with_another_template(tmp_path, tiny_base):
    async def main():
        with pytest.raises(UserError, match="a different chat template"):
            async with serving(tmp_path, tiny_base, aliases={}, adapters={}, fingerprint="0" * 64):
                pass

    run(main)
