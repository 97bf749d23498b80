"""Attacks on the gateway, over real sockets: each one costs the attacker and not the others."""

import asyncio
import gc
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from serve_harness import DEADLINE, RELEASE, ListSink, open_house, raw

from graftwork.engines.embedded_process import EmbeddedBackend
from graftwork.engines.protocol import EngineJob, GenerateRequest
from graftwork.http.client import Client
from graftwork.http.messages import ApiError, Request, Response, StreamResponse
from graftwork.http.server import HttpLimits, Server
from graftwork.records.interaction import Message
from graftwork.serve.settings import ServeSettings
from graftwork.serve.supervisor import EngineSupervisor

KEY = "the-key-of-this-test"
JSON = b"content-type: application/json\r\n"
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n" + JSON
BEARER = f"authorization: Bearer {KEY}\r\n".encode()
BODY = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()


def go(main):
    return asyncio.run(asyncio.wait_for(main(), 300))


async def echo(request: Request) -> Response:
    return Response(200, b"%d bytes" % len(request.body))


async def flood(port: int, opening: bytes, piece: bytes, *, most: int = 64 * 2**20) -> tuple[int, bytes]:
    """Send until the server cuts the connection; how many bytes it took, and what it answered."""
    loop = asyncio.get_running_loop()
    sent = 0
    with socket.socket() as sock:
        sock.setblocking(False)
        await loop.sock_connect(sock, ("127.0.0.1", port))
        reading = asyncio.create_task(_read_all(loop, sock))
        try:
            await loop.sock_sendall(sock, opening)
            while sent < most:
                await asyncio.wait_for(loop.sock_sendall(sock, piece), DEADLINE)
                sent += len(piece)
        except OSError:
            pass
        return sent, await asyncio.wait_for(reading, DEADLINE)


async def _read_all(loop, sock) -> bytes:
    answer = b""
    try:
        while chunk := await loop.sock_recv(sock, 65536):
            answer += chunk
    except OSError:
        pass
    return answer


async def until(check):
    async with asyncio.timeout(DEADLINE):
        while not check():
            await asyncio.sleep(0.005)


# -- bytes that are not a body -------------------------------------------------------------------

CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("opening", "piece"),
    [
        (CHUNKED + b"0\r\nx: ", b"a" * 65536),
        (CHUNKED + b"0\r\n", b"x: y\r\n" * 10_000),
        (CHUNKED + b"1;ext=", b"a" * 65536),
        (CHUNKED, b"1\r\na\r\n" * 10_000),
        (b"GET / HTTP/1.1\r\nx: ", b"a" * 65536),
        (b"GET / HTTP/1.1\r\n", b"x: y\r\n" * 10_000),
        (b"GET /", b"a" * 65536),
    ],
    ids=["trailer", "trailers", "chunk extension", "tiny chunks", "header", "headers", "target"],
)
def test_input_that_is_no_body_is_refused_after_a_few_kilobytes(opening, piece):
    async def main():
        server = Server(echo, limits=HttpLimits(max_body_bytes=1 << 20))
        port = await server.listen()
        sent, answer = await flood(port, opening, piece)
        assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 413 ")) or answer == b""
        assert sent < 32 * 2**20  # what the kernel buffers, and what is discarded while the answer is read
        assert server.buffered == 0
        await server.close()

    go(main)


def test_a_head_in_two_reads_with_a_large_body_behind_it_is_taken():
    async def main():
        server = Server(echo, limits=HttpLimits(max_header_bytes=4096))
        port = await server.listen()
        body = b"a" * 200_000
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-le")
        await writer.drain()
        await until(lambda: any(connection._receiving for connection in server.connections))
        writer.write(b"ngth: %d\r\nconnection: close\r\n\r\n" % len(body) + body)
        answer = await asyncio.wait_for(reader.read(-1), DEADLINE)
        assert answer.endswith(b"200000 bytes")
        writer.close()
        await server.close()

    go(main)


# -- who has no key ------------------------------------------------------------------------------


def test_a_client_without_a_key_is_refused_before_its_body_is_read():
    async def main():
        async with open_house(api_key=KEY) as house:
            head = CHAT + b"content-length: 3000000\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
            writer.write(head)  # and not a byte of the body
            answer = await asyncio.wait_for(reader.read(-1), DEADLINE)
            assert answer.startswith(b"HTTP/1.1 401 ")
            assert house.server.buffered == 0
            writer.close()

    go(main)


