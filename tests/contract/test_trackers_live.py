"""Releases and runs in a real MLflow, runs in a real trackio, by the command that people type.

`make test-trackers` installs both apart from the product; without them these tests are skipped.
"""

import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from registry_workers import make_release, open_work
from tracker_servers import mlflow_server, running, trackio_server, whole_python_path, wire_to

from graftwork.files.disk import file_digest
from graftwork.registry.project import promote_release, rollback_alias

needs_mlflow = pytest.mark.skipif(
    importlib.util.find_spec("mlflow") is None or importlib.util.find_spec("flask") is None,
    reason="MLflow's server is not installed: make test-trackers",
)
needs_trackio = pytest.mark.skipif(
    importlib.util.find_spec("trackio") is None, reason="trackio is not installed: make test-trackers"
)
PASSWORD, TOKEN = "s3cr@t-pass-of-many-words", "write-token-that-nobody-hears"
GUARD = """
import os, socket
log = os.open(os.environ["SOCKET_GUARD"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
os.write(log, b"on\\n")
look_up = socket.getaddrinfo
def guarded(host, *words, **more):
    if host not in (None, "127.0.0.1", "localhost", b"127.0.0.1", b"localhost"):
        os.write(log, f"{host}\\n".encode())
        raise OSError("no network here")
    return look_up(host, *words, **more)
socket.getaddrinfo = guarded
connect = socket.socket.connect
def guarded_connect(self, address):
    if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "localhost"):
        os.write(log, f"{address[0]}\\n".encode())
        raise OSError("no network here")
    return connect(self, address)
socket.socket.connect = guarded_connect
"""
READ_MLFLOW = """
import json, sys
from mlflow import MlflowClient
from mlflow.artifacts import download_artifacts
client = MlflowClient()
name, folder = sys.argv[1:]
model = client.get_registered_model(name)
reported = {"aliases": {key: str(value) for key, value in model.aliases.items()}, "versions": {}, "runs": 0}
for version in client.search_model_versions():
    if version.name == name:
        run = client.get_run(version.run_id)
        facts = [version.tags["graftwork.release"], run.info.status, run.data.metrics]
        reported["versions"][str(version.version)] = facts
reported["runs"] = len(client.search_runs(client.get_experiment_by_name("cited-answers").experiment_id))
if "champion" in reported["aliases"] and not ("'" in name or "/" in name):
    download_artifacts(f"models:/{name}@champion", dst_path=folder)
print(json.dumps(reported))
"""
TRAIN = """
import sys
from pathlib import Path
from graftwork.train.trackers import load_tracker
for steps in ([1, 2], [3]):
    run = load_tracker(sys.argv[1]).open_run("run-1", {"rank": 8, "eval": {"every": 5}}, Path(sys.argv[2]))
    for step in steps:
        run.log(step, {"train/loss": 1.0 / step})
    run.close()
"""


