"""A server that cannot write the store holds what it serves: garbage collection beside it sees that."""

import errno
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from registry_samples import PROJECT, parts, write_adapter

from graftwork.registry import leases
from graftwork.registry.memory import ReleasesInMemory
from graftwork.registry.publish import publish
from graftwork.registry.store import ReleaseStore

NOBODY = 65534


@pytest.fixture
def store() -> Iterator[ReleaseStore]:
    # Not below pytest's own folder: another user has to get there.
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    yield ReleaseStore.open(folder / "releases")
    shutil.rmtree(folder)


@pytest.fixture
def make(store, tmp_path):
    def make_one(name: str) -> str:
        adapter = write_adapter(tmp_path / name, weights=name.encode())
        return publish(folder=store, index=ReleasesInMemory(project=PROJECT), **parts(adapter)).id

    return make_one


def become_another_user() -> None:
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def mount_read_only() -> None:
    """As a read-only mount refuses, as far as the store asks it."""
    real = os.open

    def refuse(path, flags, *more, **named):
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *more, **named)

    os.open = refuse


WAYS = [
    pytest.param(mount_read_only, id="read-only mount"),
    pytest.param(
        become_another_user,
        id="another user",
        marks=pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else"),
    ),
]


@contextmanager
def reader(store: ReleaseStore, release_id: str, become) -> Iterator[int]:
    """A process that cannot write the store and serves a release; its id."""
    says, said = os.pipe()
    child = os.fork()
    if child == 0:
        become()
        with ReleaseStore.open(store.root).lease() as held:
            held.add(release_id)
            whole = ReleaseStore.open(store.root).get(release_id).is_dir()
            os.write(said, b"+" if whole else b"-")
            signal.pause()
        os._exit(1)
    os.close(said)
    try:
        assert os.read(says, 1) == b"+"
        yield child
    finally:
        os.close(says)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@pytest.mark.parametrize("become", WAYS)
def test_collection_spares_what_a_reader_serves_until_its_process_is_gone(store, make, become):
    served, idle = make("served"), make("idle")
    with reader(store, served, become):
        assert store.collect_garbage([], dry_run=True).leased == (served,)
        found = store.collect_garbage([])
        assert (found.releases, found.leased) == ((idle,), (served,))
        assert store.verify(served)
        assert not list((store.root / leases.LEASES).glob("*"))
    assert store.collect_garbage([]).releases == (served,)
    assert not list(store.blobs.all())


def test_a_reader_that_comes_between_the_look_and_the_taking_keeps_its_release(store, make, monkeypatch):
    """Even where the reader could not see the store's own lock."""
    served, idle = make("served"), make("idle")
    monkeypatch.setattr("graftwork.registry.store.held_by_readers", lambda _root, _ids: frozenset())
    with reader(store, served, mount_read_only):
        found = store.collect_garbage([])
        assert found.releases == (idle,)
        assert store.verify(served)
    monkeypatch.undo()
    assert store.collect_garbage([]).releases == (served,)
    assert not list(store.blobs.all())


def test_a_reader_does_not_hold_what_was_taken_away_before_it_had_it(store, make):
    release = make("one")
    gone = store.folder(release) / "manifest.json"
    real = leases.fcntl.flock

    def flock(descriptor, how):
        real(descriptor, how)
        if how == leases.fcntl.LOCK_SH and gone.exists():
            gone.parent.rename(store.root / ".trash.1")

    with pytest.MonkeyPatch.context() as patch, leases.ExitStack() as locks:
        patch.setattr(leases.fcntl, "flock", flock)
        held = leases.Lease(store.root, None, locks)
        held.add(release)
        assert held._ids == set()
    held.add("f" * 64)
    assert held._ids == set()
