"""Tools, JSON, log-probabilities and several choices: OpenAI's client and a real, tiny model."""

import json

import pytest
from openai import BadRequestError
from serve_engines import captured, embedded, llamacpp, served_once
from serve_harness import ListSink
from tool_template import ASK, PLACE, TOOLS

SCHEMA = {
    "type": "object",
    "properties": {"place": PLACE, "sure": {"type": "boolean"}},
    "required": ["place", "sure"],
    "additionalProperties": False,
}


SINK = ListSink()


@pytest.fixture(scope="module", params=[embedded, llamacpp])
def engines(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRAFT_CACHE", str(tmp_path_factory.getbasetemp() / "gguf"))
        yield from served_once(request.param, SINK)


@pytest.fixture
def run(engines):
    return engines[0]


@pytest.fixture
def serving(engines):
    return engines[1]


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}


def test_a_forced_tool_is_called_with_arguments_of_its_schema_whole_and_streamed(run, serving, tool_base):
    async def main():
        async with serving(tool_base) as (_, client):
            choice = {"type": "function", "function": {"name": "find"}}
            ask = {"model": "base", "messages": ASK, "tools": TOOLS, "tool_choice": choice}
            whole = (await client.chat.completions.create(**ask)).choices[0]
            assert whole.finish_reason == "tool_calls"
            assert whole.message.content is None
            (call,) = whole.message.tool_calls
            assert call.function.name == "find"
            assert json.loads(call.function.arguments)["place"] in PLACE["enum"]
            stream = await client.chat.completions.create(**ask, stream=True)
            chunks = [chunk.choices[0] async for chunk in stream]
            parts = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
            assert parts[0].id
            assert parts[0].function.name == "find"
            assert "".join(part.function.arguments for part in parts) == call.function.arguments
            assert chunks[-1].finish_reason == "tool_calls"
            capture, *_ = await captured(SINK, 1)
            assert json.loads(capture.reply.split("\n")[1])["name"] == "find"
            assert capture.request["tools"][0]["function"]["name"] == "find"

    run(main)


def test_required_calls_one_of_the_tools(run, serving, tool_base):
    async def main():
        async with serving(tool_base) as (_, client):
            ask = {"model": "base", "messages": ASK, "tools": TOOLS, "parallel_tool_calls": False}
            answer = await client.chat.completions.create(**ask, tool_choice="required", max_tokens=200)
            assert [c.function.name for c in answer.choices[0].message.tool_calls] in (["find"], ["wait"])

    run(main)


def test_earlier_calls_and_results_reach_the_model_in_the_form_of_its_template(
    run, serving, tool_base, monkeypatch
):
    async def main():
        call = {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"place":"Bern"}'}}
        turns = [
            *ASK,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c1", "content": "It is there."},
        ]
        async with serving(tool_base) as (house, client):
            rendered = []
            engine = house.stub
            template = engine._prompts.template
            prompt = template.prompt
            monkeypatch.setattr(
                template, "prompt", lambda messages: rendered.append(prompt(messages)) or rendered[-1]
            )
            await client.chat.completions.create(model="base", messages=turns, tools=TOOLS, max_tokens=2)
            text = template.decode_text(rendered[0])
            assert '<tool_call>\n{"name": "find", "arguments": {"place": "Bern"}}\n</tool_call>' in text
            assert 'TOOLS {"type": "function", "function": {"name": "find"' in text
            assert "It is there." in text

    run(main)


def test_an_answer_follows_its_json_schema_greedy_and_sampled(run, serving, tiny_base):
    async def main():
        async with serving(tiny_base) as (_, client):
            for temperature in (0, 1.5):
                answer = await client.chat.completions.create(
                    model="base",
                    messages=ASK,
                    temperature=temperature,
                    response_format=schema_format(SCHEMA),
                )
                assert answer.choices[0].finish_reason == "stop"
                value = json.loads(answer.choices[0].message.content)
                assert value["place"] in PLACE["enum"]
                assert isinstance(value["sure"], bool)

    run(main)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "banana"},
        {"type": "object", "properties": {"a": {"not": {"type": "null"}}}},
        {"$ref": "https://example.com/other.json"},
        {"type": "string", "pattern": "^(?=a)b$"},
        {"$ref": "#"},
    ],
)
def test_a_schema_that_cannot_be_enforced_is_refused_by_name(run, serving, tiny_base, schema):
    async def main():
        async with serving(tiny_base) as (_, client):
            with pytest.raises(BadRequestError, match="response_format cannot be enforced") as refused:
                await client.chat.completions.create(
                    model="base", messages=ASK, response_format=schema_format(schema)
                )
            assert refused.value.param == "response_format"

    run(main)


