"""Who may change the store when: many who add, or one who takes away.

In: the store's folder. Out: a lock for as long as a block runs. Whoever makes, promotes or leases a release
holds it together with others; who collects garbage holds it alone. The kernel frees it when its holder
dies, however it dies. Reaches over the processes of one machine.
"""

import errno
import fcntl
import json
import os
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from graftwork.files.disk import explain_os_error, file_mode, make_folder, write_atomic
from graftwork.records.errors import Busy
from graftwork.registry.folder import MANIFEST
from graftwork.registry.names import require_name

LOCK = ".lock"
WAIT_SECONDS = 30.0
READ_ONLY_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM)
LOCKED_ERRNOS = (errno.EAGAIN, errno.EACCES)
"""What a lock answers that somebody else has. Any other answer says nothing about that."""


@contextmanager
def shared_lock(root: Path, *, wait_seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Nothing is taken away from the store while the block runs."""
    descriptor = _open(root)
    if descriptor is None:
        # Nobody on this side can write here, so there is nobody to wait for.
        yield
        return
    try:
        _acquire(descriptor, fcntl.LOCK_SH, wait_seconds, root, "garbage is being collected")
        yield
    finally:
        os.close(descriptor)


@contextmanager
def exclusive_lock(root: Path, *, wait_seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Nobody makes, promotes or leases a release while the block runs. Who cannot write is refused."""
    try:
        descriptor = _open_writable(root)
    except OSError as error:
        raise explain_os_error(error, root / LOCK) from error
    try:
        _acquire(descriptor, fcntl.LOCK_EX, wait_seconds, root, "a release is being made, promoted or loaded")
        yield
    finally:
        os.close(descriptor)


def _open_writable(root: Path) -> int:
    make_folder(root)
    return os.open(root / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, file_mode(root))


def _open(root: Path) -> int | None:
    path = root / LOCK
    try:
        return _open_writable(root)
    except OSError as error:
        if error.errno not in READ_ONLY_ERRNOS:
            raise explain_os_error(error, path) from error
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None


def _acquire(descriptor: int, how: int, wait_seconds: float, root: Path, doing: str) -> None:
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in LOCKED_ERRNOS:
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


LockState = Literal["free", "held", "unseen", "unreadable"]
"""`unseen`: the file system does not say. `unreadable`: the manifest cannot even be opened."""
_OWNER_WRITES, _WRITE = 0o200, 0o222


class ManifestLocks(NamedTuple):
    """The releases that readers hold, those of which it cannot be known, and those that cannot be opened."""

    held: frozenset[str]
    unseen: frozenset[str]
    unreadable: frozenset[str]


def find_manifest_locks(root: Path, release_ids: Iterable[str]) -> ManifestLocks:
    """Who holds what, at this moment."""
    found: dict[LockState, set[str]] = {"free": set(), "held": set(), "unseen": set(), "unreadable": set()}
    for one in release_ids:
        with lock_manifest(root / one / MANIFEST) as hold:
            found[hold].add(one)
    return ManifestLocks(*(frozenset(found[hold]) for hold in ("held", "unseen", "unreadable")))


@contextmanager
def lock_manifest(manifest: Path) -> Iterator[LockState]:
    """Whether somebody holds this manifest; where it is free, nobody can while the block runs."""
    try:
        descriptor = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield "free"
        return
    except OSError:
        yield "unreadable"
        return
    try:
        hold = _lock(descriptor)
        if hold == "unseen":
            os.close(descriptor)
            descriptor = -1
            descriptor, hold = _lock_as_owner(manifest)
        yield hold
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _lock(descriptor: int) -> LockState:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Only these two say that somebody has it; any other says that it cannot be found out.
        return "held" if error.errno in LOCKED_ERRNOS else "unseen"
    return "free"


def _lock_as_owner(manifest: Path) -> tuple[int, LockState]:
    """The same on a file that is open for writing. Nothing is written."""
    try:
        mode = stat.S_IMODE(manifest.stat().st_mode)
        manifest.chmod(mode | _OWNER_WRITES)
        try:
            descriptor = os.open(manifest, os.O_RDWR | os.O_CLOEXEC)
        finally:
            # Also where it was left writable by one who was killed in between.
            manifest.chmod(mode & ~_WRITE)
    except OSError:
        return -1, "unseen"
    return descriptor, _lock(descriptor)


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
        with shared_lock(self._root):
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
            with shared_lock(root):
                # Under the store's lock: a lease that is made but not yet held would look like a dead one's.
                make_folder(lock.parent)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                descriptor = os.open(lock, flags, file_mode(lock.parent))
                held.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in READ_ONLY_ERRNOS:
                raise explain_os_error(error, lock) from error
            yield Lease(root, None, held)
            return
        held.callback(lock.unlink, missing_ok=True)
        held.callback(ids.unlink, missing_ok=True)
        yield Lease(root, ids, held)


def leased_releases(root: Path, *, tidy: bool = False) -> frozenset[str]:
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
        if error.errno not in LOCKED_ERRNOS:
            raise explain_os_error(error, lock) from error
        return True
    finally:
        os.close(descriptor)
    return False
