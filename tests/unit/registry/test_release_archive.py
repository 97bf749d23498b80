"""Releases as archives: the same bytes each time, and nothing hostile, cut off or half gets in."""

import io
import os
import random
import signal
import tarfile

import pytest
from in_memory_index import InMemoryReleaseIndex
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.records.errors import GraftError
from graftwork.registry.archive import read_archive, write_archive
from graftwork.registry.folder import MANIFEST, MINISIGN
from graftwork.registry.store import ReleaseStore


def made(folder, *, weights=b"\x01\x02\x03\x04"):
    store = ReleaseStore.open(folder / "store")
    adapter = write_adapter(folder / "adapter", weights=weights)
    index = InMemoryReleaseIndex(project=PROJECT)
    return store, publish_parts(folder=store, index=index, **parts(adapter))


def take(path, store):
    with store.shared_lock(), read_archive(path, store=store) as unpacked:
        return unpacked.put_into(store)


@pytest.fixture
def archive(tmp_path):
    store, release = made(tmp_path / "here")
    write_archive(store, release.id, target=tmp_path / "one.tar")
    return tmp_path / "one.tar", release


def test_the_same_release_is_the_same_archive_and_comes_back_as_it_was(tmp_path):
    store, release = made(tmp_path / "here")
    first = write_archive(store, release.id, target=tmp_path / "a.tar")
    os.utime(store.folder(release.id) / "README.md", (1, 1))
    second = write_archive(store, release.id, target=tmp_path / "b.tar")
    assert first == second
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    with tarfile.open(tmp_path / "a.tar") as tar:
        members = tar.getmembers()
    assert [member.name.partition("/")[2] for member in members] == [
        MANIFEST,
        *sorted(f.path for f in release.files),
    ]
    assert {(member.mtime, member.uid, member.gid, member.uname) for member in members} == {(0, 0, 0, "")}
    far = ReleaseStore.open(tmp_path / "far")
    arrived = take(tmp_path / "a.tar", far)
    assert arrived == (release, True)
    assert far.verify(release.id) == release
    assert take(tmp_path / "a.tar", far).new is False
    assert not list(far.root.glob(".*.part"))


def test_a_signature_travels_with_its_release(tmp_path):
    store, release = made(tmp_path / "here")
    store.sign(release.id, b"untrusted comment: x\n")
    write_archive(store, release.id, target=tmp_path / "a.tar")
    far = ReleaseStore.open(tmp_path / "far")
    take(tmp_path / "a.tar", far)
    assert (far.folder(release.id) / MINISIGN).read_bytes() == b"untrusted comment: x\n"


def test_a_damaged_release_is_not_exported_and_leaves_nothing(tmp_path):
    store, release = made(tmp_path / "here")
    path = store.folder(release.id) / "plan.json"
    path.chmod(0o644)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(GraftError, match="does not match its hash"):
        write_archive(store, release.id, target=tmp_path / "out" / "a.tar")
    assert not (tmp_path / "out").exists()


def rebuilt(path, change):
    """The archive with its members changed by `change(list of (TarInfo, bytes))`."""
    with tarfile.open(path) as tar:
        members = [(member, tar.extractfile(member).read()) for member in tar.getmembers()]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for member, data in change(members):
            member.size = len(data) if member.isreg() else 0
            tar.addfile(member, io.BytesIO(data) if member.isreg() else None)
    path.write_bytes(buffer.getvalue())


def added(name="", *, kind=tarfile.REGTYPE, link=""):
    def change(members):
        top = members[0][0].name.partition("/")[0]
        member = tarfile.TarInfo(name or f"{top}/more")
        member.type, member.linkname = kind, link
        return [*members, (member, b"more")]

    return change


def renamed(name):
    def change(members):
        members[-1][0].name = name
        return members

    return change


def without_the_id(members):
    for member, _data in members:
        member.name = "/" + member.name.partition("/")[2]
    return members


def with_other_bytes(members):
    return [(one, bytes(len(data)) if one.name.endswith("README.md") else data) for one, data in members]


def with_more_bytes(members):
    return [(one, data + b"x" if one.name.endswith("README.md") else data) for one, data in members]


def with_another_manifest(members):
    return [(members[0][0], members[0][1].replace(b'"deploy"', b'"abort!"')), *members[1:]]


