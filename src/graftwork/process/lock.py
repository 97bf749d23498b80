"""One worker a folder. The kernel frees the lock when its holder dies, however it dies."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graftwork.records.errors import Busy

LOCK_FILE = "lock"


@contextmanager
def hold(folder: Path) -> Iterator[None]:
    """Hold the folder, or say at once who does."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / LOCK_FILE
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = path.read_text().strip() or "unknown"
            raise Busy(
                f"another worker (process {holder}) works in this folder",
                why="two workers on one run would overwrite each other",
                fix="wait for it (`graft status`), or stop it first",
                where=str(folder),
            ) from error
        os.ftruncate(descriptor, 0)
        os.write(descriptor, str(os.getpid()).encode())
        yield
    finally:
        os.close(descriptor)


def holder_of(folder: Path) -> int | None:
    """The process that holds the folder now, or None."""
    path = folder / LOCK_FILE
    if not path.exists():
        return None
    descriptor = os.open(path, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = path.read_text().strip()
        return int(text) if text.isdigit() else -1
    finally:
        os.close(descriptor)
    return None
