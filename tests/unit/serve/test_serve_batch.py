"""Batches and growing text, without a model."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_harness import DEADLINE

from graftwork.records.interaction import Message
from graftwork.serve.embedded_engine import Batcher, TextStream, Ticket
from graftwork.serve.engine_protocol import GenerateRequest, ReplyPiece
from graftwork.serve.http_messages import ApiError


def ticket(key="a"):
    request = GenerateRequest(model=key, messages=(Message(role="user", content="x"),), max_tokens=1)
    return Ticket(request, key=key, prompt=[1])


async def collect(one):
    return [piece async for piece in one.pieces()]


class Answers:
    """Finishes every ticket, and remembers the batches; waits for `go` first."""

    def __init__(self):
        self.batches = []
        self.go = threading.Event()
        self.entered = threading.Event()

    def __call__(self, batch):
        self.entered.set()
        assert self.go.wait(DEADLINE)
        self.batches.append(batch)
        for ticket in batch:
            ticket.emit(ReplyPiece(text="done", finish_reason="stop"))


def make(answers, **more):
    batcher = Batcher(answers, **{"batch_size": 3, "wait_seconds": 0.0, "queue_limit": 100, **more})
    batcher.start()
    return batcher


def test_requests_with_the_same_key_share_a_batch_in_the_order_of_arrival(run):
    async def main():
        answers = Answers()
        batcher = make(answers)
        first = ticket("z")
        batcher.submit(first)
        await asyncio.to_thread(answers.entered.wait, DEADLINE)  # it runs; the rest piles up behind it
        tickets = [ticket(key) for key in "abaabaa"]
        for waiting in tickets:
            batcher.submit(waiting)
        answers.go.set()
        await asyncio.gather(*map(collect, [first, *tickets]))
        a0, b0, a1, a2, b1, a3, a4 = tickets
        assert answers.batches == [[first], [a0, a1, a2], [b0, b1], [a3, a4]]
        batcher.close(seconds=DEADLINE)

    run(main)


def test_a_request_whose_caller_left_is_passed_over(run):
    async def main():
        answers = Answers()
        batcher = make(answers)
        first, left, last = ticket(), ticket(), ticket()
        batcher.submit(first)
        await asyncio.to_thread(answers.entered.wait, DEADLINE)
        batcher.submit(left)
        batcher.submit(last)
        waiting = asyncio.create_task(collect(left))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        answers.go.set()
        await asyncio.gather(collect(first), collect(last))
        assert answers.batches == [[first], [last]]
        batcher.close(seconds=DEADLINE)

    run(main)


def test_a_batch_that_fails_fails_its_callers_and_nobody_else(run):
    async def main():
        def answer(batch):
            if batch[0].key == "bad":
                raise RuntimeError("a bug")
            batch[0].emit(ReplyPiece(text="", finish_reason="stop"))

        batcher = make(answer)
        bad, good = ticket("bad"), ticket("good")
        batcher.submit(bad)
        batcher.submit(good)
        with pytest.raises(ApiError, match="failed on this request"):
            await collect(bad)
        assert await collect(good)
        batcher.close(seconds=DEADLINE)

    run(main)


def test_beyond_the_limit_a_request_is_refused(run):
    async def main():
        answers = Answers()
        batcher = make(answers, queue_limit=1)
        batcher.submit(ticket())
        await asyncio.to_thread(answers.entered.wait, DEADLINE)
        batcher.submit(ticket())
        with pytest.raises(ApiError) as refused:
            batcher.submit(ticket())
        assert refused.value.status == 429
        answers.go.set()
        batcher.close(seconds=DEADLINE)

    run(main)


@given(
    st.text(alphabet="abcé€", max_size=30),
    st.lists(st.text(alphabet="abc", min_size=1, max_size=3), max_size=3),
)
def test_the_pieces_make_the_text_up_to_the_first_stop_string(text, stops):
    flow = TextStream(tuple(stops))
    pieces = []
    grown = ""
    for character in text:
        grown += character
        # A character of several tokens is seen half first.
        if len(character.encode()) > 1:
            pieces.append(flow.push(grown[:-1] + "\ufffd"))
        pieces.append(flow.push(grown))
        if flow.stopped:
            break
    pieces.append(flow.finish())
    places = [grown.find(stop) for stop in stops if stop in grown]
    assert "".join(pieces) == (grown[: min(places)] if places else text)
    assert flow.stopped == bool(places)
    assert "\ufffd" not in "".join(pieces)
