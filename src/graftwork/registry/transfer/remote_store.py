"""A store of releases at an fsspec URL: s3://bucket/folder, file:///mnt/releases, memory://name.

In: blobs, and manifests that name them. Out: the same, checked by their hashes. A blob is never changed: its
name is its content. A manifest is written after all that it names, so what has one is whole. Does not know
which release is live, nor what lies in the store on this machine.
"""

import hashlib
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from graftwork.files.remote import has_buckets, open_url
from graftwork.records.base import hide_login
from graftwork.records.errors import Damaged, EnvironmentLacks, UserMistake
from graftwork.records.release import Release, ReleaseFile
from graftwork.records.units import MIB
from graftwork.registry.folder import MANIFEST, MINISIGN, SIGSTORE
from graftwork.registry.manifest import content_id
from graftwork.registry.names import FILE, NAME, require_name
from graftwork.registry.progress import ProgressCallback, ProgressCounter, digest_with_progress, no_progress
from graftwork.registry.store import ReleaseStore, staging_folder
from graftwork.registry.transfer.archive import LARGEST_MANIFEST, LARGEST_SIGNATURE, ReceivedRelease
from graftwork.text.messages import redact_login

_PIECE = MIB


class RemoteStore:
    """The releases below one URL."""

    def __init__(self, url: str) -> None:
        if "://" not in url:
            raise UserMistake(
                f"{hide_login(url)!r} is not a URL",
                fix="write it like s3://bucket/folder or file:///mnt/releases",
                where="release.store",
            )
        self._files, root = open_url(url, kind="store", setting="release.store")
        self._root = root.rstrip("/")
        self._has_buckets = has_buckets(self._files)
        self._url, self.address = url, hide_login(url)
        if self._has_buckets:
            self._require_bucket()

    def ids(self) -> tuple[str, ...]:
        """The releases whose manifests are here, not looked into."""
        self._files.invalidate_cache()
        found = self._asked(lambda: self._files.glob(f"{self._root}/releases/*/{MANIFEST}"))
        names = (str(path).rsplit("/", 2)[-2] for path in found)
        return tuple(sorted(name for name in names if NAME.fullmatch(name)))

    def has(self, release_id: str) -> bool:
        return self._size(self._manifest(release_id)) is not None

    def find(self, id_or_prefix: str) -> str:
        """The id of the only release that begins so."""
        require_name(id_or_prefix, kind="release id")
        found = [one for one in self.ids() if one.startswith(id_or_prefix)]
        if len(found) != 1:
            raise UserMistake(
                f"{'several releases begin' if found else 'no release begins'} with {id_or_prefix} there",
                why=f"{self.address} holds {len(self.ids())} releases",
                fix="give more of the id, or push the release there first (`graft release push`)",
                where=self.address,
            )
        return found[0]

    def put_blob(self, source: Path, file: ReleaseFile, *, count: ProgressCounter | None = None) -> bool:
        """Bring a blob there and read it back. Says whether it had to be sent.

        `count` counts each byte twice: on its way there, and read back.
        """
        place, counted = self._blob(file.sha256), count or ProgressCounter(no_progress, "", 0)
        if self._size(place) == file.size and self._digest(place, counted) == file.sha256:
            counted.add(file.size)
            return False
        self._make_parent(place)
        self._carry(self._files.put_file, str(source), place, size=file.size, count=counted)
        if self._size(place) != file.size or self._digest(place, counted) != file.sha256:
            raise Damaged(
                f"{file.path} did not arrive as it was sent",
                why="read back, it has other bytes",
                fix="push the release again",
                where=self.address,
            )
        return True

    def get_blob(self, file: ReleaseFile, target: Path, *, count: ProgressCounter | None = None) -> Path:
        """Fetch a blob; refused where it is missing, has another length or other bytes."""
        place, counted = self._blob(file.sha256), count or ProgressCounter(no_progress, "", 0)
        size = self._size(place)
        if size != file.size:
            found = "is not there" if size is None else f"has {size:,} bytes, not {file.size:,}"
            raise self._damaged(f"{file.path} {found}", "the manifest names it")
        self._carry(self._files.get_file, place, str(target), size=file.size, count=counted)
        if digest_with_progress(target, ProgressCounter(no_progress, "", 0)) != file.sha256:
            raise self._damaged(f"{file.path} has other bytes than its manifest says", "its hash is another")
        return target

    def put_text(self, release_id: str, name: str, content: bytes) -> None:
        """A file beside the manifest, or the manifest itself; whole or not at all."""
        place = f"{self._root}/releases/{require_name(release_id, kind='release id')}/{name}"
        if self._has_buckets:
            # An object appears when all of it has arrived.
            self._asked(lambda: self._files.pipe_file(place, content))
            return
        self._make_parent(place)
        part = f"{place}.{uuid.uuid4().hex[:8]}.part"
        self._asked(lambda: self._files.pipe_file(part, content))
        self._asked(lambda: self._files.mv(part, place))

    def get_text(self, release_id: str, name: str, *, largest: int = LARGEST_MANIFEST) -> bytes | None:
        """None where it is not there."""
        place = f"{self._root}/releases/{require_name(release_id, kind='release id')}/{name}"
        size = self._size(place)
        if size is None:
            return None
        if size > largest:
            raise self._damaged(f"{name} is too large", f"it may have {largest:,} bytes")
        return bytes(self._asked(lambda: self._files.cat_file(place)))

    def read(self, release_id: str) -> Release:
        """The manifest, proven to be the one that its id names."""
        data = self.get_text(release_id, MANIFEST)
        if data is None:
            raise UserMistake(
                f"release {release_id[:12]} is not there",
                why="there is no manifest, which is written last",
                fix="push it there first (`graft release push`)",
                where=self.address,
            )
        try:
            release = Release.from_json(data)
        except ValidationError as error:
            raise self._damaged("the manifest cannot be read", str(error).splitlines()[0]) from error
        if release.id != release_id or release.id != content_id(release):
            raise self._damaged("the manifest was changed", "its id is not the hash of its content")
        return release

    def _require_bucket(self) -> None:
        bucket = self._root.partition("/")[0]
        if not bucket or not self._asked(lambda: self._files.exists(bucket)):
            raise UserMistake(
                f"there is no bucket {bucket!r}",
                why="a bucket is made by whoever pays for it, not by this command",
                fix="make the bucket, or mend its name",
                where=self.address,
            )

    def _make_parent(self, place: str) -> None:
        if not self._has_buckets:
            self._asked(lambda: self._files.makedirs(place.rpartition("/")[0], exist_ok=True))

    def _manifest(self, release_id: str) -> str:
        return f"{self._root}/releases/{require_name(release_id, kind='release id')}/{MANIFEST}"

    def _blob(self, sha256: str) -> str:
        if not re.fullmatch(r"[0-9a-f]{64}", sha256):
            raise self._damaged(f"{sha256[:80]!r} is not a sha256", "blobs go by 64 hexadecimal digits")
        return f"{self._root}/blobs/{sha256[:2]}/{sha256[2:]}"

    def _size(self, place: str) -> int | None:
        def look() -> int | None:
            try:
                return int(self._files.info(place)["size"])
            except FileNotFoundError:
                return None

        self._files.invalidate_cache()
        found: int | None = self._asked(look)
        return found

    def _carry(
        self, way: Callable[..., Any], source: str, target: str, *, size: int, count: ProgressCounter
    ) -> None:
        """There or back. Some file systems tell how far they are; the others are done at once."""
        from fsspec.callbacks import Callback

        told = 0

        class Counted(Callback):  # type: ignore[misc, unused-ignore]
            def relative_update(self, inc: int = 1) -> None:
                nonlocal told
                inc = min(inc, size - told)
                told += inc
                count.add(inc)

        self._asked(lambda: way(source, target, callback=Counted()))
        count.add(size - told)

    def _digest(self, place: str, count: ProgressCounter) -> str:
        def read() -> str:
            digest = hashlib.sha256()
            with self._files.open(place, "rb") as handle:
                while piece := handle.read(_PIECE):
                    digest.update(piece)
                    count.add(len(piece))
            return digest.hexdigest()

        return str(self._asked(read))

    def _asked(self, ask: Callable[[], Any]) -> Any:
        """Whatever a network library may raise becomes what, why and fix."""
        try:
            return ask()
        except Exception as error:
            raise EnvironmentLacks(
                f"the store cannot be used: {redact_login(error, self._url)}",
                why="it does not answer, or does not allow it",
                fix="see whether the address and the credentials are right, and try again",
                where=self.address,
            ) from error

    def _damaged(self, what: str, why: str) -> Damaged:
        return Damaged(
            what, why=why, fix="push the release again from a machine that has it", where=self.address
        )


