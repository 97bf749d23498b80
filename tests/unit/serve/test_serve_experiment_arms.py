"""What another model answers in place of an arm of an experiment counts for that arm."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from openai import AsyncOpenAI
from serve_harness import DEADLINE, OTHER, RELEASE, ListSink, open_house
from stub_engine import StubEngine

from graftwork.http.messages import ApiError
from graftwork.serve.escalation import Escalator
from graftwork.serve.routing import Fallbacks, Routes, update_routes
from graftwork.serve.settings import EscalateSettings, ServeSettings, ShadowSettings, SplitSettings
from graftwork.serve.shadow import Shadow

BOTH = {"champion": RELEASE, "challenger": OTHER}
SPLIT = SplitSettings(share=0.5)
ROUTES = update_routes(Routes(), aliases=BOTH, releases=frozenset({RELEASE, OTHER}), split=SPLIT)
ARMS = {f"s{n}": ROUTES.experiment.assign(f"s{n}") for n in range(12)}


class Large:
    state, models = "ready", ("large-1",)

    async def complete(self, call, *, model):
        return {"text": "large", "finish_reason": "stop", "prompt_tokens": 1, "reply_tokens": 1}


class Refused:
    """No answer of the challenger passes the check."""

    def find_failing(self, messages, text):
        return "json_valid" if OTHER in text else None


class BrokenChallenger(StubEngine):
    async def generate(self, request) -> AsyncGenerator:
        if request.model == OTHER:
            raise ApiError(500, "out of memory", code="engine_error")
        async for piece in super().generate(request):
            yield piece


@asynccontextmanager
async def open_split(sink, *, routes=ROUTES, backend=None, fallback=None, escalate=None, chains=None):
    settings = ServeSettings.model_validate({"split": SPLIT.model_dump(), "chains": chains or {}})
    async with (
        open_house(
            sink, settings=settings, routes=replace(routes, chains=tuple(settings.chains)), backend=backend
        ) as house,
        AsyncOpenAI(base_url=f"{house.url}/v1", api_key="x", max_retries=0, timeout=DEADLINE) as client,
    ):
        house.answers.chains = settings.chains
        house.answers.fallbacks = Fallbacks(fallback or {}, engine=house.engine, endpoints={"large": Large()})
        if escalate is not None:
            asked = EscalateSettings(to="large", checks=("json_valid",), **escalate)
            house.answers.escalator = Escalator(asked, checks=Refused(), clock=time.monotonic)
        yield house, client


async def ask_all(client, model="champion"):
    """One question of each session; the release that each answer states."""
    answered = {}
    for session in ARMS:
        answer = await client.chat.completions.with_raw_response.create(
            model=model,
            messages=[{"role": "user", "content": "hello"}],
            extra_headers={"x-session-id": session},
        )
        answered[session] = answer.headers["x-graft-release"]
    return answered


def test_an_escalated_answer_stays_with_its_arm(run):
    sink = ListSink()

    async def main():
        async with open_split(sink, escalate={}) as (house, client):
            answered = await ask_all(client)
            await house.close_captures()
        assert set(answered.values()) == {RELEASE, "large"}

    run(main)
    assert {capture.session: capture.arm for capture in sink.captures} == ARMS
    assert {capture.dealt for capture in sink.captures} == {ROUTES.experiment.experiment}
    escalated = [capture for capture in sink.captures if capture.release == "large"]
    assert {(c.arm, c.asked_release, c.own_reply) for c in escalated} == {
        ("challenger", OTHER, f"[{OTHER}] hello")
    }


def test_an_answer_that_failed_a_check_and_was_sent_all_the_same_names_the_check(run):
    sink = ListSink()

    async def main():
        async with open_split(sink, escalate={"per_minute": 1}) as (house, client):
            await ask_all(client)
            await house.close_captures()

    run(main)
    failed = {capture.session for capture in sink.captures if capture.failed_check == "json_valid"}
    assert failed == {session for session, arm in ARMS.items() if arm == "challenger"}
    assert sum(capture.escalated_from is not None for capture in sink.captures) == 1


def test_a_failure_that_a_fallback_covers_is_a_failure_of_its_arm(run):
    sink = ListSink()

    async def main():
        backend = BrokenChallenger([RELEASE, OTHER])
        async with open_split(sink, backend=backend, fallback={"champion": ("large",)}) as (house, client):
            answered = await ask_all(client)
            counted = house.answers.metrics.assigned_failures
            await house.close_captures()
        assert {ARMS[s] for s, release in answered.items() if release == "large"} == {"challenger"}
        assert counted[ROUTES.experiment.experiment, "champion"] == 0
        assert counted[ROUTES.experiment.experiment, "challenger"] == len(
            [arm for arm in ARMS.values() if arm == "challenger"]
        )

    run(main)
    assigned = [capture for capture in sink.captures if capture.dealt is not None]
    assert {capture.session: capture.arm for capture in assigned} == ARMS
    reasons = {(capture.arm, capture.finish_reason) for capture in assigned}
    assert reasons == {("champion", "stop"), ("challenger", "error")}


def test_a_failed_step_of_a_chain_is_a_failure_of_its_arm(run):
    sink = ListSink()
    chain = {"steps": [{"name": "draft", "model": "champion", "fallback": "large"}]}

    async def main():
        backend = BrokenChallenger([RELEASE, OTHER])
        async with open_split(sink, backend=backend, chains={"solo": chain}) as (house, client):
            await ask_all(client, model="solo")
            await house.close_captures()

    run(main)
    assigned = [capture for capture in sink.captures if capture.dealt is not None]
    failed = [capture for capture in assigned if capture.finish_reason == "error"]
    assert {capture.arm for capture in failed} == {"challenger"}
    assert len(assigned) == len(ARMS)


@pytest.mark.parametrize("to", ["large", "champion"])
def test_a_copy_of_an_escalated_request_says_nothing_of_the_check_that_failed(run, to):
    """Nor is it left out where the challenger is the large model itself."""
    sink = ListSink()
    routes = replace(ROUTES, experiment=None, aliases={"champion": RELEASE, "next": OTHER})

    async def main():
        async with open_split(sink, routes=routes, escalate={"models": ("next",)}) as (house, client):
            house.answers.shadow = shadow = Shadow(
                ShadowSettings(to=to, models=("next",), share=1.0),
                resolve=lambda name: house.answers.fallbacks.resolve(name, routes),
                is_remote=True,
                captures=house.captures,
                is_idle=lambda: True,
            )
            await ask_all(client, model="next")
            async with asyncio.timeout(DEADLINE):
                while sum(shadow.counts.values()) < len(ARMS):
                    await asyncio.sleep(0.005)
            assert shadow.counts["answered"] == len(ARMS)
            await shadow.close()
            await house.close_captures()

    run(main)
    copies = [capture for capture in sink.captures if capture.shadow_of is not None]
    assert len(copies) == len(ARMS)
    assert {(copy.failed_check, copy.escalated_from) for copy in copies} == {(None, None)}
    live = [capture for capture in sink.captures if capture.shadow_of is None]
    assert {(c.failed_check, c.asked_release) for c in live} == {("json_valid", OTHER)}
