"""Two releases behind one alias: the arm is fixed for a session, has its share, and depends only on it."""

import asyncio
import itertools
import json
import logging
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai import APIStatusError, AsyncOpenAI
from pydantic import ValidationError
from scipy import stats
from serve_harness import DEADLINE, OTHER, RELEASE, ListSink, open_house

from graftwork.http.client import Client
from graftwork.serve.routing import (
    AliasWatcher,
    Experiment,
    Routes,
    is_experiment_between,
    make_experiment,
    set_up_experiment,
    update_routes,
)
from graftwork.serve.settings import ServeSettings, SplitSettings

BOTH = {"champion": RELEASE, "challenger": OTHER}
HELLO = [{"role": "user", "content": "hello there friend"}]
shares = st.floats(0.01, 0.99)


def experiment_of(share=0.5, experiment="", champion=RELEASE, challenger=OTHER):
    split = SplitSettings(share=share, experiment=experiment)
    return make_experiment(split, champion=champion, challenger=challenger)


def split_routes(split):
    return update_routes(Routes(), aliases=BOTH, releases=frozenset({RELEASE, OTHER}), split=split)


# -- assignment --------------------------------------------------------------------------------


@given(st.text(), shares, st.text(max_size=20))
def test_a_session_gets_the_same_lot_every_time_and_everywhere(session, share, experiment):
    here, there = experiment_of(share, experiment), experiment_of(share, experiment)
    assert here == there
    assert here.assign(session) == there.assign(session)
    assert here.release_of(here.assign(session)) in (RELEASE, OTHER)


@settings(max_examples=25, deadline=None)
@given(st.floats(0.02, 0.98), st.text(max_size=8), st.sampled_from(["{}", "user-{}@team", "2026-01-{:04}"]))
def test_the_challenger_gets_its_share_whatever_sessions_are_called(share, experiment, form):
    running = experiment_of(share, experiment)
    got = sum(running.assign(form.format(n)) == "challenger" for n in range(4000))
    assert stats.binomtest(got, 4000, share).pvalue > 1e-7


@pytest.mark.parametrize(
    "changed",
    [{"experiment": "second"}, {"share": 0.51}, {"champion": "b" * 16}, {"challenger": "c" * 16}],
)
def test_a_new_experiment_reassigns_every_session(changed):
    old, new = experiment_of(0.5), experiment_of(**{"share": 0.5, **changed})
    assert old.experiment != new.experiment
    same = sum(old.assign(str(n)) == new.assign(str(n)) for n in range(4000))
    assert stats.binomtest(same, 4000, 0.5).pvalue > 1e-4


def test_lots_of_neighbouring_sessions_have_nothing_to_do_with_each_other():
    drawn = [experiment_of(0.5).assign(f"session-{n}") for n in range(8000)]
    both = sum(a == b for a, b in itertools.pairwise(drawn))
    assert stats.binomtest(both, 7999, 0.5).pvalue > 1e-4


@given(shares)
def test_the_bound_of_the_lots_is_the_share(share):
    assert math.isclose(experiment_of(share).bound / 2**64, share, rel_tol=1e-9)


def test_an_experiment_names_its_two_releases():
    name = experiment_of().experiment
    assert is_experiment_between(name, RELEASE, OTHER)
    assert is_experiment_between(name, OTHER, RELEASE)
    assert not is_experiment_between(name, RELEASE, RELEASE)
    assert not is_experiment_between(name, RELEASE, "b" * 64)
    assert not is_experiment_between("nonsense", RELEASE, OTHER)


@pytest.mark.parametrize(
    "aliases",
    [{}, {"champion": RELEASE}, {"challenger": OTHER}, {"champion": RELEASE, "challenger": RELEASE}],
)
def test_where_two_releases_are_not_there_nothing_is_assigned_and_it_is_reported(aliases):
    found = set_up_experiment(SplitSettings(), aliases)
    assert isinstance(found, str)
    assert found
    assert set_up_experiment(None, aliases) is None
    assert isinstance(set_up_experiment(SplitSettings(), BOTH), Experiment)


