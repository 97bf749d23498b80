"""What the product keeps is for its owner alone: no file of a project's state can be read by anybody else."""

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "registry"))

from registry_samples import PROJECT, parts, publish_parts, write_adapter
from store_samples import capture

from graftwork.files.disk import Journal, atomic_folder, close_to_others, make_folder, write_atomic
from graftwork.pipeline.table import run_pipeline
from graftwork.process.worker import hold_lock, start_detached
from graftwork.project.folder import open_project
from graftwork.project.open_project import OpenProject, use_project
from graftwork.project.reporter import NullReporter
from graftwork.registry.deploy import export_release, import_release
from graftwork.registry.project import collect_garbage, open_store, promote_release
from graftwork.store.database import open_database


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    """As most machines have it: others may read what a user writes."""
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def root(tmp_path) -> Path:
    """A project in a folder that others may look into, unlike those of the tests."""
    folder = tmp_path / "project"
    folder.mkdir(0o755)
    settings = {"project": PROJECT, "data": {"logs": ["logs.jsonl"]}}
    (folder / "graft.yaml").write_text(yaml.safe_dump(settings))
    return folder


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def open_to_others(folder: Path) -> list[str]:
    """What others may read, write or enter."""
    found = [folder, *folder.rglob("*")]
    return [
        f"{path} {mode(path):04o}" for path in sorted(found) if not path.is_symlink() and mode(path) & 0o077
    ]


def write_state(work: OpenProject) -> str:
    """Most of what a project's state can hold, made by the product's own means; the id of a release."""
    work.captures.add([capture("one")])
    store = open_store(work)
    adapter = write_adapter(work.project.root / "adapter")
    release = publish_parts(folder=store, index=work.releases, **parts(adapter)).id
    store.sign(release, b"untrusted comment: x\n")
    promote_release(work, release)
    _, archive, _ = export_release(work, release, target=work.project.root / "out.tar")
    import_release(work, archive)
    with store.lease() as held:
        held.add(release)
        assert open_to_others(work.project.releases) == []
    collect_garbage(work)
    with hold_lock(work.project.state / "pipeline"):
        Journal(work.project.state / "events" / "log.jsonl").append({"a": 1})
        write_atomic(work.project.state / "a" / "b" / "c.json", "{}")
    start_detached(
        [sys.executable, "-c", "print(1)"],
        log=work.project.state / "logs" / "x.log",
        folder=work.project.root,
    ).wait()
    with atomic_folder(work.project.datasets / "one") as folder:
        # As a library would, that knows nothing of this.
        (folder / "deep").mkdir()
        (folder / "deep" / "rows.parquet").write_bytes(b"PAR1")
        (folder / "deep").chmod(0o755)
        (folder / "deep" / "rows.parquet").chmod(0o644)
    return release


def test_nothing_of_a_projects_state_can_be_read_by_others(root):
    with use_project(open_project(root), NullReporter()) as work:
        release = write_state(work)
        # Also while the database is open: its log lies in files of their own.
        assert {path.name for path in work.project.state.glob("state.db*")} >= {"state.db", "state.db-wal"}
        assert open_to_others(work.project.state) == []
        assert mode(work.project.state) == 0o700
        assert mode(work.project.state / "state.db") == 0o600
        assert mode(open_store(work).folder(release) / "manifest.json") == 0o400
    assert open_to_others(root / ".graft") == []


@pytest.mark.parametrize("first", ["lock", "database", "folder", "journal", "file"])
def test_whatever_makes_the_state_first_makes_it_private(tmp_path, first):
    state = tmp_path / "open" / ".graft"
    state.parent.mkdir(0o755)
    if first == "lock":
        with hold_lock(state / "pipeline"):
            pass
    elif first == "database":
        open_database(state / "state.db").close()
    elif first == "folder":
        make_folder(state / "runs" / "one")
    elif first == "journal":
        Journal(state / "runs" / "steps.jsonl").append(1)
    else:
        write_atomic(state / "runs" / "job.json", "{}")
    assert open_to_others(state) == []
    assert mode(state.parent) == 0o755


