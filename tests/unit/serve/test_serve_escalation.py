"""Small first, large when needed, over HTTP: who answers, what the headers say, what is captured."""

import asyncio
import json
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from openai import AsyncOpenAI
from pydantic import ValidationError
from serve_harness import DEADLINE, RELEASE, ListSink, open_house
from stub_engine import StubEngine
from tool_template import ASK, TOOLS

from graftwork.data.ingest.captures import read_captured
from graftwork.engines.protocol import ReplyPiece
from graftwork.records.interaction import Origin
from graftwork.serve.budgets import RequestBudget
from graftwork.serve.escalation import Escalator
from graftwork.serve.family import Family
from graftwork.serve.keys import KeyRing
from graftwork.serve.routing import Fallbacks, Routes
from graftwork.serve.run import operating
from graftwork.serve.settings import EscalateSettings, FamilySettings, ServedModel, ServeSettings
from graftwork.text.tool_calls import TextAndCalls, ToolCall, split_tools, write_calls

GOOD, BAD = "answer as JSON", "say anything"


class LargeEngine:
    """The large model: always right, unless it `fails` or `hangs`."""

    state = "ready"
    models = ("large-1",)

    def __init__(self, *, fails=False, hangs=False, text="from the large model"):
        self.asked, self.fails, self.hangs, self.text = [], fails, hangs, text

    async def complete(self, call, *, model):
        self.asked.append(model)
        if self.fails:
            raise ConnectionError("the large model is gone")
        if self.hangs:
            await asyncio.Event().wait()
        return {
            "text": self.text,
            "finish_reason": "stop",
            "prompt_tokens": 3,
            "reply_tokens": 4,
        }


class AsksForJson:
    def find_failing(self, messages, text):
        return None if "JSON" in text else "json_valid"


@asynccontextmanager
async def open_pair(sink=None, *, large=None, serving=None, routes=None, backend=None, **settings):
    large = large or LargeEngine()
    asked = EscalateSettings(to="large", checks=("json_valid",), **settings)
    async with (
        open_house(sink, settings=serving, routes=routes, backend=backend) as house,
        AsyncOpenAI(base_url=f"{house.url}/v1", api_key="x", max_retries=0, timeout=DEADLINE) as client,
    ):
        house.answers.fallbacks = Fallbacks({}, engine=house.engine, endpoints={"large": large})
        house.answers.escalator = Escalator(asked, checks=AsksForJson(), clock=time.monotonic)
        # No minute ends meanwhile.
        house.answers.escalator.budget = RequestBudget(asked.per_minute, asked.per_day, clock=lambda: 0.0)
        yield house, client


async def ask(client, question, model="champion", **options):
    messages = [{"role": "user", "content": question}]
    answer = await client.chat.completions.with_raw_response.create(model=model, messages=messages, **options)
    return answer.parse().choices[0].message.content, answer.headers


def test_an_answer_that_passes_is_the_small_models(run):
    async def main():
        large = LargeEngine()
        async with open_pair(large=large) as (_, client):
            text, headers = await ask(client, GOOD)
            assert text == f"[{RELEASE}] {GOOD}"
            assert headers["x-graft-release"] == RELEASE
            assert "x-graft-escalation" not in headers
            assert not large.asked

    run(main)


def test_the_large_model_answers_where_a_check_fails_and_both_answers_are_captured(run):
    sink = ListSink()

    async def main():
        async with open_pair(sink) as (house, client):
            text, headers = await ask(client, BAD)
            assert text == "from the large model"
            assert headers["x-graft-release"] == "large"
            assert headers["x-graft-escalation"] == "json_valid failed, large answered"
            metrics = house.answers.metrics.render({})
            assert 'graft_escalations_total{check="json_valid",outcome="escalated"} 1' in metrics
            await house.close_captures()

    run(main)
    (capture,) = sink.captures
    assert (capture.release, capture.escalated_from) == ("large", RELEASE)
    assert (capture.reply, capture.rejected) == ("from the large model", f"[{RELEASE}] {BAD}")
    row = read_captured(json.loads(capture.to_line()), Origin(file="captures", line=1))
    assert (row.reply, row.rejected) == (capture.reply, capture.rejected)


def test_both_answers_count_for_the_memory_of_the_capture_queue(run):
    offered = []

    async def main():
        async with open_pair(ListSink()) as (house, client):
            offer = house.captures.offer
            house.captures.offer = lambda exchange, **options: (
                offered.append(exchange) or offer(exchange, **options)
            )
            await ask(client, BAD)
            await house.close_captures()

    run(main)
    (exchange,) = offered
    body = json.dumps(exchange.request, separators=(",", ":"))
    assert exchange.size == len(body) + len(exchange.reply) + len(exchange.rejected)


def test_a_streamed_answer_is_checked_before_its_first_byte(run):
    async def main():
        async with open_pair() as (_, client):
            for question, expected in ((GOOD, f"[{RELEASE}] {GOOD}"), (BAD, "from the large model")):
                stream = await client.chat.completions.create(
                    model="champion", messages=[{"role": "user", "content": question}], stream=True
                )
                chunks = [chunk async for chunk in stream]
                assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == expected
                assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"

    run(main)


