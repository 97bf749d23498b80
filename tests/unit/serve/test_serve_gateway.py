"""The gateway as its users see it: the official client over real sockets."""

import asyncio
import json
import re

import pytest
from openai import APIError, APIStatusError, AsyncOpenAI, AuthenticationError, BadRequestError, NotFoundError
from serve_harness import DEADLINE, OTHER, RELEASE, BrokenSink, ListSink, open_house, raw

from graftwork.http.client import Client
from graftwork.http.messages import ApiError
from graftwork.serve.api.chat import parse_chat_body
from graftwork.serve.exchange import stream_choices
from graftwork.serve.gateway import MOST_BODY_BYTES
from graftwork.serve.routing import Routes, update_routes
from graftwork.serve.settings import ServeSettings

HELLO = [{"role": "user", "content": "hello there friend"}]


def client_of(house, key="unused"):
    return AsyncOpenAI(base_url=f"{house.url}/v1", api_key=key, max_retries=0, timeout=DEADLINE)


def test_an_answer_names_the_release_that_gave_it(run):
    async def main():
        async with open_house(ListSink()) as house, client_of(house) as client:
            answer = await client.chat.completions.with_raw_response.create(model="champion", messages=HELLO)
            parsed = answer.parse()
            assert parsed.choices[0].message.content == f"[{RELEASE}] hello there friend"
            assert parsed.choices[0].finish_reason == "stop"
            assert parsed.model == "champion"
            assert parsed.system_fingerprint == RELEASE
            assert parsed.usage.total_tokens == parsed.usage.prompt_tokens + parsed.usage.completion_tokens
            assert answer.headers["x-graft-release"] == RELEASE
            assert answer.headers["x-graft-capture"]

    run(main)


def test_base_a_release_and_its_first_characters_can_be_asked_for(run):
    async def main():
        async with open_house() as house, client_of(house) as client:
            for name, release in (("base", "base"), (OTHER, OTHER), ("a1b2c3d4f", OTHER)):
                answer = await client.chat.completions.create(model=name, messages=HELLO)
                assert answer.system_fingerprint == release
                assert answer.model == name
            listed = {model.id for model in (await client.models.list()).data}
            assert listed == {"champion", "base", RELEASE, OTHER}

    run(main)


def test_an_unknown_model_is_refused_with_the_known_ones(run):
    async def main():
        async with open_house() as house, client_of(house) as client:
            with pytest.raises(NotFoundError, match="champion, base"):
                await client.chat.completions.create(model="gpt-4o", messages=HELLO)
            with pytest.raises(BadRequestError, match="prefix of 2 releases"):
                await client.chat.completions.create(model="a1b2c3d4", messages=HELLO)

    run(main)


