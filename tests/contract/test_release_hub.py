"""Releases to a Hub and back through the official client, against a server that speaks its protocol."""

import hashlib
import logging
import sys
import uuid
from pathlib import Path

import pytest
from hub_server import TOKEN, running_hub

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "registry"))

from in_memory_index import InMemoryReleaseIndex
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.records.errors import EnvironmentFailure, GraftError, UserError
from graftwork.registry.hub import Hub
from graftwork.registry.signatures import create_key_pair, load_secret_key, sign_manifest
from graftwork.registry.store import ReleaseStore

REPOSITORY = "team/cited-answers"


@pytest.fixture
def hub(monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    # As it comes: the client prefers Xet where it can.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with running_hub() as server:
        yield server


@pytest.fixture
def store(tmp_path):
    return ReleaseStore.open(tmp_path / "here")


def make(store, *, weights=b"\x01\x02\x03\x04"):
    adapter = write_adapter(store.root.parent / f"adapter-{uuid.uuid4().hex}", weights=weights)
    return publish_parts(folder=store, index=InMemoryReleaseIndex(project=PROJECT), **parts(adapter))


def open_hub(hub):
    return Hub(REPOSITORY, endpoint=hub.url)


def anything(_release):
    pass


def test_a_release_goes_to_the_hub_and_comes_back_byte_for_byte(hub, store, tmp_path):
    release = make(store)
    commit, tag = open_hub(hub).push(store, release.id)
    there = hub.repositories[REPOSITORY][commit]
    assert there == {path.name: path.read_bytes() for path in store.folder(release.id).iterdir()}
    far = ReleaseStore.open(tmp_path / "far")
    for revision, new in (("main", True), (tag, False), (commit, False)):
        assert open_hub(hub).pull(far, revision=revision, allow=anything) == (release, new)
    assert far.verify(release.id) == release
    assert not list(far.root.glob(".*.part"))


def test_files_on_the_hub_are_not_uploaded_again(hub, store):
    first, second = make(store), make(store, weights=b"others")
    for _ in range(2):
        open_hub(hub).push(store, first.id)
    assert len(hub.uploads) == 1
    open_hub(hub).push(store, second.id)
    assert len(hub.uploads) == 2
    assert hub.tags.keys() == {(REPOSITORY, release.id[:12]) for release in (first, second)}


def test_a_push_that_breaks_off_goes_on_where_it_was(hub, store):
    release = make(store)
    hub.broken = "/commit/"
    with pytest.raises(EnvironmentFailure) as reported:
        open_hub(hub).push(store, release.id)
    assert reported.value.fix
    assert hub.uploads == [next(f.sha256 for f in release.files if f.path.endswith("safetensors"))]
    hub.broken = None
    open_hub(hub).push(store, release.id)
    assert len(hub.uploads) == 1


def test_other_bytes_on_the_hub_are_not_taken_in(hub, store, tmp_path):
    release = make(store)
    commit, _ = open_hub(hub).push(store, release.id)
    far = ReleaseStore.open(tmp_path / "far")
    good = dict(hub.repositories[REPOSITORY][commit])
    weights = "adapter_model.safetensors"
    for change in (
        {weights: good[weights][:-1] + b"!"},
        {weights: good[weights] + bytes(10)},
        {"manifest.json": good["manifest.json"].replace(b"deploy", b"abort!")},
        {"manifest.json": b"no JSON"},
    ):
        hub.commit(REPOSITORY, {**good, **change})
        with pytest.raises(GraftError):
            open_hub(hub).pull(far, allow=anything)
    for name in (weights, "manifest.json"):
        hub.commit(REPOSITORY, {key: data for key, data in good.items() if key != name})
        with pytest.raises(GraftError):
            open_hub(hub).pull(far, allow=anything)
    assert far.ids() == ()
    assert open_hub(hub).pull(far, revision=commit, allow=anything).release == release


def test_a_file_that_changed_on_its_way_is_found_out(hub, store, monkeypatch):
    release = make(store)
    real = type(hub).commit

    def commit(self, repository, files):
        return real(
            self, repository, {name: data.replace(b"small", b"SMALL") for name, data in files.items()}
        )

    monkeypatch.setattr(type(hub), "commit", commit)
    with pytest.raises(GraftError, match="a different hash"):
        open_hub(hub).push(store, release.id)
    assert not hub.tags


def test_the_token_is_needed_and_never_shown(hub, store, monkeypatch, caplog, capfd):
    release = make(store)
    caplog.set_level(logging.DEBUG)
    open_hub(hub).push(store, release.id)
    hub.broken = "/"
    with pytest.raises(EnvironmentFailure) as reported:
        open_hub(hub).push(store, release.id)
    output = capfd.readouterr()
    heard = [str(reported.value.as_json()), caplog.text, output.out, output.err]
    assert not [text for text in heard if TOKEN in text]
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(EnvironmentFailure, match="no token"):
        open_hub(hub).push(store, release.id)


def test_without_rights_it_is_reported(hub, store, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(EnvironmentFailure, match="the request to the Hub failed"):
        open_hub(hub).push(store, make(store).id)
    assert hub.unauthorized
    assert hashlib.sha256(b"").hexdigest() not in hub.large


@pytest.mark.parametrize("name", ["", "no-slash", "a/b/c", "../x", "a b/c"])
def test_a_name_that_is_no_repository_is_refused(name):
    with pytest.raises(UserError):
        Hub(name)


def test_a_push_is_one_commit_over_lfs_though_the_client_could_use_xet(hub, store, caplog, capfd):
    pytest.importorskip("hf_xet")
    runtime = pytest.importorskip("huggingface_hub.utils._runtime")
    assert runtime.is_xet_available()
    release = make(store)
    open_hub(hub).push(store, release.id)
    assert len(hub.uploads) == 1
    assert sum("/commit/" in path for path in hub.asked) == 1
    assert not [path for path in hub.asked if "xet" in path]
    assert "Xet" not in caplog.text + capfd.readouterr().err


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "plan.json"])
def test_a_file_that_is_damaged_here_after_the_check_does_not_pass_for_the_release(
    hub, store, monkeypatch, name
):
    release = make(store)
    client = open_hub(hub)
    real_create = client._api.create_repo

    def create_repo(*args, **options):
        path = store.folder(release.id) / name
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        return real_create(*args, **options)

    monkeypatch.setattr(client._api, "create_repo", create_repo)
    with pytest.raises(GraftError, match=f"{name} has a different hash"):
        client.push(store, release.id)
    assert not hub.tags