def test_over_the_budget_the_small_models_answer_is_sent(run):
    async def main():
        large = LargeEngine()
        async with open_pair(large=large, per_minute=1) as (_, client):
            await ask(client, BAD)
            text, headers = await ask(client, BAD)
            assert text == f"[{RELEASE}] {BAD}"
            assert headers["x-graft-escalation"] == "json_valid failed, large is over budget"
            assert headers["x-graft-release"] == RELEASE
            assert len(large.asked) == 1

    run(main)


def test_an_endpoint_that_starts_again_goes_on_with_the_budget_of_the_day(run, tmp_path):
    async def main():
        large = LargeEngine()
        said = []
        for _ in range(2):
            async with open_pair(large=large, per_day=1) as (house, client):
                house.answers.escalator.budget.wall_clock = lambda: 1e9
                async with operating(house.answers, KeyRing(), lambda: (), folder=tmp_path):
                    _, headers = await ask(client, BAD)
                    said.append(headers["x-graft-escalation"])
        assert said == ["json_valid failed, large answered", "json_valid failed, large is over budget"]

    run(main)


def test_a_large_model_that_is_not_ready_uses_up_no_budget(run):
    async def main():
        large = LargeEngine()
        async with open_pair(large=large, per_minute=1, per_day=1) as (_, client):
            large.state = "unreachable"
            for _ in range(2):
                text, headers = await ask(client, BAD)
                assert text == f"[{RELEASE}] {BAD}"
                assert headers["x-graft-escalation"] == "json_valid failed, large is not ready"
            large.state = "ready"
            assert (await ask(client, BAD))[0] == "from the large model"
            _, headers = await ask(client, BAD)
            assert headers["x-graft-escalation"] == "json_valid failed, large is over budget"

    run(main)


@pytest.mark.parametrize("how", [{"fails": True}, {"text": ""}])
def test_a_large_model_that_fails_or_says_nothing_costs_no_answer(run, how):
    sink = ListSink()

    async def main():
        async with open_pair(sink, large=LargeEngine(**how)) as (house, client):
            text, headers = await ask(client, BAD)
            assert text == f"[{RELEASE}] {BAD}"
            assert headers["x-graft-release"] == RELEASE
            assert headers["x-graft-escalation"] == "json_valid failed, large failed too"
            await house.close_captures()

    run(main)
    assert sink.captures[0].rejected is None
    assert sink.captures[0].release == RELEASE


def test_a_large_model_that_never_answers_costs_no_answer(run_with_limit):
    async def main(limit, pass_when):
        large, serving = LargeEngine(hangs=True), ServeSettings(request_timeout_seconds=limit)
        async with open_pair(large=large, serving=serving) as (_, client):
            passed = pass_when(lambda: large.asked)
            text, headers = await ask(client, BAD)
            assert text == f"[{RELEASE}] {BAD}"
            assert headers["x-graft-release"] == RELEASE
            assert headers["x-graft-escalation"] == "json_valid failed, large failed too"
            assert passed.done()

    run_with_limit(main)


@pytest.mark.parametrize("named", ["auto", "champion"])
def test_a_family_is_checked_by_its_own_name_and_by_that_of_its_member(run, named):
    async def main():
        family = Family(FamilySettings(), main="main", aliases={"main": "champion"})
        routes = Routes(releases=frozenset({RELEASE}), aliases={"champion": RELEASE}, family=family)
        async with open_pair(routes=routes, models=(named,)) as (_, client):
            assert (await ask(client, BAD, model="auto"))[0] == "from the large model"
            assert (await ask(client, BAD, model=RELEASE))[0].endswith(BAD)

    run(main)


@pytest.mark.parametrize("model", ["base", RELEASE])
def test_a_model_asked_for_by_its_own_id_is_not_escalated(run, model):
    async def main():
        large = LargeEngine()
        async with open_pair(large=large) as (_, client):
            text, headers = await ask(client, BAD, model=model)
            assert text.endswith(BAD)
            assert "x-graft-escalation" not in headers
            assert not large.asked

    run(main)


class UnsureEngine(StubEngine):
    """States log-probabilities: low where the question is hard."""

    async def generate(self, request):
        assert request.logprobs == 0
        logprob = -2.0 if "hard" in request.messages[-1].content else -0.1
        token = {"token": "x", "logprob": logprob, "bytes": [120], "top_logprobs": []}
        yield ReplyPiece(
            text="small JSON", finish_reason="stop", prompt_tokens=1, reply_tokens=1, logprobs=(token,)
        )


