"""Model names of clients: the endpoint behind them, and the share that a small model answers."""

import json
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from graftwork.engines.protocol import BASE
from graftwork.http.messages import ApiError
from graftwork.records.errors import UserError
from graftwork.records.interaction import TokenPrice
from graftwork.serve.answers import AnswerService
from graftwork.serve.metrics import Metrics
from graftwork.serve.project import read_settings
from graftwork.serve.routing import Fallbacks, Routes, choose_target, update_routes
from graftwork.serve.settings import ServeSettings

SMALL = "5" * 64
LARGE = {"large": {"url": "http://127.0.0.1:9/v1", "model": "gpt-4o"}}
PRICE = TokenPrice(model="gpt-4o", usd_per_million_input=2.5, usd_per_million_output=10.0)


def make_settings(**model):
    models = {"gpt-4o": {"to": "large", **model}}
    return ServeSettings.model_validate({"models": models, "failover": {"endpoints": LARGE}})


def make_routes(settings, *, aliases):
    old = Routes(models=settings.models)
    return update_routes(old, aliases=aliases, releases=frozenset(aliases.values()))


def engine(*models, state="ready"):
    return SimpleNamespace(state=state, models=list(models))


def choose(routes, *, session="a", large="ready", own="ready", name="gpt-4o"):
    fallbacks = Fallbacks(
        {},
        engine=engine(BASE, state=own),
        endpoints={"large": engine(BASE, state=large)},
        find_prices=lambda _settings: {"large": PRICE},
    )
    fallbacks.revise(ServeSettings())
    call = SimpleNamespace(model=name)
    target = choose_target(call, {}, routes=routes, fallbacks=fallbacks, session=session, metrics=Metrics())
    return target, fallbacks


def test_a_small_model_answers_its_share_of_the_sessions_always_the_same_ones():
    settings = make_settings(small="champion", share=0.25)
    routes = make_routes(settings, aliases={"champion": SMALL})
    targets = [choose(routes, session=str(number))[0] for number in range(400)]
    shares = {release: [t.release for t in targets].count(release) for release in ("large", SMALL)}
    assert shares["large"] + shares[SMALL] == 400
    assert 70 < shares[SMALL] < 130
    assert [choose(routes, session=str(number))[0].release for number in range(400)] == [
        target.release for target in targets
    ]
    for target in targets:
        assert target.assignment.arm == ("challenger" if target.release == SMALL else "champion")
        assert target.price == (PRICE if target.release == "large" else None)
        assert (target.name, target.label) == ("gpt-4o", "gpt-4o")


def test_until_its_release_is_loaded_the_small_model_gets_no_request():
    routes = make_routes(make_settings(small="champion", share=0.9), aliases={})
    for number in range(20):
        target, _ = choose(routes, session=str(number))
        assert (target.release, target.assignment) == ("large", None)


def test_the_large_model_answers_where_the_small_one_of_its_share_cannot():
    routes = make_routes(make_settings(small="champion", share=0.5), aliases={"champion": SMALL})
    target, fallbacks = next(
        chosen for n in range(99) if (chosen := choose(routes, session=str(n)))[0].release == SMALL
    )
    other = fallbacks.find_next((target.name, target.name), routes, failed=target.release)
    assert (other.release, other.price) == ("large", PRICE)
    assert fallbacks.find_next((target.name, target.name), routes, failed="large") is None


def test_an_endpoint_that_is_not_ready_is_an_error_that_clients_try_again():
    with pytest.raises(ApiError, match="the endpoint large is not ready") as refusal:
        choose(make_routes(make_settings(), aliases={}), large="unreachable")
    assert refusal.value.status == 503
    assert dict(refusal.value.headers)["retry-after"]


def test_a_name_may_go_to_a_release_and_without_an_engine_there_is_no_base():
    settings = ServeSettings.model_validate({"models": {"gpt-4o": {"to": "champion"}}})
    routes = make_routes(settings, aliases={"champion": SMALL})
    assert choose(routes)[0].release == SMALL
    with pytest.raises(ApiError, match="there is no model 'base'"):
        Routes(has_base=False).resolve(BASE)


