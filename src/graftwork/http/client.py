"""A minimal HTTP/1.1 client for one server: on a unix socket, a loopback port, or at any URL, with TLS.

Keeps idle connections. Closing a reply before its end closes its connection, which cancels the work in the
server. Follows no redirects. A key goes into a header only.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, cast
from urllib.parse import urlsplit

import orjson

from graftwork.http.messages import JSON_TYPE, Headers
from graftwork.http.server import httptools

_BUFFER_BYTES = 64 * 1024
_HEAD_BYTES = 256 * 1024
"""Limit on headers, interim responses and trailers of one reply."""
_FRAMING = 16
"""Bytes of chunk headers allowed per byte of the body; a chunk of one byte costs five."""


class Client:
    """Ask the server at `path` (a unix socket), or at 127.0.0.1 and `port`."""

    def __init__(
        self, *, path: str | None = None, port: int = 0, keep: int = 64, host: str = "localhost"
    ) -> None:
        self._host = host
        self._path = path
        self._port = port
        self._keep = keep
        self._idle: list[Link] = []
        self._busy: set[Link] = set()

    async def send(
        self, method: str, target: str, *, body: bytes = b"", headers: Headers = ()
    ) -> "ClientReply":
        """Send one request; returns once the headers of the reply have arrived. Raises OSError."""
        lines = "".join([f"{name}: {value}\r\n" for name, value in headers]) if headers else ""
        head = (
            f"{method} {target} HTTP/1.1\r\nhost: {self._host}\r\n{lines}content-length: {len(body)}\r\n\r\n"
        )
        data = head.encode("latin-1") + body
        while self._idle:
            link = self._idle.pop()
            if link.usable:
                try:
                    return await self._exchange(link, data)
                except StaleConnection:
                    # The server closed it while it was idle and has not read a byte: ask again.
                    continue
        return await self._exchange(await self._connect(), data)

    async def fetch(
        self, method: str, target: str, *, body: bytes = b"", seconds: float = 10.0
    ) -> tuple[int, bytes]:
        """Status and whole body of a small reply. Raises TimeoutError, an OSError, after `seconds`."""
        async with asyncio.timeout(seconds):
            reply = await self.send(method, target, body=body)
            return reply.status, await reply.read()

    def close(self) -> None:
        for link in self._idle:
            link.close()
        self._idle.clear()

    def abort(self) -> None:
        """Close all connections: pending replies raise OSError."""
        self.close()
        for link in list(self._busy):
            link.abort()

    async def _connect(self) -> "Link":
        loop = asyncio.get_running_loop()
        if self._path is not None:
            _, link = await loop.create_unix_connection(Link, self._path)
        else:
            _, link = await loop.create_connection(Link, "127.0.0.1", self._port)
        return link

    async def _exchange(self, link: "Link", data: bytes) -> "ClientReply":
        self._busy.add(link)
        try:
            link.start(data)
            await link.head_ready()
        except BaseException:
            self.drop(link)
            raise
        return ClientReply(self, link)

    def drop(self, link: "Link") -> None:
        self._busy.discard(link)
        link.close()

    def give_back(self, link: "Link") -> None:
        self._busy.discard(link)
        if link.usable and len(self._idle) < self._keep:
            self._idle.append(link)
        else:
            link.close()


class StaleConnection(ConnectionError):
    """A kept connection was closed by the server before it answered."""


class ClientReply:
    """A reply whose headers have arrived. Read it to the end, or close it."""

    def __init__(self, client: Client, link: "Link") -> None:
        self._client = client
        self._link: Link | None = link
        self.status = link.status
        self.headers = link.headers
        self.rest = b""
        """The rest after the last line of `next_lines`."""

    async def read(self, *, most: int | None = None) -> bytes:
        """Read the whole body, of at most `most` bytes. Not a generator, since this is the hot path."""
        pieces: list[bytes] = []
        size = 0
        try:
            while self._link is not None:
                piece = await self._link.next_piece()
                if piece is None:
                    self._give_back()
                    break
                pieces.append(piece)
                size += len(piece)
                if most is not None and size > most:
                    raise ConnectionError(f"the server's answer is too large: more than {most} bytes")
        finally:
            self.close()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def next_chunk(self) -> bytes | None:
        """The next bytes of the body; None at its end."""
        if self._link is None:
            return None
        piece = await self._link.next_piece()
        if piece is None:
            self._give_back()
        return piece

    async def next_lines(self) -> list[bytes] | None:
        """Return the lines completed by the next bytes of the body, possibly none; None at its end."""
        chunk = await self.next_chunk()
        if chunk is None:
            return None
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        return lines

    async def events(self) -> AsyncIterator[bytes]:
        """Yield the data of server-sent events, except the one that marks the end."""
        while (lines := await self.next_lines()) is not None:
            for line in lines:
                if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                    yield data

    def _give_back(self) -> None:
        if self._link is not None:
            self._client.give_back(self._link)
            self._link = None

    def close(self) -> None:
        if self._link is not None:
            self._client.drop(self._link)
            self._link = None


class Link(asyncio.Protocol):
    """One connection; httptools calls the `on_…` methods while it parses the reply."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._served = 0
        self._closed = self._aborted = False
        self._parser: httptools.HttpResponseParser | None = httptools.HttpResponseParser(self)
        self._reset()

    def _reset(self) -> None:
        self._pieces: deque[bytes] = deque()
        self._buffered = 0
        self._paused = False
        self._head_done = False
        self._done = False
        self._is_interim = False
        self._other_bytes = self._body_bytes = 0
        self._keep_alive = False
        self._busy = False
        self.status = 0
        self.headers: dict[str, str] = {}

    @property
    def usable(self) -> bool:
        return not self._closed and not self._busy

    def start(self, data: bytes) -> None:
        self._reset()
        self._busy = True
        if self._closed:
            raise StaleConnection("the connection is closed")
        self._transport.write(data)

    async def head_ready(self) -> None:
        while not self._head_done:
            if self._error is not None:
                raise self._error
            await self._wait()

    async def next_piece(self) -> bytes | None:
        """The next bytes of the body; None at its end."""
        while not self._pieces:
            if self._done:
                self._served += 1
                self._busy = not self._keep_alive
                return None
            if self._error is not None:
                raise self._error
            await self._wait()
        piece = self._pieces.popleft()
        self._buffered -= len(piece)
        if self._paused and self._buffered < _BUFFER_BYTES:
            self._paused = False
            self._transport.resume_reading()
        return piece

    def close(self) -> None:
        self._closed = True
        self._transport.close()

    def abort(self) -> None:
        self._closed = self._aborted = True
        self._transport.abort()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- the transport's side ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._closed = True
        self._parser = None  # it holds our methods: without this, the pair would wait for the cycle collector
        if error is None and not self._aborted and self._ends_with_connection():
            self._done = True
        if self._busy and not self._done and self._error is None:
            is_stale = self._served and not self._head_done and not self._aborted
            kind = StaleConnection if is_stale else ConnectionResetError
            self._error = kind(f"the server closed the connection before its answer was whole ({error})")
        self._wake()

    def _ends_with_connection(self) -> bool:
        """Whether the reply states no length and ends with the connection."""
        framed = "content-length" in self.headers or "transfer-encoding" in self.headers
        return self._head_done and not framed and self._error is None

    def data_received(self, data: bytes) -> None:
        assert self._parser is not None
        self._other_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._error = ConnectionError(f"the server does not answer in HTTP/1.1: {error}")
            self.close()
        if self._other_bytes > _HEAD_BYTES + _FRAMING * self._body_bytes and not self._done:
            self._error = ConnectionError("the head or the trailers of the server's answer are too large")
            self.close()
        if self._buffered > _BUFFER_BYTES and not self._paused and not self._closed:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    # -- the parser's side ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._done:
            # Not asked for. The next request on this connection would get it as its answer.
            raise ConnectionError("the server sent a second answer")

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.status = self._parser.get_status_code()
        self._is_interim = self.status < 200
        if self._is_interim:
            self.headers = {}
        else:
            self._head_done = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._buffered += len(body)
        self._other_bytes -= len(body)
        self._body_bytes += len(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._is_interim:  # `100 Continue` and the like: the answer is still to come
            return
        self._keep_alive = self._parser.should_keep_alive()
        self._done = True


class UpstreamClient(Client):
    """Targets are relative to the URL's path: `/chat/completions` of `https://host/v1`."""

    def __init__(self, url: str, *, key: str | None = None) -> None:
        parts = urlsplit(url.rstrip("/"))
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._name = parts.hostname or "localhost"
        self._at = parts.port or (443 if self._tls else 80)
        self._path_prefix = parts.path
        self._key: Headers = (("authorization", f"Bearer {key}"),) if key else ()
        self.secrets = (key,) if key else ()
        """Texts that no message to a client may contain."""
        super().__init__(host=parts.netloc)

    async def _connect(self) -> Link:
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(Link, self._name, self._at, ssl=self._tls)
        return link

    async def post(
        self, target: str, body: dict[str, Any], *, from_root: bool = False, headers: Headers = ()
    ) -> ClientReply:
        """`from_root` leaves out the path of the URL."""
        path = target if from_root else f"{self._path_prefix}{target}"
        return await self.send(
            "POST", path, body=orjson.dumps(body), headers=(JSON_TYPE, *self._key, *headers)
        )

    async def get(self, target: str, *, from_root: bool = False) -> ClientReply:
        path = target if from_root else f"{self._path_prefix}{target}"
        return await self.send("GET", path, headers=self._key)
