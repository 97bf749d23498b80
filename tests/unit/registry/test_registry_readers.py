"""A server that cannot write the store holds what it serves: garbage collection next to it sees that."""

import errno
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import get_args

import pytest
from in_memory_index import InMemoryReleaseIndex
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.records.errors import EnvironmentFailure
from graftwork.registry import store as locks
from graftwork.registry.store import LockState, ReleaseStore

NOBODY = 65534


def look_too_early(monkeypatch) -> None:
    nobody = {state: set() for state in get_args(LockState)}
    monkeypatch.setattr("graftwork.registry.store.find_manifest_locks", lambda _root, _ids: nobody)


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
        return publish_parts(folder=store, index=InMemoryReleaseIndex(project=PROJECT), **parts(adapter)).id

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
    says, output = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            become()
            with ReleaseStore.open(store.root).lease() as held:
                held.add(release_id)
                whole = ReleaseStore.open(store.root).get(release_id).is_dir()
                os.write(output, b"+" if whole else b"-")
                signal.pause()
        finally:
            os._exit(1)
    os.close(output)
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
        assert not list((store.root / locks.LEASES).glob("*"))
    assert store.collect_garbage([]).releases == (served,)
    assert not list(store.blobs.all())


def test_a_reader_that_comes_between_the_look_and_the_taking_keeps_its_release(store, make, monkeypatch):
    """Even where the reader could not see the store's own lock."""
    served, idle = make("served"), make("idle")
    look_too_early(monkeypatch)
    held = {file.sha256 for file in store.verify(served).files}
    own = [file.size for file in store.verify(idle).files if file.sha256 not in held]
    manifest = (store.folder(idle) / "manifest.json").stat().st_size
    with reader(store, served, mount_read_only):
        stayed = []
        found = store.collect_garbage([], stays=stayed.append)
        assert (found.releases, found.kept, found.leased) == ((idle,), 1, (served,))
        assert stayed == [{served}]
        # What only the other one had is gone, with its manifest; what both have stays.
        assert (found.blobs, found.bytes) == (len(own), sum(own) + manifest)
        assert store.verify(served)
    monkeypatch.undo()
    assert store.collect_garbage([]).releases == (served,)
    assert not list(store.blobs.all())


def test_a_reader_does_not_hold_what_was_taken_away_before_it_had_it(store, make):
    release = make("one")
    gone = store.folder(release) / "manifest.json"
    real = locks.fcntl.flock

    def flock(descriptor, how):
        real(descriptor, how)
        if how == locks.fcntl.LOCK_SH and gone.exists():
            gone.parent.rename(store.root / ".trash.1")

    with pytest.MonkeyPatch.context() as patch, locks.ExitStack() as stack:
        patch.setattr(locks.fcntl, "flock", flock)
        held = locks.Lease(store.root, None, stack)
        held.add(release)
        assert held._ids == set()
    held.add("f" * 64)
    assert held._ids == set()


def open_files_in(folder: Path) -> list[str]:
    """Of this process. What other tests left open may be closed at any time."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # the one that lists them is gone
            found.append(str(descriptor.readlink()))
    return sorted(path for path in found if path.startswith(str(folder)))


@pytest.mark.parametrize("number", [errno.ENOLCK, None])
def test_a_reader_that_holds_nothing_keeps_nothing_open(store, make, number, monkeypatch):
    release = make("one")
    real, locked = locks.fcntl.flock, []

    def flock(descriptor, how):
        if (store.folder(release) / "manifest.json").samefile(f"/proc/self/fd/{descriptor}"):
            locked.append(descriptor)
            if number is not None:
                raise OSError(number, os.strerror(number))
            store.folder(release).rename(store.root / ".trash.1")
        real(descriptor, how)

    monkeypatch.setattr(locks.fcntl, "flock", flock)
    with locks.ExitStack() as stack:
        held, before = locks.Lease(store.root, None, stack), open_files_in(store.root)
        if number is None:
            held.add(release)
        else:
            with pytest.raises(EnvironmentFailure):
                held.add(release)
        assert (held._ids, len(locked), open_files_in(store.root)) == (set(), 1, before)


def answer_like_nfs(monkeypatch) -> None:
    """A lock that excludes others is refused on what is not open for writing, as NFS does."""
    real = fcntl.flock

    def flock(descriptor, how):
        writes = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        if how & fcntl.LOCK_EX and not writes:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)


def answer_on_manifests(monkeypatch, number: int) -> None:
    real = fcntl.flock

    def flock(descriptor, how):
        if Path(f"/proc/self/fd/{descriptor}").readlink().name == "manifest.json":
            raise OSError(number, os.strerror(number))
        return real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)


def test_on_nfs_garbage_goes_and_what_a_reader_serves_stays(store, make, monkeypatch):
    served, idle = make("served"), make("idle")
    with reader(store, served, mount_read_only):
        answer_like_nfs(monkeypatch)
        found = store.collect_garbage([])
        assert (found.releases, found.leased, found.readers_unseen) == ((idle,), (served,), ())
        assert (store.folder(served) / "manifest.json").stat().st_mode & 0o777 == 0o444
    assert store.collect_garbage([]).releases == (served,)


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_where_readers_cannot_be_seen_releases_stay_and_it_is_reported(store, make, monkeypatch, number):
    one = make("one")
    answer_on_manifests(monkeypatch, number)
    found = store.collect_garbage([])
    assert (found.releases, found.leased, found.readers_unseen) == ((), (), (one,))
    assert (store.folder(one) / "manifest.json").stat().st_mode & 0o777 == 0o444
    assert store.verify(one)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EACCES])
def test_both_answers_of_a_lock_that_is_taken_mean_held(store, make, monkeypatch, number):
    one = make("one")
    answer_on_manifests(monkeypatch, number)
    found = store.collect_garbage([])
    assert (found.releases, found.leased, found.readers_unseen) == ((), (one,), ())


def test_an_ordinary_lease_holds_on_nfs_too(store, make, monkeypatch):
    served, idle = make("served"), make("idle")
    answer_like_nfs(monkeypatch)
    with store.lease() as held:
        held.add(served)
        assert store.collect_garbage([]).releases == (idle,)
    assert store.collect_garbage([]).releases == (served,)


def test_a_file_system_without_locks_is_reported(store, make, monkeypatch):
    make("one")

    def flock(_descriptor, _how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(EnvironmentFailure, match="locks"):
        store.collect_garbage([])


def test_one_manifest_that_cannot_be_opened_does_not_stop_the_collection(store, make, monkeypatch):
    closed, idle = make("closed"), make("idle")
    real = os.open

    def refuse(path, *more, **named):
        if Path(path) == store.folder(closed) / "manifest.json":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(path, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    for dry_run in (True, False):
        found = store.collect_garbage([], dry_run=dry_run)
        assert (found.releases, found.unreadable, found.kept, found.blobs) == ((idle,), (closed,), 1, 0)
    monkeypatch.undo()
    assert store.verify(closed)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_as_another_user_the_closed_manifest_is_named_and_the_rest_goes(store, make):
    closed, idle = make("closed"), make("idle")
    for path in (store.root, *store.root.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    manifest = store.folder(closed) / "manifest.json"
    os.chown(manifest, 0, 0)
    manifest.chmod(0o400)
    child = os.fork()
    if child == 0:
        try:
            become_another_user()
            found = ReleaseStore.open(store.root).collect_garbage([])
            os._exit(0 if (found.releases, found.unreadable) == ((idle,), (closed,)) else 1)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.verify(closed)