def test_the_signature_of_the_release_before_does_not_stay_with_the_next(hub, store, tmp_path):
    first, second = make(store), make(store, weights=b"others")
    key = load_secret_key(create_key_pair(tmp_path / "keys")[0])
    store.sign(first.id, sign_manifest(store.folder(first.id), key=key, comment="ours"))
    signed = open_hub(hub).push(store, first.id)
    unsigned = open_hub(hub).push(store, second.id)
    far = ReleaseStore.open(tmp_path / "far")
    for _, tag in (signed, unsigned):
        open_hub(hub).pull(far, revision=tag, allow=anything)
    assert (far.folder(first.id) / "manifest.json.minisig").is_file()
    assert not (far.folder(second.id) / "manifest.json.minisig").exists()


SIGNATURE = "manifest.json.minisig"


def test_a_signature_that_came_later_is_found_under_the_tag(hub, store, tmp_path):
    release, far = make(store), ReleaseStore.open(tmp_path / "far")
    first, tag = open_hub(hub).push(store, release.id)
    open_hub(hub).pull(far, revision=tag, allow=anything)
    store.sign(release.id, b"signed\n")
    second, _ = open_hub(hub).push(store, release.id)
    assert first != second
    assert hub.tags == {(REPOSITORY, release.id[:12]): second}
    # Also by whom the release was fetched before.
    assert not open_hub(hub).pull(far, revision=tag, allow=anything).new
    assert (far.folder(release.id) / SIGNATURE).read_bytes() == b"signed\n"
    assert open_hub(hub).push(store, release.id)[0] == second


@pytest.mark.parametrize("between", [False, True])
def test_a_copy_that_is_not_signed_does_not_take_the_signature_away(hub, store, tmp_path, between):
    release, other = make(store), make(store, weights=b"others")
    copy = ReleaseStore.open(tmp_path / "copy")
    open_hub(hub).push(store, release.id)
    open_hub(hub).pull(copy, allow=anything)
    store.sign(release.id, b"signed\n")
    open_hub(hub).push(store, release.id)
    if between:
        # Then the newest commit is that of another release, and only the tag knows this one's signature.
        open_hub(hub).push(store, other.id)
        assert SIGNATURE not in hub.repositories[REPOSITORY][hub.head(REPOSITORY)]
    commit, tag = open_hub(hub).push(copy, release.id)
    assert hub.repositories[REPOSITORY][commit][SIGNATURE] == b"signed\n"
    assert hub.tags[REPOSITORY, tag] == commit


def test_a_tag_that_went_while_it_was_moved_comes_back_with_the_next_push(hub, store):
    release = make(store)
    open_hub(hub).push(store, release.id)
    store.sign(release.id, b"signed\n")
    client = open_hub(hub)
    client._api.create_tag = None
    with pytest.raises(EnvironmentFailure):
        client.push(store, release.id)
    assert not hub.tags
    commit, tag = open_hub(hub).push(store, release.id)
    assert hub.tags == {(REPOSITORY, tag): commit}


def test_a_password_in_the_endpoint_is_never_shown(store, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    address = "http://joe:pass%2Dword@hub.example.org"
    monkeypatch.setenv("HF_ENDPOINT", address)
    client = Hub(REPOSITORY)

    def fail(*_args, **_options):
        raise RuntimeError(f"{address}/api?key=1 of joe:pass-word refused {TOKEN}; tried pass%2Dword")

    client._api.create_repo = fail
    with pytest.raises(EnvironmentFailure, match="the request to the Hub failed") as reported:
        client.push(store, make(store).id)
    output = str(reported.value.as_json())
    assert "refused" in output
    assert not [secret for secret in ("pass-word", "pass%2Dword", "key=1", TOKEN) if secret in output]


def test_bytes_done_of_bytes_total_are_reported_on_the_way_out_and_in(hub, store, tmp_path):
    release = make(store, weights=bytes(3 * 2**20))
    total = sum(file.size for file in release.files)
    heard: list[tuple[str, int, int]] = []

    def report(*reported):
        heard.append(reported)

    open_hub(hub).push(store, release.id, progress=report)
    far = ReleaseStore.open(tmp_path / "far")
    open_hub(hub).pull(far, allow=anything, progress=report)
    for phase in ("check", "send", "fetch", "store"):
        done = [event[1] for event in heard if event[0] == phase]
        assert {event[2] for event in heard if event[0] == phase} == {total}
        assert done[-1] == total, phase
        assert len(set(done)) > 3, phase
    assert [event[1] for event in heard if event[0] == "send"] == sorted(
        event[1] for event in heard if event[0] == "send"
    )