@pytest.mark.parametrize("wrong", [{"share": 0}, {"share": 1}, {"share": -0.1}, {"challenger": "champion"}])
def test_a_split_that_splits_nothing_is_refused(wrong):
    with pytest.raises(ValidationError):
        ServeSettings.model_validate({"split": wrong})
    with pytest.raises(ValidationError, match="extra"):
        ServeSettings.model_validate({"split": {"shares": 0.1}})


# -- the gateway -------------------------------------------------------------------------------


def client_of(house):
    return AsyncOpenAI(base_url=f"{house.url}/v1", api_key="unused", max_retries=0, timeout=DEADLINE)


async def ask(client, model="champion", session=None, **more):
    headers = {} if session is None else {"x-session-id": session}
    answer = await client.chat.completions.with_raw_response.create(
        model=model, messages=HELLO, extra_headers=headers, **more
    )
    return answer.headers["x-graft-release"]


def test_sessions_are_assigned_and_their_captures_name_the_experiment(run):
    split = SplitSettings(share=0.4)
    routes, sink = split_routes(split), ListSink()

    async def main():
        async with (
            open_house(sink, settings=ServeSettings(split=split), routes=routes) as house,
            client_of(house) as client,
        ):
            for n in range(12):
                expected = routes.experiment.release_of(routes.experiment.assign(f"s{n}"))
                assert {await ask(client, session=f"s{n}") for _ in range(2)} == {expected}
                # The user stands for the session where no header names one, also in a stream.
                assert await ask(client, user=f"s{n}", stream=True) == expected
            await ask(client)
            for name, release in (("challenger", OTHER), (RELEASE, RELEASE), ("base", "base")):
                assert await ask(client, model=name, session="s1") == release
            http = Client(port=house.port)
            health = json.loads((await http.fetch("GET", "/health"))[1])["split"]
            figures = (await http.fetch("GET", "/metrics"))[1].decode()
            await house.close_captures()
        assert (health["state"], health["experiment"]) == ("on", routes.experiment.experiment)
        assert health["arms"]["challenger"]["share"] == 0.4
        counted = {arm: facts["requests"] for arm, facts in health["arms"].items()}
        assert sum(counted.values()) == 37
        name = f'graft_split_requests_total{{experiment="{routes.experiment.experiment}",arm="challenger"}}'
        assert f"{name} {counted['challenger']}\n" in figures

    run(main)
    assigned = [capture for capture in sink.captures if capture.dealt is not None]
    assert len(assigned) == 37
    for capture in assigned:
        assert capture.dealt == routes.experiment.experiment
        assert capture.share == 0.4
        assert routes.experiment.release_of(capture.arm) == capture.release
        if capture.session is None:
            assert routes.experiment.assign(capture.id) == capture.arm
    assert {c.model for c in sink.captures if c.dealt is None} == {"challenger", RELEASE, "base"}
    assert all(c.arm is None and c.share is None for c in sink.captures if c.dealt is None)


def test_a_request_that_names_no_model_takes_part(run):
    split = SplitSettings(share=0.5)
    routes, sink = split_routes(split), ListSink()

    async def main():
        async with open_house(sink, settings=ServeSettings(split=split), routes=routes) as house:
            http = Client(port=house.port)
            reply = await http.send(
                "POST",
                "/v1/chat/completions",
                body=json.dumps({"messages": HELLO}).encode(),
                headers=(("content-type", "application/json"),),
            )
            assert reply.status == 200
            await reply.read()
            await house.close_captures()

    run(main)
    assert sink.captures[0].dealt == routes.experiment.experiment


def test_without_a_challenger_the_champion_answers_all_and_health_says_why(run):
    split = SplitSettings(share=0.9)
    routes = update_routes(Routes(), aliases=BOTH, releases=frozenset({RELEASE}), split=split)
    sink = ListSink()

    async def main():
        async with (
            open_house(sink, settings=ServeSettings(split=split), routes=routes) as house,
            client_of(house) as client,
        ):
            assert {await ask(client, session=str(n)) for n in range(20)} == {RELEASE}
            health = json.loads((await Client(port=house.port).fetch("GET", "/health"))[1])
            assert health["split"]["state"] == "off"
            assert "challenger" in health["split"]["why"]
            await house.close_captures()

    run(main)
    assert {capture.dealt for capture in sink.captures} == {None}


