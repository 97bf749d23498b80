"""Which releases running servers need: a lease holds them until its process ends.

In: the store's folder and the ids that a server loads. Out: a lease file that is locked as long as the
process lives; to whoever asks, the ids of all leases that are. A lease of a dead process counts no more.

Who cannot write the store cannot leave a file there. It holds the manifests of its releases locked instead,
for which it needs to read them only: by that, too, whoever collects garbage sees it.
"""

import fcntl
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from graftwork.files.disk import explain_os_error, file_mode, make_folder, write_atomic
from graftwork.registry.beside import MANIFEST
from graftwork.registry.guard import CANNOT_WRITE, HELD, adding
from graftwork.registry.names import require_name

LEASES = ".leases"
_LOCK, _IDS = ".lock", ".json"


class Lease:
    """The releases that this process needs. Add one before it is loaded."""

    def __init__(self, root: Path, file: Path | None, locks: ExitStack) -> None:
        self._root = root
        self._file = file
        self._locks = locks
        self._ids: set[str] = set()

    def add(self, *release_ids: str) -> None:
        """From now on nobody takes these away. Waits while garbage is collected."""
        wanted = {require_name(one, kind="release id") for one in release_ids} - self._ids
        if not wanted:
            return
        with adding(self._root):
            if self._file is not None:
                self._ids |= wanted
                write_atomic(self._file, json.dumps(sorted(self._ids)))
            else:
                self._ids |= {one for one in wanted if self._lock(self._root / one / MANIFEST)}

    def _lock(self, manifest: Path) -> bool:
        """Whether it could be held. What is not there is not held: whoever loads it is told so."""
        try:
            descriptor = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise explain_os_error(error, manifest) from error
        with ExitStack() as unless_held:
            unless_held.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                # Whoever took it away meanwhile gave the folder another name first.
                if manifest.stat().st_ino != os.fstat(descriptor).st_ino:
                    return False
            except FileNotFoundError:
                return False
            except OSError as error:
                raise explain_os_error(error, manifest) from error
            unless_held.pop_all()
        self._locks.callback(os.close, descriptor)
        return True


@contextmanager
def lease(root: Path) -> Iterator[Lease]:
    """A lease for as long as the block runs: a file, or where none can be written, locks on manifests."""
    name = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    lock, ids = (root / LEASES / f"{name}{end}" for end in (_LOCK, _IDS))
    with ExitStack() as held:
        try:
            with adding(root):
                # Under the store's lock: a lease that is made but not yet held would look like a dead one's.
                make_folder(lock.parent)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                descriptor = os.open(lock, flags, file_mode(lock.parent))
                held.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in CANNOT_WRITE:
                raise explain_os_error(error, lock) from error
            yield Lease(root, None, held)
            return
        held.callback(lock.unlink, missing_ok=True)
        held.callback(ids.unlink, missing_ok=True)
        yield Lease(root, ids, held)


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
    except OSError as error:
        if error.errno not in HELD:
            raise explain_os_error(error, lock) from error
        return True
    finally:
        os.close(descriptor)
    return False
