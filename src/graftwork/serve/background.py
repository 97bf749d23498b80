"""Work in threads that block nothing else: items in batches, and calls that may hang. Bounded."""

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class BackgroundBatches(Generic[T]):
    """`work` gets what was offered since it was called last. Items beyond `limit` are dropped and counted."""

    def __init__(
        self, work: Callable[[list[T]], None], *, name: str, limit: int = 4096, seconds: float = 0.2
    ) -> None:
        self._work = work
        self._limit = limit
        self._seconds = seconds
        self._waiting: deque[T] = deque()
        self._wake = threading.Event()
        self.closing = threading.Event()
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def offer(self, item: T) -> None:
        """Returns at once in every case."""
        if len(self._waiting) >= self._limit:
            self.dropped += 1
            return
        self._waiting.append(item)
        if not self._wake.is_set():
            self._wake.set()

    def close(self, *, seconds: float = 5.0) -> None:
        """Work on what waits, then end; gives up after `seconds`."""
        self.closing.set()
        self._wake.set()
        self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self.closing.wait(self._seconds)
            self._wake.clear()
            ending = self.closing.is_set()
            batch = [self._waiting.popleft() for _ in range(len(self._waiting))]
            try:
                if batch:
                    self._work(batch)
            except Exception as error:
                log.warning("%s: %s", self._thread.name, type(error).__name__)
            if ending and not self._waiting:
                return


class DaemonThreads(Generic[T]):
    """Runs calls that may hang: they block neither asyncio's threads nor the end of the process."""

    def __init__(self, most: int, *, name: str) -> None:
        self._most, self._name = most, name
        self._waiting: dict[Future[T], Callable[[], T]] = {}
        self._changed = threading.Condition()
        self._started = self._busy = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Waits for nothing. A call that is cancelled before it runs is forgotten at once."""
        future: Future[T] = Future()
        with self._changed:
            self._waiting[future] = work
            if len(self._waiting) > self._started - self._busy and self._started < self._most:
                self._started += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._changed.notify()
        # Where all threads hang, nobody would ever take it out.
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[T]) -> None:
        if future.cancelled():
            with self._changed:
                self._waiting.pop(future, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                future = next(iter(self._waiting))
                work = self._waiting.pop(future)
                self._busy += 1
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del future, work
            with self._changed:
                self._busy -= 1