class Pushed(NamedTuple):
    """`sent` are the files that had to travel; the others were there already."""

    release: Release
    sent: tuple[str, ...]
    bytes: int


def push_release(
    store: ReleaseStore, place: RemoteStore, release_id: str, *, tell: ProgressCallback = no_progress
) -> Pushed:
    """Verify here, send what is missing there, read it back, and write the manifest last."""
    with store.shared_lock():
        release, folder = store.verify(release_id, tell=tell), store.folder(release_id)
        count = ProgressCounter(tell, "send and read back", 2 * sum(file.size for file in release.files))
        sent = tuple(file for file in release.files if place.put_blob(folder / file.path, file, count=count))
        there = _manifest_there(place, release.id)
        for name in (MINISIGN, SIGSTORE):
            # One that was made at another time has other bytes, and signatures of its own.
            if (folder / name).is_file() and there in (None, release):
                place.put_text(release.id, name, (folder / name).read_bytes())
        if there is None:
            place.put_text(release.id, MANIFEST, (folder / MANIFEST).read_bytes())
    return Pushed(release, tuple(file.path for file in sent), sum(file.size for file in sent))


def pull_release(
    store: ReleaseStore, place: RemoteStore, release_id: str, *, tell: ProgressCallback = no_progress
) -> ReceivedRelease:
    """Fetch into the store. Hold the store's `adding()` around this and the entry in the index."""
    release = place.read(release_id)
    for file in release.files:
        if not FILE.fullmatch(file.path):
            raise Damaged(
                f"the manifest names {file.path[:80]!r}",
                why="that is not a file of a release",
                fix="push the release again from where it was made",
                where=place.address,
            )
    signatures = {
        name: data
        for name in (MINISIGN, SIGSTORE)
        if (data := place.get_text(release_id, name, largest=LARGEST_SIGNATURE)) is not None
    }
    if store.has(release_id):
        return ReceivedRelease(store.complete(release, signatures=signatures, tell=tell), new=False)
    with staging_folder(store.root) as folder:
        count = ProgressCounter(tell, "fetch", sum(file.size for file in release.files))
        sources: dict[str, Path | bytes] = {
            file.path: place.get_blob(file, folder / str(number), count=count)
            for number, file in enumerate(release.files)
        }
        return ReceivedRelease(
            store.put(release, sources=sources, signatures=signatures, tell=tell), new=True
        )


def _manifest_there(place: RemoteStore, release_id: str) -> Release | None:
    """A manifest that is there stays; a damaged one is written anew: its id says what belongs there."""
    try:
        return place.read(release_id)
    except (Damaged, UserMistake):
        return None
