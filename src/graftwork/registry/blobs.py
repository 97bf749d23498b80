"""Content-addressed files: each is stored once as `blobs/ab/cdef…`, however many releases contain it.

Releases link to blobs with hard links, or with copies where the file system has none. Does not know what a
release is.
"""

import errno
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from graftwork.files.disk import (
    create_file,
    explain_os_error,
    file_digest,
    make_folder,
    read_only_mode,
    sync_folder,
)
from graftwork.records.errors import Damaged
from graftwork.registry.progress import ProgressCounter, copy_with_progress, no_progress

BLOBS = "blobs"
PART = ".part"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NO_LINKS = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


class Blob(NamedTuple):
    sha256: str
    path: Path


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
            _write(temporary, source, counter or ProgressCounter(no_progress, "", 0))
            found = file_digest(temporary)
            if found != sha256:
                raise _changed(source, sha256, found)
            temporary.chmod(read_only_mode(target.parent))
            temporary.replace(target)
            sync_folder(target.parent)
        except OSError as error:
            raise explain_os_error(error, target) from error
        finally:
            temporary.unlink(missing_ok=True)
        return target

    def place(self, sha256: str, target: Path) -> None:
        """Link a blob to another path."""
        link_or_copy(self.path(sha256), target)

    def all(self) -> Iterator[Blob]:
        """Every blob, unverified."""
        if self.folder.is_dir():
            for path in sorted(self.folder.glob("??/*")):
                digest = path.parent.name + path.name
                if _DIGEST.fullmatch(digest):
                    yield Blob(digest, path)

    def leftovers(self) -> Iterator[Path]:
        """Temporary files of killed writers. Needs the exclusive lock of the store."""
        if self.folder.is_dir():
            yield from self.folder.glob(f"??/.*{PART}")


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link, or a read-only copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)
        target.chmod(read_only_mode(target.parent))


def _write(path: Path, source: Path | bytes, counter: ProgressCounter) -> None:
    if isinstance(source, bytes):
        with create_file(path) as handle:
            handle.write(source)
        counter.add(len(source))
    else:
        # A copy, not a link: later changes in the run must not reach the release.
        copy_with_progress(source, path, counter)
    with path.open("rb") as written:
        os.fsync(written.fileno())


def _changed(source: Path | bytes, expected: str, found: str) -> Damaged:
    return Damaged(
        f"{source.name if isinstance(source, Path) else 'a file'} changed while it was stored",
        why=f"expected sha256 {expected[:12]}…, found {found[:12]}…",
        fix="make the release again when nothing writes to the source",
        where=str(source) if isinstance(source, Path) else "",
    )
