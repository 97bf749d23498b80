"""Families of adapters, shards of evaluations, several machines: Slurm and Ray give what one machine gives.

`make test-slurm` and `make test-ray` run them.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from ray_cluster import require_ray, running_ray
from slurm_cluster import running_slurm

from graftwork.evaluate.ask.answers import ANSWERS_FILE
from graftwork.fleet import simulated_hosts
from graftwork.fleet.simulated_hosts import HostNetwork, start_ray, start_slurm
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter
from graftwork.records.errors import EnvironmentFailure
from graftwork.train.all_models import train_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
SMALL = {"rank": 2, "epochs": 1, "batch_size": 4, "checkpoint_every": 2, "threads": 1, "max_rows": 16}


@pytest.fixture(params=["slurm", "ray"])
def engine(request, tmp_path, monkeypatch):
    """The settings of a project that uses a running cluster."""
    folder = tmp_path / request.param
    folder.mkdir()
    shared = str(tmp_path / "shared")
    if request.param == "slurm":
        with running_slurm(folder) as conf:
            monkeypatch.setenv("SLURM_CONF", str(conf))
            yield {"engine": "slurm", "fleet": {"slurm": {"folder": shared}}}
        return
    with running_ray(folder, nodes=2, dashboard=True) as cluster:
        place = {"address": cluster.address, "jobs": f"http://{cluster.head_node.webui_url}"}
        place |= {"folder": shared, "token": str(folder / "token")}
        # As on a machine of the user: only the settings name the token.
        for name in [name for name in os.environ if name.startswith("RAY_AUTH")]:
            monkeypatch.delenv(name)
        yield {"engine": "ray", "fleet": {"ray": place}}


def change(folder, **sections):
    path = folder / "graft.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **sections}, sort_keys=False))


def adapters_of(folder):
    with use_project(open_project(folder), NullReporter()) as work:
        trained = train_all(work)
        assert not trained.failed, trained.failed
        return {model.model: model.outcome.adapter_hash for model in trained.models}, work.jobs.list()


def test_a_family_on_a_cluster_has_the_bytes_of_one_that_is_trained_here(small_project, engine, tmp_path):
    models = {
        "main": {},
        "other": {"train": {"learning_rate": 1e-3}},
        "special": {"train": {"start_from": "main"}},
    }
    change(small_project, train=SMALL, models=models)
    far = tmp_path / "far"
    shutil.copytree(small_project, far)
    change(far, **engine)
    expected, _ = adapters_of(small_project)
    found, jobs = adapters_of(far)
    assert found == expected
    assert [(job.place, job.state) for job in jobs] == [(engine["engine"], "done")] * 3


def answers_of(folder):
    """What each subject answered, without times."""
    return {
        path.parent.name: sorted(
            (line["case_id"], line["text"]) for line in map(json.loads, path.read_text().splitlines())
        )
        for path in (folder / ".graft" / "evaluations").glob(f"*/{ANSWERS_FILE}")
    }


def graft(*words, **options):
    done = subprocess.run(
        [sys.executable, "-m", "graftwork.cli.main", *words],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_shards_of_an_evaluation_on_a_cluster_answer_as_those_here(small_project, engine, tmp_path):
    change(small_project, train=SMALL, evaluate={"max_new_tokens": 4, "latency_cases": 2, "batch_size": 4})
    graft("train", "-C", str(small_project))
    far = tmp_path / "far"
    shutil.copytree(small_project, far)
    graft("eval", "-C", str(small_project), "--shards", "2", "--subject", "base", "--json")
    change(far, **engine)
    graft("eval", "-C", str(far), "--shards", "2", "--subject", "base", "--json")
    expected = answers_of(small_project)
    assert expected
    assert answers_of(far) == expected


def evaluate(folder):
    words = [sys.executable, "-m", "graftwork.cli.main", "eval", "-C", str(folder)]
    words += ["--shards", "2", "--subject", "base", "--json"]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_shards_are_answered_here_when_the_head_of_ray_dies(small_project, tmp_path):
    require_ray()
    change(small_project, train=SMALL, evaluate={"max_new_tokens": 4, "latency_cases": 2, "batch_size": 4})
    graft("train", "-C", str(small_project))
    far = tmp_path / "far"
    shutil.copytree(small_project, far)
    here = evaluate(small_project)
    assert here.wait() == 0, here.stdout.read()
    with running_ray(tmp_path, nodes=2) as cluster:
        place = {"address": cluster.address, "token": str(tmp_path / "token")}
        change(far, engine="ray", fleet={"ray": place})
        process = evaluate(far)
        # Both shards have begun on their nodes.
        while len(list((far / ".graft" / "evaluations").glob("*/shard-*/lock"))) < 2:
            assert process.poll() is None, process.stdout.read()
        cluster.remove_node(cluster.head_node, allow_graceful=False)
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 0, output
    logs = "".join(path.read_text() for path in (far / ".graft" / "evaluations").glob("*/worker.log"))
    assert "continues with the rest" in logs + output
    assert answers_of(far) == answers_of(small_project) != {}


def test_training_on_a_ray_that_is_not_there_is_explained(small_project, tmp_path):
    require_ray()
    (tmp_path / "token").write_text("0" * 64)
    place = {"address": "127.0.0.1:1", "token": str(tmp_path / "token")}
    change(small_project, train={**SMALL, "strategy": "ddp"}, engine="ray", fleet={"ray": place})
    words = [sys.executable, "-m", "graftwork.cli.main", "train", "-C", str(small_project), "--nodes", "2"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "cannot be reached" in done.stderr, done.stderr


def hosts_with(*folders):
    try:
        simulated_hosts.require_namespaces()
    except EnvironmentFailure as error:
        pytest.skip(f"hosts cannot be simulated here: {error.what}")
    return HostNetwork(2, share=folders)


def train_on_hosts(network, project, environment, *words):
    command = [sys.executable, "-m", "graftwork.cli.main", "train", "-C", str(project), "--json", *words]
    return subprocess.run(
        network.command("h1", command),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PATH": simulated_hosts.PATH, "OMP_NUM_THREADS": "1", **environment},
    )


@pytest.mark.parametrize("kind", ["slurm", "ray"])
def test_a_cluster_gives_the_machines_of_one_training(kind, small_project, tmp_path):
    if kind == "ray":
        require_ray()
    base = Path(yaml.safe_load((small_project / "graft.yaml").read_text())["base"])
    change(small_project, train={**SMALL, "strategy": "ddp"}, engine=kind)
    with hosts_with(tmp_path, base) as network:
        environment = start_ray(network, dashboard=False) if kind == "ray" else start_slurm(network)
        done = train_on_hosts(network, small_project, environment, "--nodes", "2")
        logs = [path.read_text()[-2000:] for path in (small_project / ".graft" / "engine").glob("*.log")]
        assert done.returncode == 0, "\n".join([done.stderr[-3000:], *logs])
    assert json.loads(done.stdout)["adapter_hash"]
    engine = small_project / ".graft" / "engine"
    assert len(list(engine.glob("machine-*.log" if kind == "ray" else "*.log"))) == (
        2 if kind == "ray" else 1
    )


def test_a_machine_of_ray_that_fails_is_named_and_ends_the_others(small_project, tmp_path):
    require_ray()
    change(small_project, train={**SMALL, "strategy": "single"}, engine="ray")
    with hosts_with(tmp_path) as network:
        environment = start_ray(network, dashboard=False)
        done = train_on_hosts(network, small_project, environment, "--nodes", "2")
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert "machine 0 ended with" in output
    assert "machine-0.log" in output
