"""A variable that should hold a key and does not is an error before anything starts."""

import pytest

from graftwork.evaluate.settings import JudgeSettings
from graftwork.pipeline.preflight import find_missing_key
from graftwork.records.errors import EnvironmentLacks
from graftwork.serve.settings import ServeSettings, require_upstream_keys

ENDPOINT = {"url": "http://127.0.0.1:9/v1", "model": "large", "key_env": "KEY_OF_A_TEST"}


def test_the_key_of_the_judge_is_looked_for_before_training(monkeypatch):
    judge = JudgeSettings(url=ENDPOINT["url"], model="large", key_variable="KEY_OF_A_TEST")
    monkeypatch.delenv("KEY_OF_A_TEST", raising=False)
    (problem,) = find_missing_key(judge)
    assert problem.severity == "error"
    assert "KEY_OF_A_TEST" in problem.what
    monkeypatch.setenv("KEY_OF_A_TEST", "k")
    assert find_missing_key(judge) == []
    assert find_missing_key(None) == []


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"engine": {"kind": "endpoint", **ENDPOINT}}, "serve.engine.key_env"),
        ({"failover": {"endpoints": {"big": ENDPOINT}}}, "serve.failover.endpoints.big.key_env"),
    ],
)
def test_keys_of_servers_that_are_asked_are_looked_for_before_serving(monkeypatch, settings, where):
    serve = ServeSettings.model_validate(settings)
    monkeypatch.setenv("KEY_OF_A_TEST", " ")
    with pytest.raises(EnvironmentLacks, match="KEY_OF_A_TEST") as missing:
        require_upstream_keys(serve)
    assert missing.value.where == where
    monkeypatch.setenv("KEY_OF_A_TEST", "k")
    require_upstream_keys(serve)
