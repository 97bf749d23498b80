"""Signatures in minisign's format: its own published ones hold, ours hold, changed ones do not."""

import base64
import fcntl
import shutil
import subprocess

import pytest
from in_memory_index import InMemoryReleaseIndex
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.records.errors import Corrupted, GraftError, NegativeResult, UserError
from graftwork.registry import signatures
from graftwork.registry.folder import MINISIGN
from graftwork.registry.signatures import (
    SecretKey,
    create_key_pair,
    load_public_key,
    load_secret_key,
    sign_manifest,
)
from graftwork.registry.store import ReleaseStore

# The test vectors of the minisign-verify crate, by minisign's author: a key and two signatures of b"test".
KEY = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3"
OF_FILE = (
    "untrusted comment: signature from minisign secret key\n"
    "RWQf6LRCGA9i59SLOFxz6NxvASXDJeRtuZykwQepbDEGt87ig1BNpWaVWuNrm73YiIiJbq71Wi+dP9eKL8OC351vwIasSSbXxwA=\n"
    "trusted comment: timestamp:1555779966\tfile:test\n"
    "QtKMXWyYcwdpZAlPF7tE2ENJkRd1ujvKjlj1m9RtHTBnZPa5WKU5uWRs5GoP5M/VqE81QFuMKI5k/SfNQUaOAA=="
)
OF_HASH = (
    "untrusted comment: signature from minisign secret key\n"
    "RUQf6LRCGA9i559r3g7V1qNyJDApGip8MfqcadIgT9CuhV3EMhHoN1mGTkUidF/z7SrlQgXdy8ofjb7bNJJylDOocrCo8KLzZwo=\n"
    "trusted comment: timestamp:1556193335\tfile:test\n"
    "y/rUw2y8/hOUYjZU71eHp/Wo1KZ40fGy2VJEDl34XMJM+TX48Ss/17u3IvIfbVR1FkZZSNCisQbuQY+bHwhEBg=="
)
SECRET = SecretKey(number=b"12345678", seed=bytes(range(32)))

# RFC 8032, section 7.1, tests 1 to 3: seed, public key, message, signature.
RFC_8032 = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e065224901555fb8821590a33bacc61e39701cf9b46b"
        "d25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da085ac1e43e15996e458f3613d0f11d8c"
        "387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac18ff9b538d16f290ae67f760984dc659"
        "4a7c15e9716ed28dc027beceea1ec40a",
    ),
]


@pytest.mark.parametrize(("seed", "public", "message", "signature"), RFC_8032)
def test_the_vectors_of_the_standard_hold(seed, public, message, signature):
    seed, public, message, signature = (bytes.fromhex(text) for text in (seed, public, message, signature))
    assert signatures.public_bytes(seed) == public
    assert signatures.sign_ed25519(message, seed=seed) == signature
    assert signatures.verify_ed25519(message, signature=signature, public=public)
    assert not signatures.verify_ed25519(message + b"x", signature=signature, public=public)
    # The same point with a scalar beyond the order: another signature that a careless reader would take.
    order = 2**252 + 27742317777372353535851937790883648493
    beyond = (int.from_bytes(signature[32:], "little") + order).to_bytes(32, "little")
    assert not signatures.verify_ed25519(message, signature=signature[:32] + beyond, public=public)


@pytest.mark.parametrize("text", [OF_FILE, OF_HASH])
def test_signatures_of_minisign_itself_hold_and_changed_ones_do_not(text):
    key = signatures.read_public_key(f"untrusted comment: a key\n{KEY}\n")
    signature = signatures.read_signature(text, where="x")
    assert signatures.is_valid_signature(signature, b"test", key=key)
    assert not signatures.is_valid_signature(signature, b"Test", key=key)
    assert not signatures.is_valid_signature(
        signature._replace(trusted_comment="timestamp:1"), b"test", key=key
    )
    assert not signatures.is_valid_signature(signature, b"test", key=signatures.public_of(SECRET))


def test_a_signature_of_ours_holds_and_names_its_comment():
    text = signatures.sign(b"manifest", key=SECRET, trusted_comment="release:1\nforged: line")
    found = signatures.read_signature(text, where="x")
    assert found.trusted_comment == "release:1 forged: line"
    assert signatures.is_valid_signature(found, b"manifest", key=signatures.public_of(SECRET))


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here to be the second opinion")
def test_openssl_agrees_with_our_signature(tmp_path):
    public = signatures.public_bytes(SECRET.seed)
    (tmp_path / "key.der").write_bytes(bytes.fromhex("302a300506032b6570032100") + public)
    (tmp_path / "message").write_bytes(b"a message")
    (tmp_path / "signature").write_bytes(signatures.sign_ed25519(b"a message", seed=SECRET.seed))
    command = (
        "openssl pkeyutl -verify -pubin -keyform DER -inkey key.der -rawin -in message -sigfile signature"
    )
    done = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_keys_are_written_once_and_readable_to_their_owner_only(tmp_path):
    secret_key, public_key = create_key_pair(tmp_path / "keys")
    assert secret_key.stat().st_mode & 0o077 == 0
    secret = load_secret_key(secret_key)
    assert signatures.read_public_key(public_key) == signatures.public_of(secret)
    assert load_public_key("keys/graft.pub", root=tmp_path).strip().endswith(public_key)
    with pytest.raises(UserError, match="already exists"):
        create_key_pair(tmp_path / "keys")


