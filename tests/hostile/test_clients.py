"""Clients against hostile servers: every request ends, within its time and its bytes, and keeps its key.

A server that drips would take minutes for one answer here, and one that floods would never stop: a test
that ends has a client that hung up.
"""

import contextlib
import gzip
import json
import threading
from collections.abc import Callable, Iterator
from random import Random
from unittest.mock import patch

import pytest
from hostile_server import HostileServer, Script, reply

from graftwork.engines.endpoint import EndpointEngine, TryAgain
from graftwork.engines.interface import DecodingSettings
from graftwork.evaluate import judge
from graftwork.evaluate.ask import runner
from graftwork.evaluate.ask.runner import ask_endpoint
from graftwork.evaluate.cases import write_cases
from graftwork.evaluate.judge import JudgeClient
from graftwork.evaluate.settings import JudgeSettings
from graftwork.process.alert import post
from graftwork.process.asking import NoReply
from graftwork.process.http_client import Retries, may_pass, retry_after
from graftwork.records.errors import EnvironmentFailure, GraftError
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case, Endpoint, EvalJob
from graftwork.registry import hub
from graftwork.registry.folder import ProgressCounter, no_progress
from graftwork.registry.hub import DownloadTooLarge, progress_bar_class

SECONDS = 0.25
"""The time of a request to a server that would take longer than any test."""
PATIENT = 30.0
"""The time of one to a server that answers at once."""
MANY_BYTES = 64 * 2**20
"""Far more than any client takes; with what waits in buffers a few MiB more than its limit are sent."""
KEY = "sk-test-4f9KxQ27vTbN81mZ"
ASKED = (Message(role="user", content="hello"),)
ANSWER = b'{"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}'
LONG_DRIP = b"x" * 100_000


@pytest.fixture
def serve() -> Iterator[Callable[[Script], HostileServer]]:
    started: list[HostileServer] = []

    def start(script: Script) -> HostileServer:
        started.append(HostileServer(script))
        return started[-1]

    yield start
    for server in started:
        server.close()


def ask_endpoint_once(address: str, seconds: float = PATIENT) -> str:
    endpoint = Endpoint(url=address, model="m", api_key_env="HOSTILE_KEY", timeout_seconds=seconds)
    return EndpointEngine(endpoint).ask_once(ASKED, DecodingSettings(16)).text


def ask_judge_once(address: str, seconds: float = PATIENT) -> str:
    settings = JudgeSettings(url=address, model="m", api_key_env="HOSTILE_KEY")
    with patch.multiple(judge, ANSWER_SECONDS=seconds, ATTEMPTS=1):
        client = JudgeClient(settings)
    return client.say([{"role": "user", "content": "hello"}]).text


def send_alert_once(address: str, seconds: float = PATIENT) -> str:
    failure = post(f"{address}/hook", b"{}", pauses=(), seconds=seconds)
    if failure:
        raise NoReply(failure)
    return "yes"


CLIENTS = {"endpoint": ask_endpoint_once, "judge": ask_judge_once, "webhook": send_alert_once}
READERS = {name: CLIENTS[name] for name in ("endpoint", "judge")}
"""Those that read the body of an answer."""
REFUSED = (TryAgain, NoReply, GraftError)


@pytest.fixture(autouse=True)
def _key(monkeypatch):
    monkeypatch.setenv("HOSTILE_KEY", KEY)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def silence(server, connection):
    server.closing.wait(60)


def drip_the_status(server, connection):
    server.drip(connection, b"HTTP/1.1 200 " + LONG_DRIP)


def drip_the_head(server, connection):
    server.drip(connection, b"HTTP/1.1 200 OK\r\nX-Long: " + LONG_DRIP)


def endless_head(server, connection):
    server.write(connection, b"HTTP/1.1 200 OK\r\n")
    server.flood(connection, b"X-More: y\r\n" * 1000)


def one_huge_header(server, connection):
    server.write(connection, b"HTTP/1.1 200 OK\r\nX-Huge: ")
    server.flood(connection, b"y" * 65536)


