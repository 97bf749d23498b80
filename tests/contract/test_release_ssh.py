"""Releases over a real sshd: checked there before the alias moves, whole or not at all."""

import sys
import uuid
from pathlib import Path

import pytest
from ssh_server import running_sshd

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "registry"))

from in_memory_index import InMemoryReleaseIndex
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.records.errors import Corrupted, EnvironmentFailure, GraftError, UserError
from graftwork.registry import ssh
from graftwork.registry.signatures import create_key_pair, load_secret_key, sign_manifest
from graftwork.registry.ssh import parse_target, push_over_ssh
from graftwork.registry.store import ReleaseStore


@pytest.fixture(scope="module")
def sshd(tmp_path_factory):
    with running_sshd(tmp_path_factory.mktemp("sshd")) as command:
        yield command


@pytest.fixture
def far(sshd, tmp_path, monkeypatch):
    """The folder on the other machine, which is this one; its name asks for trouble."""
    monkeypatch.setenv("GRAFT_SSH", sshd)
    return tmp_path / "it's $(touch far)"


@pytest.fixture
def store(tmp_path):
    return ReleaseStore.open(tmp_path / "here")


def make(store, *, weights=b"\x01\x02\x03\x04"):
    adapter = write_adapter(store.root.parent / f"adapter-{uuid.uuid4().hex}", weights=weights)
    return publish_parts(folder=store, index=InMemoryReleaseIndex(project=PROJECT), **parts(adapter))


def target(far):
    return parse_target(f"127.0.0.1:{far}")


def alias_there(far, name="champion"):
    path = far / ".aliases" / name
    return path.read_text().strip() if path.exists() else None


def test_a_release_arrives_whole_and_then_the_alias_moves(far, store):
    first, second = make(store), make(store, weights=b"others")
    done = push_over_ssh(store, first.id, target=target(far), alias="champion")
    assert (done.sent, done.previous) == (True, None)
    assert ReleaseStore.open(far).verify(first.id) == first
    assert alias_there(far) == first.id
    again = push_over_ssh(store, first.id, target=target(far), alias="champion")
    assert (again.sent, again.previous) == (False, first.id)
    done = push_over_ssh(store, second.id, target=target(far), alias="tagger/champion")
    assert alias_there(far, "tagger/champion") == second.id
    assert alias_there(far) == first.id
    assert ReleaseStore.open(far).ids() == tuple(sorted((first.id, second.id)))
    assert len((far / ".aliases" / ".log").read_text().splitlines()) == 2
    assert not list(far.glob(".*.part"))


def test_without_an_alias_only_the_files_travel(far, store):
    release = make(store)
    assert push_over_ssh(store, release.id, target=target(far)).sent
    assert ReleaseStore.open(far).verify(release.id) == release
    assert not (far / ".aliases").exists()


def test_damaged_remote_files_are_repaired_before_the_alias_moves(far, store):
    release = make(store)
    push_over_ssh(store, release.id, target=target(far))
    victim = far / release.id / "plan.json"
    victim.chmod(0o644)
    victim.write_text("{}")
    assert push_over_ssh(store, release.id, target=target(far), alias="champion").sent
    assert ReleaseStore.open(far).verify(release.id) == release
    assert alias_there(far) == release.id


@pytest.mark.parametrize(
    "share", [0.0, 0.6, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.2, 0.95))]
)
def test_a_transfer_that_breaks_off_leaves_neither_release_nor_alias(
    far, store, monkeypatch, tmp_path, share
):
    release = make(store, weights=bytes(200_000))
    real = ssh._run

    def cut_off(where, script, given, *, stream=None, count=None):
        if stream is None:
            return real(where, script, given)
        data = stream.read()
        cut = tmp_path / "cut.tar"
        cut.write_bytes(data[: int(len(data) * share)])
        with cut.open("rb") as handle:
            return real(where, script, given, stream=handle, count=count)

    monkeypatch.setattr(ssh, "_run", cut_off)
    with pytest.raises(GraftError):
        push_over_ssh(store, release.id, target=target(far), alias="champion")
    assert alias_there(far) is None
    assert ReleaseStore.open(far).ids() == ()
    assert not list(far.glob(".*.part"))


def test_bytes_that_changed_on_the_way_are_refused_there(far, store, monkeypatch, tmp_path):
    release = make(store)
    real = ssh._run

    def changed(where, script, given, *, stream=None, count=None):
        if stream is None:
            return real(where, script, given)
        path = tmp_path / "changed.tar"
        path.write_bytes(stream.read().replace(b"every rule passes", b"every rule PASSES"))
        with path.open("rb") as handle:
            return real(where, script, given, stream=handle, count=count)

    monkeypatch.setattr(ssh, "_run", changed)
    with pytest.raises(Corrupted, match="did not arrive"):
        push_over_ssh(store, release.id, target=target(far), alias="champion")
    assert alias_there(far) is None
    assert ReleaseStore.open(far).ids() == ()


