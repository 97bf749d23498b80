"""A variable that should hold a key and does not is an error before anything starts."""

import pytest

from graftwork.pipeline.preflight import find_missing_keys
from graftwork.project.settings import ProjectSettings
from graftwork.records.errors import EnvironmentFailure
from graftwork.serve.settings import ServeSettings, require_upstream_keys

ENDPOINT = {"url": "http://127.0.0.1:9/v1", "model": "large", "api_key_env": "KEY_OF_A_TEST"}


def test_keys_that_a_run_will_need_are_looked_for_before_training(monkeypatch):
    key, address = {"api_key_env": "KEY_OF_A_TEST"}, {"url": ENDPOINT["url"], "model": "large"}
    settings = ProjectSettings.model_validate(
        {
            "project": "p",
            "base": "small",
            "data": {"logs": ["a.jsonl"]},
            "train": {
                "objective": "grpo",
                "rewards": [{"metric": "exact_match"}],
                "rollouts": {"endpoint": {**address, **key}},
            },
            "evaluate": {
                "judge": {**address, **key},
                "subjects": ["base", "adapter", f"{ENDPOINT['url']}#large,key=KEY_OF_A_TEST"],
            },
        }
    )
    monkeypatch.delenv("KEY_OF_A_TEST", raising=False)
    problems = find_missing_keys(settings)
    assert [problem.severity for problem in problems] == ["error"] * 3
    assert all("KEY_OF_A_TEST" in problem.what for problem in problems)
    monkeypatch.setenv("KEY_OF_A_TEST", "k")
    assert find_missing_keys(settings) == []


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"engine": {"kind": "endpoint", **ENDPOINT}}, "serve.engine.api_key_env"),
        ({"failover": {"endpoints": {"big": ENDPOINT}}}, "serve.failover.endpoints.big.api_key_env"),
    ],
)
def test_keys_of_servers_that_are_asked_are_looked_for_before_serving(monkeypatch, settings, where):
    serve = ServeSettings.model_validate(settings)
    monkeypatch.setenv("KEY_OF_A_TEST", " ")
    with pytest.raises(EnvironmentFailure, match="KEY_OF_A_TEST") as missing:
        require_upstream_keys(serve)
    assert missing.value.where == where
    monkeypatch.setenv("KEY_OF_A_TEST", "k")
    require_upstream_keys(serve)
