"""What users say of an answer is kept next to it: never lost in silence, never with their secrets."""

import asyncio
import json
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI
from serve_harness import DEADLINE, BrokenSink, ListSink, open_house

from graftwork.http.client import Client
from graftwork.http.messages import ApiError
from graftwork.serve.feedback import parse_feedback

HELLO = [{"role": "user", "content": "hello there friend"}]
JSON = (("content-type", "application/json"),)
ID = "0123456789abcdef" * 2


class Book(ListSink):
    """Captures and feedback in memory, as the store keeps them."""

    def __init__(self):
        super().__init__()
        self.feedback = []
        self.open = threading.Event()
        self.open.set()

    def add_many(self, captures):
        self.open.wait(DEADLINE)
        super().add_many(captures)

    def add_feedback(self, feedback):
        if feedback.capture not in {capture.id for capture in self.captures}:
            return False
        self.feedback.append(feedback)
        return True


async def post(house, body, headers=JSON):
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    reply = await Client(port=house.port).send("POST", "/v1/feedback", body=data, headers=headers)
    return reply.status, json.loads(await reply.read())


async def ask(house, **more):
    async with AsyncOpenAI(
        base_url=f"{house.url}/v1", api_key="key", max_retries=0, timeout=DEADLINE
    ) as client:
        return await client.chat.completions.create(model="champion", messages=HELLO, **more)


def test_a_correction_is_redacted_and_says_by_itself_that_the_answer_was_wrong():
    alone = parse_feedback(
        json.dumps({"capture": ID, "correction": "Write to ada@example.com."}).encode(), at=0
    )
    assert alone.score == 0.0
    assert alone.correction.startswith("Write to ")
    assert "ada@example.com" not in alone.correction
    praised = parse_feedback(json.dumps({"capture": ID, "score": 1, "correction": "Yes."}).encode(), at=0)
    assert (praised.score, praised.correction) == (1.0, "Yes.")
    with pytest.raises(ApiError):
        parse_feedback(json.dumps({"capture": ID, "correction": "x" * 40_000}).encode(), at=0)


def parse(**body):
    return parse_feedback(json.dumps({"capture": ID, **body}).encode(), at=0)


def test_a_score_of_null_next_to_a_correction_counts_as_none():
    assert parse(score=None, corrected="We open at nine.").score == 0.0


@pytest.mark.parametrize("body", [{}, {"corrected": ""}, {"score": None}, {"comment": "Hm."}])
def test_feedback_without_score_and_correction_names_both(body):
    with pytest.raises(ApiError) as refused:
        parse(**body)
    assert "score" in refused.value.message
    assert "corrected" in refused.value.message


@pytest.mark.parametrize("key", ["corrected", "correction", "reviewer", "user"])
def test_a_wrong_type_is_reported_under_the_key_that_the_client_sent(key):
    with pytest.raises(ApiError) as refused:
        parse(score=True, **{key: 5})
    assert refused.value.param == key
    assert refused.value.message.startswith(f"{key} must be")


def test_feedback_is_kept_for_the_answer_that_it_names_in_either_way(run):
    async def main():
        book = Book()
        async with open_house(book, feedback=book) as house:
            answer = await ask(house)
            plain = answer.id.removeprefix("chatcmpl-")
            secret = "ghp_" + "a1B2c3D4e5F6g7H8i9J0" * 2
            status, reported = await post(
                house,
                {"capture": plain, "score": True, "comment": f"good, {secret}", "user": "ada@example.org"},
            )
            assert (status, reported) == (200, {"object": "feedback", "capture": plain, "score": 1.0})
            assert (await post(house, {"capture": answer.id, "score": 0.25}))[0] == 200
            # The other APIs write the same id behind other prefixes.
            for prefix in ("msg_", "resp_"):
                assert (await post(house, {"capture": f"{prefix}{plain}", "score": True}))[0] == 200
            health = json.loads((await Client(port=house.port).fetch("GET", "/health"))[1])
            assert health["captures"]["feedback"] == 4
        first, second, *others = book.feedback
        assert [feedback.capture for feedback in others] == [plain, plain]
        assert (first.capture, first.score, second.score) == (plain, 1.0, 0.25)
        assert secret not in first.comment
        assert first.who.startswith("user-")
        assert first.at
        assert (second.comment, second.who) == (None, None)

    run(main)


def test_feedback_that_is_faster_than_its_capture_waits_for_it(run):
    async def main():
        book = Book()
        async with open_house(book, feedback=book) as house:
            book.open.clear()
            answer = await ask(house)
            tried = threading.Event()
            add = book.add_feedback

            def add_late(feedback):
                found = add(feedback)
                if not found:  # the first try found nothing: only now is the capture written
                    tried.set()
                    book.open.set()
                return found

            book.add_feedback = add_late
            assert (await post(house, {"capture": answer.id, "score": False}))[0] == 200
            assert tried.is_set()
        assert [feedback.score for feedback in book.feedback] == [0.0]

    run(main)