def test_a_state_that_was_open_is_closed_when_the_project_is_opened(root, tmp_path):
    with use_project(open_project(root), NullReporter()) as work:
        release = write_state(work)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("not of this project")
    elsewhere.chmod(0o644)
    (root / ".graft" / "link").symlink_to(elsewhere)
    (root / ".graft" / "lost").symlink_to(tmp_path / "nowhere")
    for path in [root / ".graft", *(root / ".graft").rglob("*")]:
        if not path.is_symlink():
            path.chmod(mode(path) | (0o055 if path.is_dir() else 0o044))
    assert open_to_others(root / ".graft")
    with use_project(open_project(root), NullReporter()) as work:
        assert open_to_others(root / ".graft") == []
        assert open_store(work).verify(release).id == release
        assert work.captures.count() == 1
    assert mode(elsewhere) == 0o644
    # What the project shows to others stays as it is.
    assert mode(root) == 0o755
    assert mode(root / "graft.yaml") == 0o644
    assert mode(root / "out.tar") == 0o644


def test_a_closing_that_was_interrupted_is_finished_by_the_next(root, monkeypatch):
    with use_project(open_project(root), NullReporter()):
        pass
    for path in (root / ".graft", root / ".graft" / "state.db"):
        path.chmod(0o755)

    def interrupted(_path, _mode):
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "chmod", interrupted)
    with pytest.raises(KeyboardInterrupt):
        open_project(root)
    monkeypatch.undo()
    open_project(root)
    assert open_to_others(root / ".graft") == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_files_of_another_user_do_not_prevent_opening_the_project(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir(0o755)
    (folder / "file").write_text("x")
    tmp_path.chmod(0o755)
    child = os.fork()
    if child == 0:
        try:
            os.setuid(65534)
            close_to_others(folder)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mode(folder / "file") == 0o644


def test_files_written_for_the_user_follow_the_umask(root):
    write_atomic(root / "report.html", "<p>")
    with atomic_folder(root / "export") as folder:
        (folder / "file").write_text("x")
    make_folder(root / "more")
    assert [mode(root / name) for name in ("report.html", "export", "export/file", "more")] == [
        0o644,
        0o755,
        0o644,
        0o755,
    ]


def test_exported_captures_are_for_their_owner_alone(root):
    with use_project(open_project(root), NullReporter()) as work:
        work.captures.add([capture("one")])
    out = root / "captured.jsonl"
    command = [
        sys.executable,
        "-m",
        "graftwork.cli.main",
        "data",
        "captures",
        "--out",
        str(out),
        "-C",
        str(root),
    ]
    subprocess.run(command, check=True, capture_output=True)
    assert json.loads(out.read_text())["id"] == "one"
    assert mode(out) == 0o600


@pytest.mark.slow
def test_the_whole_pipeline_leaves_nothing_for_others_to_read(root, tiny_base):
    rows = [
        {"messages": [{"role": "user", "content": f"{n} {n * n}?"}, {"role": "assistant", "content": f"{n}"}]}
        for n in range(40)
    ]
    (root / "logs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "project": PROJECT,
        "base": str(tiny_base),
        "data": {"logs": ["logs.jsonl"], "test": 0.3, "validation": 0.1, "question_similarity": 0.99},
        "train": {"rank": 2, "epochs": 1, "batch_size": 4, "checkpoint_every": 2, "threads": 1},
        "evaluate": {"max_new_tokens": 4, "latency_cases": 6},
        "gate": {"rules": [{"metric": "latency_seconds", "under": 1000.0}]},
    }
    (root / "graft.yaml").write_text(yaml.safe_dump(settings))
    with use_project(open_project(root), NullReporter()) as work:
        run_pipeline(work)
        assert open_to_others(work.project.state) == []
    state = root / ".graft"
    assert {"runs", "datasets", "evaluations", "releases", "serving", "state.db"} <= {
        path.name for path in state.iterdir()
    }
    assert list(state.rglob("engine.log"))
    assert list(state.rglob("worker.log"))
    assert mode(root / "report.html") == 0o644
