"""OpenAI's client through the gateway to vLLM, SGLang and other APIs: tools, JSON, log-probabilities."""

import asyncio
import json
import shutil
from contextlib import asynccontextmanager

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from serve_harness import DEADLINE, RELEASE, ListSink, open_house
from tool_template import ASK, FIND, TOOL_TEMPLATE, TOOLS
from upstream_servers import MODEL, ChatServer, LoraServer

from graftwork.engines.process import PromptReleases
from graftwork.engines.protocol import EngineJob
from graftwork.engines.settings import EngineSettings
from graftwork.engines.upstream import UpstreamBackend
from graftwork.http.client import UpstreamClient
from graftwork.http.server import Server
from graftwork.records.interaction import Message
from graftwork.records.release import PROMPT_FILE, PromptVariant
from graftwork.serve.routing import Routes

BOTH = pytest.mark.parametrize("kind", ["vllm", "sglang"])
# Where the two servers are asked alike.
ALIKE = pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.slow)])
SCHEMA = {"type": "object", "properties": {"sure": {"type": "boolean"}}, "required": ["sure"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}}
CALL = '<tool_call>\n{"name": "find", "arguments": {"place": "Bern"}}\n</tool_call>'


@pytest.fixture(scope="module")
def tool_base(tiny_base, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tool_base")
    shutil.copytree(tiny_base, folder, dirs_exist_ok=True)
    (folder / "chat_template.jinja").write_text(TOOL_TEMPLATE)
    return folder


@asynccontextmanager
async def serving(kind, upstream, base, *, sink=None, adapters=()):
    server = Server(upstream.handle)
    port = await server.listen(host="127.0.0.1", port=0)
    url = f"http://127.0.0.1:{port}/v1"
    engine = EngineSettings(kind=kind, url=url, model=MODEL)
    job = EngineJob(folder=str(base), base_folder=str(base), engine=engine, adapters=dict(adapters))
    prompts = PromptReleases()
    backend = UpstreamBackend(prompts.split(job), UpstreamClient(url))
    await backend.start()
    routes = Routes(releases=frozenset(job.adapters))
    async with (
        open_house(sink, backend=backend, routes=routes, prompts=prompts) as house,
        AsyncOpenAI(base_url=f"{house.url}/v1", api_key="x", max_retries=0, timeout=DEADLINE) as client,
    ):
        yield house, client
    await backend.close()
    await server.close()


def go(main):
    return asyncio.run(asyncio.wait_for(main(), 300))


def ask(**more):
    return {"model": "base", "messages": ASK, **more}


async def read_stream(stream):
    """Text, calls by index as (name, arguments), the last finish reason and the usage."""
    text, calls, reason, usage = "", {}, None, None
    async for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
            for part in choice.delta.tool_calls or []:
                name, arguments = calls.get(part.index, ("", ""))
                new = part.function.arguments or ""
                calls[part.index] = (part.function.name or name, arguments + new)
    return text, calls, reason, usage


@BOTH
def test_tools_are_rendered_by_our_template_and_calls_are_read_back(kind, tool_base):
    async def main():
        server, sink = LoraServer(kind), ListSink()
        server.says = (
            "I look.",
            "\n<tool",
            '_call>\n{"name": "find", ',
            '"arguments": {"place": "Bern"}}\n</tool_call>',
        )
        async with serving(kind, server, tool_base, sink=sink) as (house, client):
            whole = (await client.chat.completions.create(**ask(tools=TOOLS))).choices[0]
            assert (whole.finish_reason, whole.message.content) == ("tool_calls", "I look.")
            (call,) = whole.message.tool_calls
            assert (call.function.name, call.function.arguments) == ("find", '{"place": "Bern"}')
            assert "response_format" not in server.bodies[-1]
            prompt = house.stub._prompts.template.decode_text(server.bodies[-1]["prompt"])
            assert 'TOOLS {"type": "function", "function": {"name": "find"' in prompt
            stream = await client.chat.completions.create(
                **ask(tools=TOOLS, stream=True, stream_options={"include_usage": True})
            )
            text, calls, reason, usage = await read_stream(stream)
            assert (text, calls, reason) == ("I look.", {0: ("find", '{"place": "Bern"}')}, "tool_calls")
            assert usage.completion_tokens == 4
            await house.close_captures()
            assert json.loads(sink.captures[0].reply.split("\n")[2])["name"] == "find"

    go(main)


@ALIKE
def test_a_forced_call_begins_in_the_prompt_and_goes_on_as_json_of_its_schema(kind, tool_base):
    async def main():
        server = LoraServer(kind)
        server.says = ('{"name": "find", "arg', 'uments": {"place": "Bern"}}')
        async with serving(kind, server, tool_base) as (house, client):
            choice = {"type": "function", "function": {"name": "find"}}
            for asked in (ask(tools=TOOLS, tool_choice=choice), ask(tools=TOOLS, tool_choice="required")):
                whole = (await client.chat.completions.create(**asked)).choices[0]
                (call,) = whole.message.tool_calls
                assert (call.function.name, call.function.arguments) == ("find", '{"place": "Bern"}')
                body = server.bodies[-1]
                prompt = house.stub._prompts.template.decode_text(body["prompt"])
                assert prompt.endswith("assistant\n<tool_call>\n")
            one, both = (b["response_format"]["json_schema"]["schema"] for b in server.bodies)
            assert one["properties"] == {"name": {"const": "find"}, "arguments": FIND}
            assert [s["properties"]["name"]["const"] for s in both["anyOf"]] == ["find", "wait"]
            stream = await client.chat.completions.create(**ask(tools=TOOLS, tool_choice=choice, stream=True))
            assert (await read_stream(stream))[1] == {0: ("find", '{"place": "Bern"}')}

    go(main)


@ALIKE
def test_strict_tools_bind_what_begins_as_a_call(kind, tool_base):
    async def main():
        server = LoraServer(kind)
        strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
        async with serving(kind, server, tool_base) as (_, client):
            whole = await client.chat.completions.create(**ask(tools=strict))
            assert whole.choices[0].message.content == "one two three four"
            wanted = server.bodies[-1]["response_format"]
            assert wanted["triggers"] == ["<tool_call>"]
            first = wanted["structures"][0]
            assert first["begin"] + '{"place": "Bern"}' + first["end"] == CALL
            assert first["schema"] == FIND

    go(main)


@BOTH
def test_schemas_seeds_stops_choices_and_log_probabilities_reach_the_server(kind, tool_base):
    async def main():
        server = LoraServer(kind)
        async with serving(kind, server, tool_base) as (house, client):
            await client.chat.completions.create(**ask(response_format=FORMAT, temperature=0.5, seed=4))
            body = server.bodies[-1]
            assert body["response_format"]["json_schema"]["schema"] == SCHEMA
            assert (body["temperature"], body["seed"], body["top_p"]) == (0.5, 4, 1.0)
            await client.chat.completions.create(**ask(response_format={"type": "json_object"}))
            assert server.bodies[-1]["response_format"] == {"type": "json_object"}

            several = await client.chat.completions.create(**ask(n=3, seed=4, temperature=1.0, stop=["four"]))
            assert [c.message.content for c in several.choices] == ["one two three"] * 3
            assert sorted(body["seed"] for body in server.bodies[-3:]) == [4, 5, 6]
            assert server.bodies[-1]["stop"] == ["four"]
            # The prompt counts once.
            assert several.usage.prompt_tokens == len(server.bodies[-1]["prompt"])

            listed = await client.chat.completions.create(**ask(logprobs=True, top_logprobs=2))
            tokens = listed.choices[0].logprobs.content
            assert [token.logprob for token in tokens] == [-0.5] * 4
            assert [len(token.top_logprobs) for token in tokens] == [2] * 4
            named = house.stub._prompts.template.token_bytes(7).decode()
            assert tokens[0].token == tokens[0].top_logprobs[0].token == (named if kind == "vllm" else "one")

    go(main)


@ALIKE
def test_text_completions_are_sent_as_tokens_without_a_template(kind, tool_base):
    async def main():
        server = LoraServer(kind)
        async with serving(kind, server, tool_base) as (house, client):
            answer = await client.completions.create(model="base", prompt="Once upon", logprobs=1)
            assert answer.choices[0].text == "one two three four"
            assert len(answer.choices[0].logprobs.tokens) == 4
            template = house.stub._prompts.template
            assert server.bodies[-1]["prompt"] == template.encode_text("Once upon")

    go(main)


def test_an_endpoint_gets_tools_and_formats_as_the_client_sent_them(tool_base):
    async def main():
        server, sink = ChatServer(), ListSink()
        async with serving("endpoint", server, tool_base, sink=sink) as (house, client):
            asked = ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=True)
            whole = (await client.chat.completions.create(**asked)).choices[0]
            assert whole.finish_reason == "tool_calls"
            made = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
            assert made == [("find", '{"place": "Bern"}'), ("find", "{}")]
            sent = server.bodies[-1]
            assert (sent["tools"], sent["tool_choice"]) == (TOOLS, "required")

            stream = await client.chat.completions.create(**asked, stream=True)
            _, calls, reason, _ = await read_stream(stream)
            assert (calls, reason) == ({0: made[0], 1: made[1]}, "tool_calls")

            # The results go back in another order than the calls, under their own ids.
            results = [
                {"role": "tool", "tool_call_id": call.id, "content": call.function.arguments}
                for call in reversed(whole.message.tool_calls)
            ]
            turns = [*ASK, whole.message.model_dump(), *results]
            last = await client.chat.completions.create(model="base", messages=turns, tools=TOOLS)
            assert last.choices[0].message.content == 'base-model: {"place": "Bern"}'
            answered = server.bodies[-1]["messages"]
            assert answered[2]["tool_call_id"] == answered[1]["tool_calls"][1]["id"]
            again = await client.chat.completions.create(model="base", messages=turns)
            assert again.choices[0].message.content == 'base-model: {"place": "Bern"}'

            await client.chat.completions.create(**ask(response_format=FORMAT, seed=7, stop="x"))
            sent = server.bodies[-1]
            assert (sent["response_format"], sent["seed"], sent["stop"]) == (FORMAT, 7, ["x"])
            listed = await client.chat.completions.create(**ask(logprobs=True, top_logprobs=1))
            tokens = listed.choices[0].logprobs.content
            assert [(t.logprob, len(t.top_logprobs)) for t in tokens] == [(-0.25, 1)] * 2
            assert listed.usage.total_tokens == 16
            text = await client.completions.create(model="base", prompt="Once")
            assert text.choices[0].text == "Once and on"
            await house.close_captures()
            assert sink.captures[0].reply.count('"name": "find"') == 2

    go(main)


