"""File locks between the processes of one machine, so that garbage collection never removes what is in use.

The store lock is shared by those who make, promote or lease releases, and exclusive for garbage collection. A
lease names the releases that a server needs until its process ends. A server that cannot write to the store
locks the manifests of its releases instead. The kernel frees every lock when its process dies.
"""

import errno
import fcntl
import json
import os
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from graftwork.files.disk import explain_os_error, file_mode, make_folder, write_atomic
from graftwork.files.locks import is_held, try_lock
from graftwork.records.errors import Busy
from graftwork.registry.folder import MANIFEST
from graftwork.registry.names import require_name

LOCK = ".lock"
WAIT_SECONDS = 30.0
READ_ONLY_ERRNOS = (errno.EROFS, errno.EACCES, errno.EPERM)


@contextmanager
def shared_lock(root: Path, *, wait_seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """Garbage collection waits while the block runs."""
    descriptor = _open(root)
    if descriptor is None:
        # The store is read-only for all processes here, so none collects garbage.
        yield
        return
    try:
        _acquire(descriptor, root, "garbage is being collected", wait_seconds, shared=True)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def exclusive_lock(root: Path, *, wait_seconds: float = WAIT_SECONDS) -> Iterator[None]:
    """No release is made, promoted or leased while the block runs. Raises if the store is read-only."""
    try:
        descriptor = _open_writable(root)
    except OSError as error:
        raise explain_os_error(error, root / LOCK) from error
    try:
        _acquire(descriptor, root, "a release is being made, promoted or loaded", wait_seconds, shared=False)
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


def _acquire(descriptor: int, root: Path, doing: str, wait_seconds: float, *, shared: bool) -> None:
    deadline = time.monotonic() + wait_seconds
    try:
        while not try_lock(descriptor, shared=shared):
            if time.monotonic() >= deadline:
                raise Busy(
                    "the store of releases is in use",
                    why=f"{doing} since more than {wait_seconds:.0f} s",
                    fix="try again when that is done (`graft status`)",
                    where=str(root),
                )
            time.sleep(0.01)
    except OSError as error:
        # A file system without locks: what is in use cannot be known.
        raise explain_os_error(error, root / LOCK) from error


LockState = Literal["free", "held", "unseen", "unreadable"]
"""`unseen`: the file system does not report it. `unreadable`: the manifest cannot be opened."""
_OWNER_WRITES, _WRITE = 0o200, 0o222


class ManifestLocks(NamedTuple):
    """Release ids by the state of their manifest lock."""

    held: frozenset[str]
    unseen: frozenset[str]
    unreadable: frozenset[str]


def find_manifest_locks(root: Path, release_ids: Iterable[str]) -> ManifestLocks:
    found: dict[LockState, set[str]] = {"free": set(), "held": set(), "unseen": set(), "unreadable": set()}
    for release_id in release_ids:
        with lock_manifest(root / release_id / MANIFEST) as state:
            found[state].add(release_id)
    return ManifestLocks(*(frozenset(found[state]) for state in ("held", "unseen", "unreadable")))


@contextmanager
def lock_manifest(manifest: Path) -> Iterator[LockState]:
    """Lock the manifest if it is free; its state before that.

    On NFS an exclusive lock needs a file that is open for writing. There the manifest is made writable for
    the moment in which it is opened, which only its owner can do.
    """
    try:
        descriptor = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield "free"
        return
    except OSError:
        yield "unreadable"
        return
    try:
        state = _lock(descriptor)
        if state == "unseen":
            os.close(descriptor)
            descriptor = -1
            descriptor, state = _lock_as_owner(manifest)
        yield state
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _lock(descriptor: int) -> LockState:
    try:
        return "free" if try_lock(descriptor) else "held"
    except OSError:
        return "unseen"


def _lock_as_owner(manifest: Path) -> tuple[int, LockState]:
    """Lock the manifest through a descriptor that is open for writing. Nothing is written."""
    try:
        mode = stat.S_IMODE(manifest.stat().st_mode)
        manifest.chmod(mode | _OWNER_WRITES)
        try:
            descriptor = os.open(manifest, os.O_RDWR | os.O_CLOEXEC)
        finally:
            # Also where a process that was killed here left it writable.
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
        """Keep these releases from garbage collection. Waits while it runs."""
        wanted = {require_name(name, kind="release id") for name in release_ids} - self._ids
        if not wanted:
            return
        with shared_lock(self._root):
            if self._file is not None:
                self._ids |= wanted
                write_atomic(self._file, json.dumps(sorted(self._ids)))
            else:
                self._ids |= {name for name in wanted if self._lock(self._root / name / MANIFEST)}

    def _lock(self, manifest: Path) -> bool:
        """Whether the manifest could be locked. False if the release is not there; loading it will report
        that."""
        try:
            descriptor = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise explain_os_error(error, manifest) from error
        with ExitStack() as unless_locked:
            unless_locked.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH)
                # Garbage collection renames the folder before it removes the files.
                if manifest.stat().st_ino != os.fstat(descriptor).st_ino:
                    return False
            except FileNotFoundError:
                return False
            except OSError as error:
                raise explain_os_error(error, manifest) from error
            unless_locked.pop_all()
        self._locks.callback(os.close, descriptor)
        return True


@contextmanager
def lease(root: Path) -> Iterator[Lease]:
    """A lease while the block runs: a file, or locks on manifests if the store is read-only."""
    name = f"{os.getpid()}-{uuid.uuid4().hex[:8]}"
    lock, ids = (root / LEASES / f"{name}{end}" for end in (_LOCK, _IDS))
    with ExitStack() as stack:
        try:
            with shared_lock(root):
                # Under the store lock: an unlocked lease file would look like one of a dead process.
                make_folder(lock.parent)
                flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
                descriptor = os.open(lock, flags, file_mode(lock.parent))
                stack.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in READ_ONLY_ERRNOS:
                raise explain_os_error(error, lock) from error
            yield Lease(root, None, stack)
            return
        stack.callback(lock.unlink, missing_ok=True)
        stack.callback(ids.unlink, missing_ok=True)
        yield Lease(root, ids, stack)


def leased_releases(root: Path, *, tidy: bool = False) -> frozenset[str]:
    """The releases that running processes lease. `tidy` removes the leases of dead processes; it needs the
    exclusive lock."""
    found: set[str] = set()
    for lock in sorted((root / LEASES).glob(f"*{_LOCK}")):
        ids = lock.with_name(lock.name.removesuffix(_LOCK) + _IDS)
        held = False
        with suppress(FileNotFoundError), lock.open("rb") as handle:
            try:
                held = is_held(handle.fileno())
            except OSError as error:
                raise explain_os_error(error, lock) from error
        if held:
            found |= set(json.loads(ids.read_bytes())) if ids.exists() else set()
        elif tidy:
            ids.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
    return frozenset(found)
