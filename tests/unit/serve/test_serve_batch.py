"""Requests that join and leave the decoding thread, and growing text, without a model."""

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serve_harness import DEADLINE

from graftwork.engines.embedded_process import RequestLoop, SubmittedRequest, Ticket
from graftwork.engines.process import TextStream
from graftwork.engines.protocol import ReplyPiece
from graftwork.http.messages import ApiError
from graftwork.model.generate.sampling import GenerationRequest, Sampling


class CountingDecoder:
    """Gives every running request one more token a step: 1, 2, 3, …; waits for `go` in each step."""

    def __init__(self, slots=2):
        self.slots = slots
        self.open = []
        self.together = []
        self.go = threading.Semaphore(0)
        self.entered = threading.Event()
        self.failing = False

    @property
    def busy(self):
        return bool(self.open)

    @property
    def waiting(self):
        return max(len(self.open) - self.slots, 0)

    def submit(self, request):
        self.open.append(request)

    def step(self):
        self.entered.set()
        assert self.go.acquire(timeout=DEADLINE)
        if self.failing:
            self.failing = False
            raise RuntimeError("a bug")
        running = self.open[: self.slots]
        self.together.append([request.prompt[0] for request in running])
        for request in running:
            request.launched += 1
            request.take(len(request.result.tokens) + 1, frozenset())
        self.open = [request for request in self.open if not request.done]

    def reset(self):
        forgotten, self.open = self.open, []
        return forgotten


def submitted(name, *, tokens):
    """A request that answers with its tokens."""
    ticket = Ticket()

    def take(token):
        if not ticket.cancelled:
            ticket.emit(ReplyPiece(text=str(token)))
        return not ticket.cancelled

    generation = GenerationRequest(
        [name], Sampling(tokens), on_token=take, is_cancelled=lambda: ticket.cancelled
    )
    return SubmittedRequest(
        ticket,
        generation,
        finish=lambda reason: ticket.emit(ReplyPiece(text="", finish_reason=reason)),
    )


async def collect(request):
    return "".join([piece.text async for piece in request.ticket.pieces()])


def make(decoder, **more):
    loop = RequestLoop(decoder, **{"wait_seconds": 0.0, "queue_limit": 100, **more})
    loop.start()
    return loop


def test_a_request_joins_while_others_run_and_an_ended_one_is_replaced(run):
    async def main():
        decoder = CountingDecoder(slots=2)
        loop = make(decoder)
        first = submitted("a", tokens=4)
        loop.submit(first)
        await asyncio.to_thread(decoder.entered.wait, DEADLINE)
        short, last = submitted("b", tokens=1), submitted("c", tokens=2)
        loop.submit(short)
        loop.submit(last)
        for _ in range(4):
            decoder.go.release()
        assert await asyncio.gather(*map(collect, [first, short, last])) == ["1234", "1", "12"]
        assert decoder.together == [["a"], ["a", "b"], ["a", "c"], ["a", "c"]]
        loop.close(seconds=DEADLINE)

    run(main)


def test_the_time_in_the_queue_ends_with_the_step_that_starts_a_request(run):
    async def main():
        decoder = CountingDecoder(slots=1)
        loop = make(decoder)
        first, second = submitted("a", tokens=2), submitted("b", tokens=1)
        assert first.ticket.queue_ms is None
        loop.submit(first)
        loop.submit(second)
        await asyncio.to_thread(decoder.entered.wait, DEADLINE)
        for _ in range(3):
            decoder.go.release()
        await asyncio.gather(collect(first), collect(second))
        loop.close(seconds=DEADLINE)
        assert 0 <= first.ticket.queue_ms < second.ticket.queue_ms

    run(main)


def test_a_request_whose_caller_left_frees_its_slot(run):
    async def main():
        decoder = CountingDecoder(slots=1)
        loop = make(decoder)
        left, last = submitted("left", tokens=1000), submitted("last", tokens=1)
        loop.submit(left)
        loop.submit(last)
        decoder.go.release()
        pieces = left.ticket.pieces()
        assert (await anext(pieces)).text == "1"
        await pieces.aclose()
        decoder.go.release()
        decoder.go.release()
        assert await collect(last) == "1"
        assert decoder.together in ([["left"], ["last"]], [["left"], ["left"], ["last"]])
        loop.close(seconds=DEADLINE)

    run(main)


def test_a_step_that_fails_fails_its_callers_and_nobody_else(run):
    async def main():
        decoder = CountingDecoder()
        decoder.failing = True
        loop = make(decoder)
        bad, good = submitted("bad", tokens=1), submitted("good", tokens=1)
        loop.submit(bad)
        decoder.go.release()
        with pytest.raises(ApiError, match="failed on this request"):
            await collect(bad)
        loop.submit(good)
        decoder.go.release()
        assert await collect(good) == "1"
        loop.close(seconds=DEADLINE)

    run(main)


def test_beyond_the_limit_a_request_is_refused(run):
    async def main():
        decoder = CountingDecoder(slots=1)
        loop = make(decoder, queue_limit=1)
        first, second = submitted("a", tokens=1), submitted("b", tokens=1)
        loop.submit(first)
        await asyncio.to_thread(decoder.entered.wait, DEADLINE)
        loop.submit(second)
        with pytest.raises(ApiError) as refused:
            loop.submit(submitted("c", tokens=1))
        assert refused.value.status == 429
        decoder.go.release()
        decoder.go.release()
        await asyncio.gather(collect(first), collect(second))
        loop.close(seconds=DEADLINE)

    run(main)


def test_a_task_runs_when_no_request_does(run):
    async def main():
        decoder = CountingDecoder()
        loop = make(decoder)
        first = submitted("a", tokens=2)
        loop.submit(first)
        await asyncio.to_thread(decoder.entered.wait, DEADLINE)
        busy = []
        done = loop.call_between(lambda: busy.append(decoder.busy))
        later = submitted("b", tokens=1)
        loop.submit(later)
        for _ in range(3):
            decoder.go.release()
        await asyncio.gather(collect(first), collect(later), asyncio.wrap_future(done))
        assert busy == [False]
        assert decoder.together == [["a"], ["a"], ["b"]]
        loop.close(seconds=DEADLINE)

    run(main)


def test_only_the_end_of_the_text_that_may_become_a_stop_string_is_held_back():
    flow = TextStream(("abcab!", "b?"))
    assert [flow.push(text) for text in ("x", "xab", "xabca", "xabcab", "xabcabc")] == [
        "x",
        "",
        "",
        "",
        "abc",
    ]
    assert flow.push("xabcabcb") == "abc"
    assert flow.finish() == "b"


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
    assert (flow.stopped is not None) == bool(places)
    assert "\ufffd" not in "".join(pieces)
