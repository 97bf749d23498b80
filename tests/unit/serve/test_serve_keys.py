"""API keys over real HTTP: scopes, models, expiry, budgets, and changes without a restart."""

import asyncio
import json
import random
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI, RateLimitError
from serve_harness import DEADLINE, OTHER, RELEASE, ListSink, open_house, raw

from graftwork.http.client import Client
from graftwork.http.messages import ApiError
from graftwork.serve.api.completions import parse_embeddings
from graftwork.serve.budgets import KeyBudget, KeyUsage, RequestBudget
from graftwork.serve.keys import (
    SCOPES,
    USAGE_FILE,
    ApiKey,
    KeyRing,
    SavedUsage,
    UsageFile,
    digest_secret,
    follow_keys,
    is_usable,
    make_secret,
)
from graftwork.serve.settings import ServeSettings

HELLO = [{"role": "user", "content": "hello there friend"}]
JSON = ("content-type", "application/json")


def key(secret, name="ci", **more):
    given = {"id": f"id-{name}", "name": name, "digest": digest_secret(secret), "created_at": "2026-01-01"}
    return ApiKey.model_validate({**given, **more})


def ring_of(*keys, environment=None):
    ring = KeyRing(environment)
    ring.replace(keys)
    return ring


async def ask(house, secret, path="/v1/chat/completions", body=None, method=None):
    sent = json.dumps(body if body is not None else {"messages": HELLO}).encode()
    method = method or ("POST" if path.startswith("/v1/") and path != "/v1/models" else "GET")
    headers = (JSON, ("authorization", f"Bearer {secret}"))
    reply = await Client(port=house.port).send(
        method, path, body=sent if method == "POST" else b"", headers=headers
    )
    data = await reply.read()
    return reply, json.loads(data) if data.startswith(b"{") else data


def test_a_stored_key_and_the_key_of_the_environment_work_at_the_same_time(run):
    async def main():
        keys = ring_of(key("first"), key("second", "app"), environment="fixed")
        async with open_house(keys=keys) as house:
            statuses = [(await ask(house, s))[0].status for s in ("first", "second", "fixed", "third", "")]
            assert statuses == [200, 200, 200, 401, 401]

    run(main)


def test_a_key_may_come_as_x_api_key_and_bearer_in_any_case(run):
    async def main():
        async with open_house(keys=ring_of(key("first"))) as house:
            for header in (("x-api-key", "first"), ("authorization", "bearer first")):
                reply = await Client(port=house.port).send("GET", "/v1/models", headers=(header,))
                assert reply.status == 200
            reply = await Client(port=house.port).send(
                "GET", "/v1/models", headers=(("authorization", "Basic first"),)
            )
            assert reply.status == 401

    run(main)


PATHS = {
    "models": ("/v1/chat/completions", "/v1/models"),
    "feedback": ("/v1/feedback",),
    "traces": ("/v1/traces",),
    "metrics": ("/metrics",),
}


@pytest.mark.parametrize("scope", SCOPES)
def test_a_key_reaches_only_the_paths_of_its_scope(run, scope):
    async def main():
        async with open_house(keys=ring_of(key("s", scopes=(scope,)))) as house:
            for needed, paths in PATHS.items():
                for path in paths:
                    reply, body = await ask(house, "s", path)
                    if needed == scope:
                        assert reply.status not in (401, 403)
                    else:
                        assert reply.status == 403
                        assert body["error"]["code"] == "missing_scope"
                        assert body["error"]["type"] == "permission_error"
            _, health = await ask(house, "s", "/health")
            assert ("engine" in health) == (scope == "admin")

    run(main)


def test_a_key_for_some_models_is_refused_for_others_and_lists_only_its_own(run):
    async def main():
        async with open_house(keys=ring_of(key("s", models=("champion",)))) as house:
            assert (await ask(house, "s"))[0].status == 200  # the default model
            for model in ("base", OTHER, RELEASE):
                reply, body = await ask(house, "s", body={"model": model, "messages": HELLO})
                assert (reply.status, body["error"]["code"]) == (403, "model_not_allowed")
                assert body["error"]["param"] == "model"
            _, listed = await ask(house, "s", "/v1/models")
            assert [model["id"] for model in listed["data"]] == ["champion"]
            found = [
                await ask(house, "s", f"/v1/models/{name}", method="GET") for name in ("champion", OTHER)
            ]
            assert [reply.status for reply, _ in found] == [200, 404]
            assert found[0][1] == listed["data"][0]
            assert found[1][1]["error"]["code"] == "model_not_found"

    run(main)


