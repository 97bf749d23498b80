"""Releases between the store on this machine and a place.

In: a store, a place, an id. Out: the release on the other side, whole or not at all, and what had to be sent.
Killed in the middle, the next try sends what is missing. What is in the index is not known here.
"""

from pathlib import Path
from typing import NamedTuple

from graftwork.records.errors import Damaged, UserMistake
from graftwork.records.release import Release
from graftwork.registry.counting import Count, Listener, nobody
from graftwork.registry.exchange.archive import LARGEST_SIGNATURE, Arrived
from graftwork.registry.exchange.incoming import incoming_folder
from graftwork.registry.folder import MANIFEST, MINISIGN, SIGSTORE
from graftwork.registry.names import FILE
from graftwork.registry.places.place import Place
from graftwork.registry.store import ReleaseStore


class Pushed(NamedTuple):
    """`sent` are the files that had to travel; the others were there already."""

    release: Release
    sent: tuple[str, ...]
    bytes: int


def push_release(store: ReleaseStore, place: Place, release_id: str, *, tell: Listener = nobody) -> Pushed:
    """Verify here, send what is missing there, read it back, and write the manifest last."""
    with store.adding():
        release, folder = store.verify(release_id, tell=tell), store.folder(release_id)
        count = Count(tell, "send and read back", 2 * sum(file.size for file in release.files))
        sent = tuple(file for file in release.files if place.put_blob(folder / file.path, file, count=count))
        there = _manifest_there(place, release.id)
        for name in (MINISIGN, SIGSTORE):
            # One that was made at another time has other bytes, and signatures of its own.
            if (folder / name).is_file() and there in (None, release):
                place.put_text(release.id, name, (folder / name).read_bytes())
        if there is None:
            place.put_text(release.id, MANIFEST, (folder / MANIFEST).read_bytes())
    return Pushed(release, tuple(file.path for file in sent), sum(file.size for file in sent))


def pull_release(store: ReleaseStore, place: Place, release_id: str, *, tell: Listener = nobody) -> Arrived:
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
        return Arrived(store.complete(release, signatures=signatures, tell=tell), new=False)
    with incoming_folder(store.root) as folder:
        count = Count(tell, "fetch", sum(file.size for file in release.files))
        sources: dict[str, Path | bytes] = {
            file.path: place.get_blob(file, folder / str(number), count=count)
            for number, file in enumerate(release.files)
        }
        return Arrived(store.put(release, sources=sources, signatures=signatures, tell=tell), new=True)


def _manifest_there(place: Place, release_id: str) -> Release | None:
    """A manifest that is there stays; a damaged one is written anew: its id says what belongs there."""
    try:
        return place.read(release_id)
    except (Damaged, UserMistake):
        return None
