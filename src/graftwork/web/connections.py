"""The page's connections: uvicorn's HTTP/1.1, with a limit on how long a request may take to arrive.

uvicorn waits for the rest of a head or a body for ever, so half requests would hold their connections.
"""

import asyncio

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol


class TimedConnection(H11Protocol):
    """Ends a connection whose next request is not complete in time. Answers may take as long as they need."""

    receive_seconds = 15.0
    _limit: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def _expect_request(self) -> None:
        self._stop_waiting()
        if not self.transport.is_closing():
            self._limit = self.loop.call_later(self.receive_seconds, self._end_if_receiving)

    def _stop_waiting(self) -> None:
        if self._limit is not None:
            self._limit.cancel()

    def _end_if_receiving(self) -> None:
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self.transport.abort()
