"""A small HTTP/1.1 server on asyncio.Protocol and httptools.

A handler gets whole requests, one at a time per connection and in order. A client that disconnects cancels
its handler; a slow client pauses its stream, up to a deadline. Every received byte counts against a limit
before it is stored, and `admit` refuses a request at the end of its headers, so that a client without a key
cannot make the server store a body. A connection that misses a deadline is aborted, because a graceful close
would wait for a flush that never comes. docs/decisions/0020 compares uvicorn, granian and hypercorn.
"""

import asyncio
import logging
import resource
import ssl
import time
from collections import deque
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import cast

from graftwork.http.messages import (
    USUAL_HEADERS,
    Answer,
    ApiError,
    Handler,
    Request,
    Response,
    StreamResponse,
    error_response,
)
from graftwork.records.base import MIB
from graftwork.records.errors import needs_extra

with needs_extra("serve", why="serving parses HTTP with it"):
    import httptools

__all__ = ["httptools"]

Admit = Callable[[Request], None]
"""Checks a request whose headers have arrived and whose body has not. Raises ApiError to refuse it."""

log = logging.getLogger(__name__)

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n" for s in HTTPStatus}
_HEAD_SLICE = 4 * 1024
_BODY_SLICE = 64 * 1024
"""Input is parsed in slices: at most one slice is read beyond a limit before it is noticed."""
_READ_AHEAD = 64 * 1024
"""Bytes received after a running request at which reading pauses. A paused connection does not see its
end.
"""
_PIPELINED = 32
"""Requests that a client may send ahead of their answers."""
_LINGER_SECONDS, _HANDSHAKE_SECONDS = 2.0, 5.0
_TICK_SECONDS = 5.0
"""Interval at which connections check their deadlines."""
_WARN_SECONDS = 10.0
_SPARE_DESCRIPTORS = 64
"""File descriptors kept free for the engine, the database and log files."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits on clients."""

    max_connections: int = 1024
    """At this number, the connection that has waited longest without an admitted request is closed."""
    max_header_bytes: int = 32 * 1024
    """For the request line, headers, trailers and chunk framing of one request."""
    max_headers: int = 100
    max_body_bytes: int = 8 * MIB
    max_buffered_bytes: int = 256 * MIB
    """For the bodies of all connections together."""
    head_seconds: float = 15.0
    receive_seconds: float = 60.0
    """How long a body may take to arrive, from the end of its headers."""
    idle_seconds: float = 75.0
    write_seconds: float = 30.0
    """How long a client may leave its response unread while the server waits to send more."""

    @property
    def tick_seconds(self) -> float:
        """How often a connection looks at the clock."""
        return min(_TICK_SECONDS, self.head_seconds, self.receive_seconds, self.idle_seconds)


class Server:
    """Listens, keeps the connections, and ends cleanly."""

    def __init__(
        self,
        handler: Handler,
        *,
        admit: Admit | None = None,
        limits: HttpLimits = HttpLimits(),  # noqa: B008
    ) -> None:
        self.handler = handler
        self.admit = admit
        self.limits = limits
        self.on_refused: Callable[[str, ApiError], None] | None = None
        """Gets the path and the refusal of each request that does not reach the handler."""
        self.closing = False
        self.connections: set[Connection] = set()
        self.evictable: dict[Connection, None] = {}
        """Connections without an admitted request, the longest waiting first."""
        self.evicted = 0
        self.rejected = 0
        self.buffered = 0
        """Bytes of request bodies in memory."""
        self._listener: asyncio.Server | None = None
        self._all_gone = asyncio.Event()
        self._warned_at = float("-inf")

    async def listen(
        self, *, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
    ) -> int:
        """Listen on TCP; returns the port, which the system chooses if `port` is 0."""
        loop = asyncio.get_running_loop()
        self._max_connections = _fit_descriptors(self.limits.max_connections)
        handshake = None if tls is None else min(_HANDSHAKE_SECONDS, self.limits.head_seconds)
        self._listener = await loop.create_server(
            lambda: Connection(self), host, port, backlog=1024, ssl=tls, ssl_handshake_timeout=handshake
        )
        return int(self._listener.sockets[0].getsockname()[1])

    async def listen_unix(self, path: str) -> None:
        loop = asyncio.get_running_loop()
        self._max_connections = _fit_descriptors(self.limits.max_connections)
        self._listener = await loop.create_unix_server(lambda: Connection(self), path, backlog=1024)

    async def close(self, *, drain_seconds: float = 0.0) -> None:
        """Accept no more connections, let running requests finish for `drain_seconds`, then close them."""
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

    def add(self, connection: "Connection") -> bool:
        """Register a new connection. False if it cannot be served: all others have a request."""
        full = len(self.connections) >= self._max_connections
        oldest = next(iter(self.evictable), None) if full else None
        if oldest is not None:
            self.evicted += 1
            oldest.abort()
            self.forget(oldest)
        self.connections.add(connection)
        if full:
            now = time.monotonic()
            if now - self._warned_at >= _WARN_SECONDS:
                self._warned_at = now
                log.warning(
                    "all %d connections are in use: %d idle ones closed, %d new ones refused so far",
                    self._max_connections,
                    self.evicted,
                    self.rejected,
                )
            if oldest is None:
                self.rejected += 1
                return False
        self.evictable[connection] = None
        return True

    def forget(self, connection: "Connection") -> None:
        self.connections.discard(connection)
        self.evictable.pop(connection, None)
        if not self.connections:
            self._all_gone.set()


