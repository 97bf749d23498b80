"""The store of releases: folders on disk whose files are kept once.

In: a manifest and its files. Out: `<root>/<id>/`, a plain adapter folder made of links into `blobs/`, whole
or not at all; the same folder, proven, to whoever loads, serves, exports or promotes it. Which release
is live is not known here: the index knows.
"""

import shutil
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple, Self

from graftwork.files.whole import explain_os_error, folder_made_whole, sync_folder, write_whole
from graftwork.records.errors import Damaged
from graftwork.records.release import Garbage, Release
from graftwork.registry import guard
from graftwork.registry.blobs import BLOBS, PART, READ_ONLY, Blob, BlobStore
from graftwork.registry.counting import Count, Listener, nobody
from graftwork.registry.folder import (
    BESIDE,
    MANIFEST,
    MINISIGN,
    SIGSTORE,
    read_manifest,
    release_folder,
    verify_release,
)
from graftwork.registry.leases import Lease, held_by_readers, lease, leased, taken_away
from graftwork.registry.names import FILE, NAME
from graftwork.registry.release import name_by_content
from graftwork.registry.signature import require_signature

TRASH = ".trash"


class Stock(NamedTuple):
    """What lies in the store: the ids of its releases, and those that running servers hold."""

    ids: tuple[str, ...]
    leased: frozenset[str]


InUse = Collection[str] | Callable[[Stock], Collection[str]]
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
        tell: Listener = nobody,
    ) -> Release:
        """Store the release, its manifest last, and check what was stored.

        `sources` gives each file that the manifest names. A release that is there already stays as it is; it
        is checked and its manifest comes back. Hold `adding()` around this and the entry in the index.
        """
        target = self.folder(release.id)
        _require_sound(release, sources, where=target)
        with self.adding():
            if not target.exists():
                count = Count(tell, "store", sum(file.size for file in release.files))
                for file in release.files:
                    self.blobs.put(sources[file.path], file.sha256, count=count)
                count.finish()
                with folder_made_whole(target) as folder:
                    self._fill(folder, release, signatures or {})
            return verify_release(target, tell=tell)

    def verify(self, release_id: str, *, tell: Listener = nobody) -> Release:
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
        path = self.folder(release_id) / MINISIGN
        with self.adding():
            # Together: of a release that was taken away in between nothing but a signature would be there.
            self.verify_unsigned(release_id)
            write_whole(path, signature)
            path.chmod(READ_ONLY)
        return path

    def verify_unsigned(self, release_id: str, *, tell: Listener = nobody) -> Release:
        """Check every byte, whoever signed it or not."""
        return ReleaseStore(self.root).verify(release_id, tell=tell)

    def adding(self) -> AbstractContextManager[None]:
        """Nothing is collected while the block runs: hold it while a release is made, entered or promoted."""
        return guard.adding(self.root)

    def lease(self) -> AbstractContextManager[Lease]:
        """Hold releases for as long as this process needs them."""
        return lease(self.root)

    def collect_garbage(self, in_use: InUse, *, dry_run: bool = False) -> Garbage:
        """Take away the releases that are neither in use nor leased, and what no release holds any more.

        A release goes by one rename, then its files, then the blobs that nobody holds: killed anywhere, each
        release is there whole or gone, and the next collection finishes the work.
        """
        with guard.alone(self.root):
            ids = self.ids()
            stock = Stock(ids, leased(self.root, tidy=not dry_run) | held_by_readers(self.root, ids))
            wanted = in_use(stock) if callable(in_use) else in_use
            kept = (set(wanted) | stock.leased) & set(stock.ids)
            doomed = tuple(one for one in stock.ids if one not in kept)
            held, unreadable = self._held_by(kept)
            blobs = () if unreadable else tuple(one for one in self.blobs.all() if one.sha256 not in held)
            leftovers = tuple(self._leftovers())
            found = Garbage(
                releases=doomed,
                blobs=len(blobs),
                leftovers=len(leftovers),
                bytes=self._weigh(doomed, blobs, leftovers),
                kept=len(kept),
                leased=tuple(sorted(stock.leased)),
                unreadable=unreadable,
                dry_run=dry_run,
            )
            if dry_run:
                return found
            spared = self._remove_releases(doomed)
            # What came to be held in the last moment keeps its blobs, too; the next collection looks again.
            self._remove_loose(() if spared else blobs, leftovers)
            gone = tuple(one for one in doomed if one not in spared)
            return found.model_copy(update={"releases": gone, "blobs": 0 if spared else len(blobs)})

    def _fill(self, folder: Path, release: Release, signatures: Mapping[str, bytes]) -> None:
        for file in release.files:
            self.blobs.place(file.sha256, folder / file.path)
        for name in (MINISIGN, SIGSTORE):
            if name in signatures:
                write_whole(folder / name, signatures[name])
                (folder / name).chmod(READ_ONLY)
        write_whole(folder / MANIFEST, release.to_json())
        (folder / MANIFEST).chmod(READ_ONLY)

    def _held_by(self, kept: Collection[str]) -> tuple[set[str], tuple[str, ...]]:
        """The hashes that these releases name, and those whose manifests cannot tell."""
        held: set[str] = set()
        unreadable: list[str] = []
        for one in sorted(kept):
            try:
                held |= {file.sha256 for file in read_manifest(self.folder(one)).files}
            except Damaged:
                unreadable.append(one)
        return held, tuple(unreadable)

    def _leftovers(self) -> Iterator[Path]:
        """What killed processes left: nobody is at work now, so nobody needs it."""
        yield from self.root.glob(f".*{PART}")
        yield from self.root.glob(f"{TRASH}.*")
        yield from self.blobs.leftovers()

    def _weigh(self, doomed: Collection[str], blobs: Collection[Blob], leftovers: Collection[Path]) -> int:
        folders = [self.folder(one) for one in doomed] + [path for path in leftovers if path.is_dir()]
        inside = [path.stat() for folder in folders for path in folder.rglob("*") if path.is_file()]
        loose = [path.stat() for path in leftovers if path.is_file()]
        # What is linked elsewhere is freed with its last name, and counted there.
        return sum(one.st_size for one in (*inside, *loose) if one.st_nlink == 1) + sum(
            one.path.stat().st_size for one in blobs
        )

    def _remove_releases(self, doomed: Collection[str]) -> frozenset[str]:
        """Take the folders away; those that somebody holds by now stay, and are given back."""
        spared = set()
        try:
            for one in doomed:
                trash = self.root / f"{TRASH}.{uuid.uuid4().hex[:8]}"
                with taken_away(self.folder(one) / MANIFEST) as free:
                    if not free:
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
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _require_sound(release: Release, sources: Mapping[str, Path | bytes], *, where: Path) -> None:
    """A manifest that does not name itself rightly, or files that it may not name, are not let in."""
    names = [file.path for file in release.files]
    if release.id != name_by_content(release):
        why = "its id is not the hash of its content"
    elif any(not FILE.fullmatch(name) or name in BESIDE for name in names) or len(set(names)) < len(names):
        why = "it names a file that no release may have"
    elif missing := sorted(set(names) - set(sources)):
        why = f"{missing[0]} is not given"
    else:
        return
    raise Damaged(
        f"the manifest of release {release.id[:12]} cannot be taken",
        why=why,
        fix="get the release again from where it was made",
        where=str(where),
    )
