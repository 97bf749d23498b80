"""The server's own promises, over real sockets."""

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from serve_harness import DEADLINE, raw

from graftwork.http.client import Client, Link
from graftwork.http.messages import ApiError, Request, Response, StreamResponse
from graftwork.http.server import HttpLimits, Server


async def echo(request: Request):
    return Response(200, request.method.encode() + b" " + request.path.encode() + b" " + request.body)


def test_a_connection_is_kept_and_pipelined_requests_are_answered_in_order(run):
    async def main():
        started = []

        async def slow_first(request: Request):
            started.append(request.path)
            if request.path == "/1":
                await asyncio.sleep(0)  # give the second every chance to overtake
            return Response(200, request.path.encode())

        server = Server(slow_first)
        port = await server.listen()
        data = b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % i for i in range(1, 30))
        answer = await raw(port, data + b"GET /end HTTP/1.1\r\nconnection: close\r\n\r\n")
        assert started == [f"/{i}" for i in range(1, 30)] + ["/end"]
        places = [answer.index(b"\r\n\r\n/%d" % i) for i in range(1, 30)]
        assert places == sorted(places)
        assert answer.endswith(b"/end")
        await server.close()

    run(main)


def test_a_chunked_body_arrives_whole(run):
    async def main():
        server = Server(echo)
        port = await server.listen()
        head = b"POST /c HTTP/1.1\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
        answer = await raw(port, head + b"3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        assert answer.endswith(b"POST /c abcde")
        await server.close()

    run(main)


def test_a_body_that_is_announced_as_too_large_is_refused_before_it_is_sent(run):
    async def main():
        server = Server(echo, limits=HttpLimits(max_body_bytes=10))
        port = await server.listen()
        answer = await raw(port, b"POST / HTTP/1.1\r\ncontent-length: 11\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert b'"error"' in answer
        await server.close()

    run(main)


def test_a_chunked_body_that_grows_too_large_is_refused_and_the_refusal_can_be_read(run):
    async def main():
        server = Server(echo, limits=HttpLimits(max_body_bytes=1000))
        port = await server.listen()
        chunks = b"".join(b"400\r\n" + b"x" * 1024 + b"\r\n" for _ in range(2000))
        answer = await raw(port, b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
        assert answer.startswith(b"HTTP/1.1 413 ")
        await server.close()

    run(main)


def test_headers_without_end_are_refused(run):
    async def main():
        server = Server(echo, limits=HttpLimits(max_header_bytes=2000))
        port = await server.listen()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n")
        for i in range(300):
            writer.write(b"x-%d: %b\r\n" % (i, b"y" * 100))
            await writer.drain()
        answer = await asyncio.wait_for(reader.read(-1), DEADLINE)
        assert answer.startswith(b"HTTP/1.1 431 ")
        writer.close()
        await server.close()

    run(main)


def test_a_request_that_never_ends_is_given_up(run):
    async def main():
        server = Server(echo, limits=HttpLimits(receive_seconds=0.05))
        port = await server.listen()
        assert await raw(port, b"POST / HTTP/1.1\r\ncontent-length: 5\r\n\r\nab") == b""
        await server.close()

    run(main)


def test_a_handler_that_fails_is_answered_with_500_and_the_server_goes_on(run):
    async def main():
        async def fail(request: Request):
            if request.path == "/fail":
                raise RuntimeError("a bug")
            return Response(200, b"fine")

        server = Server(fail)
        port = await server.listen()
        data = b"GET /fail HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\nconnection: close\r\n\r\n"
        answer = await raw(port, data)
        assert answer.startswith(b"HTTP/1.1 500 ")
        assert b"a bug" not in answer
        assert answer.endswith(b"fine")
        await server.close()

    run(main)


def test_a_client_that_leaves_cancels_its_handler(run):
    async def main():
        entered, cancelled = asyncio.Event(), asyncio.Event()

        async def wait(_request: Request):
            entered.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

        server = Server(wait)
        port = await server.listen()
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await asyncio.wait_for(entered.wait(), DEADLINE)
        writer.close()
        await asyncio.wait_for(cancelled.wait(), DEADLINE)
        await server.close()

    run(main)


def test_a_slow_reader_holds_the_stream_back(run):
    async def main():
        made = 0
        closed = asyncio.Event()

        async def endless():
            nonlocal made
            try:
                while True:
                    made += 1
                    yield b"x" * 65536
                    await asyncio.sleep(0)
            finally:
                closed.set()

        async def stream(_request: Request):
            return StreamResponse(200, endless())

        server = Server(stream)
        port = await server.listen()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        await reader.readexactly(10)
        before = -1
        while before != made:  # it stands still once the buffers of the system are full
            before = made
            for _ in range(200):
                await asyncio.sleep(0)
        assert made < 1000
        writer.transport.abort()
        await asyncio.wait_for(closed.wait(), DEADLINE)
        await server.close()

    run(main)


def test_a_stream_that_breaks_is_cut_and_not_ended_as_if_it_were_whole(run):
    async def main():
        async def broken():
            yield b"begin"
            raise RuntimeError("a bug")

        async def stream(_request: Request):
            return StreamResponse(200, broken())

        server = Server(stream)
        port = await server.listen()
        try:
            answer = await raw(port, b"GET / HTTP/1.1\r\n\r\n")
        except ConnectionResetError:
            answer = b""
        assert not answer.endswith(b"0\r\n\r\n")
        client = Client(port=port)
        reply = await client.send("GET", "/")
        try:
            await reply.read()
        except ConnectionError:
            pass
        else:
            raise AssertionError("the client took half an answer for a whole one")
        await server.close()

    run(main)


def test_an_upgrade_is_not_followed(run):
    async def main():
        server = Server(echo)
        port = await server.listen()
        head = b"GET /u HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n\x81\x05hello"
        answer = await raw(port, head)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert answer.endswith(b"GET /u ")
        await server.close()

    run(main)


OFFER = (
    b"POST /u?q=1 HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    b"http2-settings: AAEAAEAA\r\n"
)
"""The head that Java's HttpClient sends with every request over plain HTTP."""


@pytest.mark.parametrize(
    "body",
    [
        b"content-length: 4\r\n\r\nbody",
        b"transfer-encoding: chunked\r\n\r\n2\r\nbo\r\n2\r\ndy\r\n0\r\n\r\n",
    ],
)
def test_the_body_of_a_request_that_offers_an_upgrade_is_read_wherever_it_is_cut(run, body):
    async def main():
        server = Server(echo)
        port = await server.listen()
        data = OFFER + body
        for size in (len(data), len(OFFER), 20, 1):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for start in range(0, len(data), size):
                writer.write(data[start : start + size])
                await writer.drain()
                await asyncio.sleep(0)
            answer = await asyncio.wait_for(reader.read(-1), DEADLINE)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert answer.endswith(b"POST /u body")
            writer.close()
        await server.close()

    run(main)


def test_a_body_behind_an_offered_upgrade_has_the_same_limits(run):
    async def main():
        refused = []

        def admit(head):
            refused.append(head.headers.get("authorization"))
            if "authorization" not in head.headers:
                raise ApiError(401, "no key")

        server = Server(echo, admit=admit, limits=HttpLimits(max_body_bytes=8))
        port = await server.listen()
        key = b"authorization: Bearer x\r\n"
        large = OFFER + key + b"transfer-encoding: chunked\r\n\r\n9\r\n123456789\r\n0\r\n\r\n"
        assert (await raw(port, large)).startswith(b"HTTP/1.1 413 ")
        assert (await raw(port, OFFER + b"content-length: 4\r\n\r\nbody")).startswith(b"HTTP/1.1 401 ")
        tunnel = b"CONNECT x:1 HTTP/1.1\r\n" + key + b"content-length: 4\r\n\r\nbody"
        assert (await raw(port, tunnel)).startswith(b"HTTP/1.1 ")
        behind = OFFER + key + b"content-length: 4\r\n\r\nbodyGET /second HTTP/1.1\r\n\r\n"
        answer = await raw(port, behind)
        assert answer.count(b"HTTP/1.1 200 ") == 1
        assert b"second" not in answer
        assert server.buffered == 0
        await server.close()

    run(main)


def test_a_client_that_expects_100_continue_gets_it(run):
    async def main():
        server = Server(echo)
        port = await server.listen()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(b"ok")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
        writer.close()
        await server.close()

    run(main)


def test_closing_lets_a_running_answer_finish(run):
    async def main():
        entered, go = asyncio.Event(), asyncio.Event()

        async def wait(_request: Request):
            entered.set()
            await go.wait()
            return Response(200, b"finished")

        server = Server(wait)
        port = await server.listen()
        asking = asyncio.create_task(raw(port, b"GET / HTTP/1.1\r\n\r\n"))
        await entered.wait()
        closing = asyncio.create_task(server.close(drain_seconds=DEADLINE))
        await asyncio.sleep(0)
        go.set()
        assert (await asking).endswith(b"finished")
        await closing

    run(main)


def test_the_client_keeps_its_connection_and_asks_again_when_the_server_closed_it(run):
    async def main():
        server = Server(echo)
        port = await server.listen()
        client = Client(port=port)
        assert (await client.fetch("GET", "/"))[0] == 200
        first = set(server.connections)
        for _ in range(3):
            assert await client.fetch("POST", "/x", body=b"hi") == (200, b"POST /x hi")
        assert server.connections == first
        await server.close()
        again = Server(echo)
        await again.listen(port=port)
        assert await client.fetch("POST", "/y") == (200, b"POST /y ")
        client.close()
        await again.close()

    run(main)


def test_a_reply_without_a_length_ends_with_its_connection(run):
    async def main():
        sent = b""

        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(sent)
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        client = Client(port=server.sockets[0].getsockname()[1])
        for version in (b"1.0", b"1.1"):
            sent = b"HTTP/%b 200 OK\r\ncontent-type: text/plain\r\n\r\nall of it" % version
            assert await client.fetch("GET", "/") == (200, b"all of it")
        chunk = b"transfer-encoding: chunked\r\n\r\n4\r\nhalf\r\n"
        for rest in (b"content-length: 20\r\n\r\nhalf of it", chunk, b""):
            sent = b"HTTP/1.1 200 OK\r\n" + rest
            with pytest.raises(OSError, match="before its answer was whole"):
                await client.fetch("GET", "/")
        client.close()
        server.close()

    run(main)


@asynccontextmanager
async def scripted_server(answer, client_type=Client):
    """A server that answers each connection by `answer(reader, writer)`; gives a client of it."""

    async def serve(reader, writer):
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            await answer(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = client_type(port=server.sockets[0].getsockname()[1])
    try:
        yield client
    finally:
        client.abort()
        server.close()


def whole_answer(text):
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text)


@pytest.mark.parametrize("interim", [b"100 Continue", b"102 Processing", b"103 Early Hints"])
def test_an_interim_answer_is_not_the_answer(run, interim):
    # Taken for the answer, it would leave the real one on the connection for the next request.
    async def main():
        taken = asyncio.Event()

        async def answer(reader, writer):
            while True:
                asked = await reader.readuntil(b"\r\n\r\n")
                taken.clear()
                writer.write(b"HTTP/1.1 %b\r\nlink: </x>\r\n\r\n" % interim)
                await taken.wait()
                writer.write(whole_answer(b"for " + asked.split()[1]))

        class WatchedLink(Link):
            def data_received(self, data):
                super().data_received(data)
                taken.set()

        class WatchedClient(Client):
            async def _connect(self):
                loop = asyncio.get_running_loop()
                return (await loop.create_connection(WatchedLink, "127.0.0.1", self._port))[1]

        async with scripted_server(answer, WatchedClient) as client:
            return [await client.fetch("GET", f"/{name}") for name in ("ada", "ben")]

    assert run(main) == [(200, b"for /ada"), (200, b"for /ben")]


def test_a_connection_that_brings_more_than_was_asked_for_is_not_used_again(run):
    connections = 0

    async def answer(reader, writer):
        nonlocal connections
        connections += 1
        while True:
            asked = await reader.readuntil(b"\r\n\r\n")
            name = asked.split()[1]
            writer.write(whole_answer(b"for " + name) + whole_answer(b"more for " + name))

    async def main():
        async with scripted_server(answer) as client:
            return [await client.fetch("GET", f"/{name}") for name in ("ada", "ben")]

    assert run(main) == [(200, b"for /ada"), (200, b"for /ben")]
    assert connections == 2


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        (b"HTTP/1.1 200 OK\r\n", b"x-more: 1\r\n" * 4096),
        (b"HTTP/1.1 200 OK\r\nx: ", b"x" * 65536),
        (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 4096),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n0\r\n", b"x-more: 1\r\n" * 4096),
    ],
    ids=["headers", "one header", "interim answers", "trailers"],
)
def test_a_head_without_end_is_given_up(run, head, piece):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head)
        for _ in range(1024):
            writer.write(piece)
            await writer.drain()

    async def main():
        async with scripted_server(answer) as client:
            with pytest.raises(ConnectionError, match="too large"):
                await client.fetch("GET", "/", seconds=DEADLINE)

    run(main)