def test_the_other_apis_reach_an_endpoint_with_their_tools(tool_base):
    async def main():
        async with serving("endpoint", ChatServer(), tool_base) as (_, client):
            flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
            answer = await client.responses.create(model="base", input="Where is it?", tools=flat)
            assert [item.name for item in answer.output if item.type == "function_call"] == ["find", "find"]
            events = [
                event
                async for event in await client.responses.create(
                    model="base", input="Where is it?", tools=flat, stream=True
                )
            ]
            done = [event for event in events if event.type == "response.function_call_arguments.done"]
            assert [event.arguments for event in done] == ['{"place": "Bern"}', "{}"]

    go(main)


def test_a_refusal_of_the_server_names_its_field(tool_base):
    async def main():
        server = ChatServer()
        server.refuses = "tools"
        async with serving("endpoint", server, tool_base) as (_, client):
            for stream in (False, True):
                with pytest.raises(BadRequestError, match="Unsupported parameter: tools") as refused:
                    await client.chat.completions.create(**ask(tools=TOOLS, stream=stream))
                assert refused.value.param == "tools"

    go(main)


def test_embeddings_are_passed_to_the_server_and_back(tool_base):
    async def main():
        server, sink = ChatServer(), ListSink()
        async with serving("endpoint", server, tool_base, sink=sink) as (house, client):
            found = await client.embeddings.create(
                model="base", input=["a", "bcd"], encoding_format="float", dimensions=2
            )
            assert [item.embedding for item in found.data] == [[0.5, 1.0], [0.5, 3.0]]
            assert (found.model, found.usage.total_tokens) == ("base", 3)
            packed = await client.embeddings.create(model="base", input="bcd")
            assert packed.data[0].embedding == [0.5, 3.0]
            assert server.bodies[-1]["encoding_format"] == "base64"
            for bad in ("", [], [""], [1, "a"], [[]], {"a": 1}, 7, [True]):
                with pytest.raises(BadRequestError) as refused:
                    await client.embeddings.create(model="base", input=bad)
                assert refused.value.param == "input"
            await house.close_captures()
            assert sink.captures == []

    go(main)


