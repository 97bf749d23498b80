"""vLLM, SGLang and OpenAI-compatible endpoints as engines, against servers that keep to their interfaces."""

import asyncio
import json
import sys
from contextlib import asynccontextmanager

import pytest
from upstream_servers import EVENTS, MODEL, ChatServer, LoraServer, event

from graftwork.engines import upstream
from graftwork.engines.protocol import BASE, EngineJob, GenerateRequest, LoadAdapter
from graftwork.engines.settings import EngineSettings
from graftwork.engines.upstream import UpstreamBackend, server_command
from graftwork.http.client import UpstreamClient
from graftwork.http.messages import ApiError, StreamResponse, json_response
from graftwork.http.server import Server
from graftwork.model.adapter_shape import lora_rank
from graftwork.records.interaction import Message

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
    asyncio.run(asyncio.wait_for(main(), 300))


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
            await asyncio.wait_for(server.cancelled.wait(), 300)
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


class NewerServer(ChatServer):
    """A model that refuses the fields that newer models of OpenAI refuse, in OpenAI's words."""

    def __init__(self):
        super().__init__()
        self.asked: list[dict] = []

    async def handle(self, request):
        if request.path == "/v1/models":
            raise ApiError(404, "no list")
        body = json.loads(request.body)
        self.asked.append(body)
        if "max_tokens" in body:
            message = "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
            raise ApiError(400, f"{message}'max_completion_tokens' instead.", param="max_tokens")
        if body.get("temperature", 1) != 1:
            message = "Unsupported value: 'temperature' does not support this value. Only 1 is supported."
            raise ApiError(400, message, param="temperature")
        text = f"at most {body['max_completion_tokens']}"
        return StreamResponse(200, self.events([{"delta": {"content": text}}]), EVENTS)


def test_an_endpoint_that_refuses_our_defaults_is_asked_without_them(tiny_base, tmp_path):
    async def main():
        server = NewerServer()
        async with engine_on("endpoint", server.handle, tiny_base, tmp_path, model="large") as backend:
            assert (await collect(backend, request()))[0] == "at most 8"
            assert len(server.asked) == 3
            # What was learned holds for the requests that follow.
            assert (await collect(backend, request()))[0] == "at most 8"
            assert len(server.asked) == 4
            with pytest.raises(ApiError) as refusal:
                await collect(backend, request(temperature=0.5))
            assert (refusal.value.status, refusal.value.param) == (400, "temperature")
            assert server.asked[-1]["temperature"] == 0.5

    run(main)


def test_requests_that_are_refused_at_the_same_time_are_all_asked_again(tiny_base, tmp_path):
    async def main():
        server = NewerServer()
        async with engine_on("endpoint", server.handle, tiny_base, tmp_path, model="large") as backend:
            found = await asyncio.gather(*(collect(backend, request()) for _ in range(4)))
            assert [text for text, _ in found] == ["at most 8"] * 4

    run(main)


@pytest.mark.parametrize("streamed", [False, True])
def test_a_server_that_quotes_our_key_does_not_show_it_to_clients(tiny_base, tmp_path, streamed):
    quoted = f"{'x' * 490} {KEY} is no key"

    async def events():
        yield event({"error": {"message": quoted}})

    async def handle(request):
        if request.path == "/v1/models":
            raise ApiError(404, "no list")
        if streamed:
            return StreamResponse(200, events(), EVENTS)
        raise ApiError(400, quoted, param=KEY)

    async def main():
        async with engine_on("endpoint", handle, tiny_base, tmp_path, key=KEY, model="m") as backend:
            with pytest.raises(ApiError) as refusal:
                await collect(backend, request())
        shown = f"{refusal.value} {refusal.value.message} {refusal.value.param}"
        assert "xxx" in shown
        assert KEY[:8] not in shown

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


def test_a_refusal_of_any_size_is_read_in_part(tiny_base, tmp_path):
    sent = 0

    async def handle(asked):
        async def body():
            nonlocal sent
            for _ in range(4096):
                sent += 2**16
                yield b"x" * 2**16

        return StreamResponse(400, body())

    async def main():
        async with engine_on("endpoint", handle, tiny_base, tmp_path, model="m") as backend:
            with pytest.raises(OSError, match="too large"):
                await collect(backend, request())

    run(main)
    assert sent < 2**25


def test_a_server_that_takes_the_connection_and_is_silent_does_not_hang_the_start(
    tiny_base, tmp_path, monkeypatch
):
    monkeypatch.setattr(upstream, "_ANSWER_SECONDS", 0.05)
    asked = 0

    async def handle(_request):
        nonlocal asked
        asked += 1
        if asked == 1:
            await asyncio.Event().wait()
        return json_response({"data": [{"id": "found"}]})

    async def main():
        async with engine_on("vllm", handle, tiny_base, tmp_path) as backend:
            assert backend._base_name == "found"

    run(main)
    assert asked == 2


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        ({"r": 12}, 16),
        ({"r": 4, "rank_pattern": {"q_proj": 33}}, 64),
        ({"r": 1000}, None),
        ({"lora_bias": True}, None),
    ],
)
def test_vllm_reserves_memory_for_the_next_rank_that_it_knows(tmp_path, config, rank):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 12, **config}))
    assert lora_rank(tmp_path) == rank