@pytest.mark.parametrize("stream", [False, True])
def test_an_unlikely_answer_escalates_and_clients_do_not_see_log_probabilities(run, stream):
    async def main():
        async with open_house(backend=UnsureEngine([RELEASE])) as house:
            client = AsyncOpenAI(base_url=f"{house.url}/v1", api_key="x", max_retries=0, timeout=DEADLINE)
            large = LargeEngine()
            house.answers.fallbacks = Fallbacks({}, engine=house.engine, endpoints={"large": large})
            asked = EscalateSettings(to="large", min_logprob=-1.0)
            house.answers.escalator = Escalator(asked, checks=AsksForJson(), clock=time.monotonic)
            messages = [{"role": "user", "content": "easy"}]
            answer = await client.chat.completions.create(model="champion", messages=messages, stream=stream)
            if stream:
                chunks = [chunk async for chunk in answer]
                assert not any(choice.logprobs for chunk in chunks for choice in chunk.choices)
            else:
                assert answer.choices[0].logprobs is None
            text, headers = await ask(client, "hard")
            assert text == "from the large model"
            assert headers["x-graft-escalation"] == "min_logprob failed, large answered"
            await client.close()

    run(main)


def test_escalation_without_anything_that_decides_is_refused():
    with pytest.raises(ValidationError, match="nothing decides"):
        EscalateSettings(to="large")
    with pytest.raises(ValidationError):
        EscalateSettings(to="large", min_logprob=0.5)
    with pytest.raises(ValidationError, match="a budget of 0 never escalates"):
        EscalateSettings(to="large", checks=("json_valid",), per_minute=0)
    with pytest.raises(ValidationError, match="champion cannot escalate to itself"):
        EscalateSettings(to="champion", checks=("json_valid",), models=("champion",))


def test_the_large_models_own_answers_are_not_escalated_to_itself(run):
    async def main():
        routes = Routes(releases=frozenset({RELEASE}), aliases={"champion": RELEASE, "large": RELEASE})
        async with open_pair(routes=routes) as (_, client):
            text, headers = await ask(client, BAD, model="large")
            assert text.endswith(BAD)
            assert "x-graft-escalation" not in headers

    run(main)


@pytest.mark.parametrize("stream", ["hold", "prefix"])
def test_a_name_of_clients_that_goes_to_the_large_model_is_not_escalated_to_it(run, stream):
    async def main():
        large = LargeEngine(text=BAD)
        routes = Routes(models={"gpt-4o": ServedModel(to="large")})
        async with open_pair(large=large, routes=routes, stream=stream) as (_, client):
            text, headers = await ask(client, BAD, model="gpt-4o")
            assert (text, headers["x-graft-release"]) == (BAD, "large")
            assert "x-graft-escalation" not in headers
            assert large.asked == ["large-1"]

    run(main)


class CallingEngine(StubEngine):
    """A small model that answers with one call."""

    call = {"name": "find", "arguments": '{"place": "Bern"}'}

    async def generate(self, request):
        async for piece in super().generate(request):
            ended = piece.finish_reason is not None
            yield replace(piece, text="", tool_calls=(self.call,) if ended else ())


class NotesMessages:
    def __init__(self):
        self.seen = []

    def find_failing(self, messages, text):
        self.seen.append((messages, text))
        return "tool_calls_valid" if "Paris" in text else None

    def judge_prefix(self, messages, text):
        raise AssertionError("a call is checked whole")


@pytest.mark.parametrize("how", ["hold", "prefix"])
@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_checked_with_the_tools_of_the_request_and_escalate(run, stream, how):
    sink, checks, large = ListSink(), NotesMessages(), LargeEngine(text="")
    right = {"name": "find", "arguments": '{"place": "Rome"}'}
    complete = large.complete

    async def complete_with_call(call, *, model):
        return {**await complete(call, model=model), "tool_calls": [right]}

    large.complete = complete_with_call

    async def ask_with_tools(client):
        ask = {"model": "champion", "messages": ASK, "tools": TOOLS}
        if not stream:
            (call,) = (await client.chat.completions.create(**ask)).choices[0].message.tool_calls
            return call.function.arguments
        chunks = [chunk async for chunk in await client.chat.completions.create(**ask, stream=True)]
        parts = [part for c in chunks for part in c.choices[0].delta.tool_calls or []]
        return "".join(part.function.arguments for part in parts)

    async def main():
        async with open_pair(sink, large=large, backend=CallingEngine([RELEASE]), stream=how) as pair:
            house, client = pair
            house.answers.escalator = Escalator(
                house.answers.escalator.settings, checks=checks, clock=time.monotonic
            )
            assert json.loads(await ask_with_tools(client)) == {"place": "Bern"}
            assert not large.asked
            house.stub.call = {"name": "find", "arguments": '{"place": "Paris"}'}
            assert json.loads(await ask_with_tools(client)) == {"place": "Rome"}
            await house.close_captures()

    run(main)
    messages, text = checks.seen[0]
    assert text == write_calls(TextAndCalls("", (ToolCall("find", {"place": "Bern"}),)))
    assert split_tools(messages[0]["content"])[1] == list(TOOLS)
    assert "Paris" in sink.captures[1].rejected
    assert "Rome" in sink.captures[1].reply
