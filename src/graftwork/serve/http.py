"""A small HTTP/1.1 server on asyncio.Protocol and httptools.

In: a handler, `async (Request) -> Response | StreamResponse`, and limits. Out: whole requests to
the handler, one at a time a connection and in order; its answers to the client. A client that
leaves cancels its handler; a slow one holds its stream back. Knows nothing of models or JSON
beyond the body of its own refusals.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import cast

from graftwork.serve.messages import Answer, ApiError, Request, Response, StreamResponse, refuse
from graftwork.serve.parser import httptools

Handler = Callable[[Request], Awaitable[Answer]]

log = logging.getLogger(__name__)

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n" for s in HTTPStatus}
_WAITING_REQUESTS = 8
_LINGER_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What one connection may ask of the server."""

    max_header_bytes: int = 32 * 1024
    max_body_bytes: int = 8 * 1024 * 1024
    idle_seconds: float = 75.0
    receive_seconds: float = 60.0


class Server:
    """Listens, keeps the connections, and ends in good order."""

    def __init__(self, handler: Handler, *, limits: Limits = Limits()) -> None:  # noqa: B008
        self.handler = handler
        self.limits = limits
        self.closing = False
        self.connections: set[Connection] = set()
        self._listener: asyncio.Server | None = None
        self._all_gone = asyncio.Event()

    async def listen(self, *, host: str = "127.0.0.1", port: int = 0) -> int:
        """Listen on TCP; gives the port, which the system chose where `port` is 0."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: Connection(self), host, port, backlog=1024)
        return int(self._listener.sockets[0].getsockname()[1])

    async def listen_unix(self, path: str) -> None:
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_unix_server(lambda: Connection(self), path, backlog=1024)

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Accept nothing more, let what runs finish for `drain_seconds`, then cut it."""
        self.closing = True
        if self._listener is not None:
            self._listener.close()
        for connection in list(self.connections):
            connection.close_when_idle()
        if self.connections and drain_seconds > 0:
            await self._wait_gone(drain_seconds)
        for connection in list(self.connections):
            connection.abort()
        await self._wait_gone(_LINGER_SECONDS)

    async def _wait_gone(self, seconds: float) -> None:
        self._all_gone.clear()
        if self.connections:
            try:
                await asyncio.wait_for(self._all_gone.wait(), seconds)
            except TimeoutError:
                log.info("%d connections did not end within %s s", len(self.connections), seconds)

    def forget(self, connection: "Connection") -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._all_gone.set()


@dataclass(frozen=True, slots=True)
class _Turn:
    """A request with its place in the order of answers, or the refusal that stands there instead."""

    request: Request
    keep_alive: bool
    chunked: bool
    refusal: ApiError | None = None