def test_a_body_is_read_up_to_the_size_that_the_caller_allows(run):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        for _ in range(1024):
            writer.write(b"x" * 65536)
            await writer.drain()

    async def main():
        async with scripted_server(answer) as client:
            reply = await client.send("GET", "/")
            with pytest.raises(ConnectionError, match="too large"):
                await reply.read(most=1 << 20)
            assert not client._busy

    run(main)


REQUEST = b"POST /v1 HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nbody"


@st.composite
def broken_requests(draw):
    """Noise, and good requests with a piece cut out or put in."""
    if draw(st.booleans()):
        return draw(st.binary(min_size=1, max_size=200))
    place = draw(st.integers(0, len(REQUEST)))
    end = draw(st.integers(place, min(len(REQUEST), place + 8)))
    return REQUEST[:place] + draw(st.binary(max_size=8)) + REQUEST[end:]


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(broken_requests(), min_size=1, max_size=6))
@example([b"GET / HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"])
@example([b"CONNECT x:1 HTTP/1.1\r\n\r\n"])
@example([b"CONNECT x:1 HTTP/1.1\r\ncontent-length: 2\r\n\r\nab"])
@example([b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"])
def test_no_bytes_break_the_server(inputs):
    async def main():
        failures = []
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: failures.append(context))
        server = Server(
            echo, limits=HttpLimits(max_header_bytes=500, max_body_bytes=500, receive_seconds=0.02)
        )
        port = await server.listen()
        for data in inputs:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data)
            if writer.can_write_eof():
                writer.write_eof()
            try:
                answer = await asyncio.wait_for(reader.read(-1), DEADLINE)
            except ConnectionResetError:
                answer = b""
            assert answer == b"" or answer.startswith(b"HTTP/1.1 ")
            writer.close()
        server.limits = (
            HttpLimits()
        )  # on a busy machine, a good request may take longer than 20 ms to come in
        assert (await raw(port, b"GET /ok HTTP/1.1\r\nconnection: close\r\n\r\n")).endswith(b"GET /ok ")
        assert failures == []
        await server.close()

    asyncio.run(main())
