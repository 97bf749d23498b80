"""Garbage collection next to others, and among things that are not as the store made them."""

from pathlib import Path

import pytest
from in_memory_index import InMemoryReleaseIndex
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.records.errors import Busy, Corrupted
from graftwork.records.release import Release
from graftwork.registry import store as locks
from graftwork.registry.store import ReleaseStore


@pytest.fixture
def store(tmp_path: Path) -> ReleaseStore:
    return ReleaseStore.open(tmp_path / "releases")


@pytest.fixture
def make(tmp_path, store):
    def make_one(name: str, weights: bytes = b"1234") -> Release:
        adapter = write_adapter(tmp_path / "runs" / name, weights=weights)
        return publish_parts(folder=store, index=InMemoryReleaseIndex(project=PROJECT), **parts(adapter))

    return make_one


def test_a_signature_never_comes_alone(store, make, monkeypatch):
    """Garbage collection while a release is being signed has to wait until it is."""
    release = make("one")
    real = ReleaseStore.verify

    def verify_while_somebody_collects(self, release_id, **more):
        found = real(self, release_id, **more)
        with pytest.raises(Busy), locks.exclusive_lock(store.root, wait_seconds=0.0):
            pytest.fail("the store could be had alone")
        return found

    monkeypatch.setattr(ReleaseStore, "verify", verify_while_somebody_collects)
    assert store.sign(release.id, b"signature").is_file()
    monkeypatch.undo()
    store.collect_garbage([])
    with pytest.raises(Corrupted):
        store.sign(release.id, b"signature")
    assert not store.folder(release.id).exists()


def test_a_link_in_the_place_of_a_release_goes_and_what_it_points_at_stays(store, make, tmp_path):
    release, other = make("one"), make("two", weights=b"other")
    elsewhere = tmp_path / "elsewhere"
    store.folder(release.id).rename(elsewhere)
    store.folder(release.id).symlink_to(elsewhere)
    (store.root / ".old.part").symlink_to(elsewhere)
    assert store.verify(release.id) == release
    assert set(store.collect_garbage([]).releases) == {release.id, other.id}
    assert (elsewhere / "manifest.json").is_file()
    assert store.ids() == ()
    assert store.collect_garbage([]).leftovers == 0
