"""Breaks HTTP requests and bodies at random: no error but our own, and the same meaning however cut.

    python tests/fuzz/fuzz_http.py [--seconds N] [--seed S]

Runs until it is stopped or the time is over. What fails is printed with its seed, by which it comes
again: each round has a seed of its own.
"""

import argparse
import asyncio
import itertools
import json
import random
import time
import traceback

from graftwork.engines.protocol import GenerateRequest
from graftwork.http.messages import ApiError, Request, Response
from graftwork.http.server import Connection, HttpLimits, Server
from graftwork.serve.captures import ServedExchange, make_capture
from graftwork.serve.gateway import APIS
from graftwork.serve.settings import ServeSettings

LIMITS = HttpLimits(max_header_bytes=2048, max_body_bytes=4096, max_buffered_bytes=8192, max_headers=20)
REQUESTS = [
    b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"GET /v1/models?x=1 HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
    b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 11\r\n\r\nhello world",
    b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n1;a=b\r\nx\r\n0\r\nt: u\r\n\r\n",
    b"POST /b HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\nabc",
    b"HEAD / HTTP/1.1\r\nhost: x\r\nauthorization: Bearer k\r\nx: 1\r\nx: 2\r\n\r\n",
    b"GET /u HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n\x81\x05hello",
    b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
]
PIECES = [
    b"\r\n", b"\n", b"\r", b"\0", b" ", b"\t", b":", b"0\r\n\r\n", b"content-length: 5\r\n", b"\xff\xfe",
    b"transfer-encoding: chunked\r\n", b"transfer-encoding: identity\r\n", b"HTTP/1.1", b"ffffffffffffffff",
    b"a" * 5000, b"x: y\r\n" * 50, b"content-length: 18446744073709551616\r\n", b"connection: close\r\n",
]  # fmt: skip
CHATS = [
    {"messages": [{"role": "user", "content": "hello"}]},
    {
        "model": "champion",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "mail a@b.example"}]},
        ],
        "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 5, "temperature": 0.5,
        "top_p": 0.9, "seed": 7, "stop": ["a", "b"], "user": "u", "metadata": {"k": "v"}, "n": 1, "tools": [],
    },
]  # fmt: skip
FUNCTION = {"name": "find", "description": "d", "parameters": {"type": "object", "properties": {"a": {}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": '{"a": 1}'}}
USE = {"type": "tool_use", "id": "c", "name": "find", "input": {}}
SCHEMA = {"type": "object"}
BODIES = {
    "/v1/chat/completions": [
        *CHATS,
        {
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "r"},
            ],
            "tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": False,
            "tool_choice": {"type": "function", "function": {"name": "find"}}, "n": 2, "seed": 2**63 - 1,
            "logprobs": True, "top_logprobs": 2,
        },
        {
            "messages": [{"role": "user", "content": "hello"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        },
    ],
    "/v1/completions": [{"prompt": ["hello", "b"], "n": 2, "logprobs": 3, "stop": "a", "max_tokens": 3}],
    "/v1/responses": [
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
                {"type": "function_call", "call_id": "c", "name": "find", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "r"},
            ],
            "instructions": "i", "tools": [{"type": "function", **FUNCTION}],
            "tool_choice": {"type": "function", "name": "find"}, "stream": True,
        },
        {"input": "hello", "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
    ],
    "/v1/messages": [
        {
            "max_tokens": 9, "system": [{"type": "text", "text": "s"}], "stop_sequences": ["a"],
            "messages": [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": [{"type": "text", "text": "t"}, USE]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]},
            ],
            "tools": [{"name": "find", "input_schema": {"type": "object"}}], "tool_choice": {"type": "any"},
            "metadata": {"user_id": "u"},
        },
    ],
}  # fmt: skip
VALUES = [
    None, True, False, 0, -1, 1e308, 2**70, "", "a" * 3000, "\ud800", "\0", [], {}, [[]], [None], {"": {}},
    "text", "user", {"type": "text"}, [{"type": "text", "text": None}], float("inf"), "ﷺ" * 50,
]  # fmt: skip


def mutate(data: bytes, rng: random.Random) -> bytes:
    for _ in range(rng.randint(0, 4)):
        at = rng.randint(0, len(data))
        kind = rng.randint(0, 4)
        if kind == 0:
            data = data[:at] + rng.choice(PIECES) + data[at:]
        elif kind == 1:
            data = data[:at] + data[min(len(data), at + rng.randint(1, 8)) :]
        elif kind == 2:
            data = data[:at] + bytes([rng.randint(0, 255)]) + data[at + 1 :]
        elif kind == 3:
            start = rng.randint(0, len(data))
            data = data[:at] + data[start : start + rng.randint(1, 40)] + data[at:]
        else:
            data = data[:at].upper() + data[at:]
    return data


class Wire(asyncio.Transport):
    """A transport that keeps what is written, and holds input back while reading is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.paused = False
        self.over = False

    def write(self, data: bytes) -> None:  # type: ignore[override]
        if not self.over:  # a real one drops it too
            self.written += data

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.over

    def close(self) -> None:
        self.over = True

    def abort(self) -> None:
        self.over = True


async def send(data: bytes, cuts: list[int]) -> tuple[list[tuple[object, ...]], bytes]:
    """The requests that the handler saw, and the answer, when `data` arrives cut at these places."""
    seen: list[tuple[object, ...]] = []

    async def note(request: Request) -> Response:
        seen.append(
            (request.method, request.path, request.query, tuple(request.headers.items()), request.body)
        )
        return Response(200, b"ok")

    server = Server(note, limits=LIMITS)
    server._max_connections = 8
    connection, wire = Connection(server), Wire()
    connection.connection_made(wire)
    for start, end in itertools.pairwise([0, *cuts, len(data)]):
        for _ in range(100):
            if not wire.paused or wire.over:
                break
            await asyncio.sleep(0)
        if wire.over:
            break
        assert not wire.paused, "reading stays paused"
        if end > start:
            connection.data_received(data[start:end])
        await asyncio.sleep(0)
    for _ in range(200):
        await asyncio.sleep(0)
    connection.connection_lost(None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert server.buffered == 0, f"{server.buffered} bytes are never given back"
    assert not server.connections
    assert not server.evictable
    return seen, wire.written


def try_http(rng: random.Random) -> None:
    data = b"".join(mutate(rng.choice(REQUESTS), rng) for _ in range(rng.randint(1, 4)))
    cuts = sorted(rng.randint(0, len(data)) for _ in range(rng.randint(0, 12)))
    failures: list[dict[str, object]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
        whole, answer = await send(data, [])
        cut, _ = await send(data, cuts)
        assert answer == b"" or answer.startswith(b"HTTP/1.1 "), answer[:100]
        # A limit may be noticed one slice earlier or later; up to there both mean the same.
        shorter = min(len(whole), len(cut))
        assert whole[:shorter] == cut[:shorter], (data, cuts, whole, cut)
        if len(data) < 2000:
            assert whole == cut, (data, cuts, whole, cut)

    asyncio.run(main())
    assert not failures, (data, failures)


def mutate_json(value: object, rng: random.Random) -> object:
    if rng.random() < 0.08:
        return rng.choice(VALUES)
    if isinstance(value, dict):
        changed = {key: mutate_json(item, rng) for key, item in value.items() if rng.random() > 0.03}
        if rng.random() < 0.1:
            changed[rng.choice(["x", "name", "tool_calls", "role", "content", "model", "n"])] = rng.choice(
                VALUES
            )
        return changed
    if isinstance(value, list):
        return [mutate_json(item, rng) for item in value for _ in range(rng.choice([1, 1, 1, 1, 0, 2]))]
    return value


def try_body(rng: random.Random) -> None:
    path = rng.choice(list(BODIES))
    body = json.dumps(mutate_json(rng.choice(BODIES[path]), rng)).encode()
    if rng.random() < 0.3:
        body = mutate(body, rng)
    if rng.random() < 0.05:
        depth = rng.choice([100, 1000, 100_000])
        body = body.replace(b'"hello"', b"[" * depth + b"]" * depth)
    try:
        call = APIS[path].parse(body, ServeSettings())
    except ApiError as error:
        json.loads(APIS[path].encode_error(error))
        return
    for single in call.fan_out():
        GenerateRequest.from_json(single.encode_for_engine("r"))
    exchange = ServedExchange("i", 0.0, None, call.model, "r", call.body, "reply", "stop", 1, 1, None, 1.0)
    make_capture(exchange).to_json()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="play one round again")
    arguments = parser.parse_args()
    first = time.time_ns() % 2**32 if arguments.seed is None else arguments.seed
    rounds, failed, until = 0, 0, time.monotonic() + arguments.seconds
    while time.monotonic() < until:
        seed = first + rounds
        rng = random.Random(seed)
        try:
            (try_http if rng.random() < 0.5 else try_body)(rng)
        except Exception:
            failed += 1
            print(f"seed {seed}:\n{traceback.format_exc()}", flush=True)
        rounds += 1
        if arguments.seed is not None or failed >= 20:
            break
    print(f"{rounds} rounds, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
