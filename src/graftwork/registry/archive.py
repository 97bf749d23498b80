"""A release as one tar file, for machines without a network.

The same release gives the same bytes everywhere. An archive from anywhere is verified before it is stored.
Only plain files of one release are read from it: no links, no devices, no compression, nothing that can leave
its folder or grow beyond the size of the archive.
"""

import hashlib
import os
import tarfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from graftwork.files.disk import create_file, explain_os_error, sync_folder
from graftwork.records.base import MIB
from graftwork.records.errors import Corrupted
from graftwork.records.release import Release, ReleaseFile
from graftwork.registry.folder import (
    MANIFEST,
    MINISIGN,
    SIGSTORE,
    ProgressCallback,
    ProgressCounter,
    no_progress,
    parse_manifest,
)
from graftwork.registry.store import (
    LARGEST_MANIFEST,
    LARGEST_SIGNATURE,
    ReceivedRelease,
    ReleaseStore,
    staging_folder,
)

MOST_FILES = 1000
_PIECE = MIB
_LARGEST_USTAR = 8**11


def write_archive(
    store: ReleaseStore, release_id: str, *, target: Path, progress: ProgressCallback = no_progress
) -> str:
    """Write the archive to a temporary file, read it back, then rename it to `target`; its SHA-256."""
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
    with store.shared_lock():
        release, folder = store.verify(release_id, progress=progress), store.folder(release_id)
        signatures = [name for name in (MINISIGN, SIGSTORE) if (folder / name).is_file()]
        try:
            with temporary.open("xb") as handle:
                counter = ProgressCounter(progress, "write", sum(file.size for file in release.files))
                for name in (MANIFEST, *sorted(signatures), *sorted(file.path for file in release.files)):
                    _append(handle, folder / name, f"{release.id}/{name}", counter)
                handle.write(bytes(2 * tarfile.BLOCKSIZE))
                handle.flush()
                os.fsync(handle.fileno())
            digest = _require_same(temporary, release, progress)
            temporary.replace(target)
            sync_folder(target.parent)
        except OSError as error:
            raise explain_os_error(error, target) from error
        finally:
            temporary.unlink(missing_ok=True)
    return digest


@contextmanager
def read_archive(
    path: Path, *, store: ReleaseStore, progress: ProgressCallback = no_progress
) -> Iterator["UnpackedArchive"]:
    """The verified contents of an archive, in a folder that is removed after the block."""
    with staging_folder(store.root) as folder:
        try:
            with path.open("rb") as handle:
                counter = ProgressCounter(progress, "unpack", os.fstat(handle.fileno()).st_size)
                unpacked = _unpack(handle, folder, counter, where=str(path))
                counter.finish()
        except OSError as error:
            raise explain_os_error(error, path) from error
        yield unpacked


class UnpackedArchive(NamedTuple):
    release: Release
    sources: dict[str, Path]
    signatures: dict[str, bytes]

    def put_into(self, store: ReleaseStore, *, progress: ProgressCallback = no_progress) -> ReceivedRelease:
        """Store the release. Hold `store.shared_lock()` around this and the index entry."""
        return store.receive(
            self.release,
            signatures=self.signatures,
            fetch=lambda file, _path: self.sources[file.path],
            progress=progress,
        )