def _fit_descriptors(connections: int) -> int:
    """Return how many connections the process can keep open. Beyond that, new ones would fail silently."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + _SPARE_DESCRIPTORS
    if soft < needed:
        raised = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (raised, hard))
            soft = raised
        except (OSError, ValueError):
            pass
    fitting = min(connections, max(8, soft - _SPARE_DESCRIPTORS))
    if fitting < connections:
        log.warning(
            "%d connections at most instead of %d: the limit on open files is %d", fitting, connections, soft
        )
    return fitting


@dataclass(frozen=True, slots=True)
class _QueuedRequest:
    """A request that waits for its turn, or the refusal that is sent instead of its answer."""

    request: Request
    keep_alive: bool
    chunked: bool
    refusal: ApiError | None = None


_NO_REQUEST = Request("", "")


class Connection(asyncio.Protocol):
    """One client. httptools calls the `on_…` methods while it parses."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)
        self._unparsed = b""
        """Input after a whole request that is not answered yet; reading pauses if it grows large."""
        self._waiting: deque[_QueuedRequest] = deque()
        self._charged = 0
        self._task: asyncio.Task[None] | None = None
        self._refused = self._close_after = False
        self._lost = self._ending = False
        self._discarded = 0
        self._drained: asyncio.Future[None] | None = None
        self._writing_paused = False
        self._in_head = False
        self._receiving = False
        self._overhead = 0
        """Bytes of the current request that are not its body."""
        self._url = b""
        self._headers: dict[str, str] = {}
        self._head = _NO_REQUEST
        self._header_count = 0
        self._body: bytes | bytearray = b""
        self._deadline = 0.0
        self._timer: asyncio.TimerHandle | None = None

    # -- the transport's side ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        served = self._server.add(self)
        self._set_deadline(self._server.limits.head_seconds)
        self._timer = self._loop.call_later(self._server.limits.tick_seconds, self._check_deadline)
        if not served:
            busy = (("retry-after", "1"),)
            self._refuse(ApiError(503, "the server has no connection left", code="full", headers=busy))

    def connection_lost(self, _error: Exception | None) -> None:
        self._lost = True
        if self._timer is not None:
            self._timer.cancel()
        self._release_writer()
        # The parser holds our methods and we hold the parser: cut here, or what this connection received
        # would stay in memory until the collector of cycles comes by.
        self._parser = self._timer = None
        self._unparsed = self._body = b""
        self._headers = {}
        self._waiting.clear()
        self._release(self._charged)
        if self._task is not None:
            self._task.cancel()
        else:
            self._server.forget(self)

    def pause_writing(self) -> None:
        self._writing_paused = True
        self._end_within(self._server.limits.write_seconds)

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._release_writer()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            # The tail of a refused request. It is read so that the client gets to read our answer.
            self._discarded += len(data)
            if self._discarded > self._server.limits.max_body_bytes:
                self._transport.abort()
        elif self._task is not None or self._unparsed:
            self._unparsed += data
            if len(self._unparsed) > _READ_AHEAD:
                self._transport.pause_reading()
        else:
            self._parse(data)

    def _parse(self, data: bytes) -> None:
        """Parse up to the end of a request; what comes after it waits until that one is answered."""
        if len(data) <= _HEAD_SLICE:
            self._feed(data)
        else:
            view, start = memoryview(data), 0
            while start < len(data) and not self._refused:
                if self._waiting:
                    self._unparsed = bytes(view[start:])
                    break
                size = _BODY_SLICE if self._receiving and not self._in_head else _HEAD_SLICE
                self._feed(view[start : start + size])
                start += size
        self._start_next()
        if len(self._unparsed) > _READ_AHEAD and not self._lost:
            self._transport.pause_reading()

    def _feed(self, data: bytes | memoryview) -> None:
        self._overhead += len(data)
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._refused or not self._head.has_body or self._head.method == "CONNECT":
                # Answered as plain HTTP/1.1; what follows would be in another protocol.
                self._refused = self._close_after = True
                return
            # The parser took the body for that protocol: another one reads the head without the offer.
            self._waiting.pop()
            head = self._head.encode_plain_head(self._parser.get_http_version())
            self._parser = httptools.HttpRequestParser(self)
            self._feed(head)
            self._feed(data[upgrade.args[0] :])
        except httptools.HttpParserError as error:
            self._refuse(ApiError(400, f"this is not a valid HTTP/1.1 request: {error}"))
        # Headers, trailers, chunk sizes and their extensions; chunks of few bytes cost more than they carry.
        allowed = self._server.limits.max_header_bytes + 2 * len(self._body)
        if self._receiving and self._overhead > allowed and not self._refused:
            part = "headers are" if self._in_head else "trailers or chunk headers are"
            self._refuse(ApiError(431, f"the request's {part} too large"))

    # -- the parser's side ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._refused:
            return
        self._in_head = self._receiving = True
        self._url = b""
        self._headers = {}
        self._header_count = 0
        self._body = b""
        self._set_deadline(self._server.limits.head_seconds)

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._refused:
            return
        self._header_count += 1
        if self._header_count > self._server.limits.max_headers:
            most = self._server.limits.max_headers
            self._refuse(ApiError(431, f"the request has more than {most} headers"))
            return
        if not self._in_head:
            return  # trailers carry nothing that is needed here
        key = USUAL_HEADERS.get(name) or name.decode("latin-1").lower()
        text = value.decode("latin-1")
        self._headers[key] = f"{self._headers[key]}, {text}" if key in self._headers else text

    def on_headers_complete(self) -> None:
        self._in_head = False
        if self._refused:
            return
        try:
            self._check_head()
        except ApiError as error:
            self._refuse(error)
            return
        # From here on the connection belongs to a known client.
        self._server.evictable.pop(self, None)
        self._set_deadline(self._server.limits.receive_seconds)
        if self._headers.get("expect", "").lower() == "100-continue" and not self._waiting:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _check_head(self) -> None:
        assert self._parser is not None
        if self._parser.get_http_version() not in ("1.1", "1.0"):
            raise ApiError(505, "only HTTP/1.1 and HTTP/1.0 are supported")
        path, _, query = self._url.decode("latin-1").partition("?")
        method = self._parser.get_method().decode("latin-1")
        self._head = head = Request(method, path, query, self._headers)  # without its body
        if self._server.admit is not None:
            self._server.admit(head)
        length = self._headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._server.limits.max_body_bytes:
            raise self._too_large()

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        size = len(body)
        self._overhead -= size
        self._charged += size
        self._server.buffered += size
        if not self._body:
            self._body = body
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += body
        if len(self._body) > self._server.limits.max_body_bytes:
            self._refuse(self._too_large())
        elif self._server.buffered > self._server.limits.max_buffered_bytes:
            busy = (("retry-after", "1"),)
            self._refuse(ApiError(503, "the server holds too many requests", code="full", headers=busy))

    def on_message_complete(self) -> None:
        self._receiving = False
        self._overhead = 0
        if self._refused:
            return
        assert self._parser is not None
        head = self._head
        request = Request(head.method, head.path, head.query, self._headers, bytes(self._body))
        keep_alive = self._parser.should_keep_alive()
        self._waiting.append(_QueuedRequest(request, keep_alive, self._parser.get_http_version() != "1.0"))
        self._body = b""
        if len(self._waiting) > _PIPELINED:
            self._refuse(ApiError(429, f"more than {_PIPELINED} requests wait for their answers"))

    def _too_large(self) -> ApiError:
        limit = self._server.limits.max_body_bytes
        return ApiError(413, f"the request's body is larger than the {limit} bytes that are accepted")

    # -- answers, in order ---------------------------------------------------------------------

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error in its turn, then close: the rest of the input cannot be trusted."""
        self._refused = True
        if self._server.on_refused is not None:
            self._server.on_refused(self._url.decode("latin-1").partition("?")[0], error)
        self._in_head = self._receiving = False
        self._body = self._unparsed = b""
        self._waiting.append(_QueuedRequest(_NO_REQUEST, keep_alive=False, chunked=False, refusal=error))
        self._start_next()

    def _start_next(self) -> None:
        """Answer the next whole request; parse on if there is none."""
        while self._task is None and not self._lost and not self._ending:
            if self._waiting:
                self._task = self._loop.create_task(self._answer(self._waiting.popleft()))
            elif self._unparsed:
                data, self._unparsed = self._unparsed, b""
                self._parse(data)
                if not self._unparsed:
                    self._transport.resume_reading()
                return
            else:
                if self._server.closing and not self._receiving:
                    self._transport.close()
                return

    async def _answer(self, queued: _QueuedRequest) -> None:
        close = True
        try:
            answer = await self._ask(queued)
            close = not queued.keep_alive or self._server.closing or (self._close_after and not self._waiting)
            if isinstance(answer, Response):
                self._send_whole(queued, answer, close=close)
            else:
                close = close or not queued.chunked  # HTTP/1.0 knows the end only by the close
                await self._send_stream(queued, answer, close=close)
            if self._writing_paused:
                await self._drain()  # no further request is taken from a client that does not read
        except asyncio.CancelledError:
            if not self._lost:
                self._transport.abort()
        except Exception:
            # The head is already sent: only a broken connection shows the client that the rest is missing.
            log.exception("a streamed answer broke off")
            self._transport.abort()
        finally:
            self._task = None
            self._release(len(queued.request.body))
            if self._lost:
                self._server.forget(self)
            elif close:
                self._end()
            else:
                self._set_deadline(self._server.limits.idle_seconds)
                if not self._receiving:
                    self._server.evictable[self] = None
                self._start_next()

    async def _ask(self, queued: _QueuedRequest) -> Answer:
        if queued.refusal is not None:
            return error_response(queued.refusal)
        try:
            return await self._server.handler(queued.request)
        except ApiError as error:
            return error_response(error)
        except Exception:
            log.exception("the handler of %s %s failed", queued.request.method, queued.request.path)
            return error_response(ApiError(500, "the server failed on this request; see its log"))

    def _send_whole(self, queued: _QueuedRequest, answer: Response, *, close: bool) -> None:
        if not self._lost:
            head = _encode_head(answer, f"content-length: {len(answer.body)}\r\n", close=close)
            self._transport.write(head if queued.request.method == "HEAD" else head + answer.body)
        if answer.after is not None:
            answer.after()

    async def _send_stream(self, queued: _QueuedRequest, answer: StreamResponse, *, close: bool) -> None:
        async with aclosing(answer.chunks) as chunks:
            framing = "transfer-encoding: chunked\r\n" if queued.chunked else ""
            self._transport.write(_encode_head(answer, framing, close=close))
            async for chunk in chunks:
                if chunk:
                    self._transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if queued.chunked else chunk)
                    if self._writing_paused:
                        await self._drain()
        if queued.chunked:
            self._transport.write(b"0\r\n\r\n")

    async def _drain(self) -> None:
        """Wait until the client has read enough for more to be sent; the timer ends it otherwise."""
        if self._writing_paused and not self._lost:
            self._drained = self._loop.create_future()
            await self._drained

    def _release_writer(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)

    def _release(self, size: int) -> None:
        """Release the buffer space of this connection's bodies."""
        size = min(size, self._charged)
        self._charged -= size
        self._server.buffered -= size

    # -- the end -------------------------------------------------------------------------------

    def close_when_idle(self) -> None:
        if self._task is None and not self._receiving:
            self._transport.close()

    def abort(self) -> None:
        """Cut the connection; its loss cancels the handler."""
        self._transport.abort()

    def _end(self) -> None:
        """Close once the response is read, or at the deadline. After a refusal the connection lingers: a
        client that is still sending would get a reset before it could read the response.
        """
        self._ending = True
        self._waiting.clear()
        self._unparsed = b""
        self._release(self._charged)
        if self._refused and self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
            self._transport.resume_reading()
            self._end_within(_LINGER_SECONDS)
        else:
            self._transport.close()
            self._end_within(self._server.limits.write_seconds)

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = self._loop.time() + seconds

    def _end_within(self, seconds: float) -> None:
        """Set a deadline that may be earlier than the one that the timer waits for."""
        self._set_deadline(seconds)
        if self._timer is not None and self._timer.when() > self._deadline:
            self._timer.cancel()
            self._timer = self._loop.call_at(self._deadline, self._check_deadline)

    def _check_deadline(self) -> None:
        """One timer per connection, moved only when it fires: cheaper than one per request."""
        now = self._loop.time()
        if self._task is not None and not self._writing_paused:
            self._set_deadline(self._server.limits.idle_seconds)  # the handler has deadlines of its own
        if now >= self._deadline:
            self._transport.abort()
            return
        wake_at = min(max(self._deadline, now + 0.05), now + self._server.limits.tick_seconds)
        self._timer = self._loop.call_at(wake_at, self._check_deadline)


def _encode_head(answer: Answer, framing: str, *, close: bool) -> bytes:
    lines = "".join([f"{name}: {value}\r\n" for name, value in answer.headers])
    date = _format_date(int(time.time()))
    ending = "connection: close\r\n\r\n" if close else "\r\n"
    return f"{_STATUS_LINES[answer.status]}date: {date}\r\n{lines}{framing}{ending}".encode("latin-1")


@lru_cache(maxsize=1)
def _format_date(second: int) -> str:
    return formatdate(second, usegmt=True)
