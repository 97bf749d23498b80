"""Streams that are sent once their beginning has been checked: what clients get, and what is captured."""

import asyncio
import json
import time
from contextlib import asynccontextmanager

import pytest
from openai import AsyncOpenAI
from serve_harness import DEADLINE, RELEASE, ListSink, open_house
from stub_engine import StubEngine

from graftwork.engines.protocol import ReplyPiece
from graftwork.http.client import Client
from graftwork.serve import escalation
from graftwork.serve.budgets import RequestBudget
from graftwork.serve.escalation import Escalator, PrefixVerdict
from graftwork.serve.routing import Fallbacks
from graftwork.serve.settings import EscalateSettings, ServeSettings

GOOD, BAD, LATE = "fine", "wrong", "turns"
ANSWERS = {GOOD: list("yes it is so, all of it"), BAD: list("no and this is long"), LATE: list("yes but no!")}
LARGE = ["from ", "the ", "large ", "model"]


class WordEngine(StubEngine):
    """The small model: one token a piece; after `stop_after` pieces it waits for `go_on`."""

    def __init__(self, *args, stop_after=None, dies_after=None, logprob=-0.1):
        super().__init__(*args)
        self.stop_after, self.dies_after, self.logprob = stop_after, dies_after, logprob
        self.go_on, self.closed, self.written = asyncio.Event(), asyncio.Event(), 0

    async def generate(self, request):
        tokens = ANSWERS[request.messages[-1].content]
        try:
            for place, token in enumerate(tokens):
                if place == self.stop_after:
                    await self.go_on.wait()
                if place == self.dies_after:
                    raise ConnectionError("the engine is gone")
                await asyncio.sleep(0)
                self.written = place + 1
                found = {"token": token, "logprob": self.logprob, "bytes": [], "top_logprobs": []}
                logprobs = () if request.logprobs is None else (found,)
                yield ReplyPiece(text=token, logprobs=logprobs)
            yield ReplyPiece(text="", finish_reason="stop", prompt_tokens=1, reply_tokens=len(tokens))
        finally:
            self.closed.set()


class LargeStream:
    replica = None

    def __init__(self, *, fails, hangs, is_empty):
        self.left, self.fails, self.hangs = [""] if is_empty else list(LARGE), fails, hangs

    async def next_pieces(self):
        if self.fails:
            raise ConnectionError("the large model is gone")
        if self.hangs:
            await asyncio.Event().wait()
        if not self.left:
            return None
        text = self.left.pop(0)
        last = {"finish_reason": "stop", "prompt_tokens": 3, "reply_tokens": 4} if not self.left else {}
        return [{"text": text, **last}]

    def close(self):
        self.left = []


class LargeEngine:
    state = "ready"
    models = ("large-1",)

    def __init__(self, **how):
        self.asked, self.how = 0, {"fails": False, "hangs": False, "is_empty": False, **how}

    async def stream(self, call, *, model):
        self.asked += 1
        assert call.options is None  # log-probabilities are asked of the small model alone
        return LargeStream(**self.how)


class StartsWithYes:
    """Fails where the text does not start with `yes`; the whole text must not hold `no`."""

    def __init__(self, *, open_until=0):
        self.open_until = open_until

    def find_failing(self, messages, text):
        return "says_yes" if not text.startswith("yes") or "no" in text else None

    def judge_prefix(self, messages, text):
        if not "yes".startswith(text[:3]):
            return PrefixVerdict("says_yes", is_open=False)
        return PrefixVerdict(None, is_open=len(text) < max(3, self.open_until))


@asynccontextmanager
async def open_pair(sink=None, *, small=None, large=None, checks=None, serving=None, **settings):
    small, large = small or WordEngine([RELEASE]), large or LargeEngine()
    asked = EscalateSettings(to="large", stream="prefix", **{"checks": ("says_yes",), **settings})
    async with (
        open_house(sink, backend=small, settings=serving, feedback=sink) as house,
        AsyncOpenAI(base_url=f"{house.url}/v1", api_key="x", max_retries=0, timeout=DEADLINE) as client,
    ):
        house.answers.fallbacks = Fallbacks({}, engine=house.engine, endpoints={"large": large})
        house.answers.escalator = Escalator(asked, checks=checks or StartsWithYes(), clock=time.monotonic)
        # No minute ends meanwhile.
        house.answers.escalator.budget = RequestBudget(asked.per_minute, asked.per_day, clock=lambda: 0.0)
        yield house, client


async def stream(client, question):
    """The text of the answer, its headers, and every chunk."""
    opened = await client.chat.completions.with_raw_response.create(
        model="champion", messages=[{"role": "user", "content": question}], stream=True
    )
    chunks = [chunk async for chunk in opened.parse()]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    return text, opened.headers, chunks


