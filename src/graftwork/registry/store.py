"""The store of releases: folders on disk whose files are kept once.

In: a manifest and its files. Out: `<root>/<id>/`, a plain adapter folder made of links into `blobs/`, whole
or not at all; the same folder, proven, to whoever loads, serves, exports or promotes it. Which release
is live is not known here: the index knows.
"""

import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import NamedTuple, Self

from graftwork.files.disk import (
    atomic_folder,
    explain_os_error,
    make_folder,
    read_only_mode,
    sync_folder,
    write_atomic,
)
from graftwork.records.errors import Damaged, GraftError
from graftwork.records.release import Garbage, Release
from graftwork.registry import locks
from graftwork.registry.blobs import BLOBS, PART, Blob, BlobStore
from graftwork.registry.folder import (
    MANIFEST,
    METADATA_FILES,
    MINISIGN,
    SIGNATURES,
    add_missing_signatures,
    find_partial_signatures,
    read_manifest,
    release_folder,
    verify_release,
    write_metadata,
)
from graftwork.registry.locks import Lease, find_manifest_locks, lease, leased_releases, lock_manifest
from graftwork.registry.manifest import content_id, write_manifest
from graftwork.registry.names import FILE, NAME
from graftwork.registry.peft import choose_weight_files, require_safetensors
from graftwork.registry.progress import ProgressCallback, ProgressCounter, no_progress
from graftwork.registry.signatures import is_signed_by, require_signature

TRASH = ".trash"


class StoreContents(NamedTuple):
    """What lies in the store: the ids of its releases, those that running servers hold, and those of which
    nobody can say whether one does: these stay, too."""

    ids: tuple[str, ...]
    leased: frozenset[str]
    doubtful: frozenset[str] = frozenset()


InUse = Collection[str] | Callable[[StoreContents], Collection[str]]
"""The releases that must stay; asked for under the lock where it is a function."""


