"""Stores of releases at URLs: the same promises in memory, in a folder and on a real S3 protocol."""

import sys
import uuid
from pathlib import Path

import pytest
from s3_server import new_url

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "registry"))

from in_memory_index import InMemoryReleaseIndex
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.records.errors import EnvironmentFailure, GraftError, UserError
from graftwork.registry.remote_store import RemoteStore, pull_release, push_release
from graftwork.registry.store import ReleaseStore


@pytest.fixture(params=["memory", "file", "s3"])
def url(request, tmp_path):
    if request.param == "s3":
        request.getfixturevalue("s3_server")
        return new_url()
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/copies"
    return f"file://{tmp_path}/far away/copies"


@pytest.fixture
def store(tmp_path):
    return ReleaseStore.open(tmp_path / "here")


def make(store, *, weights=b"\x01\x02\x03\x04"):
    adapter = write_adapter(store.root.parent / f"adapter-{uuid.uuid4().hex}", weights=weights)
    return publish_parts(folder=store, index=InMemoryReleaseIndex(project=PROJECT), **parts(adapter))


def test_a_release_goes_there_and_comes_back_byte_for_byte(url, store, tmp_path):
    store.sign((release := make(store)).id, b"signed\n")
    _, sent = push_release(store, RemoteStore(url), release.id)
    assert sent == release.files
    place = RemoteStore(url)
    assert place.ids() == (release.id,)
    assert place.find(release.id[:10]) == release.id
    far = ReleaseStore.open(tmp_path / "far")
    assert pull_release(far, place, release.id) == (release, True)
    assert far.verify(release.id) == release
    assert (far.folder(release.id) / "manifest.json.minisig").read_bytes() == b"signed\n"
    assert pull_release(far, place, release.id).new is False
    assert not list(far.root.glob(".*.part"))


def test_a_signature_that_came_later_comes_with_the_next_pull_and_is_not_taken_away(url, store, tmp_path):
    release, place, far = make(store), RemoteStore(url), ReleaseStore.open(tmp_path / "far")
    push_release(store, place, release.id)
    pull_release(far, place, release.id)
    store.sign(release.id, b"signed\n")
    push_release(store, place, release.id)
    push_release(far, place, release.id)
    assert pull_release(far, place, release.id).new is False
    assert (far.folder(release.id) / "manifest.json.minisig").read_bytes() == b"signed\n"


def test_a_signature_does_not_come_to_a_manifest_that_it_does_not_sign(url, store, tmp_path):
    """The time is no part of the id, but of what is signed."""
    release, place, again = make(store), RemoteStore(url), ReleaseStore.open(tmp_path / "again")
    later = release.model_copy(update={"created_at": "2031-01-01T00:00:00Z"})
    folder = store.folder(release.id)
    again.put(later, sources={file.path: folder / file.path for file in release.files})
    store.sign(release.id, b"signed\n")
    again.sign(release.id, b"signed later\n")
    push_release(store, place, release.id)
    push_release(again, place, release.id)
    assert place.read(release.id) == release
    assert place.get_text(release.id, "manifest.json.minisig") == b"signed\n"


def test_existing_files_are_not_uploaded_again(url, store):
    first, second = make(store), make(store, weights=b"other weights")
    push_release(store, RemoteStore(url), first.id)
    assert push_release(store, RemoteStore(url), first.id)[1] == ()
    shared = {file.sha256 for file in first.files} & {file.sha256 for file in second.files}
    assert shared
    _, sent = push_release(store, RemoteStore(url), second.id)
    assert {file.sha256 for file in sent}.isdisjoint(shared)


def spoil(place, file, data):
    place._files.write(place._blob(file.sha256), data)


def test_a_damaged_blob_is_not_taken_in_and_is_repaired_by_the_next_push(url, store, tmp_path):
    release = make(store)
    place = RemoteStore(url)
    push_release(store, place, release.id)
    victim = release.files[0]
    far = ReleaseStore.open(tmp_path / "far")
    for data in (bytes(victim.size), b"short"):
        spoil(place, victim, data)
        with pytest.raises(GraftError) as reported:
            pull_release(far, RemoteStore(url), release.id)
        assert reported.value.fix
        assert far.ids() == ()
    assert push_release(store, place, release.id)[1] == (victim,)
    assert pull_release(far, RemoteStore(url), release.id).release == release


def test_a_push_that_breaks_off_shows_no_release_and_the_next_one_finishes_it(url, store, monkeypatch):
    release = make(store)
    place = RemoteStore(url)
    real, calls = place._files.system.put_file, []

    def put_file(*arguments, **more):
        calls.append(arguments)
        if len(calls) == 4:
            raise ConnectionError("the wire broke: https://user:secret@host/x?token=secret")
        return real(*arguments, **more)

    monkeypatch.setattr(place._files.system, "put_file", put_file)
    with pytest.raises(EnvironmentFailure, match="the wire broke") as reported:
        push_release(store, place, release.id)
    assert "secret" not in str(reported.value)
    assert RemoteStore(url).ids() == ()
    monkeypatch.undo()
    assert len(push_release(store, RemoteStore(url), release.id)[1]) == len(release.files) - 3
    assert RemoteStore(url).ids() == (release.id,)


def test_a_changed_manifest_and_a_missing_blob_are_refused(url, store, tmp_path):
    release = make(store)
    place, far = RemoteStore(url), ReleaseStore.open(tmp_path / "far")
    push_release(store, place, release.id)
    place._files.system.rm_file(place._files.path(place._blob(release.files[0].sha256)))
    with pytest.raises(GraftError, match="is not there"):
        pull_release(far, RemoteStore(url), release.id)
    place.put_text(release.id, "manifest.json", release.to_json().replace("deploy", "abort!").encode())
    with pytest.raises(GraftError, match="manifest"):
        pull_release(far, RemoteStore(url), release.id)
    with pytest.raises(UserError, match="not there"):
        pull_release(far, RemoteStore(url), "0" * 64)
    with pytest.raises(UserError, match="no release starts"):
        RemoteStore(url).find("0" * 64)
    assert far.ids() == ()


def test_a_damaged_manifest_is_refused_and_repaired_by_the_next_push(url, store, tmp_path):
    release = make(store)
    push_release(store, RemoteStore(url), release.id)
    far = ReleaseStore.open(tmp_path / "far")
    RemoteStore(url).put_text(release.id, "manifest.json", release.to_json().encode()[:100])
    with pytest.raises(GraftError, match="cannot be read"):
        pull_release(far, RemoteStore(url), release.id)
    assert push_release(store, RemoteStore(url), release.id)[1] == ()
    assert pull_release(far, RemoteStore(url), release.id).release == release


def test_a_bucket_that_does_not_exist_is_reported(s3_server):
    with pytest.raises(UserError, match="no bucket 'nowhere'") as reported:
        RemoteStore("s3://nowhere/folder")
    assert reported.value.fix


@pytest.mark.parametrize("url", ["not a url", "nosuchkind://somewhere/x"])
def test_an_address_that_cannot_be_used_is_reported(url):
    with pytest.raises(GraftError) as reported:
        RemoteStore(url)
    assert reported.value.fix


def test_no_secret_of_an_address_is_shown():
    assert RemoteStore("memory://key:secret@host/x?sig=abc").address == "memory://…@host/x?…"
