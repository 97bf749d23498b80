"""A release on disk: content-addressed blobs, and a read-only folder whose manifest names every file's hash.

A file is stored once as `blobs/ab/cdef…`, however many releases contain it. A release links to its blobs with
hard links, or with copies where the file system has none. Its folder is a plain PEFT adapter, the weights of
a model after full fine-tuning, or a prompt, so PEFT, vLLM and the Hugging Face Hub can load it. Signatures of
the manifest are stored next to it. Files that are read, copied or hashed report what is done in bytes.
"""

import errno
import hashlib
import io
import os
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from graftwork.files.disk import (
    create_file,
    explain_os_error,
    file_digest,
    make_folder,
    read_only_mode,
    sync_folder,
)
from graftwork.records.base import MIB
from graftwork.records.errors import Corrupted, UserError
from graftwork.records.release import PROMPT_FILE, PromptVariant, Release
from graftwork.registry.manifest import FILE, content_id, require_name
from graftwork.registry.peft import FULL_FILES, WEIGHTS, find_weight_files, require_safetensors

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
        if self._counter is not None and (offset := self.tell()) > self._furthest:
            self._counter.add(offset - self._furthest)
            self._furthest = offset
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
            raise Corrupted(
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
                raise Corrupted(
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


MANIFEST = "manifest.json"
MINISIGN = f"{MANIFEST}.minisig"
SIGSTORE = f"{MANIFEST}.sigstore.json"
SIGNATURES = (MINISIGN, SIGSTORE)
METADATA_FILES = frozenset({MANIFEST, *SIGNATURES})
"""Files that the manifest does not name: itself and its signatures."""


def write_metadata(root: Path, folder: Path, name: str, content: bytes) -> Path:
    """Write or replace the manifest or a signature atomically. Hold the shared lock of the store.

    The temporary file is in the root of the store, so a killed writer leaves nothing in the release.
    """
    temporary = root / f".sign.{uuid.uuid4().hex[:8]}{PART}"
    target = folder / name
    try:
        with create_file(temporary) as handle:
            handle.write(content)
            handle.flush()
            os.fsync(handle.fileno())
        temporary.chmod(read_only_mode(folder))
        temporary.replace(target)
        sync_folder(folder)
    except OSError as error:
        raise explain_os_error(error, target) from error
    finally:
        temporary.unlink(missing_ok=True)
    return target


def add_missing_signatures(root: Path, folder: Path, signatures: Mapping[str, bytes]) -> None:
    """Add the signatures that the release does not have. Existing ones are kept."""
    for name in SIGNATURES:
        if name in signatures and not (folder / name).exists():
            write_metadata(root, folder, name, signatures[name])


def release_folder(root: Path, release_id: str) -> Path:
    """The folder of a release. The id cannot lead out of `root`."""
    if require_name(release_id, kind="release id") == BLOBS:
        raise UserError(
            f"{BLOBS!r} cannot be a release id",
            why="it is the store's own folder",
            fix="use an id from `graft release list`",
        )
    return root / release_id


def read_manifest(folder: Path) -> Release:
    """The manifest, checked against its id. The other files are not checked."""
    path = folder / MANIFEST
    try:
        text = path.read_bytes()
    except FileNotFoundError as error:
        if not folder.exists():
            raise Corrupted(
                f"the files of release {folder.name[:12]} are not in this store",
                why="garbage collection removed them, or the release was made on another machine",
                fix="import them (`graft release import`), or make the release again (`graft run`)",
                where=str(folder),
            ) from error
        raise _damaged("there is no manifest", "it is written last: this is not a release", path) from error
    except OSError as error:
        raise explain_os_error(error, path) from error
    return parse_manifest(text, lambda what, why: _damaged(what, why, path))


Refusal = Callable[[str, str], Corrupted]
"""The error of one place where releases are, from what is wrong and why."""


def parse_manifest(text: bytes, refuse: Refusal, *, named: str | None = None) -> Release:
    """The manifest, checked against its id, and against the one that it is `named` by."""
    try:
        release = Release.from_json(text)
    except ValidationError as error:
        raise refuse("the manifest cannot be read", str(error).splitlines()[0]) from error
    if release.id != content_id(release) or named not in (None, release.id):
        raise refuse("the manifest was changed", "its id is not the hash of its content")
    return release


def require_own_files(release: Release, refuse: Refusal) -> None:
    """Refuse a manifest that names a file which no release may have."""
    for file in release.files:
        if not FILE.fullmatch(file.path) or file.path in METADATA_FILES:
            raise refuse(f"the manifest names {file.path[:80]!r}", "that is not a file of a release")


def verify_release(folder: Path, *, progress: ProgressCallback = no_progress) -> Release:
    """Check every byte of the folder against its manifest, and that there are no other files."""
    release = read_manifest(folder)
    require_own_files(release, lambda what, why: _damaged(what, why, folder))
    counter = ProgressCounter(progress, "check", sum(file.size for file in release.files))
    for file in release.files:
        if (folder / file.path).is_symlink():
            raise _damaged(f"{file.path} is a link", "it could point anywhere", folder / file.path)
        _require_bytes(folder / file.path, file.sha256, counter)
    expected = METADATA_FILES | {file.path for file in release.files}
    unexpected = sorted(path.name for path in folder.iterdir() if path.name not in expected)
    if unexpected:
        raise _damaged(f"{unexpected[0]} does not belong here", "the manifest does not name it", folder)
    if is_prompt({file.path for file in release.files}):
        require_prompt(folder / PROMPT_FILE, where=folder)
    else:
        require_safetensors(folder / find_weight_files(folder)[1])
    return release


LARGEST_PROMPT = 4 << 20


def is_prompt(names: Collection[str]) -> bool:
    """Whether a release with these files is a prompt without weights."""
    return PROMPT_FILE in names and WEIGHTS not in names and FULL_FILES[1] not in names


def require_prompt(source: Path | bytes, *, where: Path) -> PromptVariant:
    """The prompt, or an error where the file is none."""
    try:
        if isinstance(source, Path):
            with source.open("rb") as handle:
                source = handle.read(LARGEST_PROMPT)
        return PromptVariant.from_json(source)
    except (OSError, ValidationError) as error:
        raise Corrupted(
            f"{PROMPT_FILE} is not a valid prompt",
            why=str(error).splitlines()[0],
            fix="get the release again from where it was made",
            where=str(where),
        ) from error


def _require_bytes(path: Path, sha256: str, counter: ProgressCounter) -> None:
    if not path.is_file():
        raise _damaged(f"{path.name} is missing", "its manifest names it", path)
    try:
        actual = digest_with_progress(path, counter)
    except OSError as error:
        raise explain_os_error(error, path) from error
    if actual != sha256:
        why = f"expected sha256 {sha256[:12]}…, found {actual[:12]}…"
        raise _damaged(f"{path.name} does not match its hash in the manifest", why, path)


def _damaged(what: str, why: str, where: Path) -> Corrupted:
    return Corrupted(
        what,
        why=why,
        fix="`graft release rollback` goes back one release. To repair it, move its folder away, "
        "then get a copy (`graft release pull` or `import`) or make it again (`graft run`)",
        where=str(where),
    )
