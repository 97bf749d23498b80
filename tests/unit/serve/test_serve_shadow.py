"""Shadow traffic: copies are answered, captured apart, bounded, and never in a user's way."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from openai import AsyncOpenAI
from pydantic import ValidationError
from serve_harness import DEADLINE, OTHER, RELEASE, ListSink, open_house
from stub_engine import StubEngine

from graftwork.serve.budgets import RequestBudget
from graftwork.serve.routing import Fallbacks, Routes
from graftwork.serve.settings import ServeSettings, ShadowSettings
from graftwork.serve.shadow import Shadow

ROUTES = Routes(releases=frozenset({RELEASE, OTHER}), aliases={"champion": RELEASE, "challenger": OTHER})


class Challenger:
    """A remote challenger that answers when `gate` is open."""

    state, models = "ready", ("large-1",)

    def __init__(self, *, fails=False):
        self.gate, self.fails, self.asked = asyncio.Event(), fails, 0
        self.gate.set()

    async def complete(self, call, *, model):
        self.asked += 1
        await self.gate.wait()
        if self.fails:
            raise ConnectionError("gone")
        return {"text": "shadow", "finish_reason": "stop", "prompt_tokens": 1, "reply_tokens": 1}


class HeldChallenger(StubEngine):
    """The users' engine, which answers its challenger's copies only while `copies` is set."""

    def __init__(self):
        super().__init__([RELEASE, OTHER])
        self.copies = asyncio.Event()
        self.copies.set()

    async def generate(self, request):
        pieces = super().generate(request)
        yield await anext(pieces)
        if request.model == OTHER:
            await self.copies.wait()
        async for piece in pieces:
            yield piece


@asynccontextmanager
async def open_shadow(sink, *, remote=None, backend=None, **settings):
    to = "challenger" if remote is None else "remote"
    asked = ShadowSettings(to=to, share=1.0, **settings)
    async with (
        open_house(sink, routes=ROUTES, backend=backend, queue_size=1024) as house,
        AsyncOpenAI(base_url=f"{house.url}/v1", api_key="x", max_retries=0, timeout=DEADLINE) as client,
    ):
        fallbacks = Fallbacks({}, engine=house.engine, endpoints={} if remote is None else {"remote": remote})
        large = {"remote": {"url": "http://host/v1", "model": "gpt-4o"}}
        fallbacks.revise(ServeSettings.model_validate({"failover": {"endpoints": large}}))
        house.answers.shadow = shadow = Shadow(
            asked,
            resolve=lambda name: fallbacks.resolve(name, ROUTES),
            is_remote=remote is not None,
            captures=house.captures,
            is_idle=lambda: house.answers.metrics.in_flight == 0,
        )
        shadow._budget = RequestBudget(shadow._settings.per_minute, clock=lambda: 0.0)  # no minute ends
        yield house, client, shadow
        await shadow.close()


async def ask(client, model="champion", question="hello there"):
    messages = [{"role": "user", "content": question}]
    answer = await client.chat.completions.with_raw_response.create(model=model, messages=messages)
    return answer.parse().choices[0].message.content, answer.headers


async def until(holds):
    async with asyncio.timeout(DEADLINE):
        while not holds():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("remote", [False, True])
def test_a_copy_is_captured_apart_and_the_user_gets_the_champion(run, remote):
    sink = ListSink()

    async def main():
        async with open_shadow(sink, remote=Challenger() if remote else None) as (house, client, shadow):
            text, headers = await ask(client)
            assert text == f"[{RELEASE}] hello there"
            await until(lambda: shadow.counts["answered"] == 1)
            await ask(client, model="base")
            await house.close_captures()
            live, copy, _ = sorted(sink.captures, key=lambda c: c.at)
            assert (live.shadow_of, live.id) == (None, headers["x-graft-capture"])
            assert copy.shadow_of == live.id
            assert copy.release == ("remote" if remote else OTHER)
            assert copy.request == live.request
            assert (copy.upstream, copy.cost) == ("gpt-4o" if remote else None, None)
            assert shadow.counts["answered"] == 1

    run(main)


def test_a_challenger_that_hangs_or_fails_delays_nobody_and_is_bounded(run):
    sink = ListSink()

    async def main():
        remote = Challenger()
        remote.gate.clear()
        async with open_shadow(sink, remote=remote) as (house, client, shadow):
            for _ in range(80):
                await ask(client)
            assert remote.asked == 1
            assert shadow.counts["dropped"] == 80 - 1 - 64
            await shadow.close()
            await house.close_captures()
        failing = Challenger(fails=True)
        async with open_shadow(sink, remote=failing, per_minute=3) as (house, client, shadow):
            for _ in range(5):
                await ask(client)
            await until(lambda: shadow.counts["failed"] == 3 and shadow.counts["dropped"] == 2)
            await house.close_captures()
        copies = [capture for capture in sink.captures if capture.shadow_of is not None]
        assert [capture.finish_reason for capture in copies] == ["interrupted"] + ["error"] * 3

    run(main)


def test_a_copy_on_the_users_engine_is_interrupted_when_a_user_asks(run):
    sink = ListSink()

    async def main():
        engine = HeldChallenger()
        async with open_shadow(sink, backend=engine) as (house, client, shadow):
            await ask(client)
            await until(lambda: shadow.counts["answered"] == 1)
            engine.copies.clear()
            await ask(client)
            await until(lambda: len(engine.asked) == 4)  # the copy hangs in the engine
            asking = asyncio.create_task(ask(client))
            await until(lambda: shadow.counts["interrupted"] == 1)
            engine.copies.set()
            text, _ = await asking
            assert text.startswith(f"[{RELEASE}]")
            await house.close_captures()
            reasons = [capture.finish_reason for capture in sink.captures if capture.shadow_of is not None]
            assert reasons.count("interrupted") == shadow.counts["interrupted"]

    run(main)


@pytest.mark.parametrize(
    "wrong",
    [{"to": "champion"}, {"to": "x", "share": 0}, {"to": "x", "per_minute": 0}, {"to": "x", "models": []}],
)
def test_a_shadow_of_itself_or_without_a_budget_is_refused(wrong):
    with pytest.raises(ValidationError):
        ServeSettings.model_validate({"shadow": wrong})