def test_a_machine_that_does_not_answer_is_reported(store, monkeypatch):
    monkeypatch.setenv("GRAFT_SSH", "ssh -p 1")
    with pytest.raises(EnvironmentFailure, match="cannot be reached") as reported:
        push_over_ssh(store, make(store).id, target=parse_target("127.0.0.1:/nowhere"))
    assert reported.value.fix
    monkeypatch.setenv("GRAFT_SSH", "no-such-ssh")
    with pytest.raises(EnvironmentFailure, match="cannot be started"):
        push_over_ssh(store, make(store).id, target=parse_target("127.0.0.1:/nowhere"))


@pytest.mark.parametrize(
    "text", ["", "host", "host:relative", "-oProxyCommand=x:/y", "ho st:/y", "host:/a\nb"]
)
def test_a_target_that_could_mean_something_else_is_refused(text):
    with pytest.raises(UserError):
        parse_target(text)


def test_the_alias_cannot_leave_its_folder(store):
    with pytest.raises(UserError):
        push_over_ssh(store, make(store).id, target=parse_target("host:/x"), alias="../../etc/passwd")


def test_a_signature_that_came_later_is_brought_there_and_the_release_does_not_leave_its_place(
    far, store, tmp_path
):
    release = make(store)
    push_over_ssh(store, release.id, target=target(far), alias="champion")
    place = (far / release.id).stat().st_ino
    key = load_secret_key(create_key_pair(tmp_path / "keys")[0])
    store.sign(release.id, sign_manifest(store.folder(release.id), key=key, comment="ours"))
    assert push_over_ssh(store, release.id, target=target(far)).sent
    signature = "manifest.json.minisig"
    assert (far / release.id / signature).read_bytes() == (store.folder(release.id) / signature).read_bytes()
    (store.folder(release.id) / signature).unlink()
    # Pushing an unsigned copy does not remove the signature.
    assert not push_over_ssh(store, release.id, target=target(far), alias="champion").sent
    assert (far / release.id / signature).is_file()
    assert (far / release.id).stat().st_ino == place
    assert ReleaseStore.open(far).verify(release.id) == release
    assert not list(far.glob(".*.part"))


@pytest.mark.parametrize(
    ("name", "stays"), [("plan.json", True), ("manifest.json", False), ("stranger.py", True)]
)
def test_of_what_is_damaged_there_the_signature_stays_where_the_manifest_is_the_same(far, store, name, stays):
    release, signature = make(store), "manifest.json.minisig"
    push_over_ssh(store, release.id, target=target(far))
    (far / release.id / signature).write_bytes(b"signed there\n")
    victim = far / release.id / name
    if victim.exists():
        victim.chmod(0o644)
    victim.write_bytes(b"{}")
    assert push_over_ssh(store, release.id, target=target(far)).sent
    assert ReleaseStore.open(far).verify(release.id) == release
    assert (far / release.id / signature).exists() == stays


def test_a_release_damaged_during_signing_is_replaced_by_a_signed_one(far, store, monkeypatch):
    """The hashes hold before the signatures come, and do not when they are there."""
    release, signature = make(store), "manifest.json.minisig"
    push_over_ssh(store, release.id, target=target(far))
    store.sign(release.id, b"signed\n")
    moved = 'then mv -f -- "$part/$name" "$root/$id/$name"; fi'
    assert ssh._TAKE.count(moved) == 1
    damage = 'then rm -f -- "$root/$id/plan.json"; fi'
    monkeypatch.setattr(ssh, "_TAKE", ssh._TAKE.replace(moved, damage))
    push_over_ssh(store, release.id, target=target(far), alias="champion")
    assert (far / release.id / signature).read_bytes() == b"signed\n"
    assert ReleaseStore.open(far).verify(release.id) == release


def test_bytes_sent_are_reported_while_they_go(far, store, monkeypatch):
    release = make(store, weights=bytes(16 * 2**20))
    monkeypatch.setattr(ssh, "POLL_SECONDS", 0.002)
    heard: list[tuple[str, int, int]] = []
    push_over_ssh(store, release.id, target=target(far), progress=lambda *reported: heard.append(reported))
    sent = [reported for reported in heard if reported[0] == "send"]
    assert sent[-1][1] == sent[-1][2] > 16 * 2**20
    assert len({done for _, done, _ in sent}) > 3
    assert [done for _, done, _ in sent] == sorted(done for _, done, _ in sent)


def test_the_remote_check_uses_the_manifest_and_not_the_local_folder(far, store, monkeypatch):
    release = make(store)
    path = store.folder(release.id) / "plan.json"
    path.chmod(0o644)
    real = store.verify

    def verify_then_damage(*given, **named):
        found = real(*given, **named)
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        return found

    monkeypatch.setattr(store, "verify", verify_then_damage)
    with pytest.raises(GraftError):
        push_over_ssh(store, release.id, target=target(far), alias="champion")
    assert alias_there(far) is None
    assert ReleaseStore.open(far).ids() == ()
