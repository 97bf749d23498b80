"""vLLM, SGLang and OpenAI-compatible endpoints as engines, against servers that keep to their interfaces."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager

import pytest
from upstream_servers import MODEL, ChatServer, LoraServer

from graftwork.records.interaction import Message
from graftwork.serve.engine_protocol import BASE, EngineJob, GenerateRequest, LoadAdapter
from graftwork.serve.http_messages import ApiError
from graftwork.serve.http_server import Server
from graftwork.serve.settings import EngineSettings
from graftwork.serve.upstream_client import UpstreamClient
from graftwork.serve.upstream_engine import UpstreamBackend
from graftwork.serve.upstream_server import server_command

KEY = "upstream-key-0123456789"


@asynccontextmanager
async def engine_on(kind, handler, tiny_base, tmp_path, *, key=None, **engine):
    server = Server(handler)
    port = await server.listen(host="127.0.0.1", port=0)
    url = f"http://127.0.0.1:{port}/v1"
    job = EngineJob(
        folder=str(tmp_path), base_folder=str(tiny_base), engine=EngineSettings(kind=kind, url=url, **engine)
    )
    backend = UpstreamBackend(job, UpstreamClient(url, key=key))
    await backend.start()
    yield backend
    await backend.close()
    await server.close()


def adapter(tmp_path, name: str) -> str:
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "name": name}))
    return str(folder)


def request(model=BASE, **more) -> GenerateRequest:
    question = (Message(role="user", content="Count."),)
    return GenerateRequest(**{"model": model, "messages": question, "max_tokens": 8, "stream": True, **more})


async def collect(backend, asked):
    pieces = [piece async for piece in backend.generate(asked)]
    return "".join(piece.text for piece in pieces), pieces[-1]


def run(main):
    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_adapters_are_loaded_by_content_used_by_name_and_unloaded_when_nobody_needs_them(
    kind, tiny_base, tmp_path
):
    async def main():
        server = LoraServer(kind)
        async with engine_on(kind, server.handle, tiny_base, tmp_path, max_adapters=1) as backend:
            for name in ("first", "second"):
                await backend.load_adapter(
                    LoadAdapter(name=name, folder=adapter(tmp_path, name), keep=("first",))
                )
            assert backend.state()["models"] == [BASE, "first", "second"]
            names = list(server.loaded)
            assert all(name.startswith("graft-") for name in names)
            text, last = await collect(backend, request("second"))
            assert text == "one two three four"
            body = server.bodies[-1]
            assert body["model"] == (names[1] if kind == "vllm" else f"{MODEL}:{names[1]}")
            assert (last.finish_reason, last.prompt_tokens, last.reply_tokens) == (
                "stop",
                len(body["prompt"]),
                4,
            )
            assert (await collect(backend, request()))[0] == "one two three four"
            assert server.bodies[-1]["model"] == MODEL
            assert (await collect(backend, request("first", stop=(" thr",))))[0] == "one two"
            assert (await collect(backend, request("first", max_tokens=2)))[1].finish_reason == "length"

            third = LoadAdapter(name="third", folder=adapter(tmp_path, "third"), keep=("second", "third"))
            await backend.load_adapter(third)
            assert server.unloaded == names[:1]
            with pytest.raises(ApiError, match="does not hold first"):
                await collect(backend, request("first"))

    run(main)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_lost_its_adapters_gets_them_again(kind, tiny_base, tmp_path):
    async def main():
        server = LoraServer(kind)
        async with engine_on(kind, server.handle, tiny_base, tmp_path) as backend:
            await backend.load_adapter(LoadAdapter(name="first", folder=adapter(tmp_path, "first")))
            server.loaded.clear()
            assert (await collect(backend, request("first")))[0] == "one two three four"
            assert len(server.loaded) == 1

    run(main)


def test_a_restarted_engine_finds_its_adapters_loaded(tiny_base, tmp_path):
    async def main():
        server = LoraServer("vllm")
        for _ in range(2):
            async with engine_on("vllm", server.handle, tiny_base, tmp_path) as backend:
                await backend.load_adapter(LoadAdapter(name="first", folder=adapter(tmp_path, "first")))
                assert (await collect(backend, request("first")))[0] == "one two three four"

    run(main)


def test_leaving_a_stream_closes_the_connection_to_the_server(tiny_base, tmp_path):
    async def main():
        server = LoraServer("vllm")
        server.hold = True
        async with engine_on("vllm", server.handle, tiny_base, tmp_path) as backend:
            pieces = backend.generate(request())
            assert (await anext(pieces)).text == "one"
            await pieces.aclose()
            await asyncio.wait_for(server.cancelled.wait(), 10)
            server.hold = False

    run(main)


def test_an_endpoint_gets_messages_and_the_key_and_serves_no_adapters(tiny_base, tmp_path):
    async def main():
        server = ChatServer(KEY)
        async with engine_on(
            "endpoint", server.handle, tiny_base, tmp_path, key=KEY, model="large"
        ) as backend:
            assert (await collect(backend, request()))[0] == "large: Count."
            assert server.bodies[-1]["messages"] == [{"role": "user", "content": "Count."}]
            with pytest.raises(ApiError, match="serves no adapters"):
                await backend.load_adapter(LoadAdapter(name="a", folder=adapter(tmp_path, "a")))
        async with engine_on("endpoint", server.handle, tiny_base, tmp_path, model="large") as backend:
            with pytest.raises(ApiError) as refusal:
                await collect(backend, request())
            assert refusal.value.status == 502

    run(main)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_is_started_on_loopback_with_room_for_adapters(kind, tiny_base, tmp_path):
    job = EngineJob(
        folder=str(tmp_path),
        base_folder=str(tiny_base),
        engine=EngineSettings(kind=kind, max_adapters=3, arguments=("--tp", "2")),
    )
    command = server_command(job, port=1234)
    assert command[0] == sys.executable
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--max-lora-rank") + 1] == "64"
    assert "--enable-lora" in command
    assert command[-2:] == ["--tp", "2"]
