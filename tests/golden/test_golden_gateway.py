"""What OpenAI's and Anthropic's clients get from an endpoint, byte by byte, and what becomes of captures."""

import asyncio
import contextlib
import json
import re
from pathlib import Path

import pytest
import yaml
from compare import check
from scripted_engine import ScriptedEngine
from serve_harness import OTHER, RELEASE, ListSink, open_house, raw
from typed import type_json

from graftwork.files.dataset import iterate_rows
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.serve.project import StoreSink

STORED = Path(__file__).parent / "gateway"
REQUESTS = json.loads((STORED / "requests.json").read_text())
KEY = "sk-local"
ID = re.compile(rb"\b(call_|chatcmpl-|cmpl-|resp_|msg_|fc_|)([0-9a-f]{20})(?:(?<=call_.{20})|[0-9a-f]{12})")
"""Ids of answers, and those of their calls, which begin with the same digits."""
TIMES = (
    (
        re.compile(rb'("(?:created(?:_at)?|kept|completed_at|\w+_this_minute|\w+_today)":)\d+(?:\.\d+)?'),
        rb"\1 0",
    ),
    (re.compile(rb"(?m)^(date: ).*?(\r?)$"), rb"\1now\2"),
)

OF_A_CHOICE = re.compile(rb'"choices":\[\{"index":(\d+)')


class Book(ListSink):
    """Captures in memory; feedback on them is taken."""

    def add_feedback(self, feedback):
        return feedback.capture in {capture.id for capture in self.captures}


@pytest.fixture(scope="module")
def answers():
    """The bytes of every answer, by the name of its request."""

    async def ask_all():
        book = Book()
        async with open_house(
            book, backend=ScriptedEngine([RELEASE, OTHER]), api_key=KEY, feedback=book
        ) as house:
            return {name: await ask(house.port, request) for name, request in REQUESTS.items()}

    return asyncio.run(asyncio.wait_for(ask_all(), 120))


async def ask(port, request, body=None):
    value = request["body"] if body is None else body
    body = b"" if value is None else value.encode() if isinstance(value, str) else json.dumps(value).encode()
    headers = {"host": "127.0.0.1", **request["headers"], "content-length": len(body), "connection": "close"}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    line = f"{request['method']} {request['path']} HTTP/1.1\r\n"
    return await raw(port, f"{line}{head}\r\n".encode() + body)


def hide(answer: bytes) -> list[str]:
    """The lines of an answer without its frame, ids and times. An id becomes the number of its appearance."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if b"transfer-encoding: chunked" in head:
        body = sort_choices(join_chunks(body))
    head = re.sub(rb"(?m)^content-length: \d+", b"content-length: N", head)
    text = head + b"\n\n" + body
    numbers = {}

    def number(match):
        return match[1] + b"ID%d" % numbers.setdefault(match[2], len(numbers) + 1)

    text = ID.sub(number, text)
    for pattern, instead in TIMES:
        text = pattern.sub(instead, text)
    return text.decode().splitlines()


def join_chunks(body: bytes) -> bytes:
    whole = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        whole, body = whole + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return whole


def sort_choices(body: bytes) -> bytes:
    """Events of several choices arrive in any order: those of a choice follow one another here."""
    events = body.split(b"\n\n")
    places = [place for place, event in enumerate(events) if OF_A_CHOICE.search(event)]
    by_choice = sorted(
        (events[place] for place in places), key=lambda event: int(OF_A_CHOICE.search(event)[1])
    )
    for place, event in zip(places, by_choice, strict=True):
        events[place] = event
    return b"\n\n".join(events)


@pytest.mark.parametrize("api", ["chat", "completion", "response", "message", "other"])
def test_every_answer_has_the_bytes_that_it_had(api, answers, update_golden):
    own = {
        name: hide(answer)
        for name, answer in answers.items()
        if api
        == (name.split()[0] if name.split()[0] in ("chat", "completion", "response", "message") else "other")
    }
    assert own
    check(STORED / f"{api}.json", own, update_golden)


def test_a_streamed_answer_says_what_the_whole_one_says(answers):
    def events(name):
        body = join_chunks(answers[name].partition(b"\r\n\r\n")[2]).decode()
        lines = [line[6:] for line in body.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]

    whole = json.loads(answers["chat greet"].partition(b"\r\n\r\n")[2])
    pieces = [event["choices"][0]["delta"].get("content") or "" for event in events("chat greet streamed")]
    assert "".join(pieces) == whole["choices"][0]["message"]["content"]


def test_captures_and_feedback_become_the_rows_that_they_became(tmp_path, embedded_base, update_golden):
    document = {
        "project": "golden",
        "base": "smollm2-135m-instruct",
        "data": {"logs": ["captures.jsonl"], "validation": 0, "test": 0},
    }
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(document))
    asked = [
        ("When do you open?", {}, {"score": 1}),
        ("Where are you?", {}, {"corrected": "We are in Oslo."}),
        ("Are you human?", {}, {"score": 0}),
        ("How much is a coffee?", {}, None),
        ("call", {"tools": REQUESTS["chat call"]["body"]["tools"]}, {"score": 0.75, "comment": "fine"}),
        ("Mail me at ada@example.com", {"stream": True}, None),
        ("May I bring a dog?", {"user": "ada@example.com"}, {"score": True, "user": "bo@example.com"}),
        ("Is there parking?", {}, None),
        ("break", {"stream": True}, None),
    ]

    async def talk():
        with use_project(open_project(tmp_path), NullReporter()) as work:
            sink = StoreSink(work)
            async with open_house(
                sink, backend=ScriptedEngine([RELEASE, OTHER]), api_key=KEY, feedback=sink
            ) as house:
                said = []
                for place, (text, more, feedback) in enumerate(asked):
                    request = REQUESTS["chat greet"]
                    request = {**request, "headers": {**request["headers"], "x-session-id": f"s{place // 2}"}}
                    body = {"model": "champion", "messages": [{"role": "user", "content": text}], **more}
                    answer = await ask(house.port, request, body)
                    capture = re.search(rb"x-graft-capture: ([0-9a-f]+)", answer)[1].decode()
                    if feedback is not None:
                        request = {**request, "path": "/v1/feedback"}
                        said.append(hide(await ask(house.port, request, {"capture": capture, **feedback})))
                await house.close_captures()
            with contextlib.closing(work.captures.export()) as exported:
                kept = [describe_capture(capture) for capture in exported]
        return {"feedback": said, "captures": kept}

    found = asyncio.run(asyncio.wait_for(talk(), 120))
    for filtered in ("not_negative", "positive"):
        path = tmp_path / f"{filtered}.jsonl"
        typed = type_json("data", "captures", "--out", str(path), "--feedback", filtered, folder=tmp_path)
        assert typed.exit_code == 0, typed
        found[filtered] = [json.loads(line)["request"]["messages"] for line in path.read_text().splitlines()]
    (tmp_path / "not_negative.jsonl").rename(tmp_path / "captures.jsonl")
    prepared = type_json("data", "prepare", folder=tmp_path)
    assert prepared.exit_code == 0, prepared
    folder = Path(prepared.document["folder"])
    found["rows"] = sorted(
        [
            {
                "messages": [message.model_dump(exclude_none=True) for message in row.messages],
                "reply": row.reply,
            }
            for row in iterate_rows(folder, "train")
        ],
        key=json.dumps,
    )
    check(STORED / "captured.json", found, update_golden)


def describe_capture(capture):
    shown = json.loads(capture.model_dump_json())
    for name in ("id", "at", "corrected_at", "first_token_ms", "total_ms"):
        shown[name] = bool(shown[name])
    return shown
