"""The store: files kept once, nothing half-written, nothing taken that somebody needs."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from in_memory_index import InMemoryReleaseIndex
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.files.disk import file_digest
from graftwork.records.errors import Busy, Corrupted, EnvironmentFailure, GraftError, UserError
from graftwork.records.release import Release
from graftwork.registry import folder as blobs
from graftwork.registry import store as locks
from graftwork.registry.folder import release_folder, verify_release
from graftwork.registry.manifest import content_id, require_alias, require_name
from graftwork.registry.store import ReleaseStore


@pytest.fixture
def index() -> InMemoryReleaseIndex:
    return InMemoryReleaseIndex(project=PROJECT)


@pytest.fixture
def store(tmp_path: Path) -> ReleaseStore:
    return ReleaseStore.open(tmp_path / "releases")


@pytest.fixture
def make(tmp_path, store, index):
    def make_one(name: str, weights: bytes = b"1234", **changes) -> Release:
        adapter = write_adapter(tmp_path / "runs" / name, weights=weights)
        return publish_parts(folder=store, index=index, **{**parts(adapter), "parent": None, **changes})

    return make_one


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_files_that_releases_share_are_stored_once(store, make):
    one, two = make("one"), make("two", versions={"graftwork": "1"})
    assert one.id != two.id
    paths = [store.folder(release.id) / "adapter_model.safetensors" for release in (one, two)]
    shared = next(file.sha256 for file in one.files if file.path == "adapter_model.safetensors")
    assert len({path.stat().st_ino for path in (*paths, store.blobs.path(shared))}) == 1
    assert len(list(store.blobs.all())) == len({file.sha256 for file in (*one.files, *two.files)})


def test_where_there_are_no_hard_links_releases_hold_copies(store, make, monkeypatch):
    def refuse(*_arguments, **_more):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(os, "link", refuse)
    release = make("one")
    path = store.folder(release.id) / "adapter_config.json"
    assert path.stat().st_nlink == 1
    assert not path.stat().st_mode & 0o222
    assert store.verify(release.id) == release


def test_a_manifest_with_false_hashes_is_refused(store, make, tmp_path):
    made = make("one")
    sources = {file.path: store.folder(made.id) / file.path for file in made.files}
    fresh = ReleaseStore.open(tmp_path / "other")
    with pytest.raises(Corrupted, match="is not valid") as refused:
        fresh.put(made.model_copy(update={"decision": "abort"}), sources=sources)
    assert "not the hash" in refused.value.why
    with pytest.raises(Corrupted, match="is not valid") as refused:
        fresh.put(made, sources={})
    assert "is missing" in refused.value.why
    assert fresh.ids() == ()
    assert fresh.put(made, sources=sources) == made


@pytest.mark.parametrize("name", ["../escape", "/etc/passwd", "a/b", "manifest.json", ".hidden", "", "a\nb"])
def test_a_manifest_cannot_name_a_file_outside_its_folder(store, make, tmp_path, name):
    made = make("one")
    evil = made.model_copy(update={"files": (*made.files, made.files[0].model_copy(update={"path": name}))})
    evil = evil.model_copy(update={"id": content_id(evil)})
    sources = {file.path: b"x" for file in evil.files}
    with pytest.raises(Corrupted, match="is not valid"):
        ReleaseStore.open(tmp_path / "other").put(evil, sources=sources)
    folder = store.root / evil.id
    shutil.copytree(store.folder(made.id), folder)
    (folder / "manifest.json").chmod(0o644)
    (folder / "manifest.json").write_text(evil.to_json())
    with pytest.raises(Corrupted, match="the manifest names"):
        store.verify(evil.id)


@given(st.one_of(st.text(max_size=80), st.from_regex(r"(\.\./|/|~|[a-z.]{1,3}){1,6}", fullmatch=True)))
def test_no_name_leads_out_of_the_store(name):
    root = Path("/store/releases")
    try:
        found = release_folder(root, name)
    except UserError:
        pass
    else:
        assert found.parent == root
        assert os.path.normpath(found) == str(found)
    try:
        require_alias(name)
    except UserError:
        pass
    else:
        assert os.path.normpath(f"/aliases/{name}") == f"/aliases/{name}"
        assert all(require_name(part, kind="part") for part in name.split("/"))


def test_a_damaged_blob_is_found_where_it_is_used_and_does_not_reach_the_next_release(store, make):
    one = make("one")
    shared = next(file.sha256 for file in one.files if file.path == "adapter_model.safetensors")
    blob = store.blobs.path(shared)
    blob.chmod(0o644)
    blob.write_bytes(b"\0" * blob.stat().st_size)
    with pytest.raises(Corrupted, match="does not match its hash") as reported:
        store.get(one.id)
    assert reported.value.why
    assert reported.value.fix
    assert reported.value.where.endswith("adapter_model.safetensors")
    two = make("two", versions={"graftwork": "1"})
    assert store.verify(two.id) == two
    with pytest.raises(Corrupted):
        store.verify(one.id)


def test_a_missing_release_is_reported_as_missing(store):
    with pytest.raises(Corrupted, match="not in this store") as reported:
        store.get("a" * 64)
    assert "import" in reported.value.fix


def test_a_full_disk_leaves_the_store_as_it_was(store, make, monkeypatch):
    make("one")
    before = files_below(store.root)
    real, calls = blobs.copy_with_progress, []

    def fill_up(source, target, _count):
        calls.append(target)
        Path(target).write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(blobs, "copy_with_progress", fill_up)
    with pytest.raises(EnvironmentFailure, match="disk is full") as reported:
        make("two", weights=b"other")
    assert calls
    assert reported.value.fix
    for digest, path in store.blobs.all():
        assert file_digest(path) == digest
    store.collect_garbage(store.ids())
    assert files_below(store.root) == before
    monkeypatch.setattr(blobs, "copy_with_progress", real)
    assert store.verify(make("three", weights=b"other").id)


def test_a_read_only_store_gives_out_what_it_has_and_says_why_it_takes_nothing(store, make, monkeypatch):
    release = make("one")
    before = files_below(store.root)
    real = os.open

    def refuse(path, flags, *more, **named):
        if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *more, **named)

    def refuse_bytes(*_arguments):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Path, "write_bytes", refuse_bytes)
    with store.shared_lock(), store.lease() as held:
        held.add(release.id)
        assert store.get(release.id).is_dir()
    for change in (lambda: store.collect_garbage([]), lambda: store.blobs.put(b"x", "0" * 64)):
        with pytest.raises(EnvironmentFailure, match="no permission") as reported:
            change()
        assert reported.value.fix
        assert reported.value.where
    assert files_below(store.root) == before


def test_collection_takes_what_is_not_in_use_and_the_files_that_nobody_else_holds(store, make):
    one, two = make("one"), make("two", weights=b"other")
    (store.root / ".dead.part").mkdir()
    reported = store.collect_garbage([two.id], dry_run=True)
    assert store.ids() == tuple(sorted((one.id, two.id)))
    found = store.collect_garbage([two.id])
    assert found.model_copy(update={"dry_run": True}) == reported
    assert found.releases == (one.id,)
    assert found.bytes > 0
    assert store.ids() == (two.id,)
    assert store.verify(two.id) == two
    assert {digest for digest, _ in store.blobs.all()} == {file.sha256 for file in two.files}
    assert not list(store.root.glob(".*.part"))
    assert store.collect_garbage([two.id]).bytes == 0


def test_collection_spares_what_a_lease_holds_until_its_process_is_gone(store, make):
    release = make("one")
    code = (
        "import sys\nfrom pathlib import Path\nfrom graftwork.registry.store import ReleaseStore\n"
        "with ReleaseStore.open(Path(sys.argv[1])).lease() as held:\n"
        "    held.add(sys.argv[2])\n    print('held', flush=True)\n    sys.stdin.readline()\n"
    )
    command = [sys.executable, "-c", code, store.root, release.id]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout.readline() == b"held\n"
        found = store.collect_garbage([])
        assert (found.releases, found.leased) == ((), (release.id,))
        server.kill()
        server.wait()
    assert store.collect_garbage([]).releases == (release.id,)
    assert not list((store.root / ".leases").iterdir())


def test_collection_waits_for_writers(store, make):
    release = make("one")
    with (
        store.shared_lock(),
        pytest.raises(Busy, match="in use") as reported,
        locks.exclusive_lock(store.root, wait_seconds=0.0),
    ):
        pass
    assert reported.value.fix
    with (
        locks.exclusive_lock(store.root),
        pytest.raises(Busy),
        locks.shared_lock(store.root, wait_seconds=0.0),
    ):
        pass
    assert store.verify(release.id)


def test_collection_touches_no_shared_file_while_a_manifest_cannot_be_read(store, make):
    one, two = make("one"), make("two", weights=b"other")
    manifest = store.folder(two.id) / "manifest.json"
    whole = manifest.read_bytes()
    manifest.chmod(0o644)
    manifest.write_bytes(b"{}")
    found = store.collect_garbage([two.id])
    assert found.unreadable == (two.id,)
    assert (found.releases, found.blobs) == ((one.id,), 0)
    manifest.write_bytes(whole)
    assert store.verify(two.id) == two


def test_the_next_collection_ends_what_a_killed_one_began(store, make):
    one = make("one")
    store.folder(one.id).rename(store.root / ".trash.12345678")
    found = store.collect_garbage([])
    assert found.leftovers == 1
    assert list(store.blobs.all()) == []
    assert [path.name for path in store.root.iterdir() if path.name.startswith(".trash")] == []


def test_a_folder_under_another_ids_name_is_refused(store, make):
    one = make("one")
    store.folder(one.id).rename(store.root / ("a" * 64))
    with pytest.raises(Corrupted, match="this folder contains release"):
        store.get("a" * 64)


def test_a_release_opens_as_a_plain_adapter_folder(store, make):
    folder = store.get(make("one").id)
    assert (folder / "adapter_config.json").is_file()
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert verify_release(folder)
    with pytest.raises(GraftError):
        verify_release(folder.parent)
