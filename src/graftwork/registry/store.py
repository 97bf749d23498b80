"""The content-addressed store of releases, and the locks that keep garbage collection from what is in use.

A release is a plain adapter folder `<root>/<id>/` made of links into `blobs/`, written atomically and
verified before it is loaded, served, exported or promoted. Which release is live is in the index, not here.

The store lock is shared by those who make, promote or lease releases, and exclusive for garbage collection. A
lease names the releases that a server needs until its process ends. A server that cannot write to the store
locks the manifests of its releases instead. The kernel frees every lock when its process dies.
"""

import errno
import fcntl
import json
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Literal, NamedTuple, Self, get_args

from graftwork.files.disk import (
    atomic_folder,
    explain_os_error,
    file_mode,
    is_held,
    make_folder,
    read_only_mode,
    sync_folder,
    try_lock,
    write_atomic,
)
from graftwork.records.base import MIB
from graftwork.records.errors import Busy, Corrupted, GraftError
from graftwork.records.release import PROMPT_FILE, Garbage, Release, ReleaseFile
from graftwork.registry.folder import (
    BLOBS,
    MANIFEST,
    METADATA_FILES,
    MINISIGN,
    PART,
    SIGNATURES,
    BlobStore,
    ProgressCallback,
    ProgressCounter,
    add_missing_signatures,
    is_prompt,
    no_progress,
    read_manifest,
    release_folder,
    require_prompt,
    verify_release,
    write_metadata,
)
from graftwork.registry.manifest import FILE, NAME, content_id, require_name, write_manifest
from graftwork.registry.peft import choose_weight_files, require_safetensors
from graftwork.registry.signatures import is_signed_by, require_signature

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
                    why=f"{doing} for more than {wait_seconds:.0f} s",
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


def find_manifest_locks(root: Path, release_ids: Iterable[str]) -> dict[LockState, set[str]]:
    """Release ids by the state of their manifest lock."""
    by_state: dict[LockState, set[str]] = {state: set() for state in get_args(LockState)}
    for release_id in release_ids:
        with lock_manifest(root / release_id / MANIFEST) as state:
            by_state[state].add(release_id)
    return by_state


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
        new_ids = {require_name(name, kind="release id") for name in release_ids} - self._ids
        if not new_ids:
            return
        with shared_lock(self._root):
            if self._file is not None:
                self._ids |= new_ids
                write_atomic(self._file, json.dumps(sorted(self._ids)))
            else:
                self._ids |= {name for name in new_ids if self._lock(self._root / name / MANIFEST)}

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
    leased: set[str] = set()
    for lock in sorted((root / LEASES).glob(f"*{_LOCK}")):
        ids = lock.with_name(lock.name.removesuffix(_LOCK) + _IDS)
        is_leased = False
        with suppress(FileNotFoundError), lock.open("rb") as handle:
            try:
                is_leased = is_held(handle.fileno())
            except OSError as error:
                raise explain_os_error(error, lock) from error
        if is_leased:
            leased |= set(json.loads(ids.read_bytes())) if ids.exists() else set()
        elif tidy:
            ids.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
    return frozenset(leased)


TRASH = ".trash"


LARGEST_MANIFEST = 16 * MIB
LARGEST_SIGNATURE = 64 * 2**10


class ReceivedRelease(NamedTuple):
    """`new` is false if the store already had the release."""

    release: Release
    new: bool


InUse = Collection[str] | Callable[[tuple[str, ...], frozenset[str], frozenset[str]], Collection[str]]
"""The releases to keep. A function is called under the exclusive lock, with the ids of all releases, of those
that running servers use, and of those that they may use."""


