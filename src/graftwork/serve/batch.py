"""Collects requests that can be answered together, and answers them in one thread.

In: tickets, each with a key; those with the same key may share a batch. Out: calls of `answer` with
a list of tickets, one call at a time; it emits pieces into them. Tickets whose caller left are
passed over. Knows nothing of models.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable

from graftwork.serve.messages import ApiError
from graftwork.serve.protocol import GenerateRequest, Piece

log = logging.getLogger(__name__)


class Ticket:
    """One request that waits for its answer. `emit` and `fail` may be called from any thread."""

    def __init__(self, request: GenerateRequest, *, key: Hashable, prompt: list[int]) -> None:
        self.request = request
        self.key = key
        self.prompt = prompt
        self.cancelled = False
        self.ended = False
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[Piece | ApiError] = asyncio.Queue()

    def emit(self, piece: Piece) -> None:
        self.ended = self.ended or piece.finish_reason is not None
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    def fail(self, error: ApiError) -> None:
        self.ended = True
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, error)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """The answer; leaving early cancels the ticket."""
        try:
            while True:
                piece = await self._pieces.get()
                if isinstance(piece, ApiError):
                    raise piece
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            self.cancelled = True


class Batcher:
    """Start it, submit tickets, close it."""

    def __init__(
        self,
        answer: Callable[[list[Ticket]], None],
        *,
        batch_size: int,
        wait_seconds: float,
        queue_limit: int,
    ) -> None:
        self._answer = answer
        self._batch_size = batch_size
        self._wait_seconds = wait_seconds
        self._queue_limit = queue_limit
        self._waiting: deque[Ticket] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self.answered = 0
        self.running = False

    def start(self) -> None:
        self._thread.start()

    def submit(self, ticket: Ticket) -> None:
        with self._changed:
            if len(self._waiting) >= self._queue_limit:
                self._waiting = deque(t for t in self._waiting if not t.cancelled)
            if len(self._waiting) >= self._queue_limit:
                raise ApiError(429, "the engine is full; try again soon", code="full")
            self._waiting.append(ticket)
            self._changed.notify()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def close(self, *, seconds: float) -> None:
        """Answer nothing more; the batch that runs may finish for `seconds`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while batch := self._next_batch():
            self.running = True
            try:
                self._answer(batch)
            except Exception:
                # One bad batch is the business of its callers; the next one may be fine.
                log.exception("a batch of %d failed", len(batch))
            for ticket in batch:
                if not ticket.ended:
                    ticket.fail(ApiError(500, "the engine failed on this request; its log says why"))
            self.answered += len(batch)
            self.running = False

    def _next_batch(self) -> list[Ticket]:
        """The oldest ticket and its like; empty when closed."""
        with self._changed:
            while True:
                while self._waiting and self._waiting[0].cancelled:
                    self._waiting.popleft()
                if self._closed:
                    return []
                if self._waiting:
                    break
                self._changed.wait()
            key = self._waiting[0].key
            deadline = time.monotonic() + self._wait_seconds
            while not self._closed and self._count(key) < self._batch_size:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            return self._take(key)

    def _count(self, key: Hashable) -> int:
        return sum(1 for ticket in self._waiting if ticket.key == key and not ticket.cancelled)

    def _take(self, key: Hashable) -> list[Ticket]:
        batch: list[Ticket] = []
        kept: deque[Ticket] = deque()
        for ticket in self._waiting:
            if ticket.key == key and not ticket.cancelled and len(batch) < self._batch_size:
                batch.append(ticket)
            elif not ticket.cancelled:
                kept.append(ticket)
        self._waiting = kept
        return batch