def endless_continues(server, connection):
    server.flood(connection, b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


def no_http(server, connection):
    server.write(connection, b"\x16\x03\x01\x02\x00" * 100)


def closed_at_once(server, connection):
    return None


HEADS = (
    silence,
    drip_the_status,
    drip_the_head,
    endless_head,
    one_huge_header,
    endless_continues,
    no_http,
    closed_at_once,
)


def drip_the_body(server, connection):
    server.drip(connection, reply(ANSWER) + LONG_DRIP)


def drip_chunks(server, connection):
    server.write(connection, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    for _ in range(10_000):
        server.drip(connection, chunk(b": comment\n"))


def drip_events(server, connection):
    server.write(connection, b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
    event = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n'
    for _ in range(10_000):
        server.write(connection, event)
        if server.closing.wait(0.05):
            return


def endless_body(server, connection):
    server.write(connection, b"HTTP/1.1 200 OK\r\n\r\n")
    server.flood(connection, b" " * 65536)


def endless_line(server, connection):
    server.write(connection, b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: ")
    server.flood(connection, b"a" * 65536)


def endless_events(server, connection):
    server.write(connection, b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
    server.flood(connection, b'data: {"choices": [{"delta": {"content": "word"}}]}\n\n' * 100)


def endless_comments(server, connection):
    server.write(connection, b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
    server.flood(connection, b": ping\n\n" * 1000)


def endless_chunks(server, connection):
    server.write(connection, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    server.flood(connection, chunk(b" " * 65536))


def tiny_chunks(server, connection):
    server.write(connection, b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    server.flood(connection, chunk(b" ") * 10_000)


def endless_trailer(server, connection):
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    server.write(connection, head + chunk(b'{"choices": [') + b"0\r\n")
    server.flood(connection, b"X-Trailer: y\r\n" * 1000)


def huge_length(server, connection):
    server.write(connection, b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999\r\n\r\n")
    server.flood(connection, b" " * 65536)


def packed_bomb(server, connection):
    bomb = gzip.compress(b" " * (64 * 2**20) + ANSWER)
    server.write(connection, reply(bomb, more="Content-Encoding: gzip\r\n"))


def endless_refusal(server, connection):
    server.write(connection, b"HTTP/1.1 503 Busy\r\n\r\n")
    server.flood(connection, b"busy " * 10_000)


BODIES = (
    drip_the_body,
    drip_chunks,
    drip_events,
    endless_body,
    endless_line,
    endless_events,
    endless_comments,
    endless_chunks,
    tiny_chunks,
    endless_trailer,
    huge_length,
    packed_bomb,
    endless_refusal,
)


@pytest.mark.parametrize("script", HEADS, ids=lambda script: script.__name__)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_request_ends_whatever_the_head_of_its_answer_does(serve, client, script):
    server = serve(script)
    with pytest.raises(REFUSED):
        CLIENTS[client](server.address, SECONDS)
    assert server.sent < MANY_BYTES


@pytest.mark.parametrize("script", BODIES, ids=lambda script: script.__name__)
@pytest.mark.parametrize("client", READERS)
def test_a_request_ends_whatever_the_body_of_its_answer_does(serve, client, script):
    server = serve(script)
    with pytest.raises(REFUSED):
        CLIENTS[client](server.address, SECONDS)
    assert server.sent < MANY_BYTES


@pytest.mark.parametrize("client", CLIENTS)
def test_a_server_that_never_finishes_its_handshake_is_left(serve, client):
    server = serve(drip_the_status)
    with pytest.raises(REFUSED):
        CLIENTS[client](server.address.replace("http:", "https:"), SECONDS)


@pytest.mark.parametrize(
    "status", ["301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"]
)
@pytest.mark.parametrize("client", CLIENTS)
def test_a_redirect_is_never_followed(serve, client, status):
    elsewhere = serve(lambda server, connection: server.write(connection, reply(ANSWER)))
    for target in (elsewhere.address, "file:///etc/passwd", "//127.0.0.1/x", "ftp://127.0.0.1/x"):
        server = serve(
            lambda server, connection, target=target: server.write(
                connection, reply(b"", status=status, more=f"Location: {target}/v1\r\n")
            )
        )
        with pytest.raises(REFUSED):
            CLIENTS[client](server.address)
        assert len(server.requests) == 1
    assert elsewhere.requests == []


WRONG = {
    "a list": b"[]",
    "a number": b"7",
    "a text": b'"yes"',
    "nothing": b"",
    "null": b"null",
    "choices as text": b'{"choices": "yes"}',
    "choices as number": b'{"choices": 7}',
    "choices as dict": b'{"choices": {"0": 1}}',
    "message as list": b'{"choices": [{"message": [], "finish_reason": "stop"}]}',
    "content as number": b'{"choices": [{"message": {"content": 7}, "finish_reason": "stop"}]}',
    "content as list": b'{"choices": [{"message": {"content": [{"text": "yes"}]}, "finish_reason": "stop"}]}',
    "nested": b"[" * 200_000,
    "nested objects": b'{"a":' * 100_000,
    "no end": ANSWER[:-1],
    "two values": ANSWER + ANSWER,
    "other bytes": b"\xff\xfe\x00" * 1000,
    "UTF-16": ANSWER.decode().encode("utf-16"),
    "a page": b"<html><body>Please log in</body></html>",
}


@pytest.mark.parametrize("body", WRONG.values(), ids=WRONG.keys())
@pytest.mark.parametrize("client", READERS)
def test_an_answer_of_another_shape_is_refused_and_no_crash(serve, client, body):
    server = serve(lambda server, connection: server.write(connection, reply(body)))
    # JSON may stand in UTF-16, and a message without content is an empty one.
    with contextlib.suppress(*REFUSED):
        assert CLIENTS[client](server.address) in ("yes", "")


NUMBERS = ("1e999", "-1e999", "NaN", "-7", '"many"', "[]", "{}", "1" * 400, "true", "null", "1.5")


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:9])
@pytest.mark.parametrize("client", READERS)
def test_a_count_of_tokens_that_is_none_costs_at_most_the_answer(serve, client, number):
    usage = f', "usage": {{"completion_tokens": {number}, "prompt_tokens": {number}}}}}'.encode()
    server = serve(lambda server, connection: server.write(connection, reply(ANSWER[:-1] + usage)))
    with contextlib.suppress(*REFUSED):
        assert CLIENTS[client](server.address) == "yes"


@pytest.mark.parametrize("client", READERS)
def test_an_answer_can_always_be_written_down(serve, client):
    body = b'{"choices": [{"message": {"content": "a\\ud800b\\u0000c"}, "finish_reason": "stop"}]}'
    server = serve(lambda server, connection: server.write(connection, reply(body)))
    text = CLIENTS[client](server.address)
    assert text.encode().startswith(b"a")


@pytest.mark.parametrize("client", READERS)
def test_an_answer_cut_off_anywhere_is_no_answer(serve, client):
    whole = reply(ANSWER)
    for end in sorted({*range(0, len(whole), 7), len(whole) - 1}):
        server = serve(lambda server, connection, end=end: server.write(connection, whole[:end]))
        with pytest.raises(REFUSED):
            CLIENTS[client](server.address)


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
        b"HTTP/1.1 999 Odd\r\n\r\n",
        b"HTTP/1.1 0 Odd\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"HTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n bad: fold\r\n\r\n",
        b"HTTP/1.1 200 \r\n\xff\xfe: \x00\r\n\r\n",
        b"ICY 200 OK\r\n\r\n",
    ],
)
@pytest.mark.parametrize("client", READERS)
def test_a_malformed_head_is_refused_and_no_crash(serve, client, head):
    server = serve(lambda server, connection: server.write(connection, head + b"\r\n"))
    with pytest.raises(REFUSED):
        CLIENTS[client](server.address)


@pytest.mark.parametrize("client", READERS)
def test_no_error_repeats_the_key(serve, client):
    for status in ("400 Bad", "401 No", "403 No", "404 None", "429 Busy", "500 Broken", f"418 {KEY}"):
        output = json.dumps(
            {"error": {"message": f"the key {KEY} at http://me:{KEY}@host/?key={KEY}"}}
        ).encode()
        server = serve(
            lambda server, connection, s=status, b=output: server.write(connection, reply(b, status=s))
        )
        with pytest.raises(REFUSED) as caught:
            CLIENTS[client](server.address)
        error: BaseException | None = caught.value
        while error is not None:
            reported = f"{error} {error.__dict__}"
            assert KEY not in reported
            error = error.__cause__ if error.__suppress_context__ else error.__cause__ or error.__context__


RETRY_AFTER = (
    "0",
    "0.0",
    "-1",
    "nan",
    "inf",
    "1e999",
    "1e-9",
    "Wed, 21 Oct 2099 07:28:00 GMT",
    "",
    "soon",
    "0" * 99,
)


@pytest.mark.parametrize("header", RETRY_AFTER)
def test_a_busy_endpoint_is_asked_a_bounded_number_of_times(serve, tmp_path, monkeypatch, header):
    """`Retry-After: 0` used to be retried without a pause and without counting."""
    monkeypatch.setattr(runner, "FIRST_WAIT", 0.001)
    busy = reply(b"busy", status="429 Busy", more=f"Retry-After: {header}\r\n")
    server = serve(lambda server, connection: server.write(connection, busy))
    job = make_job(tmp_path, server.address, attempts=4)
    with pytest.raises(EnvironmentFailure, match="in 4 attempts"):
        ask_endpoint(job, make_cases(1), progress=Quiet(), stop_asked=threading.Event())
    assert len(server.requests) == 4


@pytest.mark.parametrize("header", RETRY_AFTER)
def test_a_busy_judge_is_asked_a_bounded_number_of_times_with_pauses(serve, header):
    pauses: list[float] = []
    busy = reply(b"busy", status="429 Busy", more=f"Retry-After: {header}\r\n")
    server = serve(lambda server, connection: server.write(connection, busy))
    client = JudgeClient(JudgeSettings(url=server.address, model="m"), wait=pauses.append)
    with pytest.raises(NoReply, match="5 times"):
        client.say([{"role": "user", "content": "hello"}])
    assert len(server.requests) == 5
    assert len(pauses) == 4
    assert all(0.25 <= pause <= 60 for pause in pauses)


def test_an_endpoint_that_understands_nothing_is_asked_a_bounded_number_of_times(serve, tmp_path):
    """Each refusal names another setting to leave out: that is no attempt, and still has an end."""
    words = b"unknown: stream_options seed temperature top_p max_tokens max_completion_tokens"
    server = serve(lambda server, connection: server.write(connection, reply(words, status="400 Bad")))
    with pytest.raises(GraftError):
        ask_endpoint(
            make_job(tmp_path, server.address, attempts=4),
            make_cases(1),
            progress=Quiet(),
            stop_asked=threading.Event(),
        )
    assert len(server.requests) <= 8


def test_pauses_grow_are_spread_and_end_with_the_budget():
    now = 0.0
    retries = Retries(attempts=1000, seconds=100.0, chance=Random(3), clock=lambda: now)
    pauses = []
    while (pause := retries.after_failure(asked=0.0)) is not None:
        pauses.append(pause)
        now += pause
    assert all(0.25 * 2**n <= pause <= 0.5 * 2**n for n, pause in enumerate(pauses))
    assert sum(pauses) <= 100
    assert len(pauses) < 10


def test_a_server_may_lengthen_a_pause_but_not_without_end():
    retries = Retries(attempts=10, seconds=1e9, longest_pause=30.0)
    assert retries.after_failure(asked=7.0) == 7.0
    assert retries.after_failure(asked=86_400.0) == 30.0


def test_one_attempt_is_never_retried():
    assert Retries(attempts=1).after_failure(asked=0.0) is None


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("1.5", 1.5),
        (" 3 ", 3.0),
        (None, None),
        ("nan", None),
        ("-1", None),
        ("٣", None),
    ],
)
def test_retry_after_is_a_plain_number_of_seconds(header, seconds):
    assert retry_after(header) == seconds


def test_transient_errors_are_retried():
    passing = {status for status in range(100, 600) if may_pass(status)}
    assert {408, 409, 425, 429, 500, 502, 503, 504, 529} <= passing
    assert not passing & {200, 301, 400, 401, 403, 404, 422, 501, 505}


@pytest.mark.parametrize(
    "script", [drip_the_head, drip_the_body, silence], ids=lambda script: script.__name__
)
def test_a_hub_that_never_finishes_is_left(serve, tmp_path, monkeypatch, script):
    """Its library restarts its timer with every byte."""
    monkeypatch.setattr(hub, "ANSWER_SECONDS", SECONDS)
    server = serve(script)
    with pytest.raises(EnvironmentFailure, match="no answer within"):
        hub.Hub("owner/name", endpoint=server.address).read("main", tmp_path)


def test_a_download_that_is_longer_than_its_file_is_ended():
    bar = progress_bar_class(ProgressCounter(no_progress, "fetch", 10), largest=10)()
    bar.update(10)
    with pytest.raises(DownloadTooLarge):
        bar.update(1)


class Quiet:
    def beat(self, *_what, **_detail): ...


def make_cases(n: int) -> list[Case]:
    origin = Origin(file="f", line=1)
    return [Case(id=f"c{i}", origin=origin, messages=ASKED, reference="r") for i in range(n)]


def make_job(folder, address: str, **fields) -> EvalJob:
    job = EvalJob(
        subject="there",
        folder=str(folder / "job"),
        base_folder=str(folder),
        adapter_folder=None,
        cases_file=str(folder / "cases.jsonl"),
        max_new_tokens=16,
        batch_size=4,
        identity="address",
        endpoint=Endpoint(url=address, model="m", timeout_seconds=30.0, **fields),
    )
    write_cases(folder / "cases.jsonl", cases=make_cases(1))
    return job