def test_a_failed_request_in_an_experiment_counts_for_its_arm(run):
    split = SplitSettings(share=0.5)
    routes, sink = split_routes(split), ListSink()
    slow = ServeSettings(split=split, request_timeout_seconds=0.05)

    async def main():
        async with open_house(sink, settings=slow, routes=routes) as house, client_of(house) as client:
            house.stub.gate.clear()
            for stream in (False, True):
                with pytest.raises(Exception, match="did not answer") as failed:
                    async for _ in await client.chat.completions.create(
                        model="champion", messages=HELLO, stream=stream
                    ):
                        pass
                assert not isinstance(failed.value, APIStatusError) or failed.value.status_code == 504
            house.engine.client.close()
            house.engine.client = None
            with pytest.raises(APIStatusError):  # no engine at all: that says nothing about a release
                await ask(client)
            counted = sum(house.answers.metrics.assigned_failures.values())
            await house.close_captures()
        assert counted == 2

    run(main)
    assert [(c.finish_reason, c.dealt) for c in sink.captures] == [
        ("error", routes.experiment.experiment)
    ] * 2


def test_a_client_that_leaves_before_the_first_token_counts_for_its_arm(run):
    split = SplitSettings(share=0.5)
    sink = ListSink()

    async def main():
        async with open_house(sink, settings=ServeSettings(split=split), routes=split_routes(split)) as house:
            house.stub.gate.clear()
            body = json.dumps({"model": "champion", "messages": HELLO}).encode()
            _, writer = await asyncio.open_connection("127.0.0.1", house.port)
            head = f"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: {len(body)}\r\n"
            writer.write(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            await asyncio.wait_for(house.stub.waiting.wait(), DEADLINE)
            writer.close()
            await asyncio.wait_for(house.stub.cancelled.wait(), DEADLINE)
            while house.answers.metrics.in_flight:
                await asyncio.sleep(0)
            await house.close_captures()

    run(main)
    assert [(c.disconnected, c.reply) for c in sink.captures] == [(True, "")]
    assert sink.captures[0].arm is not None


class QuietEngine:
    """Holds releases and answers nobody."""

    state = "ready"

    def __init__(self, *models):
        self.models = ("base", *models)

    async def load_adapter(self, name, folder, *, keep=()):
        self.models = (*self.models, name)


def test_an_alias_that_moves_ends_one_experiment_and_begins_the_next_and_both_are_logged(run, caplog):
    aliases, there = {"champion": RELEASE}, {}
    book = AliasWatcher(
        QuietEngine(RELEASE),
        resolve_aliases=lambda: dict(aliases),
        find_adapter=there.get,
        split=SplitSettings(),
    )

    async def main():
        with caplog.at_level(logging.INFO, logger="graftwork.serve.routing"):
            await book.refresh()
            assert book.routes.experiment is None
            aliases["challenger"] = OTHER
            await book.refresh()  # it points at what is not loaded
            assert book.routes.experiment is None
            there[OTHER] = "folder"
            await book.refresh()
            first = book.routes.experiment
            await book.refresh()
            assert book.routes.experiment == first
            aliases["champion"] = OTHER
            await book.refresh()
            assert book.routes.experiment is None
            assert "both" in book.routes.experiment_off

    run(main)
    reported = [record for record in caplog.records if record.getMessage().startswith("split:")]
    assert [record.levelname for record in reported] == ["WARNING", "INFO", "WARNING"]


def test_a_canary_comes_before_the_experiment_of_the_settings_and_ends_with_its_lease(run):
    canary = [SplitSettings(challenger="canary", share=0.05, experiment="canary")]
    book = AliasWatcher(
        QuietEngine(RELEASE, OTHER),
        resolve_aliases=lambda: {"champion": RELEASE, "canary": OTHER},
        find_adapter=lambda _release: None,
        find_canary=lambda: canary[0],
    )

    async def main():
        await book.refresh()
        assert (book.routes.experiment.challenger, book.routes.experiment.share) == (OTHER, 0.05)
        canary[0] = None
        await book.refresh()
        assert book.routes.experiment is None

    run(main)
