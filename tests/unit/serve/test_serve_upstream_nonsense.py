"""An upstream that answers nonsense is an error of the upstream with a name, never a crash."""

import asyncio
import json

import pytest

from graftwork.engines.protocol import GenerateRequest
from graftwork.engines.upstream import count_prompt
from graftwork.engines.upstream_messages import DIALECTS, UpstreamReply
from graftwork.http.client import ClientReply
from graftwork.http.messages import ApiError
from graftwork.records.interaction import Message


class PlainFlow:
    """Text as it comes."""

    stopped = None

    def __init__(self):
        self._seen = 0

    def push(self, text):
        new, self._seen = text[self._seen :], len(text)
        return new

    def finish(self, unsent):
        return unsent, ()


class Body(ClientReply):
    def __init__(self, data):
        self._chunks = [data]
        self.rest = b""

    async def next_chunk(self):
        return self._chunks.pop() if self._chunks else None


NONSENSE = [
    b"<html>503 from a proxy</html>",
    b"data: not json\n\n",
    b"data: [1, 2]\n\n",
    b'data: {"choices": [5]}\n\n',
    b'data: {"choices": 7}\n\n',
    b'data: {"choices": [{"delta": {"content": 5}, "finish_reason": "stop"}]}\n\n',
    b'data: {"choices": [{"delta": {"tool_calls": ["x"]}}]}\n\n',
    b'data: {"choices": [{"text": "a", "logprobs": {"content": [{"token": "a"}]}}]}\n\n',
    b'data: {"choices": [{"text": "a", "finish_reason": "stop"}], "usage": {"prompt_tokens": "many"}}\n\n',
    b'data: {"choices": [{"text": "half"}]}\n\n',
    b"",
    b"data: " + b"x" * 17 * 2**20,
    b"no event\n" * 2**21,
    b'{"error": {"message": "not now"}}',
]


@pytest.mark.parametrize("data", NONSENSE)
def test_nonsense_is_a_bad_gateway_that_fallbacks_may_answer(data):
    with pytest.raises(ApiError) as refused:
        read(data, logprobs=1)
    assert (refused.value.status, refused.value.code) == (502, "engine_error")


def read(data, **options):
    messages = (Message(role="user", content="q"),)
    request = GenerateRequest(model="base", messages=messages, max_tokens=4, **options)
    reply = UpstreamReply(request, PlainFlow(), token_bytes=lambda _number: b"")

    async def collect():
        return [piece async for piece in reply.read(Body(data), prompt_tokens=1)]

    return asyncio.run(collect())


def test_an_error_of_null_in_an_event_is_no_error():
    (piece,) = read(b'data: {"error": null, "choices": [{"text": "a", "finish_reason": "stop"}]}\n\n')
    assert piece.text == "a"


def test_the_whole_answer_of_a_server_that_does_not_stream_is_taken():
    calls = [{"id": n, "type": "function", "function": {"name": n, "arguments": "{}"}} for n in ("f", "g")]
    message = {"role": "assistant", "content": "Sure.", "tool_calls": calls}
    whole = {"choices": [{"message": message, "finish_reason": "tool_calls"}], "usage": {"prompt_tokens": 9}}
    (piece,) = read(json.dumps(whole, indent=1).encode())
    assert (piece.text, piece.finish_reason, piece.prompt_tokens) == ("Sure.", "stop", 9)
    assert [call["name"] for call in piece.tool_calls] == ["f", "g"]


def test_the_usage_is_estimated_where_the_server_states_none():
    text = "a word " * 40
    (whole,) = read(
        json.dumps({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]}).encode()
    )
    assert 40 <= whole.reply_tokens <= 120
    messages = (Message(role="user", content=text),)
    assert 40 <= count_prompt(GenerateRequest(model="base", messages=messages, max_tokens=4), None) <= 120


def test_an_endpoint_is_asked_for_log_probabilities_that_a_check_needs():
    messages = (Message(role="user", content="q"),)
    chat = {"messages": [{"role": "user", "content": "q"}]}
    asked = GenerateRequest(model="base", messages=messages, max_tokens=4, logprobs=0, chat=chat)
    assert DIALECTS["endpoint"].encode(asked, model="m", prompt=None)["logprobs"] is True


class EndlessBody(ClientReply):
    """An answer that never ends."""

    def __init__(self, piece):
        self._piece, self.rest = piece, b""
        self.taken = 0

    async def next_chunk(self):
        self.taken += len(self._piece)
        assert self.taken < 2**28, "more than a quarter of a gigabyte was read"
        await asyncio.sleep(0)
        return self._piece


def event(**choice):
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


ENDLESS = {
    "text": event(delta={"content": "x" * 2**16}),
    "calls": event(delta={"tool_calls": [{"index": 0, "function": {"arguments": "x" * 2**16}}]}),
    "log-probabilities": event(
        delta={"content": ""}, logprobs={"content": [{"token": "x", "logprob": -1.0, "bytes": [0] * 2**12}]}
    ),
    "nothing": event(delta={"role": "x" * 2**16}),
    "comments": b": " + b"x" * 2**16 + b"\n",
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ENDLESS)
def test_an_answer_without_end_is_given_up(name, stream):
    messages = (Message(role="user", content="q"),)
    request = GenerateRequest(model="base", messages=messages, max_tokens=4, stream=stream, logprobs=1)
    reply = UpstreamReply(request, PlainFlow(), token_bytes=lambda _number: b"")

    async def collect():
        async for _ in reply.read(EndlessBody(ENDLESS[name]), prompt_tokens=1):
            pass

    with pytest.raises(ApiError) as refused:
        asyncio.run(collect())
    assert (refused.value.status, refused.value.code) == (502, "engine_error")
