"""The real engine with a tiny model: what is served is what was trained, and it survives its engine."""

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from openai import AsyncOpenAI, BadRequestError, InternalServerError

from graftwork.engines.protocol import EngineJob
from graftwork.http.client import Client
from graftwork.records.errors import UserError
from graftwork.records.interaction import Message
from graftwork.serve.run import ServedProject, serve
from graftwork.serve.settings import ServeSettings

RELEASE = "f00dfeed01234567"
DEADLINE = 300.0
# On a busy machine an engine may be silent for a while; these tests kill it themselves.
PATIENT = {"frozen_seconds": DEADLINE, "restart_seconds": DEADLINE}
QUESTION = [{"role": "user", "content": "What grows on the old tree?"}]


class ListSink:
    def __init__(self):
        self.captures = []

    def add_many(self, captures):
        self.captures.extend(captures)


@pytest.fixture(scope="module")
def adapter_folder(tiny_base, tmp_path_factory) -> Path:
    """An adapter that changes every answer."""
    import torch

    from graftwork.model.adapter_shape import AdapterShape
    from graftwork.model.adapters.peft import attach, save_adapter
    from graftwork.model.load import load_base

    model = load_base(tiny_base)
    shape = AdapterShape(rank=4, alpha=64.0, targets=("q_proj", "down_proj"), layers=(0, 1))
    torch.manual_seed(1)
    for parameter in attach(model, shape, seed=1):
        torch.nn.init.normal_(parameter.data, std=0.5)
    folder = tmp_path_factory.mktemp("adapters") / "adapter"
    save_adapter(model, folder, shape=shape, base="tiny")
    return folder


@pytest.fixture(scope="module")
def expected(tiny_base, adapter_folder):
    """The greedy answers that the weights give without any server."""
    from graftwork.model.adapters.peft import acting, load_adapter
    from graftwork.model.chat.template import ChatTemplate
    from graftwork.model.generate.generator import Generator, Sampling
    from graftwork.model.load import load_base

    model = load_base(tiny_base)
    template = ChatTemplate.from_folder(tiny_base)
    load_adapter(model, adapter_folder, name=RELEASE)
    generator = Generator(model, stop_tokens=[template.eos])
    prompt = template.prompt(tuple(Message(**m) for m in QUESTION))
    answers = {}
    for name in (None, RELEASE):
        with acting(model, name):
            tokens = generator.generate([prompt], Sampling(max_new_tokens=12))[0].tokens
        answers[name or "base"] = template.decode(tokens)
    return answers


@asynccontextmanager
async def serving(folder, tiny_base, adapters, *, sink=None, fingerprint=None, **more):
    ready = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    job = EngineJob(
        folder=str(folder / "engine"),
        base_folder=str(tiny_base),
        adapters=adapters,
        template_fingerprint=fingerprint,
    )
    task = asyncio.create_task(
        serve(
            ServeSettings(port=0, threads=1, alias_refresh_seconds=0.05, failover=PATIENT),
            engine_job=job,
            project=ServedProject(
                resolve_aliases=lambda: {"champion": RELEASE},
                find_adapter=more.pop("find_adapter", lambda _release: None),
                captures=sink,
            ),
            on_ready=ready.set_result,
            stop=stop,
            **more,
        )
    )
    await asyncio.wait({task, ready}, return_when=asyncio.FIRST_COMPLETED, timeout=DEADLINE)
    if task.done():
        task.result()
    url = ready.result()
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=DEADLINE) as client:
        yield client, Client(port=int(url.rpartition(":")[2]))
    stop.set()
    await asyncio.wait_for(task, DEADLINE)


def run(main):
    asyncio.run(asyncio.wait_for(main(), 3 * DEADLINE))


async def engine_process(http):
    """The engine's process; None while none is ready."""
    _, body = await http.fetch("GET", "/health", seconds=DEADLINE)
    return json.loads(body)["engine"]["pid"]


async def ask(client, model="champion", **more):
    more = {"max_tokens": 12, **more}
    answer = await client.chat.completions.create(model=model, messages=QUESTION, **more)
    return answer.choices[0]


def test_base_and_release_answer_with_their_own_weights_also_side_by_side(
    tmp_path, tiny_base, adapter_folder, expected
):
    assert expected["base"] != expected[RELEASE]

    async def main():
        sink = ListSink()
        async with serving(tmp_path, tiny_base, {RELEASE: str(adapter_folder)}, sink=sink) as (client, _):
            together = await asyncio.gather(*[ask(client, m) for m in ("base", "champion") * 4])
            texts = [choice.message.content for choice in together]
            assert texts == [expected["base"], expected[RELEASE]] * 4

            stream = await client.chat.completions.create(
                model="champion", messages=QUESTION, max_tokens=12, stream=True
            )
            pieces = [c.choices[0].delta.content or "" async for c in stream]
            assert "".join(pieces) == expected[RELEASE]
            assert len([piece for piece in pieces if piece]) > 1

            seeded = [await ask(client, temperature=1.5, seed=7) for _ in range(2)]
            assert seeded[0].message.content == seeded[1].message.content

            stop = expected["base"][3:6]
            stopped = await ask(client, "base", stop=[stop])
            assert stopped.finish_reason == "stop"
            assert stopped.message.content == expected["base"][: expected["base"].index(stop)]

            short = await ask(client, "base", max_tokens=1)
            assert short.finish_reason == "length"

            long = [{"role": "user", "content": "tree " * 3000}]
            with pytest.raises(BadRequestError, match="room for 2048"):
                await client.chat.completions.create(model="base", messages=long)
        assert len(sink.captures) == 13
        assert {capture.release for capture in sink.captures} == {"base", RELEASE}

    run(main)


def test_a_killed_engine_comes_back_with_the_same_answers(tmp_path, tiny_base, adapter_folder, expected):
    async def main():
        async with serving(tmp_path, tiny_base, {}, find_adapter=lambda _release: str(adapter_folder)) as (
            client,
            http,
        ):
            # The release was not in the job: the alias made the engine load it.
            assert (await ask(client)).message.content == expected[RELEASE]
            pid = await engine_process(http)
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(DEADLINE):
                while await engine_process(http) in (None, pid):
                    with suppress(InternalServerError):
                        await ask(client)
                    await asyncio.sleep(0.05)
            assert (await ask(client)).message.content == expected[RELEASE]

    run(main)


def test_a_base_with_another_template_is_refused(tmp_path, tiny_base):
    async def main():
        with pytest.raises(UserError, match="a different chat template"):
            async with serving(tmp_path, tiny_base, {}, fingerprint="0" * 64):
                pass

    run(main)