def test_feedback_on_a_pending_capture_is_retried_and_on_an_unknown_one_refused(run):
    async def main():
        book = Book()
        async with open_house(book, feedback=book) as house:
            status, reported = await post(house, {"capture": ID, "score": 1})
            assert (status, reported["error"]["code"]) == (404, "capture_not_found")
            book.open.clear()
            answer = await ask(house)
            status, reported = await post(house, {"capture": answer.id, "score": 1})
            assert (status, reported["error"]["code"]) == (503, "not_written_yet")
            book.open.set()

    run(main)


def test_an_answer_that_is_still_being_given_has_no_feedback_yet(run):
    async def main():
        book = Book()
        async with open_house(book, feedback=book) as house:
            house.stub.gate.clear()
            async with AsyncOpenAI(base_url=f"{house.url}/v1", api_key="key", timeout=DEADLINE) as client:
                stream = await client.chat.completions.create(model="base", messages=HELLO, stream=True)
                chunk = await anext(aiter(stream))
                status, reported = await post(house, {"capture": chunk.id, "score": 1})
                assert (status, reported["error"]["code"]) == (409, "still_answering")
                house.stub.gate.set()
                async for _ in stream:
                    pass
            assert (await post(house, {"capture": chunk.id, "score": 1}))[0] == 200

    run(main)


def test_feedback_needs_the_key_and_a_place_where_it_can_be_kept(run):
    async def main():
        book = Book()
        async with open_house(book, feedback=book, api_key="right") as house:
            assert (await post(house, {"capture": ID, "score": 1}))[0] == 401
            assert (await post(house, {"capture": ID, "score": 1}, (("authorization", "Bearer right"),)))[
                0
            ] == 415
        async with open_house() as house:
            status, reported = await post(house, {"capture": ID, "score": 1})
            assert (status, reported["error"]["code"]) == (404, "captures_off")
            assert (await Client(port=house.port).fetch("GET", "/v1/feedback"))[0] == 405

    run(main)


def test_a_store_that_fails_is_reported_and_not_hidden(run):
    class Broken(BrokenSink):
        def add_feedback(self, feedback):
            raise OSError("the disk is full")

    async def main():
        book = Broken()
        async with open_house(book, feedback=book) as house:
            status, reported = await post(house, {"capture": ID, "score": 1})
            assert (status, reported["error"]["code"]) == (503, "not_kept")
            assert "disk" not in reported["error"]["message"]

    run(main)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"no JSON", 400),
        (b"[]", 400),
        (b"{}", 400),
        ({"capture": ID}, 400),
        ({"score": 1}, 400),
        ({"capture": "../../etc", "score": 1}, 400),
        ({"capture": ID + "\n", "score": 1}, 400),
        ({"capture": 7, "score": 1}, 400),
        ({"capture": ID, "score": 1.01}, 400),
        ({"capture": ID, "score": -1}, 400),
        ({"capture": ID, "score": "up"}, 400),
        ({"capture": ID, "score": None}, 400),
        ({"capture": ID, "score": 1, "comment": 3}, 400),
        ({"capture": ID, "score": 1, "comment": "x" * 8001}, 400),
        ({"capture": ID, "score": 1, "user": "x" * 513}, 400),
        ({"capture": ID, "score": 1, "name": "x"}, 400),
        ({"capture": ID, "score": 1, "comment": "x" * 70_000}, 413),
    ],
)
def test_invalid_feedback_is_refused_with_the_reason(body, status):
    with pytest.raises(ApiError) as refused:
        parse_feedback(body if isinstance(body, bytes) else json.dumps(body).encode(), at=0.0)
    assert refused.value.status == status
    assert refused.value.message


@given(st.binary(max_size=200) | st.from_type(type(None)).map(lambda _: b"null"))
def test_no_bytes_break_the_desk(data):
    with pytest.raises(ApiError) as refused:  # none of them names a capture
        parse_feedback(data, at=0.0)
    assert refused.value.status == 400


@given(st.floats(0, 1) | st.booleans() | st.sampled_from([0, 1]), st.none() | st.text(max_size=60))
def test_every_score_from_0_to_1_comes_through(score, comment):
    body = json.dumps({"capture": ID, "score": score, "comment": comment}).encode("utf-8", "replace")
    found = parse_feedback(body, at=1.5)
    assert found.score == float(score)
    assert found.at == "1970-01-01T00:00:01.500+00:00"


def test_feedback_of_a_client_that_left_is_kept_and_counts_until_it_is(run):
    class SlowBook(Book):
        def __init__(self):
            super().__init__()
            self.asked = threading.Event()
            self.answer = threading.Event()

        def add_feedback(self, feedback):
            self.asked.set()
            assert self.answer.wait(DEADLINE)
            return super().add_feedback(feedback)

    async def main():
        book = SlowBook()
        async with open_house(book, feedback=book) as house:
            answer = await ask(house)
            await house.close_captures()
            leaving = asyncio.create_task(post(house, {"capture": answer.id, "score": True}))
            assert await asyncio.to_thread(book.asked.wait, DEADLINE)
            leaving.cancel()
            await asyncio.gather(leaving, return_exceptions=True)
            while any(connection._task is not None for connection in house.server.connections):
                await asyncio.sleep(0)
            waiting = house.gateway.feedback.waiting
            book.answer.set()
            while house.gateway.feedback.waiting:
                await asyncio.sleep(0)
            return waiting, len(book.feedback), house.gateway.feedback.kept

    assert run(main) == (1, 1, 1)
