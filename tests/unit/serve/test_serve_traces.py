"""Traces over OTLP/HTTP become captures: protobuf and JSON, gzip, bounded, authenticated, redacted."""

import asyncio
import gc
import gzip
import importlib
import json
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI
from serve_harness import DEADLINE, ListSink, open_house

from graftwork.data.ingest.captures import read_captured
from graftwork.http.client import Client
from graftwork.http.messages import ApiError
from graftwork.records.interaction import Origin
from graftwork.serve.budgets import KeyBudget
from graftwork.serve.keys import ApiKey, KeyRing, digest_secret
from graftwork.serve.otlp import BadTrace, parse_json, parse_protobuf, unpack
from graftwork.serve.project import read_traces
from graftwork.serve.settings import ServeSettings

TRACES = Path(__file__).parents[2] / "data" / "traces"
PACKED = (TRACES / "exporter.pb.gz").read_bytes()
LINES = (TRACES / "genai.otlp.jsonl").read_bytes().splitlines()
PROTOBUF = (("content-type", "application/x-protobuf"),)
GZIP = (*PROTOBUF, ("content-encoding", "gzip"))
JSON = (("content-type", "application/json"),)


async def post(house, body, headers, *, key=None):
    sent = (*headers, ("authorization", f"Bearer {key}")) if key else headers
    reply = await Client(port=house.port).send("POST", "/v1/traces", body=body, headers=sent)
    return reply.status, await reply.read()


def wrap(field, data):
    """A protobuf field that holds these bytes."""
    size, length = len(data), bytearray()
    while size >= 128:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([field << 3 | 2, *length, size]) + data


def house(sink, **options):
    return open_house(sink, read_traces=read_traces, **options)


def test_spans_of_the_real_exporter_become_captures(run):
    async def main():
        sink = ListSink()
        async with house(sink) as open_:
            assert await post(open_, PACKED, GZIP) == (200, b"")
            await open_.close_captures()
        return sink.captures

    captures = run(main)
    assert sorted(capture.reply for capture in captures) == sorted(
        [
            "The station is next to the river.",
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Bern"}}\n</tool_call>',
            "It is sunny in Bern.",
            "Here it comes, piece by piece.",
            "You said",
            "Everything begins with",
        ]
    )
    first = next(capture for capture in captures if capture.reply.startswith("The station"))
    assert (first.model, first.release) == ("guide", "small-1-2026")
    assert (first.prompt_tokens, first.reply_tokens, first.finish_reason) == (21, 9, "stop")
    assert first.trace
    assert first.total_ms > 0


def test_json_without_compression_is_taken_too(run):
    async def main():
        sink = ListSink()
        async with house(sink) as open_:
            for line in LINES:
                assert await post(open_, line, JSON) == (200, b"{}")
            await open_.close_captures()
        return sink.captures

    assert len(run(main)) == 6


def test_a_batch_that_is_sent_again_has_the_same_ids():
    rows = [parse_protobuf(unpack(PACKED, most=1 << 24)) for _ in range(2)]
    first, second = ([exchange.id for exchange in read_traces(row)[0]] for row in rows)
    assert first == second
    assert len(set(first)) == 6


def test_a_traced_call_counts_for_the_memory_of_the_capture_queue():
    for exchange in read_traces(parse_protobuf(unpack(PACKED, most=1 << 24)))[0]:
        texts = [turn["content"] for turn in exchange.request["messages"]]
        assert exchange.size == len("".join([*texts, exchange.reply])) > 0


def test_protobuf_and_json_of_the_same_spans_are_read_alike():
    packed = read_traces(parse_protobuf(unpack(PACKED, most=1 << 24)))[0]
    plain = [exchange for line in LINES for exchange in read_traces(parse_json(line))[0]]

    def facts(exchange):
        return (exchange.reply, exchange.request, exchange.release, exchange.prompt_tokens, exchange.model)

    assert sorted(map(repr, map(facts, packed))) == sorted(map(repr, map(facts, plain)))


def test_a_traced_call_reads_back_as_a_capture_of_the_model_that_was_asked(run):
    async def main():
        sink = ListSink()
        async with house(sink) as open_:
            await post(open_, PACKED, GZIP)
            await open_.close_captures()
        return sink.captures

    rows = [
        read_captured(json.loads(capture.to_json()), Origin(file="captures.jsonl", line=1))
        for capture in run(main)
    ]
    assert all(row.capture is not None and row.trace for row in rows)
    assert {row.model for row in rows} == {"small-1-2026"}
    assert {row.group for row in rows} == {"guide"}


