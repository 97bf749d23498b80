"""Which releases running servers need: a lease holds them until its process ends.

In: the store's folder and the ids that a server loads. Out: a lease file that is locked as long as the
process lives; to whoever asks, the ids of all leases that are. A lease of a dead process counts no more.
"""

import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graftwork.files.whole import explain_os_error, write_whole
from graftwork.registry.guard import CANNOT_WRITE, adding
from graftwork.registry.names import require_name

LEASES = ".leases"
_LOCK, _IDS = ".lock", ".json"


class Lease:
    """The releases that this process needs. Add one before it is loaded."""

    def __init__(self, root: Path, name: str | None) -> None:
        self._root = root
        self._file = root / LEASES / f"{name}{_IDS}" if name else None
        self._ids: set[str] = set()

    def add(self, *release_ids: str) -> None:
        """From now on nobody takes these away. Waits while garbage is collected."""
        wanted = {require_name(one, kind="release id") for one in release_ids}
        if self._file is None or wanted <= self._ids:
            return
        with adding(self._root):
            self._ids |= wanted
            write_whole(self._file, json.dumps(sorted(self._ids)))


@contextmanager
def lease(root: Path) -> Iterator[Lease]:
    """A lease for as long as the block runs. Where nobody can write, nobody can take away: it is empty."""
    name = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    lock, ids = (root / LEASES / f"{name}{end}" for end in (_LOCK, _IDS))
    try:
        with adding(root):
            # Under the store's lock: a lease that is made but not yet held would look like a dead one's.
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise explain_os_error(error, lock) from error
        yield Lease(root, None)
        return
    try:
        yield Lease(root, name)
    finally:
        ids.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
        os.close(descriptor)


def leased(root: Path, *, tidy: bool = False) -> frozenset[str]:
    """The releases that running processes hold. `tidy` removes the leases of dead ones; only whoever holds
    the store alone may ask for that."""
    found: set[str] = set()
    for lock in sorted((root / LEASES).glob(f"*{_LOCK}")):
        ids = lock.with_name(lock.name.removesuffix(_LOCK) + _IDS)
        if _is_held(lock):
            found |= set(json.loads(ids.read_bytes())) if ids.exists() else set()
        elif tidy:
            ids.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
    return frozenset(found)


def _is_held(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
