"""The life of releases from stored adapters, as `graft release` prints it and as it lies on disk."""

import shutil
from pathlib import Path

import pytest
import yaml
from compare import check
from registry_samples import PROJECT, WHEN, outcome, parts, publish_parts, verdict
from typed import type_json

from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.registry.project import open_store

STORED = Path(__file__).parent / "releases"
ADAPTERS = STORED / "adapters"
NAMES = sorted(path.name for path in ADAPTERS.iterdir())
"""Adapters of one tensor each: five of `main`, as they were trained."""


class Project:
    """A project folder with the stored adapters as its runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        settings = {
            "project": PROJECT,
            "data": {"logs": ["logs.jsonl"]},
            "release": {"keep_last": 1, "keep_days": 0},
        }
        (root / "graft.yaml").write_text(yaml.safe_dump(settings))

    def make(self, name: str, **changes) -> str:
        adapter = self.root / "runs" / name
        shutil.copytree(ADAPTERS / name, adapter)
        # The id is the hash of everything, this folder too.
        trained = outcome(adapter).model_copy(update={"adapter_folder": f"runs/{name}"})
        with use_project(open_project(self.root), NullReporter()) as work:
            return publish_parts(
                folder=open_store(work),
                index=work.releases,
                **{**parts(adapter), "outcome": trained, **changes},
            ).id

    def ask(self, *words: str, code: int = 0):
        typed = type_json("release", *words, folder=self.root)
        assert typed.exit_code == code, typed
        return hide(typed.document, self.root.parent)

    def files(self) -> list[str]:
        """All of the store but locks, which are empty and stay."""
        store = self.root / ".graft" / "releases"
        return sorted(
            path.relative_to(store).as_posix()
            for path in store.rglob("*")
            if path.is_file() and path.stat().st_size
        )


@pytest.fixture
def project(tmp_path):
    return Project(tmp_path / "project")


def hide(value, folder: Path):
    """Without what depends on the user, the clock and the folder."""
    if isinstance(value, dict):
        hidden = {"who": "user", "when": "time", "collected_at": "time"}
        return {
            name: hidden[name] if entry and name in hidden else hide(entry, folder)
            for name, entry in value.items()
        }
    if isinstance(value, list):
        return [hide(entry, folder) for entry in value]
    return value.replace(str(folder), "FOLDER") if isinstance(value, str) else value


def test_a_release_has_the_id_the_manifest_and_the_files_that_it_had(project, update_golden):
    first = project.make(NAMES[0])
    second = project.make(NAMES[1], parent=first, verdict=verdict("iterate"))
    found = {
        "first": project.ask("show", first),
        "second": project.ask("show", second),
        "list": project.ask("list"),
        "lineage": project.ask("lineage", second),
        "verify": project.ask("verify", second),
        "files": project.files(),
        "manifest": (project.root / ".graft" / "releases" / first / "manifest.json").read_text().splitlines(),
    }
    assert found["first"]["created_at"] == WHEN
    check(STORED / "made.json", found, update_golden)


def test_an_exported_release_has_the_same_bytes_and_arrives_as_itself(project, tmp_path, update_golden):
    release = project.make(NAMES[0])
    archive = str(tmp_path / "release.tar")
    receiver = Project(tmp_path / "receiver")
    found = {
        "exported": project.ask("export", release, "--to", archive),
        "imported": receiver.ask("import", archive),
        "imported again": receiver.ask("import", archive),
        "listed": receiver.ask("list"),
    }
    assert receiver.files() == project.files()
    check(STORED / "exported.json", found, update_golden)


def test_a_store_at_a_url_holds_and_gives_what_it_was_sent(project, tmp_path, update_golden):
    release, later = project.make(NAMES[0]), project.make(NAMES[1])
    url, store = f"file://{tmp_path}/shared", tmp_path / "shared"
    receiver = Project(tmp_path / "receiver")
    found = {
        "pushed": project.ask("push", release, "--to", url),
        "pushed again": project.ask("push", release, "--to", url),
        "later pushed": project.ask("push", later, "--to", url),
        "store": sorted(path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file()),
        "pulled": receiver.ask("pull", release[:12], "--from", url),
        "pulled again": receiver.ask("pull", release, "--from", url),
    }
    manifests = [
        place.root / ".graft" / "releases" / release / "manifest.json" for place in (project, receiver)
    ]
    assert manifests[0].read_bytes() == manifests[1].read_bytes()
    check(STORED / "pushed.json", found, update_golden)


def test_an_alias_moves_and_returns_and_its_log_says_why(project, update_golden):
    first, second = project.make(NAMES[0]), project.make(NAMES[1])
    refused = project.make(NAMES[2], verdict=verdict("iterate"))
    found = {
        "first": project.ask("promote", first, "--reason", "the first"),
        "second": project.ask("promote", second, "--reason", "better"),
        "second again": project.ask("promote", second),
        "refused": project.ask("promote", refused, code=1),
        "forced": project.ask("promote", refused, "--force", "--reason", "the other one is down"),
        "challenger": project.ask("promote", first, "--alias", "challenger"),
        "back": project.ask("rollback", "--reason", "answers nonsense"),
        "back again": project.ask("rollback"),
        "no further": project.ask("rollback", code=2),
        "log": project.ask("log"),
        "log of challenger": project.ask("log", "--alias", "challenger"),
        "aliases": project.ask("list")["aliases"],
    }
    check(STORED / "aliases.json", found, update_golden)


def test_collection_keeps_what_is_needed_and_removes_the_rest(project, update_golden):
    releases = [project.make(name) for name in NAMES]
    project.ask("promote", releases[0])
    project.ask("promote", releases[1])
    project.ask("edit", releases[2], "--tag", "keep")
    before = project.files()
    found = {"dry run": project.ask("gc", "--dry-run")}
    assert project.files() == before
    found |= {
        "collected": project.ask("gc"),
        "nothing more": project.ask("gc"),
        "files": project.files(),
        "listed": [entry["id"] for entry in project.ask("list")["releases"]],
        "remembered": project.ask("list", "--collected"),
        "not promoted": project.ask("promote", releases[3], code=3),
        "rolled back": project.ask("rollback"),
        "then": project.ask("gc", "--keep-last", "0"),
        "files then": project.files(),
    }
    check(STORED / "collected.json", found, update_golden)
