"""Calls of libraries that may never return, made in a thread of their own.

In: a call and a limit of seconds. Out: what it returned or raised; TimeoutError once the limit is reached.
The timeouts of HTTP libraries begin anew with every byte that arrives: a server that drips holds them for
ever. A call that is given up goes on in its thread, which does not keep the process from ending.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class Apart:
    """Calls one after the other, all in the same thread."""

    def __init__(self, name: str) -> None:
        self._left: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True, name=name)
        self._thread.start()

    def call(self, work: Callable[[], T], *, seconds: float) -> T:
        future: Future[T] = Future()
        self._left.put((work, future))
        try:
            return future.result(timeout=seconds)
        except TimeoutError:
            if future.done():
                # It is the call's own.
                raise
            raise TimeoutError(f"no answer within {seconds:g} s") from None

    def _work(self) -> None:
        while True:
            work, future = self._left.get()
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