def test_a_client_without_a_key_that_asks_before_it_sends_is_not_invited_to():
    async def main():
        async with open_house(api_key=KEY) as house:
            head = CHAT + b"expect: 100-continue\r\ncontent-length: 3000000\r\n\r\n"
            assert (await raw(house.port, head)).startswith(b"HTTP/1.1 401 ")

    go(main)


@pytest.mark.parametrize("framing", [b"content-length: 3000000", b"transfer-encoding: chunked"])
def test_health_which_needs_no_key_takes_no_body(framing):
    async def main():
        async with open_house(api_key=KEY) as house:
            head = b"GET /health HTTP/1.1\r\nhost: localhost\r\n" + framing + b"\r\n\r\n"
            assert (await raw(house.port, head)).startswith(b"HTTP/1.1 400 ")

    go(main)


def test_a_closed_connection_leaves_nothing_behind_even_without_the_cycle_collector():
    async def main():
        server = Server(echo)
        port = await server.listen()
        gc.collect()
        gc.disable()
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 500000\r\n\r\n" + b"a" * 400_000)
            await until(lambda: server.buffered >= 300_000)
            (connection,) = server.connections
            gone = weakref.ref(connection)
            del connection
            writer.transport.abort()
            await until(lambda: not server.connections)
            del reader, writer
            await until(lambda: gone() is None)
            assert server.buffered == 0
        finally:
            gc.enable()
        await server.close()

    go(main)


def test_the_bodies_of_all_connections_together_have_a_limit():
    async def main():
        server = Server(echo, limits=HttpLimits(max_buffered_bytes=1_000_000))
        port = await server.listen()
        writers = []
        for _ in range(3):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 500000\r\n\r\n" + b"a" * 300_000)
            writers.append(writer)
        await until(lambda: server.buffered == 900_000)
        answer = await raw(port, b"POST / HTTP/1.1\r\ncontent-length: 200000\r\n\r\n" + b"a" * 150_000)
        assert answer.startswith(b"HTTP/1.1 503 ")
        for writer in writers:
            writer.transport.abort()
        await until(lambda: server.buffered == 0)
        await server.close()

    go(main)


# -- clients that do not read --------------------------------------------------------------------


def test_requests_pipelined_by_a_client_that_does_not_read_are_bounded_and_the_connection_is_cut():
    async def main():
        answered = 0

        async def large(_request: Request) -> Response:
            nonlocal answered
            answered += 1
            return Response(200, b"x" * 65536)

        server = Server(large, limits=HttpLimits(write_seconds=0.2))
        port = await server.listen()
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", port))
            requests = b"GET / HTTP/1.1\r\nhost: x\r\nx-fill: " + b"a" * 400 + b"\r\n\r\n"

            async def send_without_end() -> None:
                while True:
                    await asyncio.wait_for(loop.sock_sendall(sock, requests * 20), DEADLINE)

            with pytest.raises(OSError, match=r"reset|Broken"):
                await send_without_end()
        await until(lambda: not server.connections)
        assert answered < 200
        await server.close()

    go(main)


def test_more_pipelined_requests_than_any_client_needs_are_refused():
    async def main():
        server = Server(echo)
        port = await server.listen()
        answer = await raw(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 150)
        assert b"HTTP/1.1 429 " in answer
        assert answer.count(b"HTTP/1.1 200 ") <= 150
        await server.close()

    go(main)


def test_a_stream_that_nobody_reads_gives_its_place_back():
    async def main():
        async with open_house(api_key=KEY, settings=ServeSettings(max_new_tokens_limit=100_000)) as house:
            house.server.limits = HttpLimits(write_seconds=0.2)
            words = "a " * 80_000
            body = json.dumps(
                {"messages": [{"role": "user", "content": words}], "stream": True, "max_tokens": 90_000}
            ).encode()
            loop = asyncio.get_running_loop()
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                sock.setblocking(False)
                await loop.sock_connect(sock, ("127.0.0.1", house.port))
                await loop.sock_sendall(
                    sock, CHAT + BEARER + b"content-length: %d\r\n\r\n" % len(body) + body
                )
                await until(lambda: house.answers.metrics.in_flight == 1)
                await until(lambda: house.answers.metrics.in_flight == 0)
            assert house.answers.metrics.disconnects == 1
            await asyncio.wait_for(house.stub.cancelled.wait(), DEADLINE)

    go(main)