def test_an_expired_key_is_refused(run):
    async def main():
        now = datetime.now(UTC)
        old = key("old", "old", expires_at=(now - timedelta(seconds=1)).isoformat())
        new = key("new", "new", expires_at=(now + timedelta(hours=1)).isoformat())
        async with open_house(keys=ring_of(old, new)) as house:
            assert (await ask(house, "old"))[0].status == 401
            assert (await ask(house, "new"))[0].status == 200

    run(main)


def test_a_revoked_key_stops_and_a_new_one_works_without_a_restart(run):
    async def main():
        stored = [(key("first"),)]
        ring = ring_of(*stored[0])
        following = asyncio.create_task(follow_keys(ring, lambda: stored[0], seconds=0.01))
        try:
            async with open_house(keys=ring) as house:
                assert (await ask(house, "first"))[0].status == 200
                stored[0] = (key("first", revoked_at="2026-01-02"), key("second", "app"))
                async with asyncio.timeout(DEADLINE):
                    while (await ask(house, "first"))[0].status != 401:
                        await asyncio.sleep(0.01)
                assert (await ask(house, "second"))[0].status == 200
        finally:
            following.cancel()

    run(main)


def test_a_store_that_fails_keeps_the_known_keys(run):
    async def main():
        asked = asyncio.Event()
        loop = asyncio.get_running_loop()

        def fail():
            loop.call_soon_threadsafe(asked.set)
            raise OSError("gone")

        ring = ring_of(key("first"))
        following = asyncio.create_task(follow_keys(ring, fail, seconds=0.01))
        try:
            async with open_house(keys=ring) as house:
                await asyncio.wait_for(asked.wait(), DEADLINE)
                assert (await ask(house, "first"))[0].status == 200
        finally:
            following.cancel()

    run(main)


def test_revoking_the_last_key_does_not_open_the_endpoint(run):
    async def main():
        async with open_house(keys=ring_of(key("first", revoked_at="2026-01-02"))) as house:
            assert (await ask(house, "first"))[0].status == 401
            assert (await ask(house, ""))[0].status == 401

    run(main)


