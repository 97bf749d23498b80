"""vLLM, SGLang and OpenAI-compatible endpoints as engines, against servers that keep to their interfaces.

The stand-ins refuse what the real servers refuse: an adapter that is not loaded, one that is loaded twice, a
model name in the other server's form, a missing key.
"""

import asyncio
import json
import sys
from contextlib import asynccontextmanager

import pytest

from graftwork.records.interaction import Message
from graftwork.serve.engine_protocol import BASE, EngineJob, GenerateRequest, LoadAdapter
from graftwork.serve.http_messages import ApiError, StreamResponse, json_response
from graftwork.serve.http_server import Server
from graftwork.serve.settings import EngineSettings
from graftwork.serve.upstream_client import UpstreamClient
from graftwork.serve.upstream_engine import UpstreamBackend
from graftwork.serve.upstream_server import server_command

MODEL = "base-model"
KEY = "upstream-key-0123456789"


class LoraServer:
    """vLLM 0.32 or SGLang 0.5 as far as this engine uses them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.loaded: dict[str, str] = {}
        self.unloaded: list[str] = []
        self.bodies: list[dict] = []
        self.cancelled = asyncio.Event()
        self.hold = False

    async def handle(self, request):
        prefix = "/v1" if self.kind == "vllm" else ""
        if request.path == "/v1/models":
            return json_response({"data": [{"id": MODEL}]})
        body = json.loads(request.body)
        if request.path == f"{prefix}/load_lora_adapter":
            if body["lora_name"] in self.loaded:
                raise ApiError(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
            self.loaded[body["lora_name"]] = body["lora_path"]
            return json_response({"message": "Success"})
        if request.path == f"{prefix}/unload_lora_adapter":
            self.unloaded.append(body["lora_name"])
            del self.loaded[body["lora_name"]]
            return json_response({"message": "Success"})
        if request.path == "/v1/completions":
            return self.complete(body)
        raise ApiError(404, f"no {request.path}")

    def complete(self, body):
        self.bodies.append(body)
        names = {MODEL, *(name if self.kind == "vllm" else f"{MODEL}:{name}" for name in self.loaded)}
        if body["model"] not in names:
            raise ApiError(404, f"The model `{body['model']}` does not exist.")
        assert all(isinstance(token, int) for token in body["prompt"])
        return StreamResponse(200, self.events(body), (("content-type", "text/event-stream"),))

    async def events(self, body):
        try:
            for word in ("one", " two", " three", " four")[: body["max_tokens"]]:
                yield _event({"choices": [{"text": word, "finish_reason": None}]})
                while self.hold:
                    await asyncio.sleep(0.01)
            reason = "length" if body["max_tokens"] < 4 else "stop"
            yield _event({"choices": [{"text": "", "finish_reason": reason}]})
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": min(body["max_tokens"], 4)}
            yield _event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n"
        except BaseException:
            self.cancelled.set()
            raise


def _event(value) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


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
    heads = []

    async def handle(asked):
        heads.append(asked.headers.get("authorization"))
        body = json.loads(asked.body)
        assert asked.path == "/v1/chat/completions"
        assert body["messages"] == [{"role": "user", "content": "Count."}]
        if heads[-1] != f"Bearer {KEY}":
            raise ApiError(401, "wrong key")

        async def events():
            yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            yield _event({"choices": [{"delta": {"content": body["model"]}, "finish_reason": "stop"}]})
            yield b"data: [DONE]\n\n"

        return StreamResponse(200, events(), (("content-type", "text/event-stream"),))

    async def main():
        async with engine_on("endpoint", handle, tiny_base, tmp_path, key=KEY, model="large") as backend:
            assert (await collect(backend, request()))[0] == "large"
            with pytest.raises(ApiError, match="serves no adapters"):
                await backend.load_adapter(LoadAdapter(name="a", folder=adapter(tmp_path, "a")))
        async with engine_on("endpoint", handle, tiny_base, tmp_path, model="large") as backend:
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