class ReleaseStore:
    """The releases below one folder. Threads and processes may share it."""

    def __init__(self, root: Path, *, public_key: str | None = None) -> None:
        self.root = root
        self.blobs = BlobStore(root)
        self._public_key = public_key

    @classmethod
    def open(cls, where: Path | str, *, public_key: str | None = None) -> Self:
        """The store in a folder. With a key, only what is signed with it is given out."""
        return cls(Path(where), public_key=public_key)

    def folder(self, release_id: str) -> Path:
        """Where a release lies or would lie; nothing is checked but the name."""
        return release_folder(self.root, release_id)

    def has(self, release_id: str) -> bool:
        return (self.folder(release_id) / MANIFEST).is_file()

    def ids(self) -> tuple[str, ...]:
        """The releases whose folders are here, not looked into."""
        if not self.root.is_dir():
            return ()
        found = (path.name for path in self.root.iterdir() if path.is_dir())
        return tuple(sorted(name for name in found if NAME.fullmatch(name) and name != BLOBS))

    def put(
        self,
        release: Release,
        *,
        sources: Mapping[str, Path | bytes],
        signatures: Mapping[str, bytes] | None = None,
        tell: ProgressCallback = no_progress,
    ) -> Release:
        """Store the release: its files, then its folder, which is checked before it gets its name.

        `sources` gives each file that the manifest names. A release that is there already stays as it is, but
        for signatures that it did not have; it is checked and its manifest comes back. Hold `adding()` around
        this and the entry in the index.
        """
        target = self.folder(release.id)
        _require_sound(release, sources, where=target)
        with self.shared_lock():
            if target.exists():
                return self.complete(release, signatures=signatures or {}, tell=tell)
            count = ProgressCounter(tell, "store", sum(file.size for file in release.files))
            for file in release.files:
                self.blobs.put(sources[file.path], file.sha256, count=count)
            count.finish()
            with atomic_folder(target) as folder:
                self._fill(folder, release, signatures or {})
                # Before it has its name: what is refused here was never a release of this store.
                stored = verify_release(folder, tell=tell)
                made = folder.stat().st_ino
            if target.stat().st_ino == made:
                return stored
            # Somebody else stored it meanwhile; the folder made here is gone.
            return self.complete(release, signatures=signatures or {}, tell=tell)

    def complete(
        self, release: Release, *, signatures: Mapping[str, bytes], tell: ProgressCallback = no_progress
    ) -> Release:
        """Check a release that is here, and take over the signatures that it lacks.

        A signature covers the manifest to the byte, and two manifests of one id may differ in the time: only
        signatures of the same one are added. A signature by the trusted key takes the place of one that does
        not hold, with the manifest that it covers: whatever arrived first, it does not block the true one.
        """
        target = self.folder(release.id)
        with self.shared_lock():
            there = verify_release(target, tell=tell)
            trusted = signatures.get(MINISIGN)
            if trusted is not None and self._is_better(target, release, trusted):
                if there == release or self._replace_manifest(target, release):
                    write_metadata(self.root, target, MINISIGN, trusted)
                    there = release
            elif there == release:
                add_missing_signatures(self.root, target, signatures)
        return there

    def _is_better(self, folder: Path, release: Release, signature: bytes) -> bool:
        """Whether the trusted key made this signature, and not the one that is here."""
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

    def _replace_manifest(self, folder: Path, release: Release) -> bool:
        """Put a manifest with another time in the place of this one, unless a reader holds it locked."""
        with lock_manifest(folder / MANIFEST) as hold:
            if hold == "free":
                write_metadata(self.root, folder, MANIFEST, write_manifest(release).encode())
        return hold == "free"

    def verify(self, release_id: str, *, tell: ProgressCallback = no_progress) -> Release:
        """Check every byte of a release, and its signature where the store has a key."""
        folder = self.folder(release_id)
        release = verify_release(folder, tell=tell)
        if release.id != release_id:
            raise Damaged(
                f"this is release {release.id[:12]}",
                why=f"it lies where {release_id[:12]} should",
                fix="give the folder its own name back",
                where=str(folder),
            )
        if self._public_key is not None:
            require_signature(folder, public_key=self._public_key)
        return release

    def get(self, release_id: str) -> Path:
        """The folder of a release, every byte checked: what may be loaded, served or exported."""
        self.verify(release_id)
        return self.folder(release_id)

    def sign(self, release_id: str, signature: bytes) -> Path:
        """Put a signature of the manifest beside it."""
        with self.shared_lock():
            # Together: of a release that was taken away in between nothing but a signature would be there.
            self.verify_unsigned(release_id)
            return write_metadata(self.root, self.folder(release_id), MINISIGN, signature)

    def verify_unsigned(self, release_id: str, *, tell: ProgressCallback = no_progress) -> Release:
        """Check every byte, whoever signed it or not."""
        return ReleaseStore(self.root).verify(release_id, tell=tell)

    def shared_lock(self) -> AbstractContextManager[None]:
        """Nothing is collected while the block runs: hold it while a release is made, entered or promoted."""
        return locks.shared_lock(self.root)

    def lease(self) -> AbstractContextManager[Lease]:
        """Hold releases for as long as this process needs them."""
        return lease(self.root)

    def collect_garbage(
        self, in_use: InUse, *, dry_run: bool = False, stays: Callable[[frozenset[str]], None] | None = None
    ) -> Garbage:
        """Take away the releases that are neither in use nor leased, and what no release holds any more.

        A release goes by one rename, then its files, then the blobs that nobody holds: killed anywhere, each
        release is there whole or gone, and the next collection finishes the work. `stays` is told, before
        anybody else can change the store, which releases are still there: one that was wanted gone may have
        come to be held in the last moment.
        """
        with locks.exclusive_lock(self.root):
            ids = self.ids()
            readers = find_manifest_locks(self.root, ids)
            stock = StoreContents(
                ids,
                leased_releases(self.root, tidy=not dry_run) | readers.held,
                readers.unseen | readers.unreadable,
            )
            wanted = in_use(stock) if callable(in_use) else in_use
            kept = (set(wanted) | stock.leased | stock.doubtful) & set(ids)
            doomed = tuple(one for one in ids if one not in kept)
            weights = {one: self._weigh(self.folder(one).rglob("*")) for one in doomed}
            spared = frozenset() if dry_run else self._remove_releases(doomed)
            kept |= spared
            gone = tuple(one for one in doomed if one not in spared)
            held, unreadable = self._held_by(kept, readers.unreadable)
            blobs = () if unreadable else tuple(one for one in self.blobs.all() if one.sha256 not in held)
            leftovers = tuple(self._leftovers(kept))
            found = Garbage(
                releases=gone,
                blobs=len(blobs),
                leftovers=len(leftovers),
                bytes=sum(weights[one] for one in gone) + self._weigh_loose(blobs, leftovers),
                kept=len(kept),
                leased=tuple(sorted(stock.leased | spared)),
                unreadable=unreadable,
                readers_unseen=tuple(sorted(readers.unseen)),
                dry_run=dry_run,
            )
            if not dry_run:
                self._remove_loose(blobs, leftovers)
                if stays is not None:
                    stays(frozenset(kept))
            return found

    def _fill(self, folder: Path, release: Release, signatures: Mapping[str, bytes]) -> None:
        for file in release.files:
            self.blobs.place(file.sha256, folder / file.path)
        for name in SIGNATURES:
            if name in signatures:
                write_atomic(folder / name, signatures[name])
                (folder / name).chmod(read_only_mode(folder))
        write_atomic(folder / MANIFEST, write_manifest(release))
        (folder / MANIFEST).chmod(read_only_mode(folder))

    def _held_by(self, kept: Collection[str], closed: Collection[str]) -> tuple[set[str], tuple[str, ...]]:
        """The hashes that these releases name; and those whose manifests cannot tell, with the closed."""
        held: set[str] = set()
        unreadable = set(closed)
        for one in sorted(kept):
            try:
                held |= {file.sha256 for file in read_manifest(self.folder(one)).files}
            except GraftError:
                unreadable.add(one)
        return held, tuple(sorted(unreadable))

    def _leftovers(self, kept: Collection[str]) -> Iterator[Path]:
        """What killed processes left: nobody is at work now, so nobody needs it."""
        yield from self.root.glob(f".*{PART}")
        yield from self.root.glob(f"{TRASH}.*")
        yield from self.blobs.leftovers()
        yield from find_partial_signatures(self.folder(one) for one in sorted(kept))

    def _weigh(self, paths: Iterable[Path]) -> int:
        # What is linked elsewhere is freed with its last name, and counted there.
        found = (path.stat() for path in paths if path.is_file())
        return sum(one.st_size for one in found if one.st_nlink == 1)

    def _weigh_loose(self, blobs: Collection[Blob], leftovers: Collection[Path]) -> int:
        inside = (path for folder in leftovers if _is_own_folder(folder) for path in folder.rglob("*"))
        return self._weigh((*inside, *leftovers)) + sum(one.path.stat().st_size for one in blobs)

    def _remove_releases(self, doomed: Collection[str]) -> frozenset[str]:
        """Take the folders away; those that somebody holds by now stay, and are given back."""
        spared = set()
        try:
            for one in doomed:
                trash = self.root / f"{TRASH}.{uuid.uuid4().hex[:8]}"
                with lock_manifest(self.folder(one) / MANIFEST) as hold:
                    if hold != "free":
                        spared.add(one)
                        continue
                    self.folder(one).rename(trash)
                sync_folder(self.root)
                _take_off(trash)
        except OSError as error:
            raise explain_os_error(error, self.root) from error
        return frozenset(spared)

    def _remove_loose(self, blobs: Collection[Blob], leftovers: Collection[Path]) -> None:
        try:
            for path in leftovers:
                _take_off(path)
            for blob in blobs:
                blob.path.unlink()
        except OSError as error:
            raise explain_os_error(error, self.root) from error


