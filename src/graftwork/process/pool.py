"""The same work on many pieces, on all cores.

In: pieces, and a function of the module level that works on one. Out: the results, in the order of
the pieces. A few pieces are worked on right here: small work does not wait for processes to start. A
Ctrl-C reaches this process alone; the others end with it. Does not know what the work is.
"""

import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import chain, islice
from queue import SimpleQueue
from typing import Any, TypeVar

from graftwork.process.worker import tie_to_parent
from graftwork.records.errors import EnvironmentLacks

Piece = TypeVar("Piece")
Result = TypeVar("Result")

WAITING_PER_PROCESS = 2
"""Enough that none is idle, and few enough that pieces do not pile up in memory."""
FEW_PIECES = 4
"""Fewer are done here: a new process takes as long for its imports as for a piece."""


def count_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def work_in_order(
    pieces: Iterable[Piece],
    work: Callable[[Piece], Result],
    *,
    prepare: Callable[..., None] | None = None,
    with_arguments: tuple[Any, ...] = (),
    processes: int | None = None,
) -> Iterator[Result]:
    """`prepare(*with_arguments)` is called once in each process before its first piece."""
    count = count_cores() if processes is None else processes
    waiting = iter(pieces)
    first = list(islice(waiting, FEW_PIECES))
    if len(first) < FEW_PIECES or count < 2:
        if prepare is not None and first:
            prepare(*with_arguments)
        yield from map(work, chain(first, waiting))
        return
    pool = ProcessPoolExecutor(
        count,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin,
        initargs=(os.getpid(), prepare, with_arguments),
    )
    left = chain(first, waiting)
    try:
        running = deque(_submit(pool, work, piece) for piece in islice(left, count * WAITING_PER_PROCESS))
        while running:
            yield running.popleft().result()
            running.extend(_submit(pool, work, piece) for piece in islice(left, 1))
    except BrokenProcessPool as error:
        raise EnvironmentLacks(
            "a worker process was killed",
            why="most often the machine ran out of memory",
            fix="run the same command again: what was finished is kept; free some memory first",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _submit(pool: ProcessPoolExecutor, work: Callable[[Piece], Result], piece: Piece) -> Future[Result]:
    """Processes start here and ignore Ctrl-C from the first moment: `_begin` runs only after imports."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(work, piece)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(parent: int, prepare: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    tie_to_parent(parent)
    if prepare is not None:
        prepare(*arguments)


T = TypeVar("T")


class CallThread:
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