def test_the_first_name_is_the_default_unless_another_is_set():
    assert ServeSettings().default_model == "champion"
    assert make_settings().default_model == "gpt-4o"
    named = {"default_model": "champion", "models": {"gpt-4o": {"to": "champion"}}}
    assert ServeSettings.model_validate(named).default_model == "champion"


@pytest.mark.parametrize(
    ("models", "why"),
    [
        ({"gpt-4o": {"to": "large", "small": "champion"}}, "go together"),
        ({"gpt-4o": {"to": "large", "share": 0.1}}, "go together"),
        ({"gpt-4o": {"to": "champion", "small": "champion", "share": 0.1}}, "share of itself"),
        ({"base": {"to": "large"}}, "name of another model"),
        ({"a": {"to": "b"}, "b": {"to": "large"}}, "is not a model"),
        ({"gpt-4o": {"to": "large", "small": "champion", "share": 1.0}}, "less than 1"),
    ],
)
def test_models_that_cannot_be_served_are_refused(models, why):
    with pytest.raises(ValidationError, match=why):
        ServeSettings.model_validate({"models": models, "failover": {"endpoints": LARGE}})


def test_endpoints_alone_answer_only_where_every_name_goes_to_one():
    assert make_settings().uses_endpoints_only
    assert make_settings(small="champion", share=0.1).uses_endpoints_only
    assert not ServeSettings().uses_endpoints_only
    assert not ServeSettings.model_validate({"models": {"gpt-4o": {"to": "champion"}}}).uses_endpoints_only


def test_a_reload_refuses_a_name_that_goes_to_nobody(tmp_path):
    file = tmp_path / "graft.yaml"
    releases = SimpleNamespace(aliases=dict, list=tuple)
    work = SimpleNamespace(project=SimpleNamespace(file=file, root=tmp_path), releases=releases)

    def reload(to):
        serve = {"models": {"gpt-4o": {"to": to}}, "failover": {"endpoints": LARGE}}
        file.write_text(json.dumps({"project": "p", "data": {"logs": ["a.jsonl"]}, "serve": serve}))
        return read_settings(work, lambda settings: settings)

    assert reload("large").models["gpt-4o"].to == "large"
    with pytest.raises(UserError, match="there is no 'lage' to answer for gpt-4o"):
        reload("lage")


@pytest.mark.parametrize(("own", "upstream"), [(False, "gpt-4o"), (True, None)])
def test_an_answer_names_the_upstream_model_unless_it_is_ours(own, upstream):
    settings = ServeSettings.model_validate(
        {"failover": {"endpoints": {"large": {**LARGE["large"], "own": own}}}}
    )
    fallbacks = Fallbacks({}, engine=engine(BASE), endpoints={"large": engine(BASE)})
    fallbacks.revise(settings)
    target = fallbacks.resolve("large", Routes())
    assert target.upstream == upstream
    small = fallbacks.resolve("base", Routes(loaded=False, has_base=True))
    assert small.upstream is None
    # Only what the small model failed at is escalated: no fair references.
    assert small.escalate_to(target).upstream is None


def test_after_a_reload_an_endpoint_has_the_price_of_its_new_model():
    def find_prices(settings):
        return {
            name: PRICE.model_copy(update={"model": endpoint.model})
            for name, endpoint in settings.failover.endpoints.items()
        }

    fallbacks = Fallbacks({}, engine=engine(BASE), endpoints={}, find_prices=find_prices)
    answers = AnswerService(
        engine(BASE), settings=make_settings(), routes=Routes, captures=None, fallbacks=fallbacks
    )
    assert answers.fallbacks.prices["large"].model == "gpt-4o"
    large = {"large": {**LARGE["large"], "model": "gpt-4o-mini"}}
    answers.revise(ServeSettings.model_validate({"failover": {"endpoints": large}}))
    assert answers.fallbacks.prices["large"].model == "gpt-4o-mini"
