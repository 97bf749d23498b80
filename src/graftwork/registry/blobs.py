"""Content-addressed files: each is stored once as `blobs/ab/cdef…`, however many releases contain it.

Releases link to blobs with hard links, or with copies where the file system has none. Files that are read,
copied or hashed report what is done in bytes. Does not know what a release is.
"""

import errno
import hashlib
import io
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from graftwork.files.disk import (
    create_file,
    explain_os_error,
    file_digest,
    make_folder,
    read_only_mode,
    sync_folder,
)
from graftwork.records.errors import Damaged
from graftwork.records.units import MIB

ProgressCallback = Callable[[str, int, int], None]
"""Called with the phase, the bytes done and the total."""

CHUNK_BYTES = MIB


def no_progress(_phase: str, _done: int, _total: int) -> None:
    """Report nothing."""


class ProgressCounter:
    """The bytes of one phase. Thread-safe. Never reports more than the total."""

    def __init__(self, report: ProgressCallback, phase: str, total: int) -> None:
        self._report, self._phase, self._total = report, phase, total
        self._done = 0
        self._lock = threading.Lock()
        report(phase, 0, total)

    def add(self, count: int) -> None:
        with self._lock:
            self._done = min(self._done + count, self._total)
            self._report(self._phase, self._done, self._total)

    def reach(self, done: int) -> None:
        """Set the number of bytes done. It never goes back."""
        with self._lock:
            self._done = min(max(self._done, done), self._total)
            self._report(self._phase, self._done, self._total)

    def finish(self) -> None:
        """Count what did not have to be done as done."""
        self.reach(self._total)


class ProgressReader(io.BufferedReader):
    """A file that counts the bytes read from `begin` on, each byte once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path.open("rb", buffering=0), CHUNK_BYTES)
        self._counter: ProgressCounter | None = None
        self._furthest = 0

    def begin(self, counter: ProgressCounter) -> None:
        self._counter = counter

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if self._counter is not None and (here := self.tell()) > self._furthest:
            self._counter.add(here - self._furthest)
            self._furthest = here
        return data


def digest_with_progress(path: Path, counter: ProgressCounter) -> str:
    """The SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as handle:
        while chunk := handle.read(CHUNK_BYTES):
            digest.update(chunk)
            counter.add(len(chunk))
    return digest.hexdigest()


def copy_with_progress(source: Path, target: Path, counter: ProgressCounter) -> None:
    with source.open("rb", buffering=0) as original, create_file(target) as copy:
        while chunk := original.read(CHUNK_BYTES):
            copy.write(chunk)
            counter.add(len(chunk))


BLOBS = "blobs"
PART = ".part"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class BlobStore:
    """The blobs below one folder."""

    def __init__(self, root: Path) -> None:
        self.folder = root / BLOBS

    def path(self, sha256: str) -> Path:
        """The path of a blob. Raises for anything that is not a SHA-256."""
        if not _DIGEST.fullmatch(sha256):
            raise Damaged(
                f"{sha256[:80]!r} is not a sha256",
                why="a blob is named by 64 hexadecimal digits",
                fix="restore the manifest from a copy",
                where=str(self.folder),
            )
        return self.folder / sha256[:2] / sha256[2:]

    def put(self, source: Path | bytes, sha256: str, *, counter: ProgressCounter | None = None) -> Path:
        """Store bytes that must have this hash. An intact blob is kept; a damaged one is replaced.

        Releases that link to the damaged file keep it, and fail their own verification.
        """
        target = self.path(sha256)
        if target.is_file() and not target.is_symlink() and file_digest(target) == sha256:
            return target
        temporary = target.with_name(f".{target.name[:12]}.{uuid.uuid4().hex[:8]}{PART}")
        try:
            make_folder(target.parent)
            counter = counter or ProgressCounter(no_progress, "", 0)
            if isinstance(source, bytes):
                with create_file(temporary) as handle:
                    handle.write(source)
                counter.add(len(source))
            else:
                # A copy, not a link: later changes in the run must not reach the release.
                copy_with_progress(source, temporary, counter)
            with temporary.open("rb") as handle:
                os.fsync(handle.fileno())
            stored = file_digest(temporary)
            if stored != sha256:
                name, where = ("a file", "") if isinstance(source, bytes) else (source.name, str(source))
                raise Damaged(
                    f"{name} changed while it was stored",
                    why=f"expected sha256 {sha256[:12]}…, found {stored[:12]}…",
                    fix="make the release again when nothing writes to the source",
                    where=where,
                )
            temporary.chmod(read_only_mode(target.parent))
            temporary.replace(target)
            sync_folder(target.parent)
        except OSError as error:
            raise explain_os_error(error, target) from error
        finally:
            temporary.unlink(missing_ok=True)
        return target

    def place(self, sha256: str, target: Path) -> None:
        """A hard link to a blob, or a read-only copy where the file system has no links."""
        source = self.path(sha256)
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            shutil.copyfile(source, target)
            target.chmod(read_only_mode(target.parent))

    def all(self) -> Iterator[tuple[str, Path]]:
        """The hash and the path of every blob, unverified."""
        if self.folder.is_dir():
            for path in sorted(self.folder.glob("??/*")):
                digest = path.parent.name + path.name
                if _DIGEST.fullmatch(digest):
                    yield digest, path

    def leftovers(self) -> Iterator[Path]:
        """Temporary files of killed writers. Needs the exclusive lock of the store."""
        if self.folder.is_dir():
            yield from self.folder.glob(f"??/.*{PART}")
