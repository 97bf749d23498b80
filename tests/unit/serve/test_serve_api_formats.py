"""Completions, responses and Anthropic's messages, as their official clients see them."""

import asyncio
import json
from contextlib import asynccontextmanager
from functools import partial

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError
from serve_engines import embedded, serve_with
from serve_harness import DEADLINE, RELEASE, ListSink, open_house
from test_serve_api_options import SCHEMA
from tool_template import ASK, FIND, PLACE, TOOLS

from graftwork.engines.protocol import GenerateRequest
from graftwork.http.messages import ApiError
from graftwork.serve.api.call import AnswerHead, TokenUsage
from graftwork.serve.gateway import APIS
from graftwork.serve.settings import ServeSettings

LIMITS = ServeSettings()
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
CLAUDE_TOOLS = [{"name": "find", "description": "Finds it.", "input_schema": FIND}]

serving = partial(serve_with, embedded)


def client_of(house, key="x"):
    return AsyncOpenAI(base_url=f"{house.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE)


@asynccontextmanager
async def anthropic_of(house, key="x"):
    anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
    options = {"base_url": house.url, "api_key": key, "max_retries": 0, "timeout": DEADLINE}
    async with anthropic.AsyncAnthropic(**options) as client:
        yield client


def test_a_text_completion_continues_its_prompt_whole_and_streamed(run):
    async def main():
        sink = ListSink()
        async with open_house(sink) as house, client_of(house) as client:
            ask = {"model": "champion", "prompt": "once upon a"}
            whole = await client.completions.create(**ask)
            assert whole.choices[0].text == f"[{RELEASE}] once upon a"
            assert whole.usage.completion_tokens == 4
            stream = await client.completions.create(
                **ask, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            texts = [choice.text for chunk in chunks for choice in chunk.choices]
            assert "".join(texts) == whole.choices[0].text
            assert chunks[-2].choices[0].finish_reason == "stop"
            assert chunks[-1].usage == whole.usage
            several = await client.completions.create(model="base", prompt=["a", "b"], n=2)
            assert [c.text for c in several.choices] == ["[base] a", "[base] a", "[base] b", "[base] b"]
            await house.close_captures()
            # Not a conversation: it cannot become a row to train on.
            assert not sink.captures

    run(main)


def test_a_text_completion_of_a_model_lists_its_log_probabilities(run, tiny_base):
    async def main():
        async with serving(tiny_base) as (_, client):
            answer = await client.completions.create(model="base", prompt="x", logprobs=2, max_tokens=3)
            logprobs = answer.choices[0].logprobs
            assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 3
            assert all(len(top) == 2 for top in logprobs.top_logprobs)

    run(main)


def test_a_response_has_the_text_and_its_events_build_the_same(run):
    async def main():
        async with open_house() as house, client_of(house) as client:
            ask = {"model": "champion", "instructions": "Be brief.", "input": "hello there friend"}
            whole = await client.responses.create(**ask)
            assert whole.output_text == f"[{RELEASE}] hello there friend"
            assert (whole.status, whole.usage.output_tokens) == ("completed", 4)
            assert [m.role for m in house.stub.asked[0].messages] == ["system", "user"]
            stream = await client.responses.create(**ask, stream=True)
            events = [event async for event in stream]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
            assert "".join(deltas) == whole.output_text
            assert len(deltas) == 4
            assert events[-1].type == "response.completed"
            assert events[-1].response.output_text == whole.output_text
            assert events[-1].response.usage == whole.usage
            cut = await client.responses.create(**ask, max_output_tokens=2)
            assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")

    run(main)


def test_a_response_calls_tools_and_takes_their_results(run, tool_base):
    async def main():
        async with serving(tool_base) as (_, client):
            choice = {"type": "function", "name": "find"}
            ask = {"model": "base", "input": "Where?", "tools": FLAT_TOOLS, "tool_choice": choice}
            whole = await client.responses.create(**ask)
            (call,) = whole.output
            assert (call.type, call.name) == ("function_call", "find")
            assert json.loads(call.arguments)["place"] in PLACE["enum"]
            async with client.responses.stream(**ask) as stream:
                final = await stream.get_final_response()
            assert [(item.name, item.arguments) for item in final.output] == [("find", call.arguments)]
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "There."}
            turns = [{"role": "user", "content": "Where?"}, call.model_dump(), output]
            answer = await client.responses.create(
                model="base", input=turns, tools=FLAT_TOOLS, max_output_tokens=3
            )
            assert answer.status == "incomplete"

    run(main)


def test_a_response_follows_its_schema(run, tiny_base):
    async def main():
        async with serving(tiny_base) as (_, client):
            wanted = {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}
            answer = await client.responses.create(model="base", input="Where?", text={"format": wanted})
            assert json.loads(answer.output_text).keys() == {"place", "sure"}

    run(main)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"max_output_tokens": 10**6}, "max_output_tokens"),
        ({"reasoning": {"effort": "high"}}, "reasoning"),
    ],
)
def test_an_unsupported_field_of_responses_is_refused_by_name(run, more, param):
    async def main():
        async with open_house() as house, client_of(house) as client:
            with pytest.raises(BadRequestError) as refused:
                await client.responses.create(**{"model": "base", "input": "x", **more})
            assert refused.value.param == param

    run(main)