def test_a_budget_of_requests_is_refused_as_clients_of_openai_expect(run):
    async def main():
        keys = ring_of(key("s", budget={"requests_per_day": 2}), key("t", "other"))
        async with (
            open_house(keys=keys) as house,
            AsyncOpenAI(base_url=f"{house.url}/v1", api_key="s", max_retries=0) as client,
        ):
            for _ in range(2):
                await client.chat.completions.create(model="champion", messages=HELLO)
            with pytest.raises(RateLimitError) as refused:
                await client.chat.completions.create(model="champion", messages=HELLO)
            assert refused.value.code == "rate_limit_exceeded"
            assert 1 <= int(refused.value.response.headers["retry-after"]) <= 86_400
            assert "'ci' has used its 2 requests a day" in refused.value.message
            assert (await ask(house, "t"))[0].status == 200  # others are not affected
            # Anthropic's clients get the same in their own form.
            _, body = await ask(house, "s", "/v1/messages", {"max_tokens": 5, "messages": HELLO})
            assert (body["type"], body["error"]["type"]) == ("error", "rate_limit_error")

    run(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_budget_of_tokens_counts_the_usage_of_answers(run, stream):
    async def main():
        ring = ring_of(key("s", budget={"tokens_per_day": 5}))
        async with open_house(keys=ring) as house:
            reply, body = await ask(house, "s", body={"messages": HELLO, "stream": stream})
            assert reply.status == 200
            used = ring.holders[0].usage.tokens
            assert used == 4 + len(HELLO[0]["content"].split()) if stream else body["usage"]["total_tokens"]
            assert (await ask(house, "s"))[0].status == 429

    run(main)


def test_an_answer_that_breaks_off_counts_against_the_budget(run):
    async def main():
        ring = ring_of(key("s", budget={"tokens_per_day": 5000}))
        async with open_house(ListSink(), keys=ring) as house:
            body = json.dumps({"messages": HELLO, "stream": True}).encode()
            house.stub.gate.clear()
            reader, writer = await asyncio.open_connection("127.0.0.1", house.port)
            head = "POST /v1/chat/completions HTTP/1.1\r\nauthorization: Bearer s"
            rest = f"content-type: application/json\r\ncontent-length: {len(body)}"
            writer.write(f"{head}\r\n{rest}\r\n\r\n".encode() + body)
            await reader.readuntil(b"\r\n\r\n")
            writer.close()
            async with asyncio.timeout(DEADLINE):
                while ring.holders[0].usage.tokens == 0:
                    await asyncio.sleep(0.01)
            assert ring.holders[0].usage.reserved == 0

    run(main)


def test_a_request_that_times_out_counts_against_the_budget(run):
    async def main():
        ring = ring_of(key("s", budget={"tokens_per_day": 5000}))
        settings = ServeSettings(request_timeout_seconds=0.2)
        async with open_house(ListSink(), settings=settings, keys=ring) as house:
            house.stub.gate.clear()
            reply, _ = await ask(house, "s")
            house.stub.gate.set()
            assert reply.status == 504
            assert ring.holders[0].usage.tokens > 0
            assert ring.holders[0].usage.reserved == 0

    run(main)


async def until(condition):
    async with asyncio.timeout(DEADLINE):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
def test_requests_that_run_at_once_cannot_exceed_a_budget_of_tokens(run, stream):
    async def main():
        # Each request uses 10 tokens or so: the second one finds the budget used up when the first has ended.
        ring = ring_of(key("s", budget={"tokens_per_day": 5}))
        usage = ring.holders[0].usage
        async with open_house(keys=ring) as house:
            house.stub.gate.clear()
            body = {"messages": HELLO, "stream": stream, "max_tokens": 50}
            tasks = [asyncio.create_task(ask(house, "s", body=body)) for _ in range(6)]
            await until(lambda: usage.waiting == 5)
            assert not any(task.done() for task in tasks)
            house.stub.gate.set()
            statuses = sorted([reply.status for reply, _ in await asyncio.gather(*tasks)])
            assert statuses == [200] + [429] * 5
            assert (usage.reserved, usage.waiting) == (0, 0)

    run(main)


def test_a_request_waits_for_those_that_may_use_the_rest_and_is_not_refused(run):
    async def main():
        ring = ring_of(key("s", budget={"tokens_per_day": 400}))
        usage = ring.holders[0].usage
        async with open_house(keys=ring) as house:
            house.stub.gate.clear()
            body = {"messages": HELLO, "max_tokens": 120}
            tasks = [asyncio.create_task(ask(house, "s", body=body)) for _ in range(5)]
            await until(lambda: usage.waiting == 3)
            assert usage.reserved <= 400
            tasks[-1].cancel()  # its client leaves while it waits
            await until(lambda: usage.waiting == 2)
            house.stub.gate.set()
            replies = await asyncio.gather(*tasks[:-1])
            assert [reply.status for reply, _ in replies] == [200] * 4
            assert (usage.reserved, usage.waiting) == (0, 0)

    run(main)


@given(
    budget=st.integers(1, 60),
    requests=st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1)), max_size=25),
    seed=st.integers(0, 1000),
)
def test_a_budget_of_tokens_is_exceeded_by_one_request_at_most(budget, requests, seed):
    chance = random.Random(seed)
    usage = KeyUsage("k", KeyBudget(tokens_per_day=budget), clock=lambda: 1e9)
    used_when_refused = []

    async def answer(most, share):
        try:
            held = await usage.reserve(most)
        except ApiError:
            used_when_refused.append(usage.tokens)
            return
        try:
            for _ in range(chance.randrange(4)):
                await asyncio.sleep(0)
        finally:
            usage.add_tokens(round(share * most))
            held.release()
            held.release()

    async def main():
        tasks = [asyncio.create_task(answer(*request)) for request in requests]
        for task in tasks:
            if chance.random() < 0.2:
                await asyncio.sleep(0)
                task.cancel()
        async with asyncio.timeout(DEADLINE):
            await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(main())
    longest = max((most for most, _ in requests), default=1)
    assert usage.tokens < budget + longest
    assert all(used >= budget for used in used_when_refused)
    assert (usage.reserved, usage.waiting) == (0, 0)


@pytest.mark.parametrize("leaves", [True, False])
def test_a_step_of_a_chain_that_breaks_off_counts_against_the_budget(run, leaves):
    chains = {"pair": {"steps": [{"name": "a", "model": "champion"}, {"name": "b", "model": "champion"}]}}

    async def main():
        ring = ring_of(key("s", budget={"tokens_per_day": 5000}))
        settings = ServeSettings.model_validate(
            {"chains": chains, "request_timeout_seconds": DEADLINE if leaves else 0.2}
        )
        async with open_house(ListSink(), settings=settings, keys=ring) as house:
            house.answers.chains = settings.chains
            house.stub.gate.clear()
            asking = asyncio.create_task(ask(house, "s", body={"model": "pair", "messages": HELLO}))
            if leaves:
                while not house.stub.asked:
                    await asyncio.sleep(0.01)
                asking.cancel()
            with suppress(asyncio.CancelledError):
                assert (await asking)[0].status >= 500
            while house.answers.metrics.in_flight:
                await asyncio.sleep(0.01)
            house.stub.gate.set()
            return ring.holders[0].usage.tokens

    assert run(main) > 0


