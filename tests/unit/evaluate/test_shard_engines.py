"""The cluster of an evaluation travels to its worker through the environment."""

import yaml

from graftwork.evaluate.ask.shards import ENGINE_VARIABLE, find_runner
from graftwork.fleet.project import shard_environment, shard_runner
from graftwork.project.folder import open_project
from graftwork.project.open_project import use_project
from graftwork.project.reporter import NullReporter


def test_a_worker_finds_the_runner_that_the_project_configures(tmp_path, monkeypatch):
    settings = {"project": "p", "base": ".", "data": {"logs": ["l.jsonl"]}, "engine": "ray"}
    (tmp_path / "graft.yaml").write_text(yaml.safe_dump(settings))
    with use_project(open_project(tmp_path), NullReporter()) as work:
        variables, runner = shard_environment(work), shard_runner(work)
    monkeypatch.setenv(ENGINE_VARIABLE, variables[ENGINE_VARIABLE])
    assert find_runner() == runner
    monkeypatch.delenv(ENGINE_VARIABLE)
    assert find_runner() is None