class Project:
    """A project with two releases, of which the first is the champion; and a shell next to it."""

    def __init__(self, root: Path) -> None:
        self.root, self.network = root / "project", root / "network"
        self.root.mkdir()
        (root / "guard").mkdir()
        (root / "guard" / "sitecustomize.py").write_text(GUARD)
        settings = {"project": "cited-answers", "data": {"logs": ["l.jsonl"]}}
        (self.root / "graft.yaml").write_text(yaml.safe_dump(settings))
        (self.root / ".graft").mkdir()
        self.work = open_work(self.root, f"sqlite:///{self.root}/.graft/state.db")
        weights = random.Random(7).randbytes(300_000)
        self.first = make_release(self.work, root / "one", weights=weights)
        self.second = make_release(self.work, root / "two", weights=b"other")
        promote_release(self.work, self.first)

    def files(self, release_id: str) -> dict[str, str]:
        folder = self.root / ".graft" / "releases" / release_id
        return {path.name: file_digest(path) for path in folder.iterdir()}

    def shell(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        # Under a test MLflow keeps quiet by itself, and nothing would be seen of what it sends to whom.
        kept = {k: v for k, v in os.environ.items() if k != "CI" and not k.startswith("PYTEST_")}
        kept |= {"PYTHONPATH": f"{self.root.parent / 'guard'}{os.pathsep}{whole_python_path()}"}
        kept |= {"SOCKET_GUARD": str(self.network), "HF_HOME": str(self.root.parent / "hf"), **environment}
        return subprocess.run(
            [sys.executable, *words],
            cwd=self.root,
            env=kept,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def push(self, name: str, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        graft = str(Path(sys.executable).with_name("graft"))
        return self.shell(graft, "release", "push", name, *words, "--json", **environment)

    def run(self, code: str, *words: str, **environment: str) -> str:
        done = self.shell("-c", code, *words, **environment)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    def assert_nobody_else_was_called(self) -> None:
        assert set(self.network.read_text().split()) == {"on"}


@pytest.fixture
def project(tmp_path):
    made = Project(tmp_path)
    yield made
    made.work.database.close()


def reported(done):
    """What a push said. The libraries' own words are not mixed with it."""
    assert done.returncode == 0, done.stderr[-2000:]
    assert not [word for word in ("View run", "Waiting up to", "* ", "Warning") if word in done.stderr]
    return json.loads(done.stdout)


def refused(done, *, code):
    """What, why and fix; no traceback."""
    heard = done.stdout + done.stderr
    assert done.returncode == code, heard[-2000:]
    assert "Traceback" not in heard
    assert "why" in heard
    assert "fix" in heard
    return heard


def digests(folder):
    return {path.name: file_digest(path) for path in Path(folder).iterdir()}


def read_mlflow(project, server, name, folder):
    return json.loads(project.run(READ_MLFLOW, name, str(folder), MLFLOW_TRACKING_URI=server.url))


@pytest.fixture(scope="module")
def proxied(tmp_path_factory):
    """Files go through the server."""
    folder = tmp_path_factory.mktemp("proxied")
    words = ("--serve-artifacts", "--artifacts-destination", str(folder / "files"))
    with running(mlflow_server(folder, *words)) as server:
        yield server


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Files go to a folder that client and server share."""
    folder = tmp_path_factory.mktemp("shared")
    words = ("--no-serve-artifacts", "--default-artifact-root", str(folder / "files"))
    with running(mlflow_server(folder, *words)) as server:
        yield server


@needs_mlflow
@pytest.mark.parametrize("kind", ["proxied", "shared"])
def test_mlflow_has_every_byte_once_and_its_aliases_follow(kind, project, request, tmp_path):
    server = request.getfixturevalue(kind)
    where = {"MLFLOW_TRACKING_URI": server.url}
    assert reported(project.push("champion", "--mlflow", "answers", **where)) == {
        "mlflow": "answers",
        "version": "1",
        "new": True,
    }
    assert reported(project.push("champion", "--mlflow", "answers", **where))["new"] is False
    found = read_mlflow(project, server, "answers", tmp_path / "a")
    figures = {"json_valid": 0.99, "latency": 0.5}
    assert found["versions"] == {"1": [project.first, "FINISHED", figures]}
    assert found["aliases"] == {"champion": "1"}
    assert digests(tmp_path / "a") == project.files(project.first)

    promote_release(project.work, project.second)
    assert reported(project.push(project.second[:12], "--mlflow", "answers", **where))["version"] == "2"
    found = read_mlflow(project, server, "answers", tmp_path / "b")
    assert (set(found["versions"]), found["aliases"], found["runs"]) == ({"1", "2"}, {"champion": "2"}, 2)
    assert digests(tmp_path / "b") == project.files(project.second)

    rollback_alias(project.work)
    assert reported(project.push("champion", "--mlflow", "answers", **where))["version"] == "1"
    found = read_mlflow(project, server, "answers", tmp_path / "c")
    assert (set(found["versions"]), found["aliases"]) == ({"1", "2"}, {"champion": "1"})
    project.assert_nobody_else_was_called()


@needs_mlflow
def test_the_guard_would_see_mlflows_telemetry(project, proxied):
    where = {"MLFLOW_TRACKING_URI": proxied.url, "MLFLOW_DISABLE_TELEMETRY": "false"}
    reported(project.push("champion", "--mlflow", "guarded", **where))
    assert "telemetry" in project.network.read_text()


@needs_mlflow
def test_mlflow_knows_a_name_of_odd_characters_again(project, proxied, tmp_path):
    name, where = 'it\'s a \\ "täglich" 100 % ☃', {"MLFLOW_TRACKING_URI": proxied.url}
    assert reported(project.push("champion", "--mlflow", name, **where))["new"] is True
    assert reported(project.push("champion", "--mlflow", name, **where))["new"] is False
    assert set(read_mlflow(project, proxied, name, tmp_path / "a")["versions"]) == {"1"}


@needs_mlflow
def test_aliases_and_figures_that_mlflow_forbids_get_names_that_it_takes(project, proxied, tmp_path):
    for alias in ("eu.west", "latest", "v2"):
        promote_release(project.work, project.first, alias=alias)
    reported(project.push(project.first[:12], "--mlflow", "aliased", MLFLOW_TRACKING_URI=proxied.url))
    found = read_mlflow(project, proxied, "aliased", tmp_path / "a")
    assert set(found["aliases"]) == {"champion", "eu-west", "alias-latest", "alias-v2"}


@needs_mlflow
@pytest.mark.parametrize("name", ["a/b", "a:b", " "])
def test_a_name_that_mlflow_does_not_take_is_a_mistake(name, project, proxied):
    assert "another name" in refused(
        project.push("champion", "--mlflow", name, MLFLOW_TRACKING_URI=proxied.url), code=2
    )


@needs_mlflow
def test_an_address_that_leads_nowhere_is_reported_without_its_password(project):
    for address, code in (
        (f"http://joe:{PASSWORD.replace('@', '%40')}@127.0.0.1:9/", 3),
        (f"nonsense://joe:{PASSWORD.replace('@', '%40')}@here", 2),
        ("", 2),
    ):
        heard = refused(project.push("champion", "--mlflow", "x", MLFLOW_TRACKING_URI=address), code=code)
        assert "MLFLOW_TRACKING_URI" in heard
        assert "s3cr" not in heard
    # Nothing was left behind in the folder either, as MLflow itself would have done.
    assert {path.name for path in project.root.iterdir()} == {"graft.yaml", ".graft"}


@needs_mlflow
def test_a_login_opens_the_registry_and_is_heard_nowhere(project, tmp_path):
    pytest.importorskip("flask_wtf", reason="mlflow[auth] is not installed")
    folder, settings = tmp_path / "server", tmp_path / "auth.ini"
    settings.write_text(
        f"[mlflow]\ndefault_permission = READ\ndatabase_uri = sqlite:///{tmp_path}/auth.db\n"
        f"admin_username = joe\nadmin_password = {PASSWORD}\nauth_cache_ttl_seconds = 60\n"
        "authorization_function = mlflow.server.auth:authenticate_request_basic_auth\n"
    )
    words = ("--app-name", "basic-auth", "--serve-artifacts", "--artifacts-destination", f"{folder}/files")
    more = {"MLFLOW_AUTH_CONFIG_PATH": str(settings), "MLFLOW_FLASK_SERVER_SECRET_KEY": "any"}
    with running(mlflow_server(folder, *words, **more)) as server:
        login = f"http://joe:{PASSWORD.replace('@', '%40')}@127.0.0.1:{server.port}"
        done = project.push("champion", "--mlflow", "answers", MLFLOW_TRACKING_URI=login)
        assert reported(done)["new"] is True
        heard = [done.stdout]
        for wrong in (login.replace(PASSWORD[-5:], "wrong"), server.url):
            output = refused(project.push("champion", "--mlflow", "x", MLFLOW_TRACKING_URI=wrong), code=3)
            assert "401" in output
            heard.append(output)
    heard.append(refused(project.push("champion", "--mlflow", "x", MLFLOW_TRACKING_URI=login), code=3))
    assert not [text for text in heard if "s3cr" in text]
    for path in (*project.root.rglob("*"), *folder.rglob("*")):
        assert not path.is_file() or b"s3cr" not in path.read_bytes(), path


@needs_mlflow
def test_an_mlflow_that_dies_over_a_file_has_no_half_version_and_the_next_push_ends_it(
    project, proxied, tmp_path
):
    few = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}

    def is_cut(command, path):
        return command == "PUT" and path.endswith("adapter_model.safetensors")

    reported(project.push(project.second[:12], "--mlflow", "broken", MLFLOW_TRACKING_URI=proxied.url))
    before = read_mlflow(project, proxied, "broken", tmp_path / "a")
    with wire_to(proxied, is_cut=is_cut) as address:
        try:
            refused(
                project.push("champion", "--mlflow", "broken", MLFLOW_TRACKING_URI=address, **few), code=3
            )
        finally:
            proxied.kill()
            proxied.start()
    between = read_mlflow(project, proxied, "broken", tmp_path / "a")
    assert between["versions"] == before["versions"]
    assert (
        reported(project.push("champion", "--mlflow", "broken", MLFLOW_TRACKING_URI=proxied.url))["new"]
        is True
    )
    after = read_mlflow(project, proxied, "broken", tmp_path / "b")
    assert after["aliases"] == {"champion": "2"}
    assert after["runs"] == between["runs"], "it went on in the run that was begun"
    assert digests(tmp_path / "b") == project.files(project.first)


@needs_mlflow
def test_a_training_run_goes_on_in_one_run_of_a_real_mlflow(project, proxied, tmp_path):
    where = {"MLFLOW_TRACKING_URI": proxied.url, "MLFLOW_EXPERIMENT_NAME": "cited-answers"}
    # A release of the same run lies in the same experiment, and is not taken for it.
    reported(project.push("champion", "--mlflow", "trained", **where))
    assert project.run(TRAIN, "mlflow", str(tmp_path / "run"), **where) == ""
    read = """
import json
from mlflow import MlflowClient
client = MlflowClient()
experiment = client.get_experiment_by_name("cited-answers").experiment_id
runs = client.search_runs([experiment], "attributes.run_name = 'run-1'")
curve = client.get_metric_history(runs[0].info.run_id, "train/loss")
reported = [[run.info.run_name, run.info.status, run.data.params] for run in runs]
print(json.dumps([reported, [[point.step, point.value] for point in curve]]))
"""
    runs, curve = json.loads(project.run(read, **where))
    assert runs == [["run-1", "FINISHED", {"rank": "8", "eval.every": "5"}]]
    assert curve == [[1, 1.0], [2, 0.5], [3, 1 / 3]]
    project.assert_nobody_else_was_called()


@pytest.fixture
def trackio_at(tmp_path):
    with running(trackio_server(tmp_path / "trackio-server", token=TOKEN)) as server:
        yield server


def rows(folder, query):
    import sqlite3

    with sqlite3.connect(Path(folder) / "answers.db") as database:
        return database.execute(query).fetchall()


@needs_trackio
def test_a_training_run_goes_on_in_one_run_of_a_real_trackio_server(project, trackio_at, tmp_path):
    where = {"TRACKIO_SERVER_URL": trackio_at.url, "TRACKIO_WRITE_TOKEN": TOKEN, "TRACKIO_PROJECT": "answers"}
    project.run(TRAIN, "trackio", str(tmp_path / "run"), **where)
    found = rows(trackio_at.folder, "select run_name, step, metrics from metrics order by step")
    assert [(run, step) for run, step, _ in found] == [("run-1", 1), ("run-1", 2), ("run-1", 3)]
    assert [json.loads(figures)["train/loss"] for *_, figures in found] == [1.0, 0.5, 1 / 3]
    project.assert_nobody_else_was_called()
