"""Hostile archives: traversal, links, bombs, altered manifests. Each is refused and leaves nothing behind."""

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "registry"))

from archive_corpus import Good, make_corpus
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.project.folder import open_project
from graftwork.project.open_project import OpenProject, use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import GraftError
from graftwork.registry.deploy import import_release
from graftwork.registry.project import collect_garbage, open_store, promote_release
from graftwork.registry.store import ReleaseStore


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Good:
    """A release of another machine that would be welcome as it is."""
    folder = tmp_path_factory.mktemp("good")
    release = publish_one(ReleaseStore.open(folder / "store"), folder / "adapter", index=_Index())
    there = folder / "store" / release
    files = {path.name: path.read_bytes() for path in there.iterdir() if path.name != "manifest.json"}
    return Good(json.loads((there / "manifest.json").read_bytes()), files)


class _Index:
    def add(self, *_release, **_more) -> None:
        pass


def publish_one(store: ReleaseStore, adapter: Path, *, index) -> str:
    made = write_adapter(adapter, weights=adapter.name.encode())
    return publish_parts(folder=store, index=index, **parts(made)).id


@pytest.fixture
def work(tmp_path) -> Iterator[OpenProject]:
    settings = {
        "project": PROJECT,
        "data": {"logs": ["logs.jsonl"]},
        "release": {"keep_last": 1, "keep_days": 0},
    }
    root = tmp_path / "outer" / "project"
    root.mkdir(parents=True)
    (root / "graft.yaml").write_text(yaml.safe_dump(settings))
    with use_project(open_project(root), NullReporter()) as opened:
        yield opened


def picture(folder: Path) -> dict[str, str]:
    """Every file below, with its hash; not the database and the locks, which every command touches."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(("state.db", ".lock"))
    }


def test_the_good_archive_is_welcome(work, good, tmp_path):
    path = tmp_path / "good.tar"
    path.write_bytes(good.archive())
    assert import_release(work, path).release.id == good.id


def test_no_hostile_archive_is_imported_leaves_a_trace_or_costs_a_good_release(work, good, tmp_path):
    store = open_store(work)
    mine = [publish_one(store, work.project.root / "runs" / name, index=work.releases) for name in "ab"]
    promote_release(work, mine[0])
    before = picture(tmp_path / "outer")
    tried, failures = 0, []
    for name, data in make_corpus(good):
        path = tmp_path / "hostile.tar"
        path.write_bytes(data)
        tried += 1
        try:
            import_release(work, path)
        except GraftError as refusal:
            if not (refusal.what and refusal.fix):
                failures.append(f"{name}: refused without a fix: {refusal}")
        except Exception as error:
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:100]}")
        else:
            failures.append(f"{name}: it was imported")
        if (after := picture(tmp_path / "outer")) != before:
            failures.append(f"{name}: it left {sorted(set(after) ^ set(before))[:3]}")
            before = after
    assert failures == []
    assert tried >= 90
    assert {entry.id for entry in work.releases.entries()} == set(mine)
    found = collect_garbage(work)
    assert (found.adopted, found.releases) == ((), ())
    assert set(store.ids()) == set(mine)


def test_gc_does_not_adopt_what_does_not_verify_and_spares_the_good_for_it(work, good, tmp_path):
    store = open_store(work)
    mine = publish_one(store, work.project.root / "runs" / "a", index=work.releases)
    pickled = good.rehashed({**good.files, "adapter_model.safetensors": b"\x80\x04cos\nsystem\n."})
    folder = store.folder(pickled.id)
    folder.mkdir()
    for name, data in {**pickled.files, "manifest.json": json.dumps(pickled.manifest).encode()}.items():
        (folder / name).write_bytes(data)
    for dry_run in (True, False, False):
        found = collect_garbage(work, dry_run=dry_run)
        assert (found.adopted, found.releases, found.refused) == ((), (), (pickled.id,))
    assert {entry.id for entry in work.releases.entries()} == {mine}
    assert store.verify(mine)