def test_secrets_are_redacted_before_anything_is_kept(run):
    secret = "sk-proj-Zk3Jq9XvT1mB7sLw0RdC5yHnE2uGf8ApQ6"
    row = json.loads(LINES[0])
    text = json.dumps(row).replace("Where is the station?", f"My key is {secret} and mail is a@example.com.")

    async def main():
        sink = ListSink()
        async with house(sink) as open_:
            await post(open_, text.encode(), JSON)
            await open_.close_captures()
        return sink.captures

    kept = "".join(capture.to_json() for capture in run(main))
    assert secret not in kept
    assert "a@example.com" not in kept


def test_without_the_key_nothing_is_taken(run):
    async def main():
        sink = ListSink()
        async with house(sink, api_key="key") as open_:
            refused = await post(open_, PACKED, GZIP)
            taken = await post(open_, PACKED, GZIP, key="key")
            await open_.close_captures()
        return refused[0], taken[0], len(sink.captures)

    assert run(main) == (401, 200, 6)


def test_a_key_for_traces_is_charged_with_their_requests_and_tokens(run):
    budget = KeyBudget(requests_per_day=2, tokens_per_day=10_000)
    stored = ApiKey(
        id="1", name="agent", digest=digest_secret("key"), created_at="", scopes=("traces",), budget=budget
    )

    async def main():
        ring = KeyRing()
        ring.replace((stored,))
        async with house(ListSink(), keys=ring) as open_:
            statuses = [(await post(open_, PACKED, GZIP, key="key"))[0] for _ in range(3)]
        return statuses, ring.holders[0].usage

    statuses, usage = run(main)
    assert statuses == [200, 200, 429]
    sizes = [exchange.size for exchange in read_traces(parse_protobuf(unpack(PACKED, most=1 << 24)))[0]]
    assert 2 * sum(sizes) / 4 <= usage.tokens <= 2 * (sum(sizes) / 4 + len(sizes))


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"\xff\xff\xff", PROTOBUF, 400),
        (b"no gzip", GZIP, 400),
        (PACKED[:100], GZIP, 400),
        (b"[]", JSON, 400),
        (b"{", JSON, 400),
        (b"{}", JSON, 400),
        (b"x", (("content-type", "text/plain"),), 415),
        (b"x", (*PROTOBUF, ("content-encoding", "br")), 415),
        (gzip.compress(bytes(1 << 20)), GZIP, 413),
    ],
)
def test_bad_bodies_are_refused_with_the_reason(run, body, headers, status, monkeypatch):
    monkeypatch.setattr("graftwork.serve.otlp.MOST_UNPACKED_BYTES", 1 << 16)

    async def main():
        async with house(ListSink()) as open_:
            return await post(open_, body, headers)

    found, answer = run(main)
    assert found == status
    assert json.loads(answer)["error"]["message"]


def test_spans_that_cannot_be_read_are_counted_in_the_answer(run):
    row = json.loads(LINES[0])
    row["resourceSpans"][0]["scopeSpans"][0]["spans"].append({"attributes": 7})

    async def main():
        async with house(ListSink()) as open_:
            return await post(open_, json.dumps(row).encode(), JSON)

    status, answer = run(main)
    assert status == 200
    assert json.loads(answer)["partialSuccess"]["rejectedSpans"] == "1"


def test_trace_intake_is_off_where_nothing_is_captured(run):
    async def main():
        async with house(None) as open_:
            off = await post(open_, PACKED, GZIP)
        async with house(ListSink(), settings=ServeSettings(traces=False)) as open_:
            return off[0], (await post(open_, PACKED, GZIP))[0]

    assert run(main) == (404, 404)


def test_chat_is_answered_while_traces_are_being_read_and_more_traces_are_refused(run):
    release = threading.Event()

    def slow(_row):
        assert release.wait(DEADLINE)
        return [], []

    async def main():
        async with open_house(ListSink(), read_traces=slow) as open_:
            waiting = [asyncio.create_task(post(open_, PACKED, GZIP)) for _ in range(2)]
            try:
                while open_.gateway._traces._under_way < 2:
                    await asyncio.sleep(0)
                refused = await post(open_, PACKED, GZIP)
                async with AsyncOpenAI(base_url=f"{open_.url}/v1", api_key="x", timeout=DEADLINE) as client:
                    answer = await client.chat.completions.create(
                        model="champion", messages=[{"role": "user", "content": "hello there"}]
                    )
            finally:
                release.set()
            done = [status for status, _ in await asyncio.gather(*waiting)]
            return refused[0], answer.choices[0].message.content, done

    refused, answer, done = run(main)
    assert (refused, done) == (429, [200, 200])
    assert answer