def test_a_beginning_that_passes_is_sent_before_the_answer_has_ended(run):
    async def main():
        small, large = WordEngine([RELEASE], stop_after=8), LargeEngine()
        async with open_pair(small=small, large=large) as (_, client):
            opened = await client.chat.completions.with_raw_response.create(
                model="champion", messages=[{"role": "user", "content": GOOD}], stream=True
            )
            got = ""
            async for chunk in opened.parse():
                got += chunk.choices[0].delta.content or ""
                if got == "yes it i":
                    small.go_on.set()  # it has not gone on yet: what was sent is its beginning
            assert got == "".join(ANSWERS[GOOD])
            assert opened.headers["x-graft-release"] == RELEASE
            assert opened.headers["x-graft-checked"] == "3 tokens"
            assert "x-graft-escalation" not in opened.headers
            assert not large.asked

    run(main)


def test_the_large_model_streams_where_the_beginning_fails_and_both_whole_answers_are_captured(run):
    sink = ListSink()

    async def main():
        async with open_pair(sink) as (house, client):
            text, headers, chunks = await stream(client, BAD)
            assert text == "".join(LARGE)
            assert len([c for c in chunks if c.choices and c.choices[0].delta.content]) == len(LARGE)
            assert headers["x-graft-release"] == "large"
            assert headers["x-graft-checked"] == "1 token"
            assert headers["x-graft-escalation"] == "says_yes failed, large answered"
            await house.answers.drain(DEADLINE)
            await house.close_captures()

    run(main)
    (capture,) = sink.captures
    assert (capture.release, capture.escalated_from, capture.failed_check) == ("large", RELEASE, "says_yes")
    assert (capture.reply, capture.rejected) == ("".join(LARGE), "".join(ANSWERS[BAD]))


class FeedbackSink(ListSink):
    def __init__(self):
        super().__init__()
        self.feedback = []

    def add_feedback(self, feedback):
        found = feedback.capture in {capture.id for capture in self.captures}
        if found:
            self.feedback.append(feedback)
        return found


async def give_feedback(house, capture):
    body = json.dumps({"capture": capture, "score": 1}).encode()
    headers = (("content-type", "application/json"),)
    reply = await Client(port=house.port).send("POST", "/v1/feedback", body=body, headers=headers)
    return reply.status, json.loads(await reply.read())


def test_feedback_right_after_an_escalated_stream_waits_for_the_small_models_answer(run):
    sink = FeedbackSink()

    async def main():
        small = WordEngine([RELEASE], stop_after=8)
        async with open_pair(sink, small=small) as (house, client):
            _, headers, _ = await stream(client, BAD)
            sent = asyncio.create_task(give_feedback(house, headers["x-graft-capture"]))
            while not house.gateway.feedback.waiting:
                await asyncio.sleep(0)
            small.go_on.set()
            status, _ = await sent
            assert status == 200

    run(main)
    assert [given.capture for given in sink.feedback] == [sink.captures[0].id]
    assert sink.captures[0].rejected == "".join(ANSWERS[BAD])


def test_feedback_does_not_wait_forever_for_a_small_model_that_hangs(run):
    async def main():
        small = WordEngine([RELEASE], stop_after=8)
        async with open_pair(FeedbackSink(), small=small) as (house, client):
            house.gateway.feedback.finish_seconds = 0.01
            _, headers, _ = await stream(client, BAD)
            status, reply = await give_feedback(house, headers["x-graft-capture"])
            assert (status, reply["error"]["code"]) == (409, "not_captured_yet")
            small.go_on.set()

    run(main)


def test_the_first_event_says_who_answers_and_what_was_checked(run):
    async def main():
        async with open_pair() as (house, _):
            body = {"model": "champion", "messages": [{"role": "user", "content": BAD}], "stream": True}
            plain = Client(port=int(house.url.rpartition(":")[2]))
            headers = (("content-type", "application/json"),)
            answer = await plain.send(
                "POST", "/v1/chat/completions", body=json.dumps(body).encode(), headers=headers
            )
            first = (await answer.read()).decode().split("\n\n")[0]
            plain.close()
            assert first == ": large answers; checked 1 token; says_yes failed, large answered"

    run(main)


def test_an_answer_that_ends_within_the_bound_is_judged_as_a_whole(run):
    async def main():
        async with open_pair(checks=StartsWithYes(open_until=1000), prefix_tokens=1000) as (_, client):
            text, headers, _ = await stream(client, LATE)
            assert text == "".join(LARGE)
            assert headers["x-graft-checked"] == f"whole answer, {len(ANSWERS[LATE])} tokens"

    run(main)


def test_an_answer_that_fails_after_its_beginning_was_sent_is_counted_and_captured(run):
    sink = ListSink()

    async def main():
        async with open_pair(sink) as (house, client):
            text, headers, _ = await stream(client, LATE)
            assert text == "".join(ANSWERS[LATE])
            assert headers["x-graft-release"] == RELEASE
            await house.answers.drain(DEADLINE)
            metrics = house.answers.metrics.render({})
            assert 'graft_escalations_total{check="says_yes",outcome="too late"} 1' in metrics
            await house.close_captures()

    run(main)
    (capture,) = sink.captures
    assert (capture.release, capture.escalated_from, capture.failed_check) == (RELEASE, None, "says_yes")


