"""An HTTP client that follows no redirects and limits the time and the bytes of a request.

Input: a request, and its limits. Output: the answer whatever its status, or `NoAnswer`. What is meant for one
host (a key, a prompt, an alert) is not carried to another because a server says so: a redirect is an answer
as any other. The time is that of the whole request, however the server spreads its bytes over it; the bytes
are those of head and body together. Nothing is unpacked: we ask for no compression, so no answer grows while
it is read. Whatever bytes a server sends, the only error is `NoAnswer`.
"""

import http.client
import io
import socket
import ssl
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from random import Random
from typing import Any

from graftwork.records.base import MIB

LONGEST_ANSWER = 4 * MIB
_PIECE = 64 * 2**10


class NoAnswer(OSError):
    """The server cannot be reached, or its answer is malformed, too late or too long. The message contains
    neither the server's text nor the address.
    """


class HttpClient:
    """Threads may share one. Proxies are used as the environment names them, unless `proxies` is off.

    `context` says which certificates are trusted; None trusts those of the system.
    """

    def __init__(
        self,
        *,
        longest: int = LONGEST_ANSWER,
        proxies: bool = True,
        context: ssl.SSLContext | None = None,
    ) -> None:
        self._opener = urllib.request.OpenerDirector()
        for handler in (
            urllib.request.ProxyHandler(None if proxies else {}),
            urllib.request.UnknownHandler(),
            _HttpHandler(longest),
            _HttpsHandler(longest, context),
        ):
            self._opener.add_handler(handler)

    @contextmanager
    def send(self, request: urllib.request.Request, *, seconds: float) -> Iterator["HttpAnswer"]:
        """Return the answer, once its headers are there. `seconds` limits the request up to the last byte of
        the answer.
        """
        with _explained():
            response = self._opener.open(request, timeout=seconds)
        try:
            yield HttpAnswer(response)
        finally:
            response.close()