def _take_off(path: Path) -> None:
    """A link goes, and what it points at stays: that is not ours."""
    if _is_own_folder(path):
        shutil.rmtree(path)
    else:
        path.unlink()


def _is_own_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _require_sound(release: Release, sources: Mapping[str, Path | bytes], *, where: Path) -> None:
    """A manifest that does not name itself rightly, or files that it may not name, are not let in."""
    names = [file.path for file in release.files]
    if release.id != content_id(release):
        why = "its id is not the hash of its content"
    elif any(not FILE.fullmatch(name) or name in METADATA_FILES for name in names) or len(set(names)) < len(
        names
    ):
        why = "it names a file that no release may have"
    elif missing := sorted(set(names) - set(sources)):
        why = f"{missing[0]} is not given"
    elif (weights := choose_weight_files(names)[1]) not in names:
        why = "it names no weights"
    else:
        # Looked at before anything is stored: a pickle leaves no trace.
        if isinstance(source := sources[weights], Path):
            require_safetensors(source)
        return
    raise Damaged(
        f"the manifest of release {release.id[:12]} cannot be taken",
        why=why,
        fix="get the release again from where it was made",
        where=str(where),
    )


@contextmanager
def staging_folder(root: Path) -> Iterator[Path]:
    """Nothing is collected while the block runs."""
    with locks.shared_lock(root):
        folder = root / f".incoming.{uuid.uuid4().hex[:8]}{PART}"
        try:
            make_folder(folder)
        except OSError as error:
            raise explain_os_error(error, folder) from error
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