def test_no_garbage_collection_looks_at_a_trace_while_it_is_read(run):
    # It would look at all its values at once, and requests wait for the interpreter meanwhile.
    collects = []

    def read(row):
        collects.append(gc.isenabled())
        return read_traces(row)

    async def main():
        async with open_house(ListSink(), read_traces=read) as open_:
            statuses = [(await post(open_, body, PROTOBUF))[0] for body in (b"", b"\xff\xff\xff")]
            return statuses, gc.isenabled()

    assert run(main) == ([200, 400], True)
    assert collects == [False]


def test_traces_of_clients_that_left_count_until_they_are_read(run):
    release = threading.Event()
    started = threading.Semaphore(0)

    def slow(_row):
        started.release()
        assert release.wait(DEADLINE)
        return [], []

    async def main():
        async with open_house(ListSink(), read_traces=slow) as open_:
            leaving = [asyncio.create_task(post(open_, PACKED, GZIP)) for _ in range(2)]
            try:
                assert await asyncio.to_thread(started.acquire, timeout=DEADLINE)
                while open_.gateway._traces._under_way < len(leaving):
                    await asyncio.sleep(0)
                # Two at once would take the interpreter's lock from chat requests twice as often.
                assert not started.acquire(blocking=False)
                for task in leaving:
                    task.cancel()
                await asyncio.gather(*leaving, return_exceptions=True)
                while any(connection._task is not None for connection in open_.server.connections):
                    await asyncio.sleep(0)
                refused, _ = await post(open_, PACKED, GZIP)
            finally:
                release.set()
            while open_.gateway._traces._under_way:
                await asyncio.sleep(0)
            return refused, (await post(open_, PACKED, GZIP))[0]

    assert run(main) == (429, 200)


@pytest.mark.parametrize(
    "data",
    [b"\x0a\x00" * (1 << 20), wrap(1, wrap(2, b"\x12\x00" * (1 << 20)))],
    ids=["resources", "spans"],
)
def test_a_trace_of_countless_empty_messages_is_refused(data):
    # Two kilobytes of gzip; each empty message of two bytes takes hundreds in memory.
    with pytest.raises(BadTrace, match="too many"):
        parse_protobuf(data)


@given(st.binary(max_size=400))
def test_any_bytes_as_protobuf_are_a_trace_or_are_refused(data):
    try:
        row = parse_protobuf(data)
    except BadTrace:
        return
    read_traces(row)


@given(st.integers(0, 3000), st.binary(max_size=4))
def test_a_broken_request_of_the_exporter_is_read_or_refused(place, put):
    whole = unpack(PACKED, most=1 << 24)
    place %= len(whole)
    with suppress(BadTrace):
        read_traces(parse_protobuf(whole[:place] + put + whole[place + len(put) :]))


def test_a_bomb_is_refused_before_it_is_unpacked():
    with pytest.raises(ApiError):
        unpack(gzip.compress(bytes(64 << 20)), most=1 << 20)


def test_the_real_exporter_talks_to_the_gateway(run):
    name = "opentelemetry.exporter.otlp.proto.http"
    http = pytest.importorskip(name, reason="the OTLP exporter is not installed")
    exporter = importlib.import_module(f"{name}.trace_exporter")
    sdk = importlib.import_module("opentelemetry.sdk.trace")
    export = importlib.import_module("opentelemetry.sdk.trace.export")

    def send(url):
        provider = sdk.TracerProvider()
        made = exporter.OTLPSpanExporter(
            endpoint=f"{url}/v1/traces",
            headers={"authorization": "Bearer key"},
            compression=http.Compression.Gzip,
        )
        provider.add_span_processor(export.SimpleSpanProcessor(made))
        messages = '[{"role": "user", "parts": [{"type": "text", "content": "Where?"}]}]'
        said = '[{"role": "assistant", "parts": [{"type": "text", "content": "Here."}]}]'
        facts = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": messages}
        with provider.get_tracer("x").start_as_current_span("chat", attributes=facts) as span:
            span.set_attribute("gen_ai.output.messages", said)
        provider.shutdown()

    async def main():
        sink = ListSink()
        async with house(sink, api_key="key") as open_:
            await asyncio.to_thread(send, open_.url)
            await open_.close_captures()
        return sink.captures

    [capture] = run(main)
    assert (capture.reply, capture.request["messages"]) == ("Here.", [{"role": "user", "content": "Where?"}])
