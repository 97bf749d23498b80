"""The same dataset by one process and by Ray nodes: `make test-ray`."""

import shutil
import sys
from pathlib import Path

import pytest
from ray_cluster import MEMORY, running_ray

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from data_scale import make_rows, write_log

from graftwork.data.audit.row_checks import AuditContext
from graftwork.data.corpus import build
from graftwork.data.prepare import PrepareJob, prepare
from graftwork.data.settings import DataSettings
from graftwork.model.base import EMBEDDED, find_base
from graftwork.model.chat.template import ChatTemplate
from graftwork.process.pieces import MapEngine, NodeRefused
from graftwork.process.ray_cluster import RayTasks, ray_environment

pytestmark = pytest.mark.slow
ROWS = 500
SOURCES = Path(build.__file__).parents[3]


@pytest.fixture(scope="module")
def template():
    return ChatTemplate.from_folder(Path(find_base(EMBEDDED, project_folder=Path("/")).folder))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Some twenty pieces of a small log."""
    monkeypatch.setattr(build, "BLOCK_BYTES", 80_000)


@pytest.fixture
def prepared(tmp_path, template):
    """Prepares the log with an engine; returns the hash of the dataset and what the engine said."""
    write_log(tmp_path / "log.jsonl", make_rows(ROWS, seed=7), mode="wb")
    settings = DataSettings(logs=("log.jsonl",), max_tokens=1024)

    def run(name, runner=None, *, on_progress=None, processes=1):
        words = []
        job = PrepareJob(
            AuditContext(settings=settings),
            base="base",
            base_fingerprint="f",
            renderer=template,
            work=tmp_path / name / "work",
            out=tmp_path / name / "out",
            root=tmp_path,
        )
        job.work.mkdir(parents=True)
        engine = MapEngine(runner, folder=tmp_path / name / "engine", processes=processes, say=words.append)
        made = prepare(job, on_progress=on_progress, engine=engine)
        return made.datasets[0].dataset.content_hash, words, engine.reports

    return run


@pytest.fixture
def expected(prepared):
    return prepared("local")[0]


def ray_of(cluster, folder):
    return RayTasks(cluster.address, ray_environment(token=str(folder / "token")))


class Once:
    """Does something when the first piece of the first stage is done."""

    def __init__(self, act):
        self._act, self.done = act, False

    def __call__(self, _step, done, _total):
        if done and not self.done:
            self.done = True
            self._act()


def test_three_ray_nodes_give_the_same_dataset_and_a_killed_one_costs_its_piece(prepared, expected, tmp_path):
    with running_ray(tmp_path, nodes=3) as cluster:
        found, words, reports = prepared("ray", ray_of(cluster, tmp_path))
        assert found == expected
        nodes, repeated = reports[0]
        assert len(nodes) == 3, words
        assert repeated == 0
        victim = list(cluster.worker_nodes)[-1]
        kill = Once(lambda: cluster.remove_node(victim, allow_graceful=False))
        found, words, reports = prepared("killed", ray_of(cluster, tmp_path), on_progress=kill)
        assert kill.done
        assert found == expected
        # One core: at most one piece was being worked on there.
        assert sum(repeated for _, repeated in reports) <= 1
        assert not any("continues with the rest" in said for said in words)


def test_a_ray_with_another_token_is_not_used(prepared, expected, tmp_path):
    (tmp_path / "wrong").write_text("0" * 64)
    with running_ray(tmp_path, nodes=1) as cluster:
        runner = RayTasks(cluster.address, ray_environment(token=str(tmp_path / "wrong")))
        found, words, reports = prepared("wrong_token", runner)
    assert found == expected
    assert not reports
    assert any("continues with the rest" in said for said in words), words


def test_the_head_dies_and_the_command_finishes_here(prepared, expected, tmp_path):
    with running_ray(tmp_path, nodes=2) as cluster:
        kill = Once(lambda: cluster.remove_node(cluster.head_node, allow_graceful=False))
        found, words, _ = prepared("headless", ray_of(cluster, tmp_path), on_progress=kill)
        assert kill.done
        assert found == expected
        assert any("continues with the rest" in said for said in words)


def test_a_ray_node_with_another_version_is_refused_by_name(prepared, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(SOURCES / "graftwork", other / "graftwork", ignore=shutil.ignore_patterns("__pycache__"))
    (other / "graftwork" / "version.py").write_text('"""Another."""\n\n__version__ = "0.0.9"\n')
    with running_ray(tmp_path, nodes=1) as cluster:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", f"{other}:{':'.join(sys.path)}")
            cluster.add_node(num_cpus=1, object_store_memory=MEMORY)
        with pytest.raises(NodeRefused, match=r"has graftwork 0\.0\.9") as caught:
            prepared("refused", ray_of(cluster, tmp_path))
        assert caught.value.where


def test_a_cluster_that_is_not_there_leaves_the_work_to_this_machine(prepared, expected, tmp_path):
    (tmp_path / "token").write_text("0" * 64)
    runner = RayTasks("127.0.0.1:1", ray_environment(token=str(tmp_path / "token")))
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    found, words, _ = prepared("nowhere", runner)
    assert found == expected
    assert any("cannot be reached" in said or "connection" in said for said in words)