def test_log_probabilities_name_each_token_and_the_likeliest_in_its_place(run, serving, tiny_base):
    async def main():
        async with serving(tiny_base) as (_, client):
            ask = {"model": "base", "messages": ASK, "logprobs": True, "top_logprobs": 3, "max_tokens": 5}
            whole = (await client.chat.completions.create(**ask)).choices[0]
            assert len(whole.logprobs.content) == 5
            for token in whole.logprobs.content:
                assert token.logprob <= 0
                assert len(token.top_logprobs) == 3
                # Greedy: the chosen token is the likeliest.
                assert token.top_logprobs[0].token == token.token
                assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)
            text = b"".join(bytes(token.bytes) for token in whole.logprobs.content)
            assert text.decode(errors="replace") == whole.message.content
            stream = await client.chat.completions.create(**ask, stream=True)
            streamed = [c.choices[0].logprobs async for c in stream if c.choices[0].logprobs]
            tokens = [token for part in streamed for token in part.content]
            assert [t.token for t in tokens] == [t.token for t in whole.logprobs.content]

    run(main)


def test_several_choices_are_numbered_and_their_tokens_counted_once_for_the_prompt(run, serving, tiny_base):
    async def main():
        async with serving(tiny_base) as (_, client):
            ask = {"model": "base", "messages": ASK, "temperature": 1.0, "seed": 5, "max_tokens": 4}
            one = await client.chat.completions.create(**ask)
            three = await client.chat.completions.create(**ask, n=3)
            assert [choice.index for choice in three.choices] == [0, 1, 2]
            texts = [choice.message.content for choice in three.choices]
            assert texts[0] == one.choices[0].message.content
            assert len(set(texts)) == 3
            assert three.usage.prompt_tokens == one.usage.prompt_tokens
            assert three.usage.completion_tokens == 3 * one.usage.completion_tokens
            stream = await client.chat.completions.create(
                **ask, n=3, stream=True, stream_options={"include_usage": True}
            )
            streamed, usage = ["", "", ""], None
            async for chunk in stream:
                usage = chunk.usage or usage
                for choice in chunk.choices:
                    streamed[choice.index] += choice.delta.content or ""
            assert streamed == texts
            assert usage == three.usage

    run(main)


def test_with_tools_and_a_schema_an_answer_is_a_call_or_json_that_follows_it(run, serving, tool_base):
    async def main():
        async with serving(tool_base) as (_, client):
            ask = {"model": "base", "messages": ASK, "tools": TOOLS, "response_format": schema_format(SCHEMA)}
            free = (await client.chat.completions.create(**ask, max_tokens=200)).choices[0].message
            if free.tool_calls:
                assert {call.function.name for call in free.tool_calls} <= {"find", "wait"}
            else:
                assert json.loads(free.content)["place"] in PLACE["enum"]
            choice = {"type": "function", "function": {"name": "wait"}}
            forced = (await client.chat.completions.create(**ask, tool_choice=choice)).choices[0].message
            assert [call.function.name for call in forced.tool_calls] == ["wait"]

    run(main)


def test_tools_may_refer_to_definitions_of_their_own(run, serving, tool_base):
    async def main():
        parameters = {
            "type": "object",
            "$defs": {"Place": PLACE},
            "properties": {"at": {"$ref": "#/$defs/Place"}},
            "required": ["at"],
            "additionalProperties": False,
        }
        tools = [*TOOLS, {"type": "function", "function": {"name": "go", "parameters": parameters}}]
        async with serving(tool_base) as (_, client):
            choice = {"type": "function", "function": {"name": "go"}}
            ask = {"model": "base", "messages": ASK, "tools": tools}
            forced = (await client.chat.completions.create(**ask, tool_choice=choice)).choices[0].message
            assert json.loads(forced.tool_calls[0].function.arguments)["at"] in PLACE["enum"]
            ask |= {"tool_choice": "required", "parallel_tool_calls": False}
            several = await client.chat.completions.create(**ask, max_tokens=200)
            assert several.choices[0].message.tool_calls

    run(main)