class ReleaseStore:
    """The releases below one folder. Threads and processes may share it."""

    def __init__(self, root: Path, *, public_key: str | None = None) -> None:
        self.root = root
        self.blobs = BlobStore(root)
        self._public_key = public_key

    @classmethod
    def open(cls, where: Path | str, *, public_key: str | None = None) -> Self:
        """The store in a folder. With a key, releases that it did not sign are refused."""
        return cls(Path(where), public_key=public_key)

    def folder(self, release_id: str) -> Path:
        """The folder of a release, which may not exist. Only the name is checked."""
        return release_folder(self.root, release_id)

    def has(self, release_id: str) -> bool:
        return (self.folder(release_id) / MANIFEST).is_file()

    def ids(self) -> tuple[str, ...]:
        """The ids of all release folders, unverified."""
        if not self.root.is_dir():
            return ()
        names = (path.name for path in self.root.iterdir() if path.is_dir())
        return tuple(sorted(name for name in names if NAME.fullmatch(name) and name != BLOBS))

    def put(
        self,
        release: Release,
        *,
        sources: Mapping[str, Path | bytes],
        signatures: Mapping[str, bytes] | None = None,
        progress: ProgressCallback = no_progress,
    ) -> Release:
        """Store the files, then the folder, which is verified before it gets its name.

        `sources` has each file that the manifest names. A release that already exists is verified and only
        gets the signatures that it does not have. Hold `shared_lock()` around this and the index entry.
        """
        target = self.folder(release.id)
        _require_valid(release, sources, where=target)
        with self.shared_lock():
            if target.exists():
                return self.complete(release, signatures=signatures or {}, progress=progress)
            counter = ProgressCounter(progress, "store", sum(file.size for file in release.files))
            for file in release.files:
                self.blobs.put(sources[file.path], file.sha256, counter=counter)
            counter.finish()
            with atomic_folder(target) as folder:
                for file in release.files:
                    self.blobs.place(file.sha256, folder / file.path)
                texts = {name: text for name, text in (signatures or {}).items() if name in SIGNATURES}
                for name, text in (texts | {MANIFEST: write_manifest(release).encode()}).items():
                    write_atomic(folder / name, text)
                    (folder / name).chmod(read_only_mode(folder))
                # Before it gets its name: what is refused here never was a release of this store.
                stored = verify_release(folder, progress=progress)
                inode = folder.stat().st_ino
            if target.stat().st_ino == inode:
                return stored
            # Another process stored it at the same time; our folder was discarded.
            return self.complete(release, signatures=signatures or {}, progress=progress)

    def complete(
        self, release: Release, *, signatures: Mapping[str, bytes], progress: ProgressCallback = no_progress
    ) -> Release:
        """Verify a release that already exists, and add the signatures that it does not have.

        A signature covers the exact bytes of the manifest, and two manifests with one id may differ in their
        time: only signatures of the same manifest are added. A signature by the trusted key replaces an
        invalid one, together with the manifest that it covers: a copy that arrived first does not block the
        signed one.
        """
        target = self.folder(release.id)
        with self.shared_lock():
            stored = verify_release(target, progress=progress)
            trusted = signatures.get(MINISIGN)
            if trusted is not None and self._is_better(target, release, trusted):
                if stored != release:
                    # Only the time is another one; a manifest that a reader has locked stays.
                    with lock_manifest(target / MANIFEST) as state:
                        if state == "free":
                            write_metadata(self.root, target, MANIFEST, write_manifest(release).encode())
                            stored = release
                if stored == release:
                    write_metadata(self.root, target, MINISIGN, trusted)
            elif stored == release:
                add_missing_signatures(self.root, target, signatures)
        return stored

    def receive(
        self,
        release: Release,
        *,
        signatures: Mapping[str, bytes],
        fetch: Callable[[ReleaseFile, Path], Path],
        progress: ProgressCallback = no_progress,
    ) -> ReceivedRelease:
        """Store a release from elsewhere. `fetch` copies a file to a path and checks it.

        Hold `shared_lock()` around this and the index entry. Of a release that is here only the signatures
        are taken that it does not have.
        """
        if self.has(release.id):
            return ReceivedRelease(
                self.complete(release, signatures=signatures, progress=progress), new=False
            )
        with staging_folder(self.root) as folder:
            sources: dict[str, Path | bytes] = {
                file.path: fetch(file, folder / str(number)) for number, file in enumerate(release.files)
            }
            stored = self.put(release, sources=sources, signatures=signatures, progress=progress)
            return ReceivedRelease(stored, new=True)

    def _is_better(self, folder: Path, release: Release, signature: bytes) -> bool:
        """Whether the trusted key made this signature but not the existing one."""
        key = self._public_key
        if key is None or not is_signed_by(
            key, manifest=write_manifest(release).encode(), signature=signature
        ):
            return False
        try:
            require_signature(folder, public_key=key)
        except GraftError:
            return True
        return False

    def verify(self, release_id: str, *, progress: ProgressCallback = no_progress) -> Release:
        """Check every byte of a release, and its signature if the store has a key."""
        folder = self.folder(release_id)
        release = verify_release(folder, progress=progress)
        if release.id != release_id:
            raise Corrupted(
                f"this folder contains release {release.id[:12]}",
                why=f"it has the name of {release_id[:12]}",
                fix="rename the folder to the id in its manifest",
                where=str(folder),
            )
        if self._public_key is not None:
            require_signature(folder, public_key=self._public_key)
        return release

    def get(self, release_id: str) -> Path:
        """The verified folder of a release, to be loaded, served or exported."""
        self.verify(release_id)
        return self.folder(release_id)

    def sign(self, release_id: str, signature: bytes) -> Path:
        """Store a signature of the manifest."""
        with self.shared_lock():
            # Under one lock, so that garbage collection cannot remove the release in between.
            self.verify_unsigned(release_id)
            return write_metadata(self.root, self.folder(release_id), MINISIGN, signature)

    def verify_unsigned(self, release_id: str) -> Release:
        """Check every byte, but no signature."""
        return ReleaseStore(self.root).verify(release_id)

    def shared_lock(self) -> AbstractContextManager[None]:
        """Block garbage collection while a release is made, indexed or promoted."""
        return shared_lock(self.root)

    def lease(self) -> AbstractContextManager[Lease]:
        """Keep releases from garbage collection while this process needs them."""
        return lease(self.root)

    def collect_garbage(
        self, in_use: InUse, *, dry_run: bool = False, stays: Callable[[frozenset[str]], None] | None = None
    ) -> Garbage:
        """Remove the releases that are neither in use nor leased, and the blobs that no release links.

        A release is renamed, then its files are removed, then unlinked blobs. After a kill each release is
        whole or gone, and the next collection finishes the work. `stays` is called under the lock with the
        releases that are still there: one that was to be removed may have been locked by a server in the
        meantime.
        """
        with exclusive_lock(self.root):
            ids = self.ids()
            locks = find_manifest_locks(self.root, ids)
            leased = leased_releases(self.root, tidy=not dry_run) | locks["held"]
            doubtful = frozenset(locks["unseen"] | locks["unreadable"])
            used = in_use(ids, leased, doubtful) if callable(in_use) else in_use
            retained = (set(used) | leased | doubtful) & set(ids)
            unused = tuple(id_ for id_ in ids if id_ not in retained)
            sizes = {id_: _count_bytes(self.folder(id_).rglob("*")) for id_ in unused}
            locked = frozenset() if dry_run else self._remove_releases(unused)
            retained |= locked
            removed = tuple(id_ for id_ in unused if id_ not in locked)
            linked, unreadable = self._linked_hashes(retained, frozenset(locks["unreadable"]))
            blobs = () if unreadable else [path for digest, path in self.blobs.all() if digest not in linked]
            # Temporary files of killed processes.
            leftovers = [
                *self.root.glob(f".*{PART}"),
                *self.root.glob(f"{TRASH}.*"),
                *self.blobs.leftovers(),
            ]
            inside = (path for folder in leftovers if _is_own_folder(folder) for path in folder.rglob("*"))
            freed = sum(sizes[id_] for id_ in removed) + sum(path.stat().st_size for path in blobs)
            garbage = Garbage(
                releases=removed,
                blobs=len(blobs),
                leftovers=len(leftovers),
                bytes=freed + _count_bytes((*inside, *leftovers)),
                kept=len(retained),
                leased=tuple(sorted(leased | locked)),
                unreadable=unreadable,
                readers_unseen=tuple(sorted(locks["unseen"])),
                dry_run=dry_run,
            )
            if not dry_run:
                try:
                    for path in leftovers:
                        _remove(path)
                    for path in blobs:
                        path.unlink()
                except OSError as error:
                    raise explain_os_error(error, self.root) from error
                if stays is not None:
                    stays(frozenset(retained))
            return garbage

    def _linked_hashes(
        self, release_ids: Collection[str], unreadable_ids: Collection[str]
    ) -> tuple[set[str], tuple[str, ...]]:
        """The hashes in the manifests of these releases, and all releases with an unreadable manifest."""
        linked: set[str] = set()
        unreadable = set(unreadable_ids)
        for release_id in sorted(release_ids):
            try:
                linked |= {file.sha256 for file in read_manifest(self.folder(release_id)).files}
            except GraftError:
                unreadable.add(release_id)
        return linked, tuple(sorted(unreadable))

    def _remove_releases(self, release_ids: Collection[str]) -> frozenset[str]:
        """Remove the folders. Returns the ids of those that are locked by now and stay."""
        locked = set()
        try:
            for release_id in release_ids:
                trash = self.root / f"{TRASH}.{uuid.uuid4().hex[:8]}"
                with lock_manifest(self.folder(release_id) / MANIFEST) as state:
                    if state != "free":
                        locked.add(release_id)
                        continue
                    self.folder(release_id).rename(trash)
                sync_folder(self.root)
                _remove(trash)
        except OSError as error:
            raise explain_os_error(error, self.root) from error
        return frozenset(locked)


