"""Files stored once, by their hash, however many releases hold them.

In: bytes or a file, and the hash that they must have. Out: a read-only blob `blobs/ab/cdef…`, and names for
it in the folders of releases: hard links, or copies where the file system has none. Does not know what
a release is.
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
        """Where a blob lies. What is not a hash cannot name one."""
        if not _DIGEST.fullmatch(sha256):
            raise Damaged(
                f"{sha256[:80]!r} is not a sha256",
                why="blobs go by 64 hexadecimal digits",
                fix="restore the manifest from a copy",
                where=str(self.folder),
            )
        return self.folder / sha256[:2] / sha256[2:]

    def put(self, source: Path | bytes, sha256: str, *, count: ProgressCounter | None = None) -> Path:
        """Store the bytes, proven to have this hash. A blob that is there and whole stays; a damaged one is
        replaced: releases that were made with it keep the damaged file and are found out by their own hashes.
        """
        target = self.path(sha256)
        if target.is_file() and not target.is_symlink() and file_digest(target) == sha256:
            return target
        temporary = target.with_name(f".{target.name[:12]}.{uuid.uuid4().hex[:8]}{PART}")
        try:
            make_folder(target.parent)
            _write(temporary, source, count or ProgressCounter(no_progress, "", 0))
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
        """Give a blob another name."""
        link_or_copy(self.path(sha256), target)

    def all(self) -> Iterator[Blob]:
        """Every blob, not looked into."""
        if self.folder.is_dir():
            for path in sorted(self.folder.glob("??/*")):
                digest = path.parent.name + path.name
                if _DIGEST.fullmatch(digest):
                    yield Blob(digest, path)

    def leftovers(self) -> Iterator[Path]:
        """What killed writers left. Only whoever holds the store alone may ask."""
        if self.folder.is_dir():
            yield from self.folder.glob(f"??/.*{PART}")


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link where there can be one; else a copy of its own, read-only."""
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copyfile(source, target)
        target.chmod(read_only_mode(target.parent))


def _write(path: Path, source: Path | bytes, count: ProgressCounter) -> None:
    if isinstance(source, bytes):
        with create_file(path) as handle:
            handle.write(source)
        count.add(len(source))
    else:
        # A copy, not a link: nothing that is done to the run can reach the release.
        copy_with_progress(source, path, count)
    with path.open("rb") as written:
        os.fsync(written.fileno())


def _changed(source: Path | bytes, expected: str, found: str) -> Damaged:
    return Damaged(
        f"{source.name if isinstance(source, Path) else 'a file'} changed while it was stored",
        why=f"expected sha256 {expected[:12]}…, found {found[:12]}…",
        fix="make the release again when nothing writes to the source",
        where=str(source) if isinstance(source, Path) else "",
    )