HOSTILE = {
    "a path that leads up": added("../../escaped"),
    "an absolute path": added("/tmp/escaped"),
    "a file of the release under a path that leads up": renamed("../verdict.json"),
    "names without the id of the release": without_the_id,
    "a folder below the release": added("x/y/z"),
    "a symbolic link": added(kind=tarfile.SYMTYPE, link="/etc/passwd"),
    "a hard link": added(kind=tarfile.LNKTYPE, link="/etc/passwd"),
    "a device": added(kind=tarfile.CHRTYPE),
    "a pipe": added(kind=tarfile.FIFOTYPE),
    "a folder": added(kind=tarfile.DIRTYPE),
    "a file that the manifest does not name": added(),
    "a name with an extended header": added("x" * 300),
    "other bytes": with_other_bytes,
    "more bytes": with_more_bytes,
    "a changed manifest": with_another_manifest,
    "a missing file": lambda members: members[:-1],
    "a file twice": lambda members: [*members, members[-1]],
    "no manifest": lambda members: members[1:],
    "the manifest last": lambda members: [*members[1:], members[0]],
    "nothing": lambda _members: [],
    "too many files": lambda members: members * 200,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused_and_leaves_nothing(archive, tmp_path, what):
    path, _ = archive
    rebuilt(path, HOSTILE[what])
    store = ReleaseStore.open(tmp_path / "a" / "b" / "far")
    with pytest.raises(GraftError) as reported:
        take(path, store)
    assert reported.value.fix
    assert store.ids() == ()
    assert not list(store.blobs.all())
    assert not list(store.root.glob(".*.part"))
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["far"]


def test_an_archive_cannot_unpack_to_more_than_it_weighs(archive, tmp_path):
    path, _ = archive
    data = bytearray(path.read_bytes())
    header = tarfile.TarInfo.frombuf(bytes(data[:512]), "utf-8", "strict")
    header.size = 8 * 2**40
    data[:512] = header.tobuf(tarfile.GNU_FORMAT)[-512:]
    path.write_bytes(bytes(data))
    store = ReleaseStore.open(tmp_path / "far")
    with pytest.raises(GraftError, match="past the end of the archive"):
        take(path, store)


def test_compressed_archives_are_not_unpacked(archive, tmp_path):
    import gzip

    path, _ = archive
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(GraftError, match="not an archive of a release"):
        take(path, ReleaseStore.open(tmp_path / "far"))


def test_no_cut_of_an_archive_gets_in(archive, tmp_path):
    path, release = archive
    whole = path.read_bytes()
    store = ReleaseStore.open(tmp_path / "far")
    for length in random.Random(7).sample(range(len(whole) - 1024), 40):
        path.write_bytes(whole[:length])
        with pytest.raises(GraftError):
            take(path, store)
        assert store.ids() == ()
    path.write_bytes(whole)
    assert take(path, store).release == release


def killed_at(moment, work):
    """Run `work` in a child that kills itself at the so-manieth sync or rename; whether it was killed."""
    child = os.fork()
    if child == 0:
        seen = 0

        def deadly(real):
            def call(*arguments, **more):
                nonlocal seen
                seen += 1
                if seen == moment:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **more)

            return call

        try:
            for name in ("fsync", "rename", "replace", "link", "mkdir"):
                setattr(os, name, deadly(getattr(os, name)))
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_killed_at_any_moment_an_import_leaves_no_half_release(archive, tmp_path, every):
    path, release = archive
    kills = 0
    for moment in range(1, 200, every):
        store = ReleaseStore.open(tmp_path / f"far-{moment}")
        if not killed_at(moment, lambda store=store: take(path, store)):
            break
        kills += 1
        assert store.ids() in ((), (release.id,))
        if store.ids():
            assert store.verify(release.id) == release
        assert take(path, store).release == release
        store.collect_garbage({release.id})
        assert not list(store.root.glob(".*.part"))
    assert kills >= 10 // every


def test_killed_at_any_moment_an_export_leaves_the_old_archive_or_the_new_one(tmp_path):
    store, release = made(tmp_path / "here")
    write_archive(store, release.id, target=tmp_path / "whole.tar")
    whole = (tmp_path / "whole.tar").read_bytes()
    target = tmp_path / "out.tar"
    kills = 0
    for moment in range(1, 50):
        target.write_bytes(b"the old one")
        if not killed_at(moment, lambda: write_archive(store, release.id, target=target)):
            break
        kills += 1
        assert target.read_bytes() in (b"the old one", whole)
    assert kills >= 2
    assert target.read_bytes() == whole