def test_a_key_without_a_checksum_is_read_as_minisign_writes_it_and_a_damaged_one_is_not(tmp_path):
    path = tmp_path / "key"
    raw = base64.b64decode(signatures.write_secret_key(SECRET).splitlines()[1])
    path.write_text(f"untrusted comment: a key\n{base64.b64encode(raw[:-32] + bytes(32)).decode()}\n")
    assert load_secret_key(path) == SECRET
    for place in (62, 93, 94, 125):
        damaged = bytearray(raw[:-32] + bytes(32))
        damaged[place] ^= 1
        path.write_text(f"untrusted comment: a key\n{base64.b64encode(damaged).decode()}\n")
        with pytest.raises(UserError, match="cannot be read"):
            load_secret_key(path)


@pytest.mark.parametrize("text", ["", "nonsense!", KEY[:-4], "RWQ=", OF_FILE])
def test_an_invalid_key_is_refused_with_its_path(text, tmp_path):
    with pytest.raises(UserError, match="cannot be read") as reported:
        load_public_key(text, root=tmp_path)
    assert reported.value.where == "release.public_key"
    (tmp_path / "key").write_text(text)
    with pytest.raises(UserError, match="cannot be read"):
        load_secret_key(tmp_path / "key")


@pytest.fixture
def signed(tmp_path):
    """A store that trusts a key, and one release in it."""
    secret_key, public_key = create_key_pair(tmp_path / "keys")
    store = ReleaseStore.open(tmp_path / "releases", public_key=public_key)
    adapter = write_adapter(tmp_path / "adapter")
    release = publish_parts(folder=store, index=InMemoryReleaseIndex(project=PROJECT), **parts(adapter))
    return store, release, load_secret_key(secret_key)


def test_where_a_key_is_trusted_only_what_it_signed_is_given_out(signed):
    store, release, key = signed
    with pytest.raises(NegativeResult, match="is not signed") as reported:
        store.get(release.id)
    assert "graft release edit" in reported.value.fix
    folder = store.folder(release.id)
    (folder / "manifest.json.sigstore.json").write_text("{}")
    with pytest.raises(NegativeResult, match="sigstore signature only"):
        store.get(release.id)
    store.sign(release.id, sign_manifest(folder, key=SECRET, comment="by another"))
    with pytest.raises(NegativeResult, match="a different key"):
        store.get(release.id)
    store.sign(release.id, sign_manifest(folder, key=key, comment="by us"))
    assert store.get(release.id) == folder
    # Without a trusted key, the signature is just a part of the folder, and nothing wrong with it.
    assert ReleaseStore.open(store.root).verify(release.id) == release


def test_every_changed_letter_of_a_signature_is_found(signed):
    store, release, key = signed
    path = store.sign(release.id, sign_manifest(store.folder(release.id), key=key, comment="ours"))
    whole = path.read_text().splitlines()
    path.chmod(0o644)
    for line in (1, 2, 3):
        for place in (len("trusted comment: "), len(whole[line]) // 2 + 12):
            changed = list(whole)
            letter = whole[line][place : place + 1]
            changed[line] = whole[line][:place] + ("A" if letter != "A" else "B") + whole[line][place + 1 :]
            path.write_text("\n".join(changed) + "\n")
            with pytest.raises(GraftError):
                store.verify(release.id)
    path.write_text("\n".join(whole) + "\n")
    assert store.verify(release.id) == release


def test_bytes_are_verified_whatever_the_signature(signed):
    store, release, key = signed
    folder = store.folder(release.id)
    store.sign(release.id, sign_manifest(folder, key=key, comment="ours"))
    (folder / "plan.json").chmod(0o644)
    (folder / "plan.json").write_bytes(b"{}")
    with pytest.raises(Corrupted, match="does not match its hash"):
        store.get(release.id)


@pytest.fixture
def carried(signed, tmp_path):
    """A signed release, and how copies of it with other signatures arrive in a store that trusts the key."""
    store, release, key = signed
    folder = store.folder(release.id)
    sources = {file.path: folder / file.path for file in release.files}
    there = ReleaseStore.open(tmp_path / "there", public_key=store._public_key)

    def arrive(signature: bytes, *, manifest=release) -> None:
        there.put(manifest, sources=sources, signatures={MINISIGN: signature})

    return there, release, sign_manifest(folder, key=key, comment="ours"), arrive


BOGUS = {
    "by another key": lambda true: signatures.sign(b"manifest", key=SECRET, trusted_comment="x").encode(),
    "that claims the trusted key": lambda true: true[:60] + bytes([true[60] ^ 1]) + true[61:],
    "of another comment": lambda true: true.replace(b"ours", b"owns"),
    "that is noise": lambda true: b"\xff\x00noise",
    "that is empty": lambda true: b"",
}


@pytest.mark.parametrize("kind", BOGUS)
def test_a_bogus_signature_neither_blocks_nor_replaces_the_true_one(carried, kind):
    store, release, true, arrive = carried
    arrive(BOGUS[kind](true))
    with pytest.raises(GraftError):
        store.get(release.id)
    arrive(true)
    assert store.verify(release.id) == release
    arrive(BOGUS[kind](true))
    assert store.verify(release.id) == release
    assert (store.folder(release.id) / MINISIGN).read_bytes() == true


def test_a_copy_with_another_time_does_not_block_the_signed_one(carried):
    store, release, true, arrive = carried
    altered = release.model_copy(update={"created_at": "2999-01-01T00:00:00+00:00"})
    arrive(b"", manifest=altered)
    with (store.folder(release.id) / "manifest.json").open("rb") as served:
        # A server that cannot write the store holds this very file: it stays in its place.
        fcntl.flock(served, fcntl.LOCK_SH)
        arrive(true)
        assert ReleaseStore.open(store.root).verify(release.id) == altered
    arrive(true)
    assert store.verify(release.id) == release
    arrive(b"", manifest=altered)
    assert store.verify(release.id) == release
