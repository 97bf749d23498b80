"""What garbage collection could not take is there, for the index, too."""

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import get_args

import pytest
import yaml
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.cli import main as cli
from graftwork.project.folder import open_project
from graftwork.project.open_project import OpenProject, use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import GraftError
from graftwork.registry.project import DOUBTFUL, HELD_LATE, collect_garbage, open_store, promote_release
from graftwork.registry.store import LockState
from graftwork.store.releases import ReleaseTable


@pytest.fixture
def work(tmp_path) -> Iterator[OpenProject]:
    settings = {
        "project": PROJECT,
        "data": {"logs": ["logs.jsonl"]},
        "release": {"keep_last": 0, "keep_days": 0},
    }
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    with use_project(open_project(tmp_path), NullReporter()) as opened:
        yield opened


def make(work: OpenProject, name: str) -> str:
    adapter = write_adapter(work.project.root / "runs" / name, weights=name.encode())
    return publish_parts(folder=open_store(work), index=work.releases, **parts(adapter)).id


def manifest(work: OpenProject, release_id: str) -> Path:
    return open_store(work).folder(release_id) / "manifest.json"


@contextmanager
def read_locked(path: Path) -> Iterator[None]:
    """As a server that cannot write the store holds it."""
    with path.open("rb") as handle:
        fcntl.flock(handle, fcntl.LOCK_SH)
        yield


def look_too_early(monkeypatch) -> None:
    nobody = {state: set() for state in get_args(LockState)}
    monkeypatch.setattr("graftwork.registry.store.find_manifest_locks", lambda _root, _ids: nobody)


def test_a_release_that_is_spared_in_the_last_moment_is_not_reported_as_collected(work, monkeypatch):
    served, idle = make(work, "served"), make(work, "idle")
    look_too_early(monkeypatch)
    with read_locked(manifest(work, served)):
        found = collect_garbage(work)
    assert (found.releases, found.kept, found.leased) == ((idle,), 1, (served,))
    assert found.why_kept == {served: HELD_LATE}
    assert work.releases.entry(served).collected_at is None
    assert work.releases.entry(idle).collected_at is not None
    promote_release(work, served)
    assert work.releases.aliases() == {"champion": served}
    with pytest.raises(GraftError):
        promote_release(work, idle)


def test_a_served_release_marked_by_a_killed_collection_is_restored(work):
    served = make(work, "served")
    assert work.releases.collect([served], when="2025-03-01T12:00:00Z") == (served,)
    with read_locked(manifest(work, served)):
        # Who only looks changes nothing.
        collect_garbage(work, dry_run=True)
        assert work.releases.entry(served).collected_at is not None
        assert collect_garbage(work).releases == ()
    assert work.releases.entry(served).collected_at is None
    assert collect_garbage(work).releases == (served,)


def test_a_manifest_that_cannot_be_opened_is_named_and_its_release_is_not_marked(work, monkeypatch):
    closed, idle = make(work, "closed"), make(work, "idle")
    real, path = os.open, manifest(work, closed)

    def refuse(given, *more, **named):
        if Path(given) == path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return real(given, *more, **named)

    monkeypatch.setattr(os, "open", refuse)
    found = collect_garbage(work)
    assert (found.releases, found.unreadable) == ((idle,), (closed,))
    assert found.why_kept == {closed: DOUBTFUL}
    assert work.releases.entry(closed).collected_at is None


def test_where_readers_cannot_be_seen_gc_says_so_and_takes_nothing(work, monkeypatch, capsys):
    one, real = make(work, "one"), fcntl.flock

    def flock(descriptor, how):
        number = descriptor if isinstance(descriptor, int) else descriptor.fileno()
        if Path(f"/proc/self/fd/{number}").readlink().name == "manifest.json":
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return real(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr("sys.argv", ["graft", "release", "gc", "-C", str(work.project.root)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "readers cannot be detected: 1 releases stay" in output
    assert open_store(work).ids() == (one,)
    assert work.releases.entry(one).collected_at is None


def test_a_release_that_is_tagged_to_be_kept_while_garbage_is_collected_stays(work, monkeypatch):
    release = make(work, "one")
    entries = ReleaseTable.entries

    def tag_after_reading(table, *query):
        found = entries(table, *query)
        monkeypatch.setattr(ReleaseTable, "entries", entries)
        table.tag(release, ["keep"])
        return found

    def begin_reading(table, *query):
        """The first look is for releases without an entry; the second one decides what is kept."""
        monkeypatch.setattr(ReleaseTable, "entries", tag_after_reading)
        return entries(table, *query)

    monkeypatch.setattr(ReleaseTable, "entries", begin_reading)
    assert collect_garbage(work).releases == ()
    assert open_store(work).has(release)
    assert work.releases.entry(release).collected_at is None
    work.releases.tag(release, ["keep"], remove=True)
    assert collect_garbage(work).releases == (release,)
