"""A family behind one name: rules, the learned router, and what the response headers say."""

from dataclasses import replace

import numpy as np
import pytest
from openai import AsyncOpenAI
from pydantic import ValidationError
from serve_harness import DEADLINE, OTHER, RELEASE, ListSink, open_house

from graftwork.project.settings import ProjectSettings
from graftwork.serve.family import Family
from graftwork.serve.routing import Fallbacks, Routes
from graftwork.serve.settings import FamilySettings, RouteRule, ServeSettings
from graftwork.text.classifier import set_threshold, train_classifier

ALIASES = {"main": "champion", "storage": "storage/champion", "people": "people/champion"}
ROUTES = Routes(
    releases=frozenset({RELEASE, OTHER}), aliases={"champion": RELEASE, "storage/champion": OTHER}
)
TEXTS = {
    "storage": [f"Where is file {n} of the archive kept on disk?" for n in range(12)],
    "people": [f"What does user {n} complain about in question {n}?" for n in range(12)],
}


def make_router():
    texts = [text for found in TEXTS.values() for text in found]
    labels = [label for label, found in TEXTS.items() for _ in found]
    router = train_classifier(texts, labels, check_texts=texts, check_labels=labels)
    judged = [(router.predict(text), label) for text, label in zip(texts, labels, strict=True)]
    return set_threshold(router, judged, target=0.95)


def family_of(*rules, router=None):
    return Family(FamilySettings(rules=rules), main="main", aliases=ALIASES, router=router)


def ask(run, family, question, *, headers=None, sink=None, **body):
    found = {}

    async def main():
        async with (
            open_house(sink, routes=replace(ROUTES, family=family)) as house,
            AsyncOpenAI(base_url=f"{house.url}/v1", api_key="x", max_retries=0, timeout=DEADLINE) as client,
        ):
            messages = [{"role": "user", "content": question}]
            answer = await client.chat.completions.with_raw_response.create(
                model="auto", messages=messages, extra_headers=headers, extra_body=body or None
            )
            found["route"] = answer.headers["x-graft-route"]
            found["release"] = answer.headers["x-graft-release"]
            found["models"] = [model.id for model in (await client.models.list()).data]
            found["metrics"] = house.answers.metrics.render({})

    run(main)
    return found


def test_the_router_sends_a_question_to_its_specialist_and_says_so(run):
    found = ask(run, family_of(router=make_router()), "Where is file 99 of the archive kept?")
    assert found["release"] == OTHER
    assert found["route"].startswith("storage (router 0.")
    assert found["models"][0] == "auto"
    assert 'graft_routed_total{model="storage",by="router"} 1' in found["metrics"]


def test_where_the_router_is_unsure_the_main_model_answers(run):
    found = ask(run, family_of(router=make_router()), "Quelle heure?")
    assert found["release"] == RELEASE
    assert found["route"].startswith("main (router unsure 0.")


def test_a_member_without_a_loaded_release_is_answered_by_the_main_model(run):
    found = ask(run, family_of(router=make_router()), "What does the user complain about in the question?")
    assert found["release"] == RELEASE
    assert "people is not loaded" in found["route"]


@pytest.mark.parametrize(
    ("rule", "headers", "body"),
    [
        (RouteRule(to="storage", role=("keeper",)), {"x-graft-role": "keeper"}, {}),
        (RouteRule(to="storage", role=("keeper",)), None, {"metadata": {"role": "keeper"}}),
        (RouteRule(to="storage", headers={"X-Team": "blue"}), {"x-team": "blue"}, {}),
        (RouteRule(to="storage", keywords=("backup",)), None, {}),
    ],
)
def test_a_rule_goes_before_the_router(run, rule, headers, body):
    question = "Is there a Backup of what the user complained about?"
    found = ask(run, family_of(rule, router=make_router()), question, headers=headers, **body)
    assert (found["release"], found["route"]) == (OTHER, "storage (rule 1)")


def test_a_rule_by_the_name_of_the_schema_matches(run):
    schema = {"type": "json_schema", "json_schema": {"name": "shelf", "schema": {"type": "object"}}}
    rule = RouteRule(to="storage", schema_names=("shelf",))
    found = ask(run, family_of(rule), "Where?", response_format=schema)
    assert found["route"] == "storage (rule 1)"


def test_keywords_match_whole_words_only(run):
    found = ask(run, family_of(RouteRule(to="storage", keywords=("disk",))), "Play the diskography.")
    assert found["route"] == "main (default)"


