"""The thread that decodes: requests join and leave it at every step.

In: tickets from the event loop. Out: their replies, piece by piece. A ticket whose caller left frees its slot
at the next step. Knows neither HTTP nor what a model is.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from graftwork.serve.engine_protocol import ReplyPiece
from graftwork.serve.http_messages import ApiError

if TYPE_CHECKING:
    from graftwork.model.generate.requests import GenerationRequest

log = logging.getLogger(__name__)


class Ticket:
    """A request that waits for its reply. `emit` and `fail` may be called from any thread."""

    def __init__(self) -> None:
        self.cancelled = False
        self.ended = False
        self._arrived = time.monotonic()
        self.started: float | None = None
        """When the step began in which it was started."""
        self._loop = asyncio.get_running_loop()
        self._pieces: asyncio.Queue[ReplyPiece | ApiError] = asyncio.Queue()

    @property
    def queue_ms(self) -> float | None:
        return None if self.started is None else 1000 * (self.started - self._arrived)

    def emit(self, piece: ReplyPiece) -> None:
        self.ended = self.ended or piece.finish_reason is not None
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, piece)

    def fail(self, error: ApiError) -> None:
        self.ended = True
        self._loop.call_soon_threadsafe(self._pieces.put_nowait, error)

    async def pieces(self) -> AsyncGenerator[ReplyPiece, None]:
        """The reply; leaving early cancels the ticket."""
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


class SubmittedRequest:
    """A ticket, what the decoder gets for it, and what to do when it is answered."""

    def __init__(
        self, ticket: Ticket, generation: "GenerationRequest", *, finish: Callable[[str], None]
    ) -> None:
        self.ticket, self.generation, self.finish = ticket, generation, finish


class StepDecoder(Protocol):
    """What the loop needs of a decoder."""

    slots: int

    @property
    def busy(self) -> bool: ...

    @property
    def waiting(self) -> int: ...

    def submit(self, request: "GenerationRequest") -> None: ...

    def step(self) -> None: ...

    def reset(self) -> "list[GenerationRequest]": ...


class RequestLoop:
    """Start it, submit requests, close it."""

    def __init__(self, decoder: StepDecoder, *, wait_seconds: float, queue_limit: int) -> None:
        self._decoder = decoder
        self._wait_seconds = wait_seconds
        self._queue_limit = queue_limit
        self._arrived: deque[SubmittedRequest] = deque()
        self._tasks: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._open: list[SubmittedRequest] = []
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="decoding", daemon=True)
        self.answered = 0
        self.steps = 0

    def start(self) -> None:
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._arrived) + self._decoder.waiting

    @property
    def running(self) -> bool:
        return bool(self._open)

    def submit(self, request: SubmittedRequest) -> None:
        with self._changed:
            if self.waiting >= self._queue_limit:
                self._arrived = deque(r for r in self._arrived if not r.ticket.cancelled)
            if self.waiting >= self._queue_limit:
                raise ApiError(429, "the engine is full; try again soon", code="full")
            self._arrived.append(request)
            self._changed.notify()

    def call_between(self, task: Callable[[], None]) -> "Future[None]":
        """Call it in the thread when no request runs; new ones wait meanwhile."""
        done: Future[None] = Future()
        with self._changed:
            self._tasks.append((task, done))
            self._changed.notify()
        return done

    def close(self, *, seconds: float) -> None:
        """Start nothing more; what runs may finish for `seconds`."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(seconds)

    def _run(self) -> None:
        while self._wait_for_work():
            if not self._open:
                self._call_tasks()
            self._take_arrived()
            if self._open:
                self._step()
        for request in self._arrived:
            request.ticket.fail(ApiError(503, "the engine is stopping", code="stopping"))

    def _wait_for_work(self) -> bool:
        """Whether there is something to do; False when closed and done."""
        with self._changed:
            while not (self._open or self._arrived or self._tasks):
                if self._closed:
                    return False
                self._changed.wait()
            if self._closed and not self._open:
                return False
            if not self._open and self._arrived:
                # Prompts that arrive together are read together.
                deadline = time.monotonic() + self._wait_seconds
                while not self._closed and len(self._arrived) < self._decoder.slots:
                    left = deadline - time.monotonic()
                    if left <= 0 or not self._changed.wait(left):
                        break
            return True

    def _call_tasks(self) -> None:
        while self._tasks:
            task, done = self._tasks.popleft()
            try:
                task()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    def _take_arrived(self) -> None:
        with self._changed:
            while self._arrived and not self._tasks and not self._closed:
                request = self._arrived.popleft()
                if request.ticket.cancelled:
                    continue
                self._open.append(request)
                self._decoder.submit(request.generation)

    def _step(self) -> None:
        now = time.monotonic()
        for request in self._open:
            if not request.generation.launched:
                request.ticket.started = now
        try:
            self._decoder.step()
        except Exception:
            # Those that ran are the business of their callers; the next ones may be fine.
            log.exception("a step with %d requests failed", len(self._open))
            self._decoder.reset()
            for request in self._open:
                request.generation.end("stop")
                if not request.ticket.ended:
                    request.ticket.fail(ApiError(500, "the engine failed on this request; see its log"))
        self.steps += 1
        for request in [request for request in self._open if request.generation.done]:
            self._open.remove(request)
            self.answered += 1
            if not request.ticket.ended:
                request.finish(request.generation.result.finish_reason)