def test_an_answer_that_is_not_read_does_not_keep_a_closed_connection_alive():
    async def main():
        async def large(_request: Request) -> StreamResponse:
            async def chunks():
                for _ in range(100):
                    yield b"x" * 65536

            return StreamResponse(200, chunks())

        server = Server(large, limits=HttpLimits(write_seconds=0.2))
        port = await server.listen()
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", port))
            await loop.sock_sendall(sock, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
            await until(lambda: server.connections)
            await until(lambda: not server.connections)
        await server.close()

    go(main)


# -- too many connections ------------------------------------------------------------------------


def test_idle_connections_make_room_for_new_ones_and_the_log_says_so(caplog):
    async def main():
        server = Server(echo, limits=HttpLimits(max_connections=8))
        port = await server.listen()
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        assert (await raw(port, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        assert len(server.connections) <= 8
        assert server.evicted >= 12
        for _, writer in idle:
            writer.close()
        await server.close()

    with caplog.at_level(logging.WARNING, logger="graftwork.http.server"):
        go(main)
    assert sum("connections are in use" in message for message in caplog.messages) == 1


def test_connections_with_a_running_request_are_not_closed_for_new_ones():
    async def main():
        release = asyncio.Event()

        async def wait(_request: Request) -> Response:
            await release.wait()
            return Response(200, b"done")

        server = Server(wait, limits=HttpLimits(max_connections=8))
        port = await server.listen()
        running = [asyncio.create_task(raw(port, b"GET / HTTP/1.0\r\n\r\n")) for _ in range(8)]
        await until(lambda: len(server.connections) == 8 and not server.evictable)
        refused = await raw(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after" in refused
        release.set()
        assert all(answer.endswith(b"done") for answer in await asyncio.gather(*running))
        await server.close()

    go(main)


LOW_ON_FILES = """
import asyncio, logging, resource, sys
logging.basicConfig(stream=sys.stdout)
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
from graftwork.http.server import Server
from graftwork.http.messages import Response

async def hello(request):
    return Response(200, b"hello")

async def main():
    server = Server(hello)
    port = await server.listen()
    held = []
    for _ in range(50):
        held.append(await asyncio.open_connection("127.0.0.1", port))
    for _ in range(40):
        held.pop(0)[1].close()
        held.append(await asyncio.open_connection("127.0.0.1", port))
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\\r\\nconnection: close\\r\\n\\r\\n")
    print((await reader.read(-1)).splitlines()[-1])

asyncio.run(main())
"""


def test_a_server_low_on_descriptors_says_so_and_keeps_below_its_limit():
    command = [sys.executable, "-c", LOW_ON_FILES]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert "the limit on open files is 128" in done.stdout
    assert "b'hello'" in done.stdout, done.stdout + done.stderr


# -- smuggling -----------------------------------------------------------------------------------

GET_SECRET = b"GET /secret HTTP/1.1\r\nhost: x\r\n\r\n"
SMUGGLED = {
    "both lengths": b"POST /a HTTP/1.1\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "both, reversed": b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
    "two lengths": b"POST /a HTTP/1.1\r\ncontent-length: 0\r\ncontent-length: 33\r\n\r\n",
    "lengths in a list": b"POST /a HTTP/1.1\r\ncontent-length: 0, 33\r\n\r\n",
    "negative length": b"POST /a HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
    "plus in the length": b"POST /a HTTP/1.1\r\ncontent-length: +0\r\n\r\n",
    "hexadecimal length": b"POST /a HTTP/1.1\r\ncontent-length: 0x0\r\n\r\n",
    "length too large to hold": b"POST /a HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n",
    "unknown coding": b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "coding with a tab": b"POST /a HTTP/1.1\r\ntransfer-encoding:\tchunkedx\r\n\r\n0\r\n\r\n",
    "space before the colon": b"POST /a HTTP/1.1\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n",
    "folded header": b"POST /a HTTP/1.1\r\nx: a\r\n transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "bare carriage return": b"POST /a HTTP/1.1\r\nx: a\rtransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunk size with junk": b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0x\r\n\r\n",
    "negative chunk": b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
    "huge chunk": b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    "chunk without its end": b"POST /a HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\naX0\r\n\r\n",
    "null in a header": b"POST /a HTTP/1.1\r\nx: a\x00b\r\ncontent-length: 0\r\n\r\n",
    "tab in the request line": b"GET\t/a\tHTTP/1.1\r\nhost: x\r\n\r\n",
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "HTTP/9": b"GET /a HTTP/9.9\r\n\r\n",
    "HTTP/0.9": b"GET /a\r\n\r\n",
}  # fmt: skip


@pytest.mark.parametrize("name", SMUGGLED)
def test_an_ambiguous_request_never_lets_a_second_one_through(name):
    async def main():
        seen = []

        async def note(request: Request) -> Response:
            seen.append(request.path)
            return Response(200, b"ok")

        server = Server(note, limits=HttpLimits(receive_seconds=0.5, head_seconds=0.5))
        port = await server.listen()
        answer = await raw(port, SMUGGLED[name] + GET_SECRET)
        assert "/secret" not in seen
        assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 505 "))
        await server.close()

    go(main)


@pytest.mark.parametrize("split", range(1, 120, 7))
def test_a_request_means_the_same_wherever_the_network_cuts_it(split):
    async def main():
        seen = []

        async def note(request: Request) -> Response:
            seen.append((request.method, request.path, request.headers.get("x"), request.body))
            return Response(200, b"ok")

        whole = (
            b"POST /a?b HTTP/1.1\r\nhost: x\r\nx: 1\r\ntransfer-encoding: chunked\r\n\r\n"
            b"3\r\nabc\r\n4;e=f\r\ndefg\r\n0\r\nt: u\r\n\r\nGET /b HTTP/1.1\r\nconnection: close\r\n\r\n"
        )
        server = Server(note)
        port = await server.listen()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for start in range(0, len(whole), split):
            writer.write(whole[start : start + split])
            await writer.drain()
            await asyncio.sleep(0)
        await asyncio.wait_for(reader.read(-1), DEADLINE)
        assert seen == [("POST", "/a", "1", b"abcdefg"), ("GET", "/b", None, b"")]
        writer.close()
        await server.close()

    go(main)


# -- captures ------------------------------------------------------------------------------------


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    "part",
    [
        '{"type": "text", "text": "x", "more": ' + nested(900) + "}",
        '{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}',
    ],
)
def test_unknown_keys_in_a_part_of_a_message_are_refused_by_name(part):
    async def main():
        async with open_house(ListSink()) as house:
            body = b'{"messages": [{"role": "user", "content": [%b]}]}' % part.encode()
            answer = await raw(
                house.port, CHAT + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            )
            assert answer.startswith(b"HTTP/1.1 400 ")
            assert b"content[0]" in answer

    go(main)


class PickySink(ListSink):
    """Refuses a batch that holds a poisonous exchange, as a database would."""

    def add_many(self, captures):
        if any("poison" in capture.reply for capture in captures):
            raise ValueError("this value cannot be stored")
        super().add_many(captures)


def test_an_exchange_that_cannot_be_captured_does_not_affect_others(monkeypatch):
    monkeypatch.setattr("graftwork.serve.captures._TRIES_AFTER_SECONDS", (0.0,))

    async def main():
        sink = PickySink()
        async with open_house(sink) as house:
            client = Client(port=house.port)

            async def ask(text: str) -> None:
                body = json.dumps({"messages": [{"role": "user", "content": text}]}).encode()
                reply = await client.send(
                    "POST", "/v1/chat/completions", body=body, headers=(("content-type", "application/json"),)
                )
                await reply.read()
                assert reply.status == 200

            await asyncio.gather(*(ask("poison" if i % 10 == 0 else f"question {i}") for i in range(40)))
            await house.close_captures()
            client.close()
            assert house.captures.kept == len(sink.captures) == 36
            assert house.captures.lost == 4

    go(main)


# -- a frozen engine -----------------------------------------------------------------------------

FROZEN_AFTER = 0.5


class Frozen:
    """A supervised stand-in engine, stopped by SIGSTOP; notes when it counts as frozen and is back."""

    def __init__(self, folder: Path, *, killed_after: float) -> None:
        self.frozen, self.back = asyncio.Event(), asyncio.Event()
        (folder / "engine").mkdir()
        self.supervisor = EngineSupervisor(
            EngineJob(folder=str(folder / "engine"), base_folder="none", adapters={RELEASE: "none"}),
            module="stub_engine",
            probe=SimpleNamespace(
                probe_seconds=0.02,
                frozen_seconds=FROZEN_AFTER,
                restart_seconds=killed_after,
                start_seconds=60,
            ),
            on_change=self._note,
        )

    def _note(self, state: str) -> None:
        if state == "frozen":
            self.frozen.set()
        if state == "ready" and self.frozen.is_set():
            self.back.set()

    async def freeze(self) -> int:
        """Start it and stop its process; the process, once the supervisor has noticed."""
        await self.supervisor.start()
        pid = self.supervisor.describe()["pid"]
        os.kill(pid, signal.SIGSTOP)
        await asyncio.wait_for(self.frozen.wait(), 300)
        return pid


# A machine that is busy for a second looks at the engine only when it is to be killed, as with equal times.
@pytest.mark.parametrize("killed_after", [1.5, FROZEN_AFTER])
def test_a_frozen_engine_is_noticed_and_replaced(tmp_path, killed_after):
    async def main():
        engine = Frozen(tmp_path, killed_after=killed_after)
        pid = await engine.freeze()
        assert engine.supervisor.client is None
        await asyncio.wait_for(engine.back.wait(), 300)
        assert engine.supervisor.describe()["pid"] != pid
        assert engine.supervisor.restarts == 1
        await engine.supervisor.stop()

    go(main)


def test_an_engine_that_thaws_in_time_is_used_again(tmp_path):
    async def main():
        engine = Frozen(tmp_path, killed_after=60)
        pid = await engine.freeze()
        os.kill(pid, signal.SIGCONT)
        await asyncio.wait_for(engine.back.wait(), 300)
        assert engine.supervisor.describe()["pid"] == pid
        assert engine.supervisor.restarts == 0
        assert engine.supervisor.client is not None
        assert (await engine.supervisor.client.fetch("GET", "/state"))[0] == 200
        await engine.supervisor.stop()

    go(main)


# -- huge prompts --------------------------------------------------------------------------------


@pytest.fixture
def engine(tiny_base, tmp_path, monkeypatch):
    """An engine over a tiny model that notes in which thread it renders a prompt."""
    engine = EmbeddedBackend(EngineJob(folder=str(tmp_path), base_folder=str(tiny_base), threads=1))
    rendered_in = []
    prompt = engine._prompts.template.prompt

    def note(messages):
        rendered_in.append(threading.current_thread())
        return prompt(messages)

    monkeypatch.setattr(engine._prompts.template, "prompt", note)
    return engine, rendered_in


async def ask_engine(engine: EmbeddedBackend, text: str):
    return await ask_with(engine, (Message(role="user", content=text),))


async def ask_with(engine: EmbeddedBackend, messages: tuple[Message, ...]):
    request = GenerateRequest(model="base", messages=messages, max_tokens=1)
    return [piece async for piece in engine.generate(request)]


def test_a_prompt_that_cannot_fit_is_refused_without_being_tokenized(engine):
    async def main():
        with pytest.raises(ApiError, match="has 3900000 characters") as refusal:
            await ask_engine(engine[0], "a" * 3_900_000)
        assert refusal.value.code == "context_length_exceeded"
        assert engine[1] == []

    go(main)


def test_more_messages_than_fit_are_refused_without_being_rendered(engine):
    # Empty ones have no characters, but the template writes something around each.
    async def main():
        messages = (Message(role="user", content=""), Message(role="assistant", content="")) * 2000
        with pytest.raises(ApiError, match="has 4000 messages") as refusal:
            await ask_with(engine[0], messages)
        assert refusal.value.code == "context_length_exceeded"
        assert engine[1] == []
        with suppress(ApiError):
            await ask_with(engine[0], messages[:1999])
        assert engine[1][0] is not threading.main_thread()

    go(main)


def test_a_long_prompt_is_tokenized_without_holding_other_streams_up(engine):
    async def main():
        with pytest.raises(ApiError, match="tokens") as refusal:
            await ask_engine(engine[0], "a word and " * 8000)
        assert refusal.value.code == "context_length_exceeded"
        assert engine[1]
        assert engine[1][0] is not threading.main_thread()

    go(main)


# -- the long form -------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seconds", [10, 120])
def test_floods_cost_neither_memory_nor_the_health_of_the_gateway(seconds):
    """Every attack of the benchmark for ten seconds; 200 connections and floods for two minutes."""
    script = Path(__file__).with_name("http_servers.py")
    command = [sys.executable, str(script), "--only", "graftwork", "--json", "--seconds", str(seconds)]
    if seconds > 60:
        command += ["--attacks", "slow heads", "bodies without a key", "open and close"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, check=True)
    attacks = json.loads(done.stdout)["graftwork"]["attacks"]
    assert attacks
    for name, seen in attacks.items():
        assert seen["after_mib"] < 1.2 * seen["before_mib"], (name, seen)
        assert seen["health_p99_ms"] < 100, (name, seen)
