"""Signatures between us and the minisign program: each verifies what the other signed, no change passes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "registry"))

from in_memory_index import InMemoryReleaseIndex
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.records.errors import Corrupted, UserError
from graftwork.registry.signatures import create_key_pair, load_public_key, load_secret_key, sign_manifest
from graftwork.registry.store import ReleaseStore

pytestmark = pytest.mark.skipif(shutil.which("minisign") is None, reason="minisign is not installed")


def minisign(*words: object, given: str = "") -> subprocess.CompletedProcess[str]:
    command = ["minisign", *map(str, words)]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture
def made(tmp_path):
    """A store that trusts nobody yet, and a release in it."""
    store = ReleaseStore.open(tmp_path / "releases")
    adapter = write_adapter(tmp_path / "adapter")
    return store, publish_parts(
        folder=store, index=InMemoryReleaseIndex(project=PROJECT), **parts(adapter)
    ).id


@pytest.fixture
def theirs(tmp_path):
    """A pair of keys that minisign made: secret, public."""
    secret, public = tmp_path / "minisign.key", tmp_path / "minisign.pub"
    done = minisign("-G", "-W", "-s", secret, "-p", public)
    assert done.returncode == 0, done.stderr
    return secret, public


@pytest.mark.parametrize("form", [(), ("-l",)], ids=["of the hash", "of the file, as old ones"])
def test_a_release_that_minisign_signed_verifies_here_and_a_changed_comment_does_not(
    made, theirs, tmp_path, form
):
    store, release = made
    secret, public = theirs
    signature = tmp_path / "signature"
    manifest = store.folder(release) / "manifest.json"
    done = minisign("-S", *form, "-s", secret, "-m", manifest, "-x", signature, "-t", "checked by hand")
    assert done.returncode == 0, done.stderr
    store.sign(release, signature.read_bytes())
    trusting = ReleaseStore.open(store.root, public_key=load_public_key(public.name, root=tmp_path))
    assert trusting.verify(release).id == release
    store.sign(release, signature.read_bytes().replace(b"checked by hand", b"checked by Hand"))
    with pytest.raises(Corrupted, match="is not valid"):
        trusting.verify(release)


def test_a_release_that_we_signed_verifies_with_minisign_and_a_changed_one_does_not(made, tmp_path):
    store, release = made
    secret_key, public_key = create_key_pair(tmp_path / "keys")
    folder = store.folder(release)
    store.sign(release, sign_manifest(folder, key=load_secret_key(secret_key), comment=f"release:{release}"))
    for key in (("-P", public_key), ("-p", tmp_path / "keys" / "graft.pub")):
        reported = minisign("-V", "-H", "-m", folder / "manifest.json", *key)
        assert reported.returncode == 0, reported.stderr
        assert f"release:{release}" in reported.stdout
    other = tmp_path / "manifest.json"
    other.write_bytes((folder / "manifest.json").read_bytes() + b" ")
    shutil.copy(folder / "manifest.json.minisig", tmp_path)
    assert minisign("-V", "-m", other, "-P", public_key).returncode != 0


def test_each_signs_with_the_others_secret_key(made, theirs, tmp_path):
    store, release = made
    secret, public = theirs
    manifest = store.folder(release) / "manifest.json"
    store.sign(release, sign_manifest(manifest.parent, key=load_secret_key(secret), comment="theirs"))
    assert minisign("-V", "-m", manifest, "-p", public).returncode == 0
    secret_key, public_key = create_key_pair(tmp_path / "keys")
    signature = tmp_path / "signature"
    assert minisign("-S", "-W", "-s", secret_key, "-m", manifest, "-x", signature).returncode == 0
    store.sign(release, signature.read_bytes())
    assert ReleaseStore.open(store.root, public_key=public_key).verify(release).id == release


@pytest.mark.slow
def test_a_key_that_minisign_locked_with_a_password_opens_here_with_it_only(made, tmp_path, monkeypatch):
    store, release = made
    secret, public = tmp_path / "locked.key", tmp_path / "locked.pub"
    assert minisign("-G", "-s", secret, "-p", public, given="a pass phrase\na pass phrase\n").returncode == 0
    monkeypatch.setenv("GRAFT_SIGNING_PASSWORD", "another")
    with pytest.raises(UserError, match="cannot be read"):
        load_secret_key(secret)
    monkeypatch.setenv("GRAFT_SIGNING_PASSWORD", "a pass phrase")
    manifest = store.folder(release) / "manifest.json"
    store.sign(release, sign_manifest(manifest.parent, key=load_secret_key(secret), comment="locked"))
    assert minisign("-V", "-m", manifest, "-p", public).returncode == 0