def test_a_server_without_embeddings_says_so(tool_base):
    async def main():
        async with serving("vllm", LoraServer("vllm"), tool_base) as (_, client):
            with pytest.raises(NotFoundError, match="no /v1/embeddings"):
                await client.embeddings.create(model="base", input="a")

    go(main)


@pytest.mark.parametrize("kind", ["vllm", "sglang", "endpoint"])
def test_a_prompt_release_is_the_base_with_the_prompt_before_the_messages(kind, tool_base, tmp_path):
    examples = (Message(role="user", content="Colour of grass?"), Message(role="assistant", content="Green."))
    prompt = PromptVariant(instruction="Answer in one word.", examples=examples)
    (tmp_path / PROMPT_FILE).write_text(prompt.to_json())
    question = [{"role": "system", "content": "Be long."}, {"role": "user", "content": "Colour of snow?"}]

    async def main():
        server = ChatServer() if kind == "endpoint" else LoraServer(kind)
        async with serving(kind, server, tool_base, adapters={RELEASE: str(tmp_path)}) as (house, client):
            for tools in ({}, {"tools": TOOLS}):
                asked = {"model": RELEASE, "messages": question, "max_tokens": 8, **tools}
                assert (await client.chat.completions.create(**asked)).model == RELEASE
                body = server.bodies[-1]
                assert body["model"] == MODEL
                if kind == "endpoint":
                    sent = " ".join(turn["content"] for turn in body["messages"])
                else:
                    sent = house.stub._prompts.template.decode_text(body["prompt"])
                order = ["Answer in one word.", "Colour of grass?", "Green.", "Colour of snow?"]
                places = [sent.index(part) for part in order]
                assert places == sorted(places)
                assert "Be long." not in sent
            # A text to continue goes to the base as it is.
            await client.completions.create(model=RELEASE, prompt="Snow is", max_tokens=8)
            assert "Green." not in str(server.bodies[-1]["prompt"])

    go(main)