def test_a_stream_gives_the_same_text_in_pieces(run):
    async def main():
        async with open_house() as house, client_of(house) as client:
            stream = await client.chat.completions.create(
                model="champion", messages=HELLO, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            texts = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
            assert "".join(texts) == f"[{RELEASE}] hello there friend"
            assert len({chunk.id for chunk in chunks}) == 1
            assert all(chunk.system_fingerprint == RELEASE for chunk in chunks)
            assert chunks[-2].choices[0].finish_reason == "stop"
            assert chunks[-1].usage.completion_tokens == 4

    run(main)


def test_pieces_reach_the_client_while_the_engine_still_works(run):
    async def main():
        async with open_house() as house, client_of(house) as client:
            house.stub.gate.clear()
            stream = await client.chat.completions.create(model="base", messages=HELLO, stream=True)
            async for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
            assert house.stub.waiting.is_set()
            house.stub.gate.set()
            assert [c async for c in stream][-1].choices[0].finish_reason == "stop"

    run(main)


@pytest.mark.parametrize("behind", [b"", b"\r\n", b"GET /health HTTP/1.1\r\n\r\n"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_the_work_upstream(run, stream, behind):
    async def main():
        sink = ListSink()
        async with open_house(sink) as house:
            house.stub.gate.clear()
            body = json.dumps({"model": "base", "messages": HELLO, "stream": stream}).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", house.port)
            head = f"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n"
            writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            await asyncio.wait_for(house.stub.waiting.wait(), DEADLINE)
            if behind:
                writer.write(behind)
                while not any(connection._unparsed for connection in house.server.connections):
                    await asyncio.sleep(0)
            writer.close()
            await asyncio.wait_for(house.stub.cancelled.wait(), DEADLINE)
            while house.answers.metrics.in_flight:
                await asyncio.sleep(0)
            await house.close_captures()
        if stream:  # an answer that was begun is kept as far as it went
            assert sink.captures[0].disconnected
            assert sink.captures[0].finish_reason is None
            assert sink.captures[0].reply == "[base]"

    run(main)


def test_each_exchange_is_captured_redacted_and_found_by_the_id_in_its_header(run):
    async def main():
        sink = ListSink()
        secret = "sk-proj-" + "Zx9Kq2Lm7Rt4Vb8Nw3Yp" * 2
        messages = [{"role": "user", "content": f"mail me at jane.doe@corp.example, key {secret}"}]
        async with open_house(sink) as house, client_of(house) as client:
            answer = await client.chat.completions.with_raw_response.create(
                model="champion", messages=messages, user="jane.doe@corp.example"
            )
            streamed = await client.chat.completions.create(
                model="champion", messages=HELLO, stream=True, extra_headers={"x-session-id": "s-7"}
            )
            assert [c async for c in streamed]
            await house.close_captures()
            wanted = answer.headers["x-graft-capture"]
        first, second = sink.captures
        assert first.id == wanted
        assert first.release == RELEASE
        assert first.model == "champion"
        text = first.to_json()
        assert secret not in text
        assert "jane.doe" not in text
        assert "REDACTED" in first.reply
        assert first.session.startswith("session-")
        assert second.session == "s-7"
        assert second.reply == f"[{RELEASE}] hello there friend"
        assert second.finish_reason == "stop"
        assert second.first_token_ms <= second.total_ms
        assert (second.prompt_tokens, second.reply_tokens) == (3, 4)

    run(main)


def test_a_sink_that_fails_never_breaks_an_answer(run):
    async def main():
        sink = BrokenSink()
        async with open_house(sink, queue_size=2) as house, client_of(house) as client:
            for _ in range(8):
                answer = await client.chat.completions.create(model="champion", messages=HELLO)
                assert answer.choices[0].message.content
            assert await asyncio.to_thread(sink.asked.wait, DEADLINE)
            await house.close_captures()
            assert house.captures.kept == 0
            assert house.captures.dropped + house.captures.lost == 8

    run(main)


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"n": 200}, "n must be"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "grammar"}}, "response_format"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"extra_body": {"best_of": 3}}, "best_of"),
    ],
)
def test_an_unsupported_field_is_refused_by_name(run, extra, named):
    async def main():
        async with open_house() as house, client_of(house) as client:
            with pytest.raises(BadRequestError, match=named):
                await client.chat.completions.create(model="base", messages=HELLO, **extra)

    run(main)


def test_an_engine_that_is_down_is_answered_with_503(run):
    async def main():
        async with open_house() as house, client_of(house) as client:
            house.engine.client.close()
            house.engine.client = None
            house.engine.status = {"state": "down", "reason": "it was killed", "restarts": 1}
            with pytest.raises(APIStatusError, match="it was killed") as refused:
                await client.chat.completions.create(model="champion", messages=HELLO)
            assert refused.value.status_code == 503
            assert refused.value.response.headers["retry-after"] == "1"

    run(main)


def test_an_engine_that_dies_in_the_middle_of_a_stream_is_an_error_in_the_stream(run):
    async def main():
        sink = ListSink()
        async with open_house(sink) as house, client_of(house) as client:
            house.stub.gate.clear()
            stream = await client.chat.completions.create(model="champion", messages=HELLO, stream=True)
            await anext(stream)
            await house.stub.waiting.wait()
            house.cut_engine()
            with pytest.raises(APIError, match="the engine is not ready"):
                _ = [chunk async for chunk in stream]
            await house.close_captures()
        assert sink.captures[0].finish_reason == "error"

    run(main)


