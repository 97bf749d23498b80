"""Signatures that come later: signing, or being killed while signing, leaves the release whole."""

import os
from pathlib import Path

import pytest
from in_memory_index import InMemoryReleaseIndex
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.files.disk import file_digest
from graftwork.records.errors import Corrupted, EnvironmentFailure
from graftwork.records.release import Release
from graftwork.registry.archive import read_archive, write_archive
from graftwork.registry.folder import verify_release
from graftwork.registry.store import ReleaseStore

SIGNATURE, BUNDLE = "manifest.json.minisig", "manifest.json.sigstore.json"
LEFT = f".{SIGNATURE}.0123abcd.part"
STEPS = ["fsync", "replace"]


@pytest.fixture
def store(tmp_path: Path) -> ReleaseStore:
    return ReleaseStore.open(tmp_path / "releases")


@pytest.fixture
def release(store, tmp_path) -> Release:
    adapter = write_adapter(tmp_path / "adapter")
    return publish_parts(folder=store, index=InMemoryReleaseIndex(project=PROJECT), **parts(adapter))


def before_each(monkeypatch, step: str, do) -> None:
    """`do` runs right before the file is synced, or gets its name."""
    owner, name = (os, "fsync") if step == "fsync" else (Path, "replace")
    real = getattr(owner, name)

    def first_do(*given):
        do()
        return real(*given)

    monkeypatch.setattr(owner, name, first_do)


@pytest.mark.parametrize("step", STEPS)
def test_a_release_is_whole_at_every_moment_while_it_is_signed(store, release, monkeypatch, step):
    seen = []
    before_each(monkeypatch, step, lambda: seen.append(verify_release(store.folder(release.id))))
    path = store.sign(release.id, b"signed\n")
    assert seen
    assert path.read_bytes() == b"signed\n"
    # As private as the folder that it lies in.
    assert path.stat().st_mode & 0o777 == 0o400


@pytest.mark.parametrize("step", STEPS)
def test_a_signer_that_is_killed_leaves_a_whole_release_and_what_gc_takes(store, release, monkeypatch, step):
    child = os.fork()
    if child == 0:
        try:
            before_each(pytest.MonkeyPatch(), step, lambda: os._exit(9))
            store.sign(release.id, b"signed\n")
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert store.verify(release.id) == release
    assert list(store.root.glob(".*.part"))
    assert store.collect_garbage([release.id]).leftovers == 1
    assert not list(store.root.glob(".*.part"))
    assert store.sign(release.id, b"signed\n").read_bytes() == b"signed\n"


def test_a_signer_that_is_stopped_leaves_nothing(store, release, monkeypatch):
    def stop():
        raise KeyboardInterrupt

    before_each(monkeypatch, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        store.sign(release.id, b"signed\n")
    assert not list(store.root.glob(".*.part"))
    assert store.verify(release.id) == release


def test_a_full_disk_while_signing_is_reported_and_keeps_the_signature_there_was(store, release, monkeypatch):
    store.sign(release.id, b"first\n")

    def fill():
        raise OSError(28, "No space left on device")

    before_each(monkeypatch, "fsync", fill)
    with pytest.raises(EnvironmentFailure, match="disk is full"):
        store.sign(release.id, b"second\n")
    assert (store.folder(release.id) / SIGNATURE).read_bytes() == b"first\n"
    assert not list(store.root.glob(".*.part"))


@pytest.mark.parametrize("name", [".manifest.json.minisig.part", ".x.0123abcd.part", LEFT, "a.part"])
def test_a_file_that_the_manifest_does_not_name_is_refused(store, release, name):
    (store.folder(release.id) / name).write_bytes(b"half")
    with pytest.raises(Corrupted, match="does not belong here"):
        store.verify(release.id)


def test_a_link_beside_the_files_is_refused(store, release, tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"half")
    (store.folder(release.id) / LEFT).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(Corrupted, match="does not belong here"):
        store.verify(release.id)


def import_into(store: ReleaseStore, archive: Path) -> bool:
    with read_archive(archive, store=store) as unpacked:
        return unpacked.put_into(store).new


def test_a_signature_that_came_later_comes_in_with_the_next_archive(store, release, tmp_path):
    far = ReleaseStore.open(tmp_path / "far")
    archives = [tmp_path / name for name in ("unsigned.tar", "signed.tar", "signed-again.tar")]
    write_archive(store, release.id, target=archives[0])
    store.sign(release.id, b"signed\n")
    write_archive(store, release.id, target=archives[1])
    store.sign(release.id, b"signed again\n")
    write_archive(store, release.id, target=archives[2])
    assert import_into(far, archives[0])
    weights = far.folder(release.id) / "adapter_model.safetensors"
    before = (weights.stat().st_ino, file_digest(weights))
    for archive in (archives[1], archives[0], archives[2]):
        assert not import_into(far, archive)
        # The one that it has stays: who brings another one does not take it away.
        assert (far.folder(release.id) / SIGNATURE).read_bytes() == b"signed\n"
    assert (weights.stat().st_ino, file_digest(weights)) == before
    assert far.verify(release.id) == release


def test_a_signature_of_a_manifest_with_another_time_is_not_taken(store, release):
    """Their ids are one, their bytes are not."""
    later = release.model_copy(update={"created_at": "2031-01-01T00:00:00Z"})
    assert store.complete(later, signatures={SIGNATURE: b"of another one"}) == release
    assert not (store.folder(release.id) / SIGNATURE).exists()
    store.complete(release, signatures={SIGNATURE: b"ours", BUNDLE: b"{}"})
    assert (store.folder(release.id) / SIGNATURE).read_bytes() == b"ours"
    assert (store.folder(release.id) / BUNDLE).read_bytes() == b"{}"
