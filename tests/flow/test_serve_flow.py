"""Real engines with a tiny model: what is served is what the weights answer, and it survives its engine."""

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from flows import DEADLINE, run_async
from flows import serving as serving_endpoint
from openai import AsyncOpenAI, BadRequestError, InternalServerError

from graftwork.engines.protocol import EngineJob
from graftwork.engines.settings import EngineSettings
from graftwork.http.client import Client
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message
from graftwork.serve.run import ServedProject
from graftwork.serve.settings import ServeSettings

FIRST, SECOND = "1" * 64, "2" * 64
# On a busy machine an engine may be silent for a while; these tests kill it themselves.
PATIENT = {"frozen_seconds": DEADLINE}
QUESTION = [{"role": "user", "content": "Where do swallows fly in winter?"}]
LONG_QUESTION = [{"role": "user", "content": "tree " * 3000}]
LLAMA_CPP = EngineSettings(kind="llamacpp", precision="f32", context=512, max_adapters=1)
ENGINES = [pytest.param(EngineSettings(), id="embedded"), pytest.param(LLAMA_CPP, id="llamacpp")]


class ListSink:
    def __init__(self):
        self.captures = []

    def add_many(self, captures):
        self.captures.extend(captures)


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

    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import attach, save_adapter
    from graftwork.model.load import load_base

    shape = AdapterShape(rank=4, alpha=64.0, targets=("q_proj", "down_proj"), layers=(0, 1))
    folders = {}
    for seed, name in enumerate((FIRST, SECOND)):
        model = load_base(tiny_base)
        torch.manual_seed(seed)
        for parameter in attach(model, shape, seed=1):
            torch.nn.init.normal_(parameter.data, std=0.5)
        folders[name] = tmp_path_factory.mktemp("adapters") / "adapter"
        save_adapter(model, folders[name], shape=shape, base="tiny")
    return folders


@pytest.fixture(scope="module")
def expected(tiny_base, adapters):
    """The greedy answers that the weights give without any server."""
    from graftwork.model.adapters.peft import acting, load_adapter
    from graftwork.model.chat.template import ChatTemplate
    from graftwork.model.generate.generator import Generator, Sampling
    from graftwork.model.load import load_base

    model = load_base(tiny_base)
    template = ChatTemplate.from_folder(tiny_base)
    for name, folder in adapters.items():
        load_adapter(model, folder, name=name)
    generator = Generator(model, stop_tokens=[template.eos])
    prompt = template.prompt(tuple(Message(**message) for message in QUESTION))
    answers = {}
    for name in (None, *adapters):
        with acting(model, name):
            tokens = generator.generate([prompt], Sampling(max_new_tokens=12))[0].tokens
        answers[name or "base"] = template.decode(tokens)
    assert len(set(answers.values())) == 3
    return answers


@asynccontextmanager
async def serving(folder, base, engine, *, adapters=None, aliases=None, sink=None, fingerprint=None):
    """A client of the endpoint; releases are found in their folders when an alias names them."""
    if engine.kind == "llamacpp":
        pytest.importorskip("xllamacpp")
    folders = adapters or {}
    job = EngineJob(folder=str(folder / "engine"), base_folder=str(base), template_fingerprint=fingerprint)
    settings = ServeSettings(port=0, threads=1, engine=engine, failover=PATIENT)
    project = ServedProject(
        resolve_aliases=lambda: dict(aliases or {}),
        find_adapter=lambda release: str(folders[release]),
        refresh_seconds=0.05,
        captures=sink,
    )
    async with (
        serving_endpoint(settings, job=job, project=project) as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE) as client,
    ):
        yield client, Client(port=int(url.rpartition(":")[2]))


async def choose(client, model="champion", **more):
    more = {"max_tokens": 12, "messages": QUESTION, **more}
    return (await client.chat.completions.create(model=model, **more)).choices[0]


async def ask(client, model="champion", **more):
    return (await choose(client, model, **more)).message.content


async def health(http):
    return json.loads((await http.fetch("GET", "/health", seconds=DEADLINE))[1])


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_serves_the_answers_of_the_evaluated_weights(
    tmp_path, tiny_base, adapters, expected, engine
):
    """Whole, streamed, in parallel, with a stop string, and after an alias moved under load and a crash."""
    aliases, sink = {"champion": FIRST}, ListSink()

    async def main():
        served = serving(tmp_path, tiny_base, engine, adapters=adapters, aliases=aliases, sink=sink)
        async with served as (client, http):
            texts = await asyncio.gather(*[ask(client, m) for m in ("base", "champion") * 4])
            assert texts == [expected["base"], expected[FIRST]] * 4
            stream = await client.chat.completions.create(
                model="champion", messages=QUESTION, max_tokens=12, stream=True
            )
            pieces = [c.choices[0].delta.content or "" async for c in stream]
            assert "".join(pieces) == expected[FIRST]
            assert len([piece for piece in pieces if piece]) > 1
            if engine.kind != "llamacpp":
                assert await ask(client, temperature=1.5, seed=7) == await ask(
                    client, temperature=1.5, seed=7
                )
            stop = expected["base"][3:6]
            stopped = await choose(client, "base", stop=[stop])
            assert stopped.finish_reason == "stop"
            assert stopped.message.content == expected["base"][: expected["base"].index(stop)]
            assert (await choose(client, "base", max_tokens=1)).finish_reason == "length"
            room = 512 if engine.kind == "llamacpp" else 2048
            with pytest.raises(BadRequestError, match=f"room for {room}"):
                await ask(client, "base", messages=LONG_QUESTION)

            aliases["champion"] = SECOND
            async with asyncio.timeout(DEADLINE):
                while (await health(http))["aliases"]["champion"] != SECOND:
                    assert await ask(client) in (expected[FIRST], expected[SECOND])
            assert await ask(client) == expected[SECOND]
            killed = (await health(http))["engine"]["pid"]
            os.kill(killed, signal.SIGKILL)
            async with asyncio.timeout(DEADLINE):
                while (await health(http))["engine"]["pid"] in (None, killed):
                    with suppress(InternalServerError):
                        await ask(client)
                    await asyncio.sleep(0.02)
            assert await ask(client) == expected[SECOND]

    run_async(main)
    assert {capture.release for capture in sink.captures} == {"base", FIRST, SECOND}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_base_with_another_template_is_refused(tmp_path, tiny_base, engine):
    async def main():
        with pytest.raises(UserError, match="chat template"):
            async with serving(tmp_path, tiny_base, engine, fingerprint="0" * 64):
                pass

    run_async(main)