def test_a_capture_names_the_member_that_answered(run):
    sink = ListSink()

    async def main():
        async with (
            open_house(
                sink, routes=replace(ROUTES, family=family_of(RouteRule(to="storage", keywords=("disk",))))
            ) as house,
            AsyncOpenAI(base_url=f"{house.url}/v1", api_key="x", max_retries=0, timeout=DEADLINE) as client,
        ):
            messages = [{"role": "user", "content": "Which disk?"}]
            await client.chat.completions.create(model="auto", messages=messages)
            await house.close_captures()

    run(main)
    assert sink.captures[0].release == OTHER


def test_a_rule_that_matches_everything_is_refused():
    with pytest.raises(ValidationError, match="matches every request"):
        RouteRule(to="storage")
    with pytest.raises(ValidationError, match="empty keyword"):
        RouteRule(to="storage", keywords=("disk", " "))


def test_a_rule_for_an_unknown_model_names_the_nearest():
    values = {
        "project": "p",
        "data": {"logs": ["log.jsonl"]},
        "models": {"main": {}, "storage": {"keep": {"role": ["storage"]}}},
        "serve": {"family": {"rules": [{"to": "storag", "keywords": ["disk"]}]}},
    }
    with pytest.raises(ValidationError, match="did you mean storage"):
        ProjectSettings.model_validate(values)


def test_a_decision_of_the_router_reads_a_long_prompt_only_at_both_ends():
    router = make_router()
    long = "Which archive is the file in? " + "word " * 200_000
    assert router.predict(long).likeliest == "storage"
    assert np.isfinite(router.predict(long).probability)


class RemoteSpecialist:
    """A specialist at another server, which is killed while it answers if `dies`."""

    models = ("people",)

    def __init__(self, *, dies=False, state="ready"):
        self.dies, self.state = dies, state

    async def complete(self, call, *, model):
        if self.dies:
            raise ConnectionResetError("killed")
        return {"text": "from people", "finish_reason": "stop", "prompt_tokens": 1, "reply_tokens": 1}


@pytest.mark.parametrize(
    ("remote", "release", "route", "fallback"),
    [
        (RemoteSpecialist(), "people-server", "people (rule 1)", None),
        (RemoteSpecialist(dies=True), RELEASE, "people (rule 1)", "from=people/champion; why=engine_down"),
        (RemoteSpecialist(state="unreachable"), RELEASE, "main (rule 1, people is not ready)", None),
    ],
)
def test_the_main_model_answers_for_a_specialist_whose_server_is_killed(
    run, remote, release, route, fallback
):
    settings = FamilySettings(
        rules=(RouteRule(to="people", role=("support",)),), remote={"people": "people-server"}
    )
    family = Family(settings, main="main", aliases=ALIASES)

    async def main():
        async with (
            open_house(routes=replace(ROUTES, family=family)) as house,
            AsyncOpenAI(base_url=f"{house.url}/v1", api_key="x", max_retries=0, timeout=DEADLINE) as client,
        ):
            house.answers.fallbacks = Fallbacks({}, engine=house.engine, endpoints={"people-server": remote})
            answer = await client.chat.completions.with_raw_response.create(
                model="auto",
                messages=[{"role": "user", "content": "hello"}],
                extra_headers={"x-graft-role": "support"},
            )
            assert answer.headers["x-graft-release"] == release
            assert answer.headers["x-graft-route"] == route
            assert answer.headers.get("x-graft-fallback") == fallback

    run(main)


def test_a_remote_member_without_an_endpoint_or_a_model_is_refused_by_name():
    with pytest.raises(ValidationError, match="not an endpoint of failover"):
        ServeSettings.model_validate({"family": {"remote": {"people": "nowhere"}}})
    serve = {
        "family": {"remote": {"main": "there"}},
        "failover": {"endpoints": {"there": {"url": "http://127.0.0.1:9/v1", "model": "m"}}},
    }
    with pytest.raises(ValidationError, match="main is not a specialist"):
        ProjectSettings.model_validate(
            {"project": "p", "data": {"logs": ["x"]}, "models": {"main": {}, "people": {}}, "serve": serve}
        )


@pytest.mark.parametrize(
    "rules",
    [
        [{"to": "a", "role": ["x"]}, {"to": "b", "role": ["x"]}],
        [{"to": "a", "keywords": ["disk", "quota"]}, {"to": "b", "keywords": ["Quota"], "role": ["x"]}],
        [{"to": "a", "headers": {"x-a": "1"}}, {"to": "b", "headers": {"x-a": "1", "x-b": "2"}}],
    ],
)
def test_a_rule_that_can_never_match_is_refused_with_the_rule_before_it(rules):
    with pytest.raises(ValidationError, match=r"rule 2 \(to b\) never matches: rule 1"):
        FamilySettings.model_validate({"rules": rules})
    reversed_rules = list(reversed(rules))
    if rules[0].get("role") != rules[1].get("role"):
        FamilySettings.model_validate({"rules": reversed_rules})