class Connection(asyncio.Protocol):
    """One client. httptools calls the `on_…` methods while it parses."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[_Turn] = deque()
        self._waiting_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._refused = False
        self._close_after = False
        self._lost = False
        self._reading_paused = False
        self._drained: asyncio.Future[None] | None = None
        self._writing_paused = False
        self._in_head = False
        self._receiving = False
        self._head_bytes = 0
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._body_bytes = 0
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # -- the transport's side ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.connections.add(self)
        self._set_deadline(self._server.limits.receive_seconds)
        self._timer = self._loop.call_at(self._deadline, self._check_deadline)

    def connection_lost(self, _error: Exception | None) -> None:
        self._lost = True
        if self._timer is not None:
            self._timer.cancel()
        self._release_writer()
        if self._task is not None:
            self._task.cancel()
        else:
            self._server.forget(self)

    def pause_writing(self) -> None:
        self._writing_paused = True

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._release_writer()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return  # the tail of a request that was refused; read so that the client can read us
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > self._server.limits.max_header_bytes:
                self._refuse(ApiError(431, "the request's headers are too large"))
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # Answered as plain HTTP/1.1; what follows would be in another protocol.
            self._refused = True
            self._close_after = True
            if self._receiving:
                self._receiving = self._in_head = False
                self._queue(_Turn(Request("", ""), False, False, ApiError(501, "upgrades are not offered")))
        except httptools.HttpParserError as error:
            self._refuse(ApiError(400, f"this is not a valid HTTP/1.1 request: {error}"))
        self._start_next()
        too_many = len(self._waiting) >= _WAITING_REQUESTS
        if (too_many or self._waiting_bytes > self._server.limits.max_body_bytes) and not self._lost:
            self._reading_paused = True
            self._transport.pause_reading()

    # -- the parser's side ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._refused:
            return
        self._in_head = self._receiving = True
        self._head_bytes = 0
        self._url = b""
        self._headers = {}
        self._body = []
        self._body_bytes = 0
        self._set_deadline(self._server.limits.receive_seconds)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._refused or not self._in_head:
            return  # trailers carry nothing that is needed here
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._refused:
            return
        size = sum(len(k) + len(v) for k, v in self._headers.items()) + len(self._url)
        if size > self._server.limits.max_header_bytes:
            self._refuse(ApiError(431, "the request's headers are too large"))
            return
        length = self._headers.get("content-length", "")
        if length.isdigit() and int(length) > self._server.limits.max_body_bytes:
            self._refuse(self._too_large())
        elif self._headers.get("expect", "").lower() == "100-continue" and self._task is None:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        self._body_bytes += len(body)
        if self._body_bytes > self._server.limits.max_body_bytes:
            self._refuse(self._too_large())
            return
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._receiving = False
        if self._refused:
            return
        path, _, query = self._url.decode("latin-1").partition("?")
        request = Request(
            method=self._parser.get_method().decode("latin-1"),
            path=path,
            query=query,
            headers=self._headers,
            body=self._body[0] if len(self._body) == 1 else b"".join(self._body),
        )
        keep_alive = self._parser.should_keep_alive()
        self._queue(_Turn(request, keep_alive, self._parser.get_http_version() != "1.0"))
        self._body = []

    def _too_large(self) -> ApiError:
        limit = self._server.limits.max_body_bytes
        return ApiError(413, f"the request's body is larger than the {limit} bytes that are accepted")

    # -- answers, in order ---------------------------------------------------------------------

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error in its turn, then close: the rest of the input cannot be trusted."""
        self._refused = True
        self._in_head = self._receiving = False
        self._queue(_Turn(Request("", ""), keep_alive=False, chunked=False, refusal=error))
        self._start_next()

    def _queue(self, turn: _Turn) -> None:
        self._waiting.append(turn)
        self._waiting_bytes += len(turn.request.body)

    def _start_next(self) -> None:
        if self._task is not None or self._lost:
            return
        if self._waiting:
            turn = self._waiting.popleft()
            self._waiting_bytes -= len(turn.request.body)
            self._task = self._loop.create_task(self._answer(turn))
            return
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        if self._server.closing and not self._receiving:
            self._transport.close()

    async def _answer(self, turn: _Turn) -> None:
        close = True
        try:
            answer = await self._ask(turn)
            close = not turn.keep_alive or self._server.closing or (self._close_after and not self._waiting)
            if isinstance(answer, Response):
                self._send_whole(turn, answer, close=close)
            else:
                close = close or not turn.chunked  # HTTP/1.0 knows the end only by the close
                await self._send_stream(turn, answer, close=close)
        except asyncio.CancelledError:
            if not self._lost:
                self._transport.abort()
        except Exception:
            # The head is out already: only a cut connection tells the client that the rest is missing.
            log.exception("a streamed answer broke off")
            self._transport.abort()
        finally:
            self._task = None
            if self._lost:
                self._server.forget(self)
            elif close:
                self._waiting.clear()
                self._linger()
            else:
                self._set_deadline(self._server.limits.idle_seconds)
                self._start_next()

    async def _ask(self, turn: _Turn) -> Answer:
        if turn.refusal is not None:
            return refuse(turn.refusal)
        try:
            return await self._server.handler(turn.request)
        except ApiError as error:
            return refuse(error)
        except Exception:
            log.exception("the handler of %s %s failed", turn.request.method, turn.request.path)
            return refuse(ApiError(500, "the server failed on this request; its log says why"))

    def _send_whole(self, turn: _Turn, answer: Response, *, close: bool) -> None:
        if not self._lost:
            head = _encode_head(answer, f"content-length: {len(answer.body)}\r\n", close=close)
            self._transport.write(head if turn.request.method == "HEAD" else head + answer.body)
        if answer.after is not None:
            answer.after()

    async def _send_stream(self, turn: _Turn, answer: StreamResponse, *, close: bool) -> None:
        async with aclosing(answer.chunks) as chunks:
            framing = "transfer-encoding: chunked\r\n" if turn.chunked else ""
            self._transport.write(_encode_head(answer, framing, close=close))
            async for chunk in chunks:
                if chunk:
                    self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if turn.chunked else chunk)
                    await self._drain()
        if turn.chunked:
            self._transport.write(b"0\r\n\r\n")

    async def _drain(self) -> None:
        """Wait until the client has read enough for more to be sent."""
        if self._writing_paused and not self._lost:
            self._drained = self._loop.create_future()
            await self._drained

    def _release_writer(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    # -- the end -------------------------------------------------------------------------------

    def close_when_idle(self) -> None:
        if self._task is None and not self._receiving:
            self._transport.close()

    def abort(self) -> None:
        """Cut the connection; its loss cancels the handler."""
        self._transport.abort()

    def _linger(self) -> None:
        """Close without a reset: a client that still sends must be able to read the answer first."""
        if self._refused and self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
            self._loop.call_later(_LINGER_SECONDS, self._transport.close)
        else:
            self._transport.close()

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = self._loop.time() + seconds

    def _check_deadline(self) -> None:
        """One timer a connection, moved only when it rings: cheaper than one a request."""
        now = self._loop.time()
        if self._task is not None:
            self._set_deadline(self._server.limits.idle_seconds)
        elif now >= self._deadline:
            self._transport.close()
            return
        self._timer = self._loop.call_at(max(self._deadline, now + 0.1), self._check_deadline)


def _encode_head(answer: Answer, framing: str, *, close: bool) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in answer.headers)
    date = _format_date(int(time.time()))
    ending = "connection: close\r\n\r\n" if close else "\r\n"
    return f"{_STATUS_LINES[answer.status]}date: {date}\r\n{lines}{framing}{ending}".encode("latin-1")


@lru_cache(maxsize=1)
def _format_date(second: int) -> str:
    return formatdate(second, usegmt=True)
