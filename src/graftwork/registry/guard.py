"""Who may change the store when: many who add, or one who takes away.

In: the store's folder. Out: a lock for as long as a block runs. Whoever makes, promotes or leases a release
holds it together with others; who collects garbage holds it alone. The kernel frees it when its holder
dies, however it dies. Reaches over the processes of one machine.
"""

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graftwork.files.disk import explain_os_error, file_mode, make_folder
from graftwork.records.errors import Busy

LOCK = ".lock"
WAIT_SECONDS = 30.0
CANNOT_WRITE = (errno.EROFS, errno.EACCES, errno.EPERM)
HELD = (errno.EAGAIN, errno.EACCES)
"""What a lock answers that somebody else has. Any other answer says nothing about that."""


@contextmanager
def adding(root: Path, *, wait_seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Nothing is taken away from the store while the block runs."""
    descriptor = _open(root)
    if descriptor is None:
        # Nobody on this side can write here, so there is nobody to wait for.
        yield
        return
    try:
        _take(descriptor, fcntl.LOCK_SH, wait_seconds, root, "garbage is being collected")
        yield
    finally:
        os.close(descriptor)


@contextmanager
def alone(root: Path, *, wait_seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Nobody makes, promotes or leases a release while the block runs. Who cannot write is refused."""
    try:
        descriptor = _open_to_write(root)
    except OSError as error:
        raise explain_os_error(error, root / LOCK) from error
    try:
        _take(descriptor, fcntl.LOCK_EX, wait_seconds, root, "a release is being made, promoted or loaded")
        yield
    finally:
        os.close(descriptor)


def _open_to_write(root: Path) -> int:
    make_folder(root)
    return os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, file_mode(root))


def _open(root: Path) -> int | None:
    path = root / LOCK
    try:
        return _open_to_write(root)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise explain_os_error(error, path) from error
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _take(descriptor: int, how: int, wait_seconds: float, root: Path, doing: str) -> None:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in HELD:
                # No locks on this file system: then nobody can know what is in use.
                raise explain_os_error(error, root / LOCK) from error
            if time.monotonic() >= deadline:
                raise Busy(
                    "the store of releases is in use",
                    why=f"{doing} since more than {wait_seconds:.0f} s",
                    fix="try again when that is done (`graft status`)",
                    where=str(root),
                ) from error
            time.sleep(0.01)
        else:
            return