def _append(handle: IO[bytes], path: Path, name: str, counter: ProgressCounter) -> None:
    """Append one file without owner and time."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = path.stat().st_size, 0o444
    if member.size < _LARGEST_USTAR:
        handle.write(member.tobuf(tarfile.USTAR_FORMAT))
    else:
        handle.write(member.tobuf(tarfile.GNU_FORMAT))
    with path.open("rb") as source:
        while piece := source.read(_PIECE):
            handle.write(piece)
            counter.add(len(piece))
    handle.write(bytes(-member.size % tarfile.BLOCKSIZE))


def _require_same(archive: Path, release: Release, progress: ProgressCallback) -> str:
    """The hash of the archive. Raises if a file changed between verifying and writing it."""
    hashes = {file.path: file.sha256 for file in release.files}
    whole = hashlib.sha256()
    with archive.open("rb") as handle:
        counter = ProgressCounter(progress, "read back", 2 * os.fstat(handle.fileno()).st_size)
        for member in _members(handle, where=str(archive)):
            digest = _copy(handle, None, member.size, counter)
            name = member.name.partition("/")[2]
            if name in hashes and hashes[name] != digest:
                raise _refuse(
                    f"{name} changed while it was exported", "it differs from what was verified", archive
                )
        handle.seek(0)
        while piece := handle.read(_PIECE):
            whole.update(piece)
            counter.add(len(piece))
        counter.finish()
    return whole.hexdigest()


def _unpack(handle: IO[bytes], folder: Path, counter: ProgressCounter, *, where: str) -> UnpackedArchive:
    members = _members(handle, where=where)
    first = next(members, None)
    if first is None or first.name.partition("/")[2] != MANIFEST:
        raise _refuse("this is not an archive of a release", f"it does not begin with {MANIFEST}", where)
    release_id = first.name.partition("/")[0]
    if first.size > LARGEST_MANIFEST:
        raise _refuse("the manifest is too large", f"it may have {LARGEST_MANIFEST:,} bytes", where)
    manifest = handle.read(first.size)
    _skip_padding(handle, first.size)
    release = parse_manifest(manifest, lambda what, why: _refuse(what, why, where), named=release_id)
    files = {file.path: file for file in release.files}
    sources: dict[str, Path] = {}
    signatures: dict[str, bytes] = {}
    for member in members:
        top, _, name = member.name.partition("/")
        if top != release_id or name in sources or name in signatures:
            raise _refuse(
                f"the archive contains {member.name[:80]!r}", "each file must occur once, below the id", where
            )
        if name in (MINISIGN, SIGSTORE) and member.size <= LARGEST_SIGNATURE:
            signatures[name] = handle.read(member.size)
            _skip_padding(handle, member.size)
        elif name in files:
            sources[name] = _take(handle, member, files[name], folder / f"{len(sources)}", counter, where)
        else:
            raise _refuse(f"the archive contains {name[:80]!r}", "the manifest does not name it", where)
    if missing := sorted(files.keys() - sources.keys()):
        raise _refuse(f"{missing[0]} is missing in the archive", "the manifest names it", where)
    return UnpackedArchive(release, sources, signatures)


def _take(
    handle: IO[bytes],
    member: tarfile.TarInfo,
    file: ReleaseFile,
    target: Path,
    counter: ProgressCounter,
    where: str,
) -> Path:
    """Write one file, named by a number until the store has checked its name."""
    if member.size != file.size:
        raise _refuse(f"{file.path} has a different size", f"{member.size:,} bytes, not {file.size:,}", where)
    with create_file(target) as out:
        digest = _copy(handle, out, member.size, counter)
    if digest != file.sha256:
        raise _refuse(
            f"{file.path} does not match its hash in the manifest",
            f"expected sha256 {file.sha256[:12]}…, found {digest[:12]}…",
            where,
        )
    return target


def _members(handle: IO[bytes], *, where: str) -> Iterator[tarfile.TarInfo]:
    """The headers in order. The caller reads each file before it asks for the next header."""
    size = os.fstat(handle.fileno()).st_size
    for _ in range(MOST_FILES):
        block = handle.read(tarfile.BLOCKSIZE)
        if not block.strip(b"\0"):
            if len(block) < tarfile.BLOCKSIZE:
                raise _refuse("the archive ends too early", "it was cut off", where)
            return
        try:
            # Header by header, because TarFile follows extended headers of any length.
            member = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.HeaderError, UnicodeDecodeError, ValueError) as error:
            raise _refuse(
                "this is not an archive of a release", f"a header cannot be read: {error}", where
            ) from error
        if member.type != tarfile.REGTYPE:
            raise _refuse(f"the archive contains {member.name[:80]!r}", "it is not a plain file", where)
        if not 0 <= member.size <= size - handle.tell():
            raise _refuse(
                f"{member.name[:80]!r} extends past the end of the archive", "the archive was cut off", where
            )
        yield member
    raise _refuse("the archive contains too many files", f"a release has at most {MOST_FILES}", where)


def _copy(handle: IO[bytes], out: IO[bytes] | None, size: int, counter: ProgressCounter) -> str:
    digest, remaining = hashlib.sha256(), size
    while remaining:
        piece = handle.read(min(_PIECE, remaining))
        if not piece:
            break
        digest.update(piece)
        if out is not None:
            out.write(piece)
        remaining -= len(piece)
        counter.add(len(piece))
    _skip_padding(handle, size)
    return digest.hexdigest()


def _skip_padding(handle: IO[bytes], size: int) -> None:
    handle.seek(-size % tarfile.BLOCKSIZE, os.SEEK_CUR)


def _refuse(what: str, why: str, where: object) -> Corrupted:
    return Corrupted(
        what,
        why=why,
        fix="export the release again (`graft release export`) and copy it again",
        where=str(where),
    )
