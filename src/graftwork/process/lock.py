"""One worker a folder. The kernel frees the lock when its holder dies, however it dies."""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graftwork.files.private import file_mode, make_folder
from graftwork.records.errors import Busy

LOCK_FILE = "lock"
_ASKED_SECONDS, _PAUSE_SECONDS = 10.0, 0.001
"""Asking who holds a folder shares its lock for a moment. A start waits for that, at most this long."""


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold the folder, or say at once who does."""
    make_folder(folder)
    path = folder / LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, file_mode(folder))
    try:
        if not _take(descriptor):
            holder = path.read_text().strip() or "unknown"
            raise Busy(
                f"another worker (process {holder}) works in this folder",
                why="two workers on one run would overwrite each other",
                fix="wait for it (`graft status`), or stop it first",
                where=str(folder),
            )
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)


def holder_of(folder: Path) -> int | None:
    """The process that holds the folder now, or None. Asking disturbs nobody who is about to hold it."""
    path = folder / LOCK_FILE
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        if not _is_held(descriptor):
            return None
        text = path.read_text().strip()
        return int(text) if text.isdigit() else -1
    finally:
        os.close(descriptor)


def _take(descriptor: int) -> bool:
    """Take the lock unless another worker has it; one that is only asked about is free in a moment."""
    deadline = time.monotonic() + _ASKED_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if _is_held(descriptor) or time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_SECONDS)
        else:
            return True


def _is_held(descriptor: int) -> bool:
    """Whether a worker has the lock. Those who ask share it, so they do not take each other for one."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False
