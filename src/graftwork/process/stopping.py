"""SIGTERM asks a command to stop in good order: what is done is kept, and the exit code says "resume me".

It takes the same way out as Ctrl-C, which every step survives; only the words and the code differ.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from graftwork.records.errors import Interrupted, StoppedInOrder

_asked = threading.Event()


@contextmanager
def stoppable() -> Iterator[None]:
    """Around the work of a command, in the main thread; elsewhere it changes nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _asked.clear()
    before = signal.signal(signal.SIGTERM, _ask)
    try:
        yield
    except KeyboardInterrupt as interrupt:
        if _asked.is_set():
            raise how_it_ended() from interrupt
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def how_it_ended() -> StoppedInOrder | Interrupted:
    """The error for work that was broken off: by whoever asked to stop, or by Ctrl-C."""
    fix = "run the same command again: it goes on from the last good point"
    if _asked.is_set():
        return StoppedInOrder("stopped in good order, as asked", fix=fix)
    return Interrupted("interrupted", fix=fix)


def _ask(_signal: int, _frame: FrameType | None) -> None:
    # Asked twice, it is on its way out already.
    if not _asked.is_set():
        _asked.set()
        raise KeyboardInterrupt