def test_a_text_completion_that_breaks_off_counts_with_its_prompts(run):
    async def main():
        ring = ring_of(key("s", budget={"tokens_per_day": 5000}))
        async with open_house(ListSink(), keys=ring) as house:
            house.stub.gate.clear()
            body = {"prompt": ["x" * 400, "y" * 400], "max_tokens": 4}
            asking = asyncio.create_task(ask(house, "s", "/v1/completions", body))
            while not house.stub.asked:
                await asyncio.sleep(0.01)
            asking.cancel()
            while house.answers.metrics.in_flight:
                await asyncio.sleep(0.01)
            house.stub.gate.set()
            return ring.holders[0].usage.tokens

    assert run(main) == 200


@pytest.mark.parametrize(
    ("given", "tokens"), [("x" * 40, 10), (["x" * 40, "y" * 4], 11), ([1, 2, 3], 3), ([[1, 2], [3]], 3)]
)
def test_embeddings_that_break_off_count_with_their_input(given, tokens):
    call = parse_embeddings(json.dumps({"input": given}).encode(), ServeSettings())
    assert call.estimate_prompt() == tokens


def test_windows_begin_again_with_the_minute_and_the_day():
    now = [86_400.0 * 20_000]
    usage = KeyUsage("k", KeyBudget(requests_per_minute=2, tokens_per_day=10), clock=lambda: now[0])
    usage.take_request()
    usage.take_request()
    now[0] += 45
    with pytest.raises(ApiError) as refused:
        usage.take_request()
    assert dict(refused.value.headers) == {"retry-after": "15"}
    now[0] += 15
    usage.take_request()
    usage.add_tokens(10)
    now[0] += 120
    with pytest.raises(ApiError) as refused:
        usage.take_request()
    assert dict(refused.value.headers) == {"retry-after": str(86_400 - 180), "x-should-retry": "false"}
    assert usage.describe()["tokens_today"] == 10
    now[0] += 86_400
    usage.take_request()
    assert usage.describe() == {
        "requests_this_minute": 1,
        "requests_today": 1,
        "tokens_this_minute": 0,
        "tokens_today": 0,
    }


def test_keys_that_stay_keep_what_they_have_used():
    ring = ring_of(key("a", "a"), key("b", "b"))
    ring.holders[0].usage.take_request()
    ring.replace((key("a", "a"), key("c", "c")))
    assert {holder.name: holder.usage.requests for holder in ring.holders} == {"a": 1, "c": 0}


def test_a_key_that_changes_in_the_store_has_its_new_budget_and_keeps_its_counts(run):
    async def main():
        ring = ring_of(key("s", budget={"requests_per_day": 1}))
        async with open_house(keys=ring) as house:
            statuses = [(await ask(house, "s"))[0].status for _ in range(2)]
            ring.replace((key("s", budget={"requests_per_day": 3}),))
            statuses += [(await ask(house, "s"))[0].status for _ in range(3)]
            ring.replace((key("s", scopes=("feedback",)),))
            statuses.append((await ask(house, "s"))[0].status)
        assert statuses == [200, 429, 200, 200, 429, 403]

    run(main)


def test_a_raised_budget_admits_the_requests_that_wait(run):
    async def main():
        usage = KeyUsage("s", KeyBudget(tokens_per_day=100))
        running = await usage.reserve(80)
        waiting = asyncio.create_task(usage.reserve(80))
        await asyncio.sleep(0)
        assert usage.waiting == 1
        usage.revise("s", KeyBudget(tokens_per_day=200))
        (await waiting).release()
        running.release()
        assert usage.reserved == 0

    run(main)


def test_secrets_are_long_and_of_a_form_that_redaction_knows():
    from graftwork.text.redact import Redactor

    secret = make_secret()
    assert len(secret) >= 50
    assert secret not in Redactor().redact(f"use {secret} here").text
    assert secret not in repr(key(secret))


def test_no_answer_repeats_the_key(run):
    async def main():
        async with open_house(keys=ring_of(key("first"))) as house:
            head = b"GET /v1/models HTTP/1.1\r\nauthorization: Bearer sk-graft-wrong\r\n"
            answer = await raw(house.port, head + b"connection: close\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 401")
            assert b"sk-graft-wrong" not in answer

    run(main)