def test_an_engine_that_takes_too_long_is_answered_with_504(run_with_limit):
    async def main(limit, pass_when):
        settings = ServeSettings(request_timeout_seconds=limit)
        async with open_house(settings=settings) as house, client_of(house) as client:
            house.stub.gate.clear()
            pass_when(house.stub.waiting.is_set)
            with pytest.raises(APIStatusError) as refused:
                await client.chat.completions.create(model="champion", messages=HELLO)
            assert refused.value.status_code == 504
            assert house.stub.waiting.is_set()
            await asyncio.wait_for(house.stub.cancelled.wait(), DEADLINE)

    run_with_limit(main)


def test_beyond_the_queue_limit_requests_are_refused_with_429(run):
    async def main():
        async with open_house(settings=ServeSettings(queue_limit=1)) as house, client_of(house) as client:
            house.stub.gate.clear()
            first = asyncio.create_task(client.chat.completions.create(model="base", messages=HELLO))
            await house.stub.waiting.wait()
            with pytest.raises(APIStatusError) as refused:
                await client.chat.completions.create(model="base", messages=HELLO)
            assert refused.value.status_code == 429
            house.stub.gate.set()
            assert (await first).choices
            assert (await client.chat.completions.create(model="base", messages=HELLO)).choices

    run(main)


def test_a_body_that_is_too_large_is_refused_with_413(run):
    async def main():
        async with open_house() as house, client_of(house) as client:
            messages = [{"role": "user", "content": "x" * MOST_BODY_BYTES}]
            with pytest.raises(APIStatusError) as refused:
                await client.chat.completions.create(model="base", messages=messages)
            assert refused.value.status_code == 413

    run(main)


def test_the_key_is_asked_for_everywhere_but_at_the_health(run):
    async def main():
        async with open_house(api_key="right") as house:
            async with client_of(house, "wrong") as client:
                with pytest.raises(AuthenticationError):
                    await client.chat.completions.create(model="base", messages=HELLO)
                with pytest.raises(AuthenticationError):
                    await client.models.list()
            async with client_of(house, "right") as client:
                assert (await client.models.list()).data
            status, body = await Client(port=house.port).fetch("GET", "/health")
            assert (status, json.loads(body)) == (200, {"status": "ok"})

    run(main)


def test_other_web_pages_cannot_use_a_server_without_a_key(run):
    async def main():
        async with open_house() as house:
            rebound = b"GET /v1/models HTTP/1.1\r\nhost: evil.example:80\r\nconnection: close\r\n\r\n"
            assert (await raw(house.port, rebound)).startswith(b"HTTP/1.1 403 ")
            simple = (
                b"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: text/plain\r\n"
                b"connection: close\r\ncontent-length: 2\r\n\r\n{}"
            )
            assert (await raw(house.port, simple)).startswith(b"HTTP/1.1 415 ")

    run(main)


def test_the_type_of_a_body_counts_in_any_case(run):
    async def main():
        async with open_house() as house:
            body = json.dumps({"model": "base", "messages": HELLO}).encode()
            head = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-type: Application/JSON; charset=UTF-8\r\n"
            framing = b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            assert (await raw(house.port, head + framing + body)).startswith(b"HTTP/1.1 200 ")

    run(main)


