"""A store of releases at an fsspec URL: s3://bucket/folder, file:///mnt/releases, memory://name.

Input: blobs, and manifests that name them. Output: the same, checked by their hashes. A blob is never
changed: its name is its content. A manifest is written after all that it names, so what has one is whole.
Does not know which release is live, nor what is in the store on this machine.
"""

import hashlib
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from graftwork.files.remote import RemoteFiles
from graftwork.records.base import MIB, hide_login
from graftwork.records.errors import Corrupted, EnvironmentFailure, UserError
from graftwork.records.release import Release, ReleaseFile
from graftwork.registry.folder import (
    BLOBS,
    MANIFEST,
    MINISIGN,
    SIGSTORE,
    ProgressCallback,
    ProgressCounter,
    digest_with_progress,
    no_progress,
    parse_manifest,
    require_own_files,
)
from graftwork.registry.manifest import NAME, require_name
from graftwork.registry.store import LARGEST_MANIFEST, LARGEST_SIGNATURE, ReceivedRelease, ReleaseStore
from graftwork.text.redact import redact_login

_PIECE = MIB


class RemoteStore:
    """The releases below one URL."""

    def __init__(self, url: str) -> None:
        if "://" not in url:
            raise UserError(
                f"{hide_login(url)!r} is not a URL",
                fix="write it like s3://bucket/folder or file:///mnt/releases",
                where="release.store",
            )
        self._files = RemoteFiles(url, kind="store", setting="release.store")
        self._url, self.address = url, hide_login(url)
        if not self._call(self._files.has_bucket):
            raise UserError(
                f"there is no bucket {self._files.root.partition('/')[0]!r}",
                why="this command does not create buckets",
                fix="create the bucket, or correct its name",
                where=self.address,
            )

    def ids(self) -> tuple[str, ...]:
        """The ids of all releases with a manifest, unverified."""
        self._files.system.invalidate_cache()
        manifests = self._call(lambda: self._files.system.glob(self._files.path(f"releases/*/{MANIFEST}")))
        names = (str(path).rsplit("/", 2)[-2] for path in manifests)
        return tuple(sorted(name for name in names if NAME.fullmatch(name)))

    def has(self, release_id: str) -> bool:
        return self._size(name_text(release_id, MANIFEST)) is not None

    def find(self, id_or_prefix: str) -> str:
        """The id of the only release that starts with this prefix."""
        require_name(id_or_prefix, kind="release id")
        matches = [release_id for release_id in self.ids() if release_id.startswith(id_or_prefix)]
        if len(matches) != 1:
            raise UserError(
                f"{'several releases start' if matches else 'no release starts'} with {id_or_prefix} there",
                why=f"{self.address} holds {len(self.ids())} releases",
                fix="use more of the id, or push the release there first (`graft release push`)",
                where=self.address,
            )
        return matches[0]

    def put_blob(self, source: Path, file: ReleaseFile, *, count: ProgressCounter | None = None) -> bool:
        """Upload a blob and read it back. False if it was already there.

        `count` counts each byte twice: on its way there, and read back.
        """
        blob, counted = self._blob(file.sha256), count or ProgressCounter(no_progress, "", 0)
        if self._size(blob) == file.size and self._digest(blob, counted) == file.sha256:
            counted.add(file.size)
            return False
        self._transfer(partial(self._files.put, source, blob), size=file.size, count=counted)
        if self._size(blob) != file.size or self._digest(blob, counted) != file.sha256:
            raise Corrupted(
                f"{file.path} was changed in transit",
                why="its hash is different when it is read back",
                fix="push the release again",
                where=self.address,
            )
        return True

    def get_blob(self, file: ReleaseFile, target: Path, *, count: ProgressCounter | None = None) -> Path:
        """Download a blob and check its size and hash."""
        blob, counted = self._blob(file.sha256), count or ProgressCounter(no_progress, "", 0)
        size = self._size(blob)
        if size != file.size:
            problem = "is not there" if size is None else f"has {size:,} bytes, not {file.size:,}"
            raise self.refuse(f"{file.path} {problem}", "the manifest names it")
        fetch = partial(self._files.system.get_file, self._files.path(blob), str(target))
        self._transfer(fetch, size=file.size, count=counted)
        if digest_with_progress(target, ProgressCounter(no_progress, "", 0)) != file.sha256:
            raise self.refuse(f"{file.path} does not match its hash in the manifest", "its hash is different")
        return target

    def put_text(self, release_id: str, name: str, content: bytes) -> None:
        """Write the manifest or one of its signatures atomically."""
        target = name_text(release_id, name)
        if self._files.has_buckets:
            # An object appears when all of it has arrived.
            self._call(lambda: self._files.write(target, content))
            return
        part = f"{target}.{uuid.uuid4().hex[:8]}.part"
        self._call(lambda: self._files.write(part, content))
        self._call(lambda: self._files.system.mv(self._files.path(part), self._files.path(target)))

    def get_text(self, release_id: str, name: str, *, largest: int = LARGEST_MANIFEST) -> bytes | None:
        """None if it does not exist."""
        source = name_text(release_id, name)
        size = self._size(source)
        if size is None:
            return None
        if size > largest:
            raise self.refuse(f"{name} is too large", f"it may have {largest:,} bytes")
        return bytes(self._call(lambda: self._files.read(source)))

    def read(self, release_id: str) -> Release:
        """The manifest, checked against its id."""
        data = self.get_text(release_id, MANIFEST)
        if data is None:
            raise UserError(
                f"release {release_id[:12]} is not there",
                why="there is no manifest, which is written last",
                fix="push it there first (`graft release push`)",
                where=self.address,
            )
        return parse_manifest(data, self.refuse, named=release_id)

    def _blob(self, sha256: str) -> str:
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise self.refuse(f"{sha256[:80]!r} is not a sha256", "a blob is named by 64 hexadecimal digits")
        return f"{BLOBS}/{sha256[:2]}/{sha256[2:]}"

    def _size(self, name: str) -> int | None:
        size: int | None = self._call(lambda: self._files.size(name))
        return size

    def _transfer(self, transfer: Callable[..., Any], *, size: int, count: ProgressCounter) -> None:
        """Transfer one file. File systems that do not report progress count as done at the end."""
        from fsspec.callbacks import Callback

        counted_bytes = 0

        class ByteCallback(Callback):  # type: ignore[misc, unused-ignore]
            def relative_update(self, inc: int = 1) -> None:
                nonlocal counted_bytes
                inc = min(inc, size - counted_bytes)
                counted_bytes += inc
                count.add(inc)

        self._call(lambda: transfer(callback=ByteCallback()))
        count.add(size - counted_bytes)

    def _digest(self, name: str, count: ProgressCounter) -> str:
        def read() -> str:
            digest = hashlib.sha256()
            with self._files.system.open(self._files.path(name), "rb") as handle:
                while piece := handle.read(_PIECE):
                    digest.update(piece)
                    count.add(len(piece))
            return digest.hexdigest()

        return str(self._call(read))

    def _call(self, ask: Callable[[], Any]) -> Any:
        """Errors of network libraries become ours."""
        try:
            return ask()
        except Exception as error:
            raise EnvironmentFailure(
                f"the store cannot be used: {redact_login(error, self._url)}",
                why="it is not responding, or does not allow this",
                fix="check the address and the credentials, and try again",
                where=self.address,
            ) from error

    def refuse(self, what: str, why: str) -> Corrupted:
        return Corrupted(
            what, why=why, fix="push the release again from a machine that has it", where=self.address
        )