class HttpAnswer:
    """An answer whose body may still be arriving."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self._response = response
        self.status = response.status

    def header(self, name: str) -> str | None:
        return self._response.headers.get(name)

    def read(self, *, most: int | None = None) -> bytes:
        """Return the body: all of it, or at most the first `most` bytes."""
        pieces: list[bytes] = []
        size = 0
        for piece in self._pieces():
            pieces.append(piece)
            size += len(piece)
            if most is not None and size >= most:
                break
        return b"".join(pieces)[:most]

    def lines(self) -> Iterator[bytes]:
        """The lines of the body as they arrive."""
        partial: list[bytes] = []
        for piece in self._pieces():
            first, *following = piece.split(b"\n")
            partial.append(first)
            for line in following:
                yield b"".join(partial)
                partial = [line]
        if last := b"".join(partial):
            yield last

    def _pieces(self) -> Iterator[bytes]:
        # Never more at a time: a server that names a huge length would have us reserve as much.
        with _explained():
            while piece := self._response.read1(_PIECE):
                yield piece
            if self._response.length:
                raise NoAnswer(f"the answer ends {self._response.length:,} bytes too early")


@contextmanager
def _explained() -> Iterator[None]:
    """Convert errors of the libraries on hostile bytes. Not chained: those errors contain the bytes."""
    try:
        yield
    except NoAnswer:
        raise
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        reason_text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise NoAnswer(reason_text) from None
    except (http.client.HTTPException, ValueError, ArithmeticError) as error:
        raise NoAnswer(f"this is not an HTTP answer ({type(error).__name__})") from None


class _HttpHandler(urllib.request.HTTPHandler):
    def __init__(self, longest: int) -> None:
        super().__init__()
        self._longest = longest

    def http_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(partial(_Connection, longest=self._longest), req)


class _HttpsHandler(urllib.request.HTTPSHandler):
    def __init__(self, longest: int, context: ssl.SSLContext | None) -> None:
        super().__init__(context=context)
        self._longest = longest

    def https_open(self, req: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(
            partial(_SecureConnection, longest=self._longest),
            req,
            context=self._context,  # type: ignore[attr-defined]
        )


class _Limit:
    """Remaining seconds and bytes of one request."""

    def __init__(self, seconds: float, longest: int) -> None:
        self._seconds, self._until = seconds, time.monotonic() + seconds
        self._longest = self._bytes = longest

    def seconds_left(self) -> float:
        remaining = self._until - time.monotonic()
        if remaining <= 0:
            raise self.too_late()
        return remaining

    def count(self, received: int) -> None:
        self._bytes -= received
        if self._bytes < 0:
            raise NoAnswer(f"the answer is over {self._longest:,} bytes")

    def too_late(self) -> NoAnswer:
        return NoAnswer(f"no whole answer within {self._seconds:g} s")


class _Connection(http.client.HTTPConnection):
    def __init__(self, host: str, *, longest: int, timeout: float, **more: Any) -> None:
        super().__init__(host, timeout=timeout, **more)
        self._limit = _Limit(timeout, longest)
        self._create_connection = partial(_dial, self._limit)

    def connect(self) -> None:
        super().connect()
        self.sock: Any = _BoundedSocket(self.sock, self._limit)


class _SecureConnection(_Connection, http.client.HTTPSConnection):
    """Applies the limit to what HTTPSConnection has connected and encrypted."""


def _dial(limit: _Limit, address: tuple[str, int], *_more: object) -> socket.socket:
    """As `socket.create_connection`, but all addresses of a host share the time."""
    failure: OSError = OSError("the name has no address")
    for family, kind, protocol, _, target in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        connection = socket.socket(family, kind, protocol)
        try:
            connection.settimeout(limit.seconds_left())
            connection.connect(target)
            # What follows on the bare socket, as a TLS handshake, has what is left.
            connection.settimeout(limit.seconds_left())
        except OSError as error:
            connection.close()
            failure = error
        else:
            return connection
    raise failure


class _BoundedSocket:
    """The methods of a socket that `http.client` uses, within the limit."""

    def __init__(self, connection: socket.socket, limit: _Limit) -> None:
        self._connection, self._limit = connection, limit
        self._reader: _BoundedReader | None = None

    def sendall(self, data: bytes) -> None:
        self._connection.settimeout(self._limit.seconds_left())
        self._connection.sendall(data)

    def makefile(self, _mode: str = "rb", *_more: object) -> io.BufferedReader:
        self._reader = _BoundedReader(self._connection, self._limit)
        return io.BufferedReader(self._reader)

    def close(self) -> None:
        """The answer may still be read: the reader then closes the connection at its end."""
        if self._reader is None or self._reader.closed:
            self._connection.close()


class _BoundedReader(io.RawIOBase):
    def __init__(self, connection: socket.socket, limit: _Limit) -> None:
        self._connection, self._limit = connection, limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        self._connection.settimeout(self._limit.seconds_left())
        try:
            received = self._connection.recv_into(buffer)
        except TimeoutError:
            raise self._limit.too_late() from None
        self._limit.count(received)
        return received

    def close(self) -> None:
        if not self.closed:
            self._connection.close()
        super().close()


FIRST_PAUSE = 0.5
LONGEST_PAUSE = 60.0
LONGEST_PATIENCE = 600.0
"""Seconds after the first attempt in which another one may begin."""
_BUSY = frozenset({408, 409, 425, 429})
_NEVER = frozenset({501, 505})


class Retries:
    """The attempts of one request. `seconds` limits the time from the first attempt to the last."""

    def __init__(
        self,
        *,
        attempts: int,
        seconds: float = LONGEST_PATIENCE,
        first_pause: float = FIRST_PAUSE,
        longest_pause: float = LONGEST_PAUSE,
        chance: Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._most, self._seconds = attempts, seconds
        self._first, self._longest = first_pause, longest_pause
        self._chance, self._clock = chance or Random(), clock
        self._began = clock()
        self.failed = 0

    def after_failure(self, *, asked: float | None = None) -> float | None:
        """The pause before the next attempt; None if this one was the last.

        Pauses double and are spread, so that many clients do not come back at once. `asked` is what the
        server asked for.
        """
        self.failed += 1
        spread = 0.5 + 0.5 * self._chance.random()
        # The exponent is bounded too: a float has no room for 2 ** 2000.
        backoff = self._first * 2.0 ** min(self.failed - 1, 30) * spread
        pause = min(max(backoff, asked or 0.0), self._longest)
        in_time = self._clock() - self._began + pause <= self._seconds
        return pause if self.failed < self._most and in_time else None


def may_pass(status: int) -> bool:
    """Whether the same request may succeed later: the server is busy or broken."""
    return status in _BUSY or (status >= 500 and status not in _NEVER)


def retry_after(header: str | None) -> float | None:
    """The seconds of a `Retry-After`; a date or anything else falls back to our own pauses."""
    text = (header or "").strip()
    whole, _, part = text.partition(".")
    plain = whole.isdecimal() and text.isascii() and (not part or part.isdecimal()) and len(text) < 20
    return float(text) if plain else None