def test_budgets_of_a_day_and_a_minute_survive_a_restart(tmp_path):
    async def main():
        at = time.time()
        stored = key("first", budget={"requests_per_day": 3, "tokens_per_minute": 100})
        before = ring_of(stored, key("second", "idle"))
        holder = next(h for h in before.holders if h.name == "ci")
        holder.usage._clock = lambda: at
        for _ in range(2):
            holder.usage.take_request()
        holder.usage.add_tokens(99)
        await UsageFile(tmp_path, before).save()

        after = ring_of(stored, key("second", "idle"))
        UsageFile(tmp_path, after).restore()
        again = next(h for h in after.holders if h.name == "ci")
        again.usage._clock = lambda: at
        assert again.usage.describe() == holder.usage.describe()
        again.usage.take_request()
        with pytest.raises(ApiError, match="3 requests a day"):
            again.usage.take_request()

    asyncio.run(main())


def test_a_request_budget_counts_minutes_and_days_and_takes_back_what_was_not_used():
    now = [86_400.0]
    budget = RequestBudget(2, 3, clock=lambda: now[0])
    assert [budget.take() for _ in range(3)] == [True, True, False]
    budget.give_back()
    assert [budget.take() for _ in range(2)] == [True, False]
    now[0] += 60
    assert [budget.take() for _ in range(2)] == [True, False]
    for _ in range(4):
        budget.give_back()
    assert budget.snapshot() == (1, 0)
    assert [budget.take() for _ in range(3)] == [True, True, False]


def test_the_escalations_of_a_day_survive_a_restart(tmp_path):
    async def main():
        budgets = [RequestBudget(None, 3) for _ in range(2)]
        budgets[0].take()
        await UsageFile(tmp_path, KeyRing(), budgets[0]).save()
        UsageFile(tmp_path, KeyRing(), budgets[1]).restore()
        assert budgets[1].snapshot() == budgets[0].snapshot() == (budgets[0].snapshot()[0], 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("changes", "usable"),
    [
        ({}, True),
        ({"expires_at": "2999-01-01T00:00:00+00:00"}, True),
        ({"expires_at": "2001-01-01T00:00:00+00:00"}, False),
        ({"revoked_at": "2001-01-01T00:00:00+00:00"}, False),
    ],
)
def test_a_key_is_usable_until_it_expires_or_is_revoked(changes, usable):
    assert is_usable(key("first").model_copy(update=changes)) is usable


def test_a_key_that_is_read_after_the_start_goes_on_with_its_counts(tmp_path):
    async def main():
        stored = key("first", budget={"requests_per_day": 1})
        before = ring_of(stored)
        before.holders[0].usage.take_request()
        await UsageFile(tmp_path, before).save()
        after = KeyRing()
        file = UsageFile(tmp_path, after)
        file.restore()
        await file.save()  # a save before the store could be read must not forget the key
        after.replace([stored])
        with pytest.raises(ApiError, match="1 requests a day"):
            after.holders[0].usage.take_request()

    asyncio.run(main())


def test_counts_are_written_only_if_they_changed_and_a_late_write_is_dropped(tmp_path):
    async def main():
        ring = ring_of(key("first"))
        file = UsageFile(tmp_path, ring)
        await file.save()
        assert not (tmp_path / USAGE_FILE).exists()
        ring.holders[0].usage.take_request()
        await file.save()
        written = (tmp_path / USAGE_FILE).stat().st_ino
        await file.save()
        assert (tmp_path / USAGE_FILE).stat().st_ino == written
        file._write(SavedUsage(), 0)
        assert "id-ci" in (tmp_path / USAGE_FILE).read_text()

    asyncio.run(main())


@pytest.mark.parametrize(
    "content", ["", "{", '{"keys": {"id-ci": [1, 2]}}', '{"keys": {"id-ci": [-1,0,0,0,0,0]}}']
)
def test_a_damaged_file_of_counts_starts_at_zero(tmp_path, content, caplog):
    (tmp_path / USAGE_FILE).write_text(content)
    ring = ring_of(key("first"))
    UsageFile(tmp_path, ring).restore()
    assert ring.holders[0].usage.describe()["requests_today"] == 0
    assert "starts at zero" in caplog.text


def test_counts_of_an_earlier_day_are_forgotten(tmp_path):
    (tmp_path / USAGE_FILE).write_text(
        '{"keys": {"id-ci": [1, 5, 5, 1, 5, 5], "id-gone": [1, 5, 5, 1, 5, 5]}}'
    )
    ring = ring_of(key("first"))
    UsageFile(tmp_path, ring).restore()
    assert ring.count_usage() == {}
    assert set(ring.holders[0].usage.describe().values()) == {0}
