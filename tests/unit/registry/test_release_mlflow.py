"""Releases into MLflow, on a stand-in that records what it is reported."""

import errno
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from in_memory_index import InMemoryReleaseIndex
from registry_samples import PROJECT, parts, publish_parts, write_adapter

from graftwork.records.errors import Corrupted, EnvironmentFailure, GraftError, UserError
from graftwork.registry.mlflow import QUIET, push_to_mlflow
from graftwork.registry.store import ReleaseStore

ADDRESS = "http://joe:pass-word@127.0.0.1:5000"


@pytest.fixture
def made(tmp_path):
    store = ReleaseStore.open(tmp_path / "store")
    adapter = write_adapter(tmp_path / "adapter")
    return store, publish_parts(folder=store, index=InMemoryReleaseIndex(project=PROJECT), **parts(adapter))


class MlflowClient:
    """Keeps what it is reported, as the registry would."""

    def __init__(self) -> None:
        self.models, self.versions, self.aliases, self.calls = {}, [], {}, []
        self.metrics, self.runs, self.files, self.spoil = {}, [], {}, lambda data: data

    def get_registered_model(self, name):
        return self.models.get(name)

    def create_registered_model(self, name, tags):
        self.models[name] = tags

    def search_model_versions(self, filter_string):
        return [version for version in self.versions if version.tags["graftwork.release"] in filter_string]

    def get_experiment_by_name(self, name):
        made = ("experiment", name) in self.calls
        return SimpleNamespace(experiment_id="7") if made else None

    def search_runs(self, _experiments, _filter, max_results):
        return self.runs[:max_results]

    def create_experiment(self, name):
        self.calls.append(("experiment", name))
        return "7"

    def create_run(self, experiment_id, tags, run_name):
        self.calls.append(("run", experiment_id, run_name))
        info = SimpleNamespace(run_id="r1", artifact_uri="mlflow-artifacts:/7/r1/artifacts")
        self.runs.append(SimpleNamespace(info=info, data=SimpleNamespace(metrics=self.metrics)))
        return self.runs[-1]

    def log_artifacts(self, run_id, folder, path):
        self.calls.append(("artifacts", run_id, folder, path))
        for file in Path(folder).iterdir():
            self.files[file.name] = self.spoil(file.read_bytes())

    def log_artifact(self, run_id, file, path):
        self.calls.append(("artifact", run_id, Path(file).name, path))
        self.files[Path(file).name] = self.spoil(Path(file).read_bytes())

    def list_artifacts(self, _run_id, _path):
        return [SimpleNamespace(path=f"release/{name}") for name in sorted(self.files)]

    def download_artifacts(self, _run_id, path, folder):
        there = Path(folder) / path
        if path != "release":
            there.parent.mkdir()
            there.write_bytes(self.files[there.name])
            return str(there)
        there.mkdir()
        for name, data in self.files.items():
            (there / name).write_bytes(data)
        return str(there)

    def log_metric(self, _run_id, name, value):
        self.metrics[name] = value

    def set_terminated(self, run_id):
        self.calls.append(("ended", run_id))

    def create_model_version(self, name, source, run_id, tags):
        self.calls.append(("version", source, run_id))
        version = str(len(self.versions) + 1)
        self.versions.append(SimpleNamespace(name=name, version=version, run_id=run_id, tags=tags))
        return self.versions[-1]

    def set_registered_model_alias(self, name, alias, version):
        self.aliases[name, alias] = version


@pytest.fixture
def mlflow(monkeypatch):
    client, module = MlflowClient(), ModuleType("mlflow")
    module.MlflowClient = lambda: client
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ADDRESS)
    for name in QUIET:
        # Set and taken away again, so that nothing of it outlives the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return client


def test_mlflow_gets_files_figures_and_facts_before_the_version_and_the_aliases(made, mlflow):
    store, release = made
    done = push_to_mlflow(store, release.id, name="answers", aliases=["champion", "tagger/champion"])
    assert done == ("1", True)
    assert [call[0] for call in mlflow.calls] == ["experiment", "run", "artifacts", "ended", "version"]
    assert mlflow.calls[2] == ("artifacts", "r1", str(store.folder(release.id)), "release")
    assert mlflow.calls[4][1] == "mlflow-artifacts:/7/r1/artifacts/release"
    assert mlflow.metrics == {"json_valid": 0.99, "latency": 0.5}
    assert mlflow.versions[0].tags["graftwork.release"] == release.id
    assert mlflow.aliases == {("answers", "champion"): "1", ("answers", "tagger-champion"): "1"}


