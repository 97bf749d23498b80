"""What a release says of itself is read back, also where another version wrote it."""

import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from registry_samples import PROJECT, dataset, parts, publish_parts, write_adapter

from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.dataset import Dataset
from graftwork.registry.deploy import export_release
from graftwork.registry.project import open_store, read_verdict, trace_release


@pytest.fixture
def work(tmp_path):
    settings = {"project": PROJECT, "data": {"logs": ["logs.jsonl"]}}
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    with use_project(open_project(tmp_path), NullReporter()) as opened:
        yield opened


@pytest.fixture
def release(work, tmp_path):
    made = parts(write_adapter(tmp_path / "adapter", weights=b"x"))
    return publish_parts(folder=open_store(work), index=work.releases, **made)


def test_the_verdict_comes_with_the_sentence_of_each_rule(work, release):
    found = read_verdict(work, release)
    assert found is not None
    assert found.decision == release.decision


def test_a_verdict_with_other_bytes_is_not_shown(work, release):
    path = open_store(work).folder(release.id) / "verdict.json"
    path.chmod(0o644)
    path.write_text(path.read_text() + " ")
    assert read_verdict(work, release) is None


def test_a_dataset_that_another_version_described_is_drawn_without_its_files(work, tmp_path):
    class LaterDataset(Dataset):
        a_later_field: int = 1

    described = parts(write_adapter(tmp_path / "adapter", weights=b"x"))
    described["dataset"] = LaterDataset(**dict(dataset()))
    release = publish_parts(folder=open_store(work), index=work.releases, **described)
    graph = trace_release(work, release)
    assert [node.kind for node in graph.nodes].count("dataset") == 1
    assert not any(node.kind == "file" for node in graph.nodes)


def test_a_folder_to_export_to_gets_a_file_of_its_own(work, release, tmp_path):
    folder = tmp_path / "out"
    folder.mkdir()
    _, path, _ = export_release(work, release.id, target=folder)
    assert path.parent == folder
    assert path.suffix == ".tar"
