"""Shadow traffic that cannot be made is reported when the endpoint starts."""

from types import SimpleNamespace

from graftwork.serve.project import describe_shadow
from graftwork.serve.settings import ServeSettings

WORK = SimpleNamespace(releases=SimpleNamespace(aliases=lambda: {"champion": "a" * 64}))
LARGE = {"endpoints": {"large": {"url": "http://127.0.0.1:1/v1", "model": "large"}}}


def describe(**shadow):
    return describe_shadow(WORK, ServeSettings.model_validate({"failover": LARGE, "shadow": shadow}))


def test_a_challenger_that_does_not_exist_is_named():
    assert "there is no challenger yet" in describe(to="challenger")


def test_models_that_nobody_can_ask_for_are_named():
    assert "no model is called next yet" in describe(to="large", models=["next"])


def test_nothing_is_said_where_requests_are_copied():
    assert describe(to="large") is None
    assert describe(to="champion", models=["base"]) is None
    assert describe_shadow(WORK, ServeSettings()) is None
