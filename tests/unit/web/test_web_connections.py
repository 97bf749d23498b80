"""Connections of the page end where a request does not arrive, and stay while an answer is given."""

import asyncio
from contextlib import suppress

import pytest
import uvicorn

from graftwork.web.serve import TimedConnection, open_socket

DEADLINE = 300.0


class ShortConnection(TimedConnection):
    receive_seconds = 0.2


class App:
    """Answers when `may_answer` is set."""

    def __init__(self):
        self.asked, self.may_answer = asyncio.Event(), asyncio.Event()

    async def __call__(self, scope, receive, send):
        self.asked.set()
        await self.may_answer.wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})


def run_with_page(main):
    async def serve():
        app = App()
        config = uvicorn.Config(app, http=ShortConnection, lifespan="off", log_level="critical")
        server = uvicorn.Server(config)
        with open_socket("127.0.0.1", 0) as listener:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            try:
                await main(app, listener.getsockname()[1])
            finally:
                app.may_answer.set()
                server.should_exit = True
                await serving

    asyncio.run(asyncio.wait_for(serve(), DEADLINE))


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\nhost: a\r\n",
        b"GET / HTTP/1.1\r\nhost: a\r\n\r\nGET / HTTP/1.1\r\n",
        b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\n\r\nab",
    ],
)
def test_a_half_request_is_ended_and_others_are_answered(sent):
    async def main(app, port):
        app.may_answer.set()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        with suppress(ConnectionResetError):
            await reader.read(-1)
        writer.close()
        answer = await ask(port)
        assert answer.startswith(b"HTTP/1.1 200")

    run_with_page(main)


def test_an_answer_may_take_longer_than_a_request():
    async def main(app, port):
        slow = asyncio.create_task(ask(port))
        await app.asked.wait()
        # As long as a half request may last, by a half request that came later.
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(ConnectionResetError):
            await reader.read(-1)
        writer.close()
        app.may_answer.set()
        answer = await slow
        assert answer.startswith(b"HTTP/1.1 200")

    run_with_page(main)


async def ask(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    answer = await reader.readuntil(b"ok")
    writer.close()
    return answer
