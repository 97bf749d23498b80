"""The key that is sent to a server never comes back out of it: not in an error, an answer or a record."""

import json
import socket
import threading
from contextlib import suppress

import pytest

from graftwork.engines.endpoint import LONGEST_REASON, EndpointEngine, TryAgain
from graftwork.engines.interface import DecodingSettings
from graftwork.evaluate.judge import JudgeClient
from graftwork.evaluate.settings import JudgeSettings
from graftwork.process.asking import NoReply
from graftwork.records.errors import EnvironmentFailure, GraftError
from graftwork.records.interaction import Message
from graftwork.records.report import Endpoint

KEY = 'sk-"7f3a/91c2+longer than a word"'
QUESTION = (Message(role="user", content="hello"),)


class Parrot:
    """Answers every request with the same bytes, whatever they are."""

    def __init__(self, output: bytes):
        self._said = output
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}/v1"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                spoken, _ = self._listening.accept()
            except OSError:
                return
            with spoken:
                spoken.settimeout(60)
                heard = b""
                while b"\r\n\r\n" not in heard and (piece := spoken.recv(65536)):
                    heard += piece
                head, _, body = heard.partition(b"\r\n\r\n")
                length = sum(
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length")
                )
                while len(body) < length and (piece := spoken.recv(65536)):
                    body += piece
                with suppress(OSError):
                    spoken.sendall(self._said)

    def close(self):
        self._listening.close()


@pytest.fixture
def parrot():
    open_ones = []

    def make(output: bytes) -> Parrot:
        open_ones.append(Parrot(output))
        return open_ones[-1]

    yield make
    for file in open_ones:
        file.close()


def http(status, body, kind="text/plain"):
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\nConnection: close"
    return head.encode() + b"\r\n\r\n" + body


def stream(*events):
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    body = "".join(f"data: {line}\n\n" for line in lines).encode()
    return http(200, body, "text/event-stream")


def ask(url, monkeypatch, key=KEY):
    monkeypatch.setenv("SOME_KEY", key)
    made = Endpoint(url=url, model="m", api_key_env="SOME_KEY", timeout_seconds=60)
    return EndpointEngine(made).ask_once(QUESTION, DecodingSettings(max_new_tokens=4))


def pieces_of(key, size=8):
    return [key[at : at + size] for at in range(len(key) - size + 1)]


PADDED = "x" * (LONGEST_REASON - 10)
"""The key behind it would be cut in the middle by making the words short first."""


@pytest.mark.parametrize(
    "output",
    [
        http(500, f"{PADDED}{KEY}".encode()),
        http(401, f"wrong key {KEY}".encode()),
        http(401, json.dumps({"error": f"wrong key {KEY}"}).encode()),
        http(400, f"{PADDED} {KEY}".encode()),
        stream({"error": {"message": f"wrong key {KEY}"}}),
        stream({"error": {"message": f"{PADDED}{KEY}"}}),
        stream(f"no JSON: {KEY}"),
        stream(f"no JSON: {PADDED}{KEY}"),
        f"WHAT {KEY}\r\n\r\n".encode(),
    ],
    ids=["500", "401", "as JSON", "400", "in stream", "long in stream", "no JSON", "long no JSON", "no HTTP"],
)
def test_no_error_holds_the_key_or_a_part_of_it(parrot, monkeypatch, output):
    with pytest.raises((TryAgain, GraftError)) as caught:
        ask(parrot(output).url, monkeypatch)
    reported = f"{caught.value} {getattr(caught.value, 'why', '')} {getattr(caught.value, 'what', '')}"
    for part in pieces_of(KEY):
        assert part not in reported
        assert json.dumps(part)[1:-1] not in reported


def test_an_answer_that_repeats_the_key_is_kept_without_it(parrot, monkeypatch):
    begin, end = KEY[:9], KEY[9:]
    output = stream(
        {"choices": [{"delta": {"content": f"you sent {begin}"}}]},
        {"choices": [{"delta": {"content": f"{end} to me"}, "finish_reason": "stop"}]},
    )
    assert ask(parrot(output).url, monkeypatch).text == "you sent … to me"


def test_a_key_that_is_a_word_does_not_spoil_the_answers(parrot, monkeypatch):
    output = stream({"choices": [{"delta": {"content": "there is none"}, "finish_reason": "stop"}]})
    assert ask(parrot(output).url, monkeypatch, key="none").text == "there is none"


@pytest.mark.parametrize("key", ["two\nlines", "schlüssel", "sk-\u200bx"])
def test_a_key_that_no_header_can_carry_is_reported_by_its_variable(monkeypatch, key):
    with pytest.raises(EnvironmentFailure, match="SOME_KEY") as caught:
        ask("http://127.0.0.1:9/v1", monkeypatch, key=key)
    assert key not in str(caught.value)


@pytest.mark.parametrize(
    "event",
    [
        {"choices": [3]},
        {"choices": {"delta": 1}},
        {"choices": [{"delta": {"content": 7}, "finish_reason": "stop"}]},
        {"choices": [{"delta": "words"}]},
        {"choices": [{"finish_reason": "stop"}], "usage": {"completion_tokens": "many"}},
        {"choices": [{"finish_reason": "stop"}], "usage": 5},
        "[" * 5000,
    ],
    ids=["number", "object", "content", "delta", "tokens", "usage", "deep"],
)
def test_a_stream_of_another_shape_is_asked_again_not_a_crash(parrot, monkeypatch, event):
    with pytest.raises(TryAgain):
        ask(parrot(stream(event)).url, monkeypatch)


def judge(url, monkeypatch, key=KEY):
    monkeypatch.setenv("SOME_KEY", key)
    monkeypatch.setattr("graftwork.evaluate.judge.ATTEMPTS", 1)
    made = JudgeSettings(url=url, model="m", api_key_env="SOME_KEY")
    return JudgeClient(made).say([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize(
    "output",
    [
        f"WHAT {KEY}\r\n\r\n".encode(),
        http(400, json.dumps({"error": {"message": f"{'x' * 190}{KEY}"}}).encode()),
        http(404, json.dumps({"error": f"no {KEY}"}).encode()),
    ],
    ids=["no HTTP", "long", "short"],
)
def test_nothing_that_the_judge_says_holds_the_key(parrot, monkeypatch, output):
    with pytest.raises((NoReply, EnvironmentFailure)) as caught:
        judge(parrot(output).url, monkeypatch)
    reported = f"{caught.value} {getattr(caught.value, 'why', '')}"
    assert not [part for part in pieces_of(KEY) if part in reported]


def test_the_judges_reply_is_kept_without_the_key(parrot, monkeypatch):
    reply = {"choices": [{"message": {"content": f"your key is {KEY}"}}]}
    output = judge(parrot(http(200, json.dumps(reply).encode(), "application/json")).url, monkeypatch)
    assert output.text == "your key is …"
