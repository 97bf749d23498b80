"""Who holds a release without being able to write the store: seen by the lock on its manifest.

In: the store's folder and ids. Out: for each whether somebody holds its manifest, nobody does, or it cannot
be found out; and, for whoever takes a release away, the same lock, so that nobody comes to hold it meanwhile.
Ordinary leases are not known here.

On NFS a lock that excludes others needs a file that is open for writing, which a manifest is not. There it is
made writable for the moment in which it is opened; only its owner can do that.
"""

import fcntl
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from graftwork.registry.beside import MANIFEST
from graftwork.registry.guard import HELD

Hold = Literal["free", "held", "unseen", "unreadable"]
"""`unseen`: the file system does not say. `unreadable`: the manifest cannot even be opened."""
_OWNER_WRITES, _WRITE = 0o200, 0o222


class Readers(NamedTuple):
    """The releases that readers hold, those of which it cannot be known, and those that cannot be opened."""

    held: frozenset[str]
    unseen: frozenset[str]
    unreadable: frozenset[str]


def find_readers(root: Path, release_ids: Iterable[str]) -> Readers:
    """Who holds what, at this moment."""
    found: dict[Hold, set[str]] = {"free": set(), "held": set(), "unseen": set(), "unreadable": set()}
    for one in release_ids:
        with taken_away(root / one / MANIFEST) as hold:
            found[hold].add(one)
    return Readers(*(frozenset(found[hold]) for hold in ("held", "unseen", "unreadable")))


@contextmanager
def taken_away(manifest: Path) -> Iterator[Hold]:
    """Whether somebody holds this manifest; where it is free, nobody can while the block runs."""
    try:
        descriptor = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        yield "free"
        return
    except OSError:
        yield "unreadable"
        return
    try:
        hold = _lock(descriptor)
        if hold == "unseen":
            os.close(descriptor)
            descriptor = -1
            descriptor, hold = _lock_as_owner(manifest)
        yield hold
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _lock(descriptor: int) -> Hold:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Only these two say that somebody has it; any other says that it cannot be found out.
        return "held" if error.errno in HELD else "unseen"
    return "free"


def _lock_as_owner(manifest: Path) -> tuple[int, Hold]:
    """The same on a file that is open for writing. Nothing is written."""
    try:
        mode = stat.S_IMODE(manifest.stat().st_mode)
        manifest.chmod(mode | _OWNER_WRITES)
        try:
            descriptor = os.open(manifest, os.O_RDWR | os.O_CLOEXEC)
        finally:
            # Also where it was left writable by one who was killed in between.
            manifest.chmod(mode & ~_WRITE)
    except OSError:
        return -1, "unseen"
    return descriptor, _lock(descriptor)
