"""Releases into MLflow and trackio, on stand-ins that record what they are told."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
from registry_samples import PROJECT, parts, write_adapter

from graftwork.records.errors import EnvironmentLacks, GraftError
from graftwork.registry.exchange.mlflow import push_to_mlflow
from graftwork.registry.exchange.trackio import push_to_trackio
from graftwork.registry.memory import ReleasesInMemory
from graftwork.registry.publish import publish
from graftwork.registry.store import ReleaseStore


@pytest.fixture
def made(tmp_path):
    store = ReleaseStore.open(tmp_path / "store")
    adapter = write_adapter(tmp_path / "adapter")
    return store, publish(folder=store, index=ReleasesInMemory(project=PROJECT), **parts(adapter))


class MlflowClient:
    """Keeps what it is told, as the registry would."""

    def __init__(self) -> None:
        self.models, self.versions, self.aliases, self.calls = {}, [], {}, []
        self.metrics = {}

    def search_registered_models(self, filter_string):
        return [name for name in self.models if filter_string == f"name = '{name}'"]

    def create_registered_model(self, name, tags):
        self.models[name] = tags

    def search_model_versions(self, filter_string):
        return [one for one in self.versions if filter_string == f"name = '{one.name}'"]

    def get_experiment_by_name(self, _name):
        return None

    def create_experiment(self, name):
        self.calls.append(("experiment", name))
        return "7"

    def create_run(self, experiment_id, tags, run_name):
        self.calls.append(("run", experiment_id, run_name))
        return SimpleNamespace(
            info=SimpleNamespace(run_id="r1", artifact_uri="mlflow-artifacts:/7/r1/artifacts")
        )

    def log_artifacts(self, run_id, folder, path):
        self.calls.append(("artifacts", run_id, folder, path))

    def log_metric(self, _run_id, name, value):
        self.metrics[name] = value

    def set_terminated(self, run_id):
        self.calls.append(("ended", run_id))

    def create_model_version(self, name, source, run_id, tags):
        self.calls.append(("version", source, run_id))
        self.versions.append(SimpleNamespace(name=name, version=str(len(self.versions) + 1), tags=tags))
        return self.versions[-1]

    def set_registered_model_alias(self, name, alias, version):
        self.aliases[name, alias] = version


@pytest.fixture
def mlflow(monkeypatch):
    client, module = MlflowClient(), ModuleType("mlflow")
    module.MlflowClient = lambda: client
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return client


def test_mlflow_gets_files_figures_and_facts_before_the_version_and_the_aliases(made, mlflow):
    store, release = made
    done = push_to_mlflow(store, release.id, name="answers", aliases=["champion", "tagger/champion"])
    assert done == ("answers", "1", True)
    assert [call[0] for call in mlflow.calls] == ["experiment", "run", "artifacts", "ended", "version"]
    assert mlflow.calls[2] == ("artifacts", "r1", str(store.folder(release.id)), "release")
    assert mlflow.calls[4][1] == "mlflow-artifacts:/7/r1/artifacts/release"
    assert mlflow.metrics == {"json_valid": 0.99, "latency": 0.5}
    assert mlflow.versions[0].tags["graftwork.release"] == release.id
    assert mlflow.aliases == {("answers", "champion"): "1", ("answers", "tagger-champion"): "1"}


def test_mlflow_is_not_told_twice(made, mlflow):
    store, release = made
    push_to_mlflow(store, release.id, name="answers")
    again = push_to_mlflow(store, release.id, name="answers", aliases=["champion"])
    assert again == ("answers", "1", False)
    assert len(mlflow.versions) == 1


@pytest.fixture
def trackio(monkeypatch):
    module = ModuleType("trackio")
    module.calls = []
    for name in ("init", "log", "log_artifact", "finish"):
        setattr(module, name, lambda *words, _name=name, **more: module.calls.append((_name, words, more)))
    monkeypatch.setitem(sys.modules, "trackio", module)
    return module


def test_trackio_gets_a_run_with_the_files_as_an_artifact(made, trackio):
    store, release = made
    done = push_to_trackio(store, release.id, project="answers")
    assert [call[0] for call in trackio.calls] == ["init", "log", "log_artifact", "finish"]
    assert trackio.calls[0][2]["name"] == done.run == f"release-{release.id[:12]}"
    assert trackio.calls[0][2]["config"]["graftwork.decision"] == "deploy"
    assert trackio.calls[1][1] == ({"json_valid": 0.99, "latency": 0.5},)
    assert trackio.calls[2][1:] == (
        (str(store.folder(release.id)),),
        {"name": "cited-answers-main", "type": "model"},
    )


def test_trackio_is_closed_when_it_fails(made, trackio):
    store, release = made

    def fail(*_words, **_more):
        raise OSError("no space")

    trackio.log_artifact = fail
    with pytest.raises(OSError, match="no space"):
        push_to_trackio(store, release.id, project="answers")
    assert trackio.calls[-1][0] == "finish"


@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_a_missing_package_is_said_with_how_to_install_it(made, monkeypatch, name):
    store, release = made
    monkeypatch.setitem(sys.modules, name, None)
    push = {
        "mlflow": lambda: push_to_mlflow(store, release.id, name="answers"),
        "trackio": lambda: push_to_trackio(store, release.id, project="answers"),
    }[name]
    with pytest.raises(EnvironmentLacks, match="not installed") as told:
        push()
    assert f"graftwork[{name}]" in told.value.fix


def test_a_trackio_without_artifacts_is_said(made, trackio):
    store, release = made
    del trackio.log_artifact
    with pytest.raises(EnvironmentLacks, match="knows no artifacts"):
        push_to_trackio(store, release.id, project="answers")


def test_damaged_bytes_reach_no_tracker(made, mlflow, trackio):
    store, release = made
    path = store.folder(release.id) / "plan.json"
    path.chmod(0o644)
    path.write_bytes(b"{}")
    with pytest.raises(GraftError):
        push_to_mlflow(store, release.id, name="answers")
    with pytest.raises(GraftError):
        push_to_trackio(store, release.id, project="answers")
    assert mlflow.calls == trackio.calls == []
