"""Chains of models: what settings refuse, what each step is asked, budgets, fallbacks, captures."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
from openai import APIStatusError, AsyncOpenAI
from pydantic import ValidationError
from serve_harness import DEADLINE, OTHER, RELEASE, ListSink, open_house

from graftwork.data.ingest.captures import read_captured
from graftwork.records.interaction import Origin
from graftwork.serve.api.chat import parse_chat_body
from graftwork.serve.budgets import KeyBudget
from graftwork.serve.chains import ChainRun, read_trace
from graftwork.serve.family import Family
from graftwork.serve.keys import ApiKey, KeyRing, digest_secret
from graftwork.serve.routing import Fallbacks, Routes
from graftwork.serve.settings import FamilySettings, ServeSettings

ROUTES = Routes(releases=frozenset({RELEASE, OTHER}), aliases={"champion": RELEASE, "judge/champion": OTHER})
THREE = {
    "steps": [
        {"name": "draft", "model": "champion"},
        {"name": "review", "model": "judge/champion", "prompt": "Check: {{draft}} (asked: {{question}})"},
        {"name": "final", "model": "base", "prompt": "{{draft}} | {{review}}", "system": "Be brief."},
    ]
}


def settings_of(chain, **others):
    return ServeSettings.model_validate({"chains": {"trio": chain, **others}})


@asynccontextmanager
async def open_chain(chain, *, sink=None, checks=None, endpoints=None, routes=ROUTES, keys=None, **others):
    settings = settings_of(chain, **others)
    routes = replace(routes, chains=tuple(settings.chains))
    async with (
        open_house(sink, settings=settings, routes=routes, keys=keys) as house,
        AsyncOpenAI(base_url=f"{house.url}/v1", api_key="x", max_retries=0, timeout=DEADLINE) as client,
    ):
        house.answers.chains = settings.chains
        house.answers.chain_checks = checks or {}
        house.answers.fallbacks = Fallbacks({}, engine=house.engine, endpoints=endpoints or {})
        yield house, client


async def ask(client, question="why", **options):
    messages = [{"role": "user", "content": question}]
    answer = await client.chat.completions.with_raw_response.create(
        model="trio", messages=messages, **options
    )
    return answer.parse(), answer.headers


def steps_with(**changes):
    """THREE with changes of its second step."""
    first, second, third = THREE["steps"]
    return {"steps": [first, {**second, **changes}, third]}


# -- settings ----------------------------------------------------------------------------------


def test_a_chain_that_leads_back_to_itself_is_refused_with_the_cycle():
    to = lambda model: {"steps": [{"name": "a", "model": model}]}  # noqa: E731
    with pytest.raises(ValidationError, match="trio → second → third → trio"):
        settings_of(to("second"), second=to("third"), third=to("trio"))
    with pytest.raises(ValidationError, match="trio → trio"):
        settings_of(to("trio"))


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        ({**THREE, "max_tokens": 0}, "max_tokens"),
        ({**THREE, "max_seconds": 0}, "max_seconds"),
        ({**THREE, "max_steps": 0}, "max_steps"),
        ({**THREE, "max_steps": 2}, "may take 3 steps"),
        ({"steps": []}, "steps"),
        ({"steps": [THREE["steps"][1]]}, "{{draft}}, which is not known there"),
        ({"steps": [{"name": "a", "model": "base", "prompt": "{{answer}}"}]}, "{{answer}}"),
        ({"steps": [{"name": "a", "model": "base"}, {"name": "a", "model": "base"}]}, "two steps"),
        ({"steps": [{"name": "question", "model": "base"}]}, "placeholder"),
        ({"steps": [{"name": "a", "model": "base", "when": {"contains": ["x"]}}]}, "no previous answer"),
        (steps_with(when={}), "always true"),
        (steps_with(when={"contains": [""]}), "empty text"),
        (steps_with(when={"answer_of": "final", "contains": ["x"]}), "not a step before it"),
        ({**THREE, "fallback": "trio"}, "is a chain"),
    ],
)
def test_a_chain_that_cannot_work_is_refused_by_name(chain, message):
    with pytest.raises(ValidationError) as refused:
        settings_of(chain)
    assert message in str(refused.value)


def test_a_chain_cannot_take_the_name_of_another_model():
    with pytest.raises(ValidationError, match="name of another model"):
        ServeSettings.model_validate({"chains": {"auto": THREE}, "family": {}})


# -- answers -----------------------------------------------------------------------------------


def test_each_step_is_asked_with_the_answers_before_it(run):
    async def main():
        async with open_chain(THREE) as (house, client):
            answer, headers = await ask(client)
            draft, review, final = [(a.model, a.messages[-1].content) for a in house.stub.asked]
            assert draft == (RELEASE, "why")
            assert review == (OTHER, f"Check: [{RELEASE}] why (asked: why)")
            said = f"[{OTHER}] {review[1]}"
            assert final == ("base", f"[{RELEASE}] why | {said}")
            assert house.stub.asked[2].messages[0].content == "Be brief."
            assert answer.choices[0].message.content == f"[base] {final[1]}"
            assert answer.model == "trio"
            assert headers["x-graft-chain"] == (
                f"trio: trio/draft={RELEASE}, trio/review={OTHER}, trio/final=base"
            )
            asked = sum(len(m.content.split()) for request in house.stub.asked for m in request.messages)
            assert answer.usage.prompt_tokens == asked
            assert "trio" in [model.id for model in (await client.models.list()).data]
            assert 'graft_chains_total{chain="trio",outcome="answered"} 1' in house.answers.metrics.render({})
            assert house.answers.metrics.in_flight == 0

    run(main)


def test_every_step_is_captured_with_one_trace_id_and_never_as_another_programs_log(run):
    sink = ListSink()

    async def main():
        parent = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"
        async with open_chain(THREE, sink=sink) as (house, client):
            _, headers = await ask(client, extra_headers={"traceparent": parent})
            assert headers["x-graft-trace"] == "ab" * 16
            await house.close_captures()
            kept = {capture.chain: capture for capture in sink.captures}
            assert set(kept) == {"trio/draft", "trio/review", "trio/final"}
            assert {capture.chain_trace for capture in sink.captures} == {"ab" * 16}
            assert kept["trio/final"].id == headers["x-graft-capture"]
            assert kept["trio/review"].request["messages"][0]["content"].startswith("Check: ")
            row = read_captured(kept["trio/review"].model_dump(), Origin(file="f", line=1))
            assert row.capture is not None
            assert row.trace is None

    run(main)


def test_a_condition_decides_whether_a_step_runs(run):
    async def has_json(messages, text):
        return None if "JSON" in text else "json_valid"

    async def main():
        chain = steps_with(when={"contains": ["REDO"], "lacks": ["never"]})
        async with open_chain(chain) as (house, client):
            _, headers = await ask(client, "fine")
            assert "trio/review=skipped" in headers["x-graft-chain"]
            assert house.stub.asked[-1].messages[-1].content == f"[{RELEASE}] fine | [{RELEASE}] fine"
            _, headers = await ask(client, "redo it")
            assert f"trio/review={OTHER}" in headers["x-graft-chain"]
            _, headers = await ask(client, "never redo it")
            assert "trio/review=skipped" in headers["x-graft-chain"]
        chain = steps_with(when={"fails": ["json_valid"]})
        async with open_chain(chain, checks={"json_valid": has_json}) as (_, client):
            assert "review=skipped" in (await ask(client, "JSON"))[1]["x-graft-chain"]
            assert f"review={OTHER}" in (await ask(client, "text"))[1]["x-graft-chain"]

    run(main)


def test_a_chain_within_a_chain_shares_its_trace_and_its_budget(run):
    inner = {"steps": [{"name": "one", "model": "champion"}, {"name": "two", "model": "base"}]}
    outer = {"steps": [{"name": "pair", "model": "inner"}, {"name": "last", "model": "judge/champion"}]}

    async def main():
        async with open_chain(outer, inner=inner) as (_, client):
            _, headers = await ask(client)
            shown = [part.partition("=")[0] for part in headers["x-graft-chain"].split(", ")]
            assert shown == ["trio: inner/one", "inner/two", "trio/last"]
        async with open_chain({**outer, "max_tokens": 5}, inner=inner) as (house, client):
            with pytest.raises(APIStatusError) as refused:
                await ask(client, "one two three")
            assert refused.value.body["code"] == "chain_budget"
            assert len(house.stub.asked) < 3

    run(main)


def test_a_chain_may_ask_the_family_and_an_endpoint(run):
    class Remote:
        state, models = "ready", ("large-1",)

        async def complete(self, call, *, model):
            return {"text": "from afar", "finish_reason": "stop", "prompt_tokens": 1, "reply_tokens": 2}

    family = Family(FamilySettings(name="auto"), main="main", aliases={"main": "champion"})
    chain = {"steps": [{"name": "a", "model": "auto"}, {"name": "b", "model": "remote"}]}

    async def main():
        routes = replace(ROUTES, family=family)
        async with open_chain(chain, endpoints={"remote": Remote()}, routes=routes) as (_, client):
            answer, headers = await ask(client)
            assert answer.choices[0].message.content == "from afar"
            assert headers["x-graft-chain"] == f"trio: trio/a={RELEASE}, trio/b=remote"
            assert headers["x-graft-release"] == "remote"

    run(main)


def test_the_last_step_is_streamed(run):
    async def main():
        async with open_chain(THREE) as (house, client):
            messages = [{"role": "user", "content": "why"}]
            stream = await client.chat.completions.create(
                model="trio", messages=messages, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
            assert len([text for text in texts if text]) > 3
            assert "".join(text or "" for text in texts).startswith("[base] ")
            asked = sum(len(m.content.split()) for request in house.stub.asked for m in request.messages)
            assert chunks[-1].usage.prompt_tokens == asked
            assert house.answers.metrics.in_flight == 0

    run(main)


def test_a_chain_reserves_its_tokens_and_gives_them_back_however_it_ends(run):
    async def main():
        ring = KeyRing()
        budget = KeyBudget(tokens_per_day=10_000)
        ring.replace([ApiKey(id="k", name="k", digest=digest_secret("x"), created_at="", budget=budget)])
        usage = ring.holders[0].usage
        async with open_chain(THREE, keys=ring, short={**THREE, "max_tokens": 1}) as (house, client):
            house.stub.gate.clear()
            asked = asyncio.create_task(ask(client))
            async with asyncio.timeout(DEADLINE):
                while not house.stub.asked:
                    await asyncio.sleep(0.01)
            assert usage.reserved > 8192
            house.stub.gate.set()
            await asked
            assert usage.tokens > 0
            assert usage.reserved == 0
            messages = [{"role": "user", "content": "why"}]
            stream = await client.chat.completions.create(model="trio", messages=messages, stream=True)
            assert [chunk async for chunk in stream]
            with pytest.raises(APIStatusError):
                await client.chat.completions.create(model="short", messages=messages)
            async with asyncio.timeout(DEADLINE):
                while usage.reserved:
                    await asyncio.sleep(0.01)

    run(main)


# -- failures ----------------------------------------------------------------------------------


class Dead:
    state, models = "ready", ("large-1",)

    async def complete(self, call, *, model):
        raise ConnectionError("killed")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_killed_step_is_a_clear_error_or_its_declared_fallback(run, place):
    steps = [dict(step) for step in THREE["steps"]]
    steps[place]["model"] = "remote"
    name = f"trio/{steps[place]['name']}"

    async def main():
        async with open_chain({"steps": steps}, endpoints={"remote": Dead()}) as (house, client):
            with pytest.raises(APIStatusError) as refused:
                await ask(client)
            assert refused.value.body["code"] == "chain_step_failed"
            assert name in refused.value.body["message"]
            failed = refused.value.response.headers
            assert len(failed["x-graft-trace"]) == 32
            assert failed["x-graft-chain"].endswith(f"{name}=failed")
            assert house.answers.metrics.in_flight == 0
        steps[place]["fallback"] = "base"
        async with open_chain({"steps": steps}, endpoints={"remote": Dead()}) as (_, client):
            _, headers = await ask(client)
            assert f"{name}=base (fallback)" in headers["x-graft-chain"]
        del steps[place]["fallback"]
        whole = {"steps": steps, "fallback": "champion"}
        async with open_chain(whole, endpoints={"remote": Dead()}) as (house, client):
            answer, headers = await ask(client)
            assert answer.choices[0].message.content == f"[{RELEASE}] why"
            assert headers["x-graft-chain"].endswith(f"trio/fallback={RELEASE}")
            assert 'outcome="fallback"} 1' in house.answers.metrics.render({})
            assert house.answers.metrics.in_flight == 0

    run(main)


def test_the_budget_of_tokens_is_enforced_before_a_step_is_asked(run):
    sink = ListSink()

    async def main():
        async with open_chain({**THREE, "max_tokens": 12}, sink=sink) as (house, client):
            with pytest.raises(APIStatusError) as refused:
                await ask(client, "one two three four five")
            assert refused.value.status_code == 400
            assert refused.value.body["code"] == "chain_budget"
            assert [request.model for request in house.stub.asked] == [RELEASE]
            assert house.stub.asked[0].max_tokens <= 12
            await house.close_captures()
            assert [capture.chain for capture in sink.captures] == ["trio/draft"]
        async with open_chain({**THREE, "max_tokens": 12, "fallback": "base"}) as (_, client):
            answer, _ = await ask(client, "one two three four five")
            assert answer.choices[0].message.content.startswith("[base]")

    run(main)


def test_the_time_of_a_chain_is_bounded(run_with_limit):
    class Silent:
        state, models = "ready", ("large-1",)

        def __init__(self):
            self.asked = False

        async def complete(self, call, *, model):
            self.asked = True
            await asyncio.Event().wait()

    async def main(limit, pass_when):
        chain, remote = {**steps_with(model="remote"), "max_seconds": limit}, Silent()
        async with open_chain(chain, endpoints={"remote": remote}) as (house, client):
            passed = pass_when(lambda: remote.asked)
            with pytest.raises(APIStatusError) as refused:
                await ask(client)
            assert (refused.value.status_code, refused.value.body["code"]) == (504, "timeout")
            assert "trio/review" in refused.value.body["message"]
            assert house.answers.metrics.in_flight == 0
            assert passed.done()

    run_with_limit(main)


def test_what_a_chain_cannot_do_is_refused(run):
    async def main():
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        async with open_chain(THREE) as (_, client):
            for options in ({"n": 2}, {"tools": [tool]}):
                with pytest.raises(APIStatusError) as refused:
                    await ask(client, **options)
                assert refused.value.body["code"] == "chain_unsupported"

    run(main)


def test_an_answer_with_a_placeholder_in_it_stays_text():
    asked = []

    async def ask_step(call, mark):
        asked.append(call.messages[-1]["content"])
        text = "{{question}} {{secret}}"
        exchange = SimpleNamespace(target=SimpleNamespace(release="x"))
        return exchange, {"text": text, "prompt_tokens": 1, "reply_tokens": 1}

    call = parse_chat_body({"messages": [{"role": "user", "content": "q"}]}, ServeSettings())
    chains = settings_of(THREE).chains
    asyncio.run(ChainRun(chains, ask_step, trace="").run("trio", call))
    assert asked[1] == "Check: {{question}} {{secret}} (asked: q)"


def test_a_malformed_traceparent_gets_a_new_trace():
    assert len(read_trace("00-zz-1-1")) == 32
    assert read_trace(None) != read_trace(None)