def test_a_probe_may_ask_for_the_head_of_health_without_a_key(run):
    async def main():
        async with open_house(api_key="right") as house:
            answer = await raw(house.port, b"HEAD /health HTTP/1.1\r\nconnection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.endswith(b"\r\n\r\n")

    run(main)


def test_metrics_escape_what_operators_call_their_models_and_checks(run):
    odd = 'the "small" one\\\n2'
    shown = 'the \\"small\\" one\\\\\\n2'

    async def main():
        routes = Routes(releases=frozenset({RELEASE}), aliases={odd: RELEASE})
        async with open_house(routes=routes) as house:
            metrics = house.answers.metrics
            metrics.count_request(odd, 200)
            metrics.count_answer(odd, prompt_tokens=12_345_678, reply_tokens=1, seconds=1.0)
            metrics.routed[odd, "rule"] += 1
            metrics.escalated[odd, "escalated"] += 1
            metrics.chained[odd, "answered"] += 1
            metrics.assigned["e", odd] += 1
            _, body = await Client(port=house.port).fetch("GET", "/metrics")
        lines = body.decode().splitlines()
        assert f'graft_requests_total{{model="{shown}",status="200"}} 1' in lines
        assert f'graft_tokens_total{{model="{shown}",kind="prompt"}} 12345678' in lines
        assert sum(shown in line for line in lines) == 7
        sample = re.compile(r'(# TYPE \w+ \w+|\w+(\{(\w+="([^"\\]|\\.)*",?)+\})? [0-9.e+-]+)')
        assert [line for line in lines if not sample.fullmatch(line)] == []

    run(main)


@pytest.mark.parametrize("refused", [False, True])
def test_streamed_choices_start_at_once_and_a_refusal_ends_the_others(run, refused):
    async def main():
        engine, count = EngineOfStreams(), 3
        body = {"model": "base", "messages": HELLO, "n": count, "stream": True}
        call = parse_chat_body(body, ServeSettings())
        starting = asyncio.create_task(stream_choices(engine, call, model="base"))
        while len(engine.asked) < count:
            await asyncio.sleep(0)
        streams = [ClosingStream() for _ in range(count)]
        engine.asked[1].set_result(streams[1])
        if refused:
            engine.asked[0].set_exception(ApiError(400, "no"))
            with pytest.raises(ApiError):
                await starting
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert engine.asked[2].cancelled()
        else:
            engine.asked[0].set_result(streams[0])
            engine.asked[2].set_result(streams[2])
            (await starting).close()
        assert streams[1].closed

    run(main)


class ClosingStream:
    closed = False

    def close(self):
        self.closed = True


class EngineOfStreams:
    """An engine whose streams begin when the test says so."""

    def __init__(self):
        self.asked = []

    async def stream(self, call, *, model):
        self.asked.append(asyncio.get_running_loop().create_future())
        return await self.asked[-1]


def test_health_and_metrics_say_how_it_is(run):
    async def main():
        async with open_house(ListSink()) as house, client_of(house) as client:
            await client.chat.completions.create(model="champion", messages=HELLO)
            http = Client(port=house.port)
            status, body = await http.fetch("GET", "/health")
            health = json.loads(body)
            assert status == 200
            assert health["aliases"] == {"champion": RELEASE}
            assert health["releases"] == sorted([RELEASE, OTHER])
            status, body = await http.fetch("GET", "/metrics")
            text = body.decode()
            assert f'graft_requests_total{{model="{RELEASE}",status="200"}} 1' in text
            assert "graft_engine_up 1" in text
            assert (await http.fetch("GET", "/v1/chat/completions"))[0] == 405
            assert (await http.fetch("GET", "/nowhere"))[0] == 404

    run(main)


def test_an_alias_whose_release_is_not_loaded_stays_where_it_was_and_says_so():
    old = Routes(releases=frozenset({"r1"}), aliases={"champion": "r1"})
    new = update_routes(old, aliases={"champion": "r2", "next": "r3"}, releases=frozenset({"r1"}))
    assert new.aliases == {"champion": "r1"}
    assert new.pending == {"champion": "r2", "next": "r3"}


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": "x"}', b'{"error": {"message": "m"}}'])
def test_an_engine_that_fails_without_a_reason_is_a_bad_gateway(body):
    from graftwork.serve.supervisor import _explain_refusal

    error = _explain_refusal(500, body)
    assert (error.status, error.code) == (502, "engine_error")
    spoken = _explain_refusal(429, b'{"error": {"message": "full", "param": null, "code": "full"}}')
    assert (spoken.status, spoken.code, str(spoken)) == (429, "full", "full")