def encode_call_of(arguments, reason):
    """The answer of `/v1/messages` with one call, whose arguments another server wrote."""
    api = APIS["/v1/messages"]
    call = api.parse(json.dumps({"model": "m", "max_tokens": 5, "messages": ASK}).encode(), LIMITS)
    piece = {"text": "", "finish_reason": reason, "prompt_tokens": 1, "reply_tokens": 1}
    made = [{"name": "find", "arguments": arguments}]
    head = AnswerHead(unique="0" * 32, created=0, model="m", release="base")
    return json.loads(api.encode(head, call, [{**piece, "tool_calls": made}], TokenUsage(1, 1)))


@pytest.mark.parametrize(
    ("arguments", "reason", "input", "stop_reason"),
    [
        ('{"place": "Bern"}', "stop", {"place": "Bern"}, "tool_use"),
        ("", "stop", {}, "tool_use"),
        ('{"place": "Be', "length", {}, "max_tokens"),
    ],
)
def test_a_call_of_another_server_becomes_a_block_of_a_message(arguments, reason, input, stop_reason):
    message = encode_call_of(arguments, reason)
    assert (message["content"][0]["input"], message["stop_reason"]) == (input, stop_reason)


@pytest.mark.parametrize("arguments", ["{place: Bern}", "[]", "null"])
def test_a_call_whose_arguments_are_no_object_is_an_error_of_the_server(arguments):
    with pytest.raises(ApiError) as refused:
        encode_call_of(arguments, "stop")
    assert (refused.value.status, refused.value.code) == (502, "engine_error")


def test_anthropics_client_gets_messages_whole_and_streamed(run):
    async def main():
        async with open_house(api_key="secret") as house, anthropic_of(house, "secret") as client:
            ask = {
                "model": "champion",
                "system": "Be brief.",
                "max_tokens": 100,
                "messages": [{"role": "user", "content": [{"type": "text", "text": "hello there friend"}]}],
            }
            whole = await client.messages.create(**ask)
            assert whole.content[0].text == f"[{RELEASE}] hello there friend"
            assert (whole.stop_reason, whole.usage.output_tokens) == ("end_turn", 4)
            async with client.messages.stream(**ask) as stream:
                texts = [text async for text in stream.text_stream]
                final = await stream.get_final_message()
            assert len(texts) == 4
            assert final.content[0].text == whole.content[0].text
            assert final.usage.output_tokens == whole.usage.output_tokens
            assert final.usage.input_tokens == whole.usage.input_tokens
            cut = await client.messages.create(**{**ask, "max_tokens": 2})
            assert cut.stop_reason == "max_tokens"

    run(main)


