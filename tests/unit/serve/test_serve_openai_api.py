"""Requests in OpenAI's shape, checked and translated, without any server."""

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.engines.protocol import GenerateRequest
from graftwork.http.messages import ApiError
from graftwork.serve.api.call import AnswerHead, TokenUsage
from graftwork.serve.api.chat import ChunkEncoder, encode_completion, parse_chat
from graftwork.serve.settings import ServeSettings

LIMITS = ServeSettings()
ASK = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}


def parse(**more):
    return parse_chat(json.dumps({**ASK, **more}).encode(), LIMITS)


def test_a_plain_request_is_greedy_and_bounded():
    call = parse()
    assert (call.temperature, call.top_p, call.seed) == (0.0, 1.0, None)
    assert call.max_tokens == LIMITS.max_new_tokens
    assert not call.stream


@pytest.mark.parametrize("temperature", [1e-320, 1e-40, 1e-8])
def test_a_temperature_of_almost_zero_is_greedy(temperature):
    assert parse(temperature=temperature).temperature == 0.0


def test_an_earlier_call_without_arguments_may_have_none():
    function = {"name": "now", "arguments": ""}
    calls = [{"id": "c1", "type": "function", "function": function}]
    call = parse(messages=[*ASK["messages"], {"role": "assistant", "content": None, "tool_calls": calls}])
    assert '"arguments": {}' in call.messages[-1]["content"]


def test_without_a_model_the_default_answers():
    assert parse_chat(json.dumps({"messages": ASK["messages"]}).encode(), LIMITS).model == "champion"


def test_text_parts_are_joined_and_developers_are_the_system():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = parse(messages=[{"role": "developer", "content": parts}])
    assert call.messages == [{"role": "system", "content": "ab"}]


def test_options_that_change_nothing_are_accepted():
    neutral = {"n": 1, "logprobs": False, "presence_penalty": 0.0, "tools": None, "logit_bias": {}}
    assert parse(**neutral, response_format={"type": "text"}).messages


def test_a_request_of_the_gateway_reaches_the_engine_unchanged():
    call = parse(temperature=0.7, top_p=0.9, seed=3, stop="END", stream=True, max_completion_tokens=5)
    request = GenerateRequest.from_json(call.encode_for_engine("r1"))
    assert (request.model, request.max_tokens, request.stop) == ("r1", 5, ("END",))
    assert (request.temperature, request.top_p, request.seed, request.stream) == (0.7, 0.9, 3, True)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]},
            "messages[0].tool_calls[0]",
        ),
        ({"model": 3}, "model"),
        ({"stream": "yes"}, "stream"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2.5}, "max_tokens"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"n": True}, "n"),
        ({"seed": "x"}, "seed"),
        ({"user": 5}, "user"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_a_wrong_option_is_named(more, param):
    with pytest.raises(ApiError) as refused:
        parse(**more)
    assert refused.value.status == 400
    assert refused.value.param == param


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(["model", "messages", "stop", "n", "seed", "tools", "stream_options", "metadata"])


@given(st.binary(max_size=80) | st.dictionaries(KEYS | st.text(max_size=6), JSON_VALUES).map(json.dumps))
def test_whatever_is_sent_is_a_call_or_a_refusal(data):
    body = data if isinstance(data, bytes) else data.encode()
    try:
        call = parse_chat(body, LIMITS)
    except ApiError as refused:
        status = refused.status
    else:
        GenerateRequest.from_json(call.encode_for_engine("base"))
        status = 400
    assert status == 400


@given(st.text(min_size=1))
def test_any_text_survives_the_answer_and_the_stream(text):
    head = AnswerHead(unique='i"d', created=1, model='m"x', release="r")
    call = parse(stream=True, stream_options={"include_usage": True})
    ending = {"text": text, "finish_reason": "stop", "prompt_tokens": 1, "reply_tokens": 2}
    whole = json.loads(encode_completion(head, call, [ending], TokenUsage(1, 2)))
    assert whole["choices"][0]["message"]["content"] == text
    encoder = ChunkEncoder(head, call)
    sent = encoder.opening() + encoder.piece(ending) + encoder.closing(TokenUsage(1, 2))
    *events, done, rest = sent.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    assert len(events) == 4
    for event in events:
        assert b"\n" not in event
        assert json.loads(event.removeprefix(b"data: "))["model"] == 'm"x'
    assert json.loads(events[1][6:])["choices"][0]["delta"]["content"] == text


def test_the_gateway_loads_no_torch_and_the_settings_no_parser():
    code = (
        "import sys, graftwork.serve.settings, graftwork.engines.protocol, graftwork.serve.routing;"
        "assert 'httptools' not in sys.modules;"
        "import graftwork.serve.run, graftwork.engines.embedded_process;"
        "assert not {'torch', 'transformers', 'numpy', 'sqlalchemy'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