def test_mlflow_is_not_notified_twice(made, mlflow):
    store, release = made
    push_to_mlflow(store, release.id, name="answers")
    again = push_to_mlflow(store, release.id, name="answers", aliases=["champion"])
    assert again == ("1", False)
    assert len(mlflow.versions) == 1


def test_a_signature_that_came_later_is_brought_to_the_version_that_mlflow_has(made, mlflow):
    store, release = made
    push_to_mlflow(store, release.id, name="answers")
    store.sign(release.id, b"signed\n")
    for _ in range(2):
        assert push_to_mlflow(store, release.id, name="answers") == ("1", False)
    assert mlflow.files["manifest.json.minisig"] == b"signed\n"
    sent = [call[1:] for call in mlflow.calls if call[0] == "artifact"]
    assert sent == [("r1", "manifest.json.minisig", "release")]
    (store.folder(release.id) / "manifest.json.minisig").unlink()
    push_to_mlflow(store, release.id, name="answers")
    assert mlflow.files["manifest.json.minisig"] == b"signed\n"


def test_a_signature_that_changed_on_its_way_to_mlflow_is_reported(made, mlflow):
    store, release = made
    push_to_mlflow(store, release.id, name="answers")
    store.sign(release.id, b"signed\n")
    mlflow.spoil = lambda data: data + b"!"
    with pytest.raises(Corrupted, match="other bytes"):
        push_to_mlflow(store, release.id, name="answers")


def test_a_store_that_cannot_be_written_can_be_pushed_to_mlflow(made, mlflow, monkeypatch):
    store, release = made
    real = Path.mkdir

    def refuse(self, *given, **named):
        if self.is_relative_to(store.root):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(self, *given, **named)

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert push_to_mlflow(store, release.id, name="answers")[1]
    assert mlflow.versions


def test_mlflow_goes_on_in_the_run_that_broke_off(made, mlflow):
    store, release = made
    whole, mlflow.create_model_version = mlflow.create_model_version, None
    with pytest.raises(EnvironmentFailure):
        push_to_mlflow(store, release.id, name="answers")
    del mlflow.files["plan.json"]
    mlflow.files["report.json"] = b"half"
    mlflow.calls = [("experiment", "cited-answers")]
    mlflow.create_model_version = whole
    assert push_to_mlflow(store, release.id, name="answers")[1]
    sent = [call[2] for call in mlflow.calls if call[0] == "artifact"]
    assert sent == ["plan.json", "report.json"]
    assert len(mlflow.runs) == 1


def test_a_file_that_changed_on_its_way_to_mlflow_makes_no_version(made, mlflow):
    store, release = made
    mlflow.spoil = lambda data: data.replace(b"small", b"SMALL")
    with pytest.raises(Corrupted, match="other bytes"):
        push_to_mlflow(store, release.id, name="answers", aliases=["champion"])
    assert not mlflow.versions
    assert not mlflow.aliases


def test_an_mlflow_error_is_reported_without_the_password(made, mlflow):
    store, release = made

    def fail(_name):
        raise RuntimeError(f"request to {ADDRESS}/api failed")

    mlflow.get_registered_model = fail
    with pytest.raises(EnvironmentFailure, match="MLflow failed") as caught:
        push_to_mlflow(store, release.id, name="answers")
    assert "pass-word" not in str(caught.value.as_json())
    assert caught.value.__suppress_context__


def test_without_an_address_mlflow_makes_no_database_here(made, mlflow, monkeypatch):
    store, release = made
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    with pytest.raises(UserError, match="address of MLflow is not set"):
        push_to_mlflow(store, release.id, name="answers")
    assert mlflow.calls == []


def test_a_missing_package_is_reported_with_how_to_install_it(made, monkeypatch):
    store, release = made
    monkeypatch.setenv("MLFLOW_TRACKING_URI", ADDRESS)
    monkeypatch.setitem(sys.modules, "mlflow", None)
    with pytest.raises(EnvironmentFailure, match="not installed") as reported:
        push_to_mlflow(store, release.id, name="answers")
    assert "[mlflow]" in reported.value.fix


def test_damaged_bytes_reach_no_tracker(made, mlflow):
    store, release = made
    path = store.folder(release.id) / "plan.json"
    path.chmod(0o644)
    path.write_bytes(b"{}")
    with pytest.raises(GraftError):
        push_to_mlflow(store, release.id, name="answers")
    assert mlflow.calls == []