def test_anthropics_client_calls_tools_and_sends_their_results(run, tool_base):
    async def main():
        async with serving(tool_base) as (house, _), anthropic_of(house) as client:
            ask = {"model": "base", "max_tokens": 100, "tools": CLAUDE_TOOLS}
            choice = {"type": "tool", "name": "find"}
            whole = await client.messages.create(**ask, messages=ASK, tool_choice=choice)
            assert whole.stop_reason == "tool_use"
            (call,) = whole.content
            assert call.name == "find"
            assert call.input["place"] in PLACE["enum"]
            async with client.messages.stream(**ask, messages=ASK, tool_choice=choice) as stream:
                final = await stream.get_final_message()
            assert final.content[0].input == call.input
            result = {"type": "tool_result", "tool_use_id": call.id, "content": "There."}
            turns = [
                *ASK,
                {"role": "assistant", "content": whole.content},
                {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
            ]
            answer = await client.messages.create(**{**ask, "max_tokens": 2}, messages=turns)
            assert answer.stop_reason == "max_tokens"

    run(main)


def test_anthropics_client_understands_our_refusals(run):
    async def main():
        async with open_house(api_key="secret") as house:
            anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed")
            ask = {"model": "base", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
            async with anthropic_of(house, "wrong") as client:
                with pytest.raises(anthropic.AuthenticationError):
                    await client.messages.create(**ask)
            async with anthropic_of(house, "secret") as client:
                with pytest.raises(anthropic.BadRequestError, match="thinking") as refused:
                    await client.messages.create(**ask, thinking={"type": "enabled", "budget_tokens": 1024})
                assert refused.value.body["error"]["type"] == "invalid_request_error"
                with pytest.raises(anthropic.NotFoundError, match="no model"):
                    await client.messages.create(**{**ask, "model": "claude"})
            async with client_of(house, "wrong") as client:
                with pytest.raises(AuthenticationError):
                    await client.completions.create(model="base", prompt="x")

    run(main)


TEXTS = st.text('ab"{<é', max_size=8) | st.sampled_from(["type", "text", "function", "name", "role", "user"])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
FIELDS = {
    "/v1/chat/completions": ["messages", "tools", "tool_choice", "response_format", "n", "logprobs"],
    "/v1/completions": ["prompt", "n", "logprobs", "stop", "max_tokens"],
    "/v1/responses": ["input", "instructions", "tools", "tool_choice", "text", "metadata"],
    "/v1/messages": [
        "messages",
        "system",
        "tools",
        "tool_choice",
        "max_tokens",
        "stop_sequences",
        "metadata",
    ],
    "/v1/embeddings": ["input", "encoding_format", "dimensions", "user"],
}
GOOD = {
    "messages": ASK, "prompt": "x", "input": "x", "max_tokens": 5, "tools": TOOLS, "tool_choice": "auto",
}  # fmt: skip


@pytest.mark.parametrize("path", APIS)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_whatever_is_sent_to_any_api_is_a_call_or_a_refusal_of_status_400(path, data):
    keys = st.sampled_from(FIELDS[path])
    body = {key: GOOD[key] for key in FIELDS[path] if key in GOOD} | data.draw(
        st.dictionaries(keys, JSON_VALUES, max_size=3)
    )
    try:
        call = APIS[path].parse(json.dumps(body).encode(), LIMITS)
    except ApiError as refused:
        json.loads(APIS[path].encode_error(refused))
        status = refused.status
    else:
        for single in call.fan_out():
            GenerateRequest.from_json(single.encode_for_engine("base"))
        status = 400
    assert status == 400


def test_embeddings_are_refused_by_name(run):
    async def main():
        async with open_house() as house, client_of(house) as client:
            with pytest.raises(NotFoundError, match="embeddings are not supported"):
                await client.embeddings.create(model="base", input="x")

    run(main)


def test_a_client_that_leaves_cancels_every_choice(run):
    async def main():
        async with open_house() as house, client_of(house) as client:
            house.stub.gate.clear()
            stream = await client.chat.completions.create(model="base", messages=ASK, n=3, stream=True)
            async for _ in stream:
                break
            await stream.close()
            async with asyncio.timeout(DEADLINE):
                await house.stub.cancelled.wait()
                while house.answers.metrics.in_flight:
                    await asyncio.sleep(0)

    run(main)