@pytest.mark.parametrize("how", [{"fails": True}, {"hangs": True}, {"is_empty": True}])
def test_the_small_models_stream_goes_on_where_the_large_one_gives_no_first_piece(run_with_limit, how):
    async def main(limit, pass_when):
        large, serving = LargeEngine(**how), ServeSettings(request_timeout_seconds=limit)
        async with open_pair(large=large, serving=serving) as (_, client):
            if "hangs" in how:
                passed = pass_when(lambda: large.asked)
            text, headers, _ = await stream(client, BAD)
            assert text == "".join(ANSWERS[BAD])
            assert headers["x-graft-release"] == RELEASE
            assert headers["x-graft-escalation"] == "says_yes failed, large failed too"
            assert "hangs" not in how or passed.done()

    run_with_limit(main)


def test_over_the_budget_the_small_models_stream_goes_on(run):
    async def main():
        large = LargeEngine()
        async with open_pair(large=large, per_minute=1) as (_, client):
            await stream(client, BAD)
            text, headers, _ = await stream(client, BAD)
            assert text == "".join(ANSWERS[BAD])
            assert headers["x-graft-escalation"] == "says_yes failed, large is over budget"
            assert large.asked == 1

    run(main)


def test_no_more_than_the_bound_of_tokens_is_held_back(run):
    async def main():
        async with open_pair(checks=StartsWithYes(open_until=1000), prefix_tokens=5) as (_, client):
            _, headers, _ = await stream(client, GOOD)
            assert headers["x-graft-checked"] == "5 tokens"

    run(main)


def test_a_slow_answer_is_held_back_no_longer_than_the_bound(run_with_limit, monkeypatch):
    class RemembersText(StartsWithYes):
        text = ""

        def judge_prefix(self, messages, text):
            self.text = text
            return super().judge_prefix(messages, text)

    async def main(limit, pass_when):
        small = WordEngine([RELEASE], stop_after=4)
        checks = RemembersText(open_until=1000)
        monkeypatch.setattr(escalation, "PREFIX_SECONDS", limit)
        async with open_pair(small=small, checks=checks) as (_, client):
            passed = pass_when(lambda: checks.text == "".join(ANSWERS[GOOD][:4]))
            opened = await client.chat.completions.with_raw_response.create(
                model="champion", messages=[{"role": "user", "content": GOOD}], stream=True
            )
            assert opened.headers["x-graft-checked"] == "4 tokens"
            assert passed.done()
            small.go_on.set()
            text = "".join([c.choices[0].delta.content or "" async for c in opened.parse() if c.choices])
            assert text == "".join(ANSWERS[GOOD])

    run_with_limit(main)


@pytest.mark.parametrize(("logprob", "release"), [(-0.1, RELEASE), (-3.0, "large")])
def test_the_log_probability_of_the_first_tokens_decides_and_is_hidden(run, logprob, release):
    async def main():
        small = WordEngine([RELEASE], logprob=logprob)
        async with open_pair(small=small, min_logprob=-1.0, prefix_tokens=4) as (_, client):
            _, headers, chunks = await stream(client, GOOD)
            assert headers["x-graft-release"] == release
            assert headers["x-graft-checked"] == "4 tokens"
            assert not any(choice.logprobs for chunk in chunks for choice in chunk.choices)
            if release == "large":
                assert headers["x-graft-escalation"] == "min_logprob failed, large answered"

    run(main)


def test_a_client_that_leaves_ends_the_small_models_work(run):
    async def main():
        small = WordEngine([RELEASE], stop_after=8)
        async with open_pair(small=small) as (house, client):
            opened = await client.chat.completions.create(
                model="champion", messages=[{"role": "user", "content": GOOD}], stream=True
            )
            async for _ in opened:
                break
            await opened.close()
            await asyncio.wait_for(small.closed.wait(), DEADLINE)
            await house.answers.drain(DEADLINE)
            assert house.answers.metrics.in_flight == 0

    run(main)


def test_a_fallback_answers_where_the_small_model_dies_before_anything_was_sent(run):
    async def main():
        small, large = WordEngine([RELEASE], dies_after=2), LargeEngine()
        async with open_pair(small=small, large=large, checks=StartsWithYes(open_until=1000)) as (
            house,
            client,
        ):
            house.answers.fallbacks = Fallbacks(
                {"champion": ("large",)}, engine=house.engine, endpoints={"large": large}
            )
            text, headers, _ = await stream(client, GOOD)
            assert text == "".join(LARGE)
            assert headers["x-graft-release"] == "large"
            assert "from=champion" in headers["x-graft-fallback"]

    run(main)


def test_whole_answers_are_checked_as_ever(run):
    async def main():
        class Whole(LargeEngine):
            async def complete(self, call, *, model):
                return {
                    "text": "large whole",
                    "finish_reason": "stop",
                    "prompt_tokens": 1,
                    "reply_tokens": 2,
                }

        async with open_pair(large=Whole()) as (_, client):
            answer = await client.chat.completions.create(
                model="champion", messages=[{"role": "user", "content": LATE}]
            )
            assert answer.choices[0].message.content == "large whole"

    run(main)
