"""A server that answers as it is scripted, byte by byte: no library keeps it from being rude."""

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

Script = Callable[["HostileServer", socket.socket], None]
"""Answers one request on an open connection. It may write for ever: it ends when the client is gone."""


class HostileServer:
    """Reads each request whole, then lets the script answer. `closing` is set when the test is over."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[bytes] = []
        self.sent = 0
        self.closing = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def write(self, connection: socket.socket, data: bytes) -> None:
        connection.sendall(data)
        self.sent += len(data)

    def drip(self, connection: socket.socket, data: bytes, *, pause: float = 0.05) -> None:
        """One byte at a time, each in time, the whole never."""
        for byte in data:
            self.write(connection, bytes([byte]))
            if self.closing.wait(pause):
                return

    def flood(self, connection: socket.socket, piece: bytes, *, most: int = 256 * 2**20) -> None:
        """The same bytes until the client hangs up, or it has taken far too many."""
        while self.sent < most and not self.closing.is_set():
            self.write(connection, piece)

    def close(self) -> None:
        self.closing.set()
        # Closing alone does not wake a thread that accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(300)

    def _accept(self) -> None:
        while not self.closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        # A client that hangs up on a hostile server is right.
        with connection, contextlib.suppress(OSError):
            connection.settimeout(20)
            self.requests.append(read_request(connection))
            self.script(self, connection)

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()


def read_request(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return data
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    length = next(
        (
            int(line.split(b":")[1])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length:")
        ),
        0,
    )
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


def reply(body: bytes, *, status: str = "200 OK", kind: str = "application/json", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body