def name_text(release_id: str, name: str) -> str:
    """The manifest of a release or one of its signatures."""
    return f"releases/{require_name(release_id, kind='release id')}/{name}"


def push_release(
    store: ReleaseStore, remote: RemoteStore, release_id: str, *, progress: ProgressCallback = no_progress
) -> tuple[Release, tuple[ReleaseFile, ...]]:
    """Verify the release, upload missing files, read them back, and write the manifest last. Returns the
    files that were missing, too."""
    with store.shared_lock():
        release, folder = store.verify(release_id, progress=progress), store.folder(release_id)
        count = ProgressCounter(progress, "send and read back", 2 * sum(file.size for file in release.files))
        sent = tuple(file for file in release.files if remote.put_blob(folder / file.path, file, count=count))
        remote_release = None  # missing, or damaged, so that it is written again
        with suppress(Corrupted, UserError):
            remote_release = remote.read(release.id)
        for name in (MINISIGN, SIGSTORE):
            # A manifest with another time has other bytes and its own signatures.
            if (folder / name).is_file() and remote_release in (None, release):
                remote.put_text(release.id, name, (folder / name).read_bytes())
        if remote_release is None:
            remote.put_text(release.id, MANIFEST, (folder / MANIFEST).read_bytes())
    return release, sent


def pull_release(
    store: ReleaseStore, remote: RemoteStore, release_id: str, *, progress: ProgressCallback = no_progress
) -> ReceivedRelease:
    """Fetch into the store. Hold the store's `shared_lock()` around this and the entry in the index."""
    release = remote.read(release_id)
    require_own_files(release, remote.refuse)
    signatures = {
        name: data
        for name in (MINISIGN, SIGSTORE)
        if (data := remote.get_text(release_id, name, largest=LARGEST_SIGNATURE)) is not None
    }
    total = 0 if store.has(release_id) else sum(file.size for file in release.files)
    count = ProgressCounter(progress if total else no_progress, "fetch", total)
    return store.receive(
        release,
        signatures=signatures,
        fetch=lambda file, path: remote.get_blob(file, path, count=count),
        progress=progress,
    )