def _remove(path: Path) -> None:
    """Remove a file or folder. Of a link only the link itself."""
    if _is_own_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink()


def _count_bytes(paths: Iterable[Path]) -> int:
    # A file with further links is freed with the last of them, and counted there.
    statuses = (path.stat() for path in paths if path.is_file())
    return sum(status.st_size for status in statuses if status.st_nlink == 1)


def _is_own_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _require_valid(release: Release, sources: Mapping[str, Path | bytes], *, where: Path) -> None:
    """Refuse a manifest with a wrong id or with files that no release may have."""
    names = [file.path for file in release.files]
    if release.id != content_id(release):
        why = "its id is not the hash of its content"
    elif any(not FILE.fullmatch(name) or name in METADATA_FILES for name in names) or len(set(names)) < len(
        names
    ):
        why = "it names a file that no release may have"
    elif missing := sorted(set(names) - set(sources)):
        why = f"the file {missing[0]} is missing"
    elif is_prompt(names):
        require_prompt(sources[PROMPT_FILE], where=where)
        return
    elif (weights := choose_weight_files(names)[1]) not in names:
        why = "it names no weights"
    else:
        # Checked before anything is stored.
        if isinstance(source := sources[weights], Path):
            require_safetensors(source)
        return
    raise Corrupted(
        f"the manifest of release {release.id[:12]} is not valid",
        why=why,
        fix="get the release again from where it was made",
        where=str(where),
    )


@contextmanager
def staging_folder(root: Path) -> Iterator[Path]:
    """An empty folder in the store for a release that is being received; removed after the block."""
    with shared_lock(root):
        folder = root / f".incoming.{uuid.uuid4().hex[:8]}{PART}"
        try:
            make_folder(folder)
        except OSError as error:
            raise explain_os_error(error, folder) from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
