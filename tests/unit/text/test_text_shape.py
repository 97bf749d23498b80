import json
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graftwork.text.shape import find_cut, find_failure, find_placeholder, has_placeholder


@pytest.mark.parametrize(
    "reply",
    [
        "Mock response",
        "mock_response_1",
        "This is a mock response for testing.",
        "TODO",
        "TODO: write this answer",
        "[insert answer here]",
        "lorem ipsum dolor sit amet, consectetur",
        "...",
        "None",
        "null",
        "xxx",
        "test test test",
        '{"answer": "placeholder", "citations": [2]}',
        '{"answer": "...", "citations": []}',
        '{"steps": [{"text": "[Simulated content from a book]"}]}',
    ],
)
def test_stand_ins_are_recognised(reply):
    assert find_placeholder(reply)


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "42",
        "none",
        "A mock response lets a test run without the real service.",
        "Todo lists help: write three things down each morning.",
        '{"answer": null, "citations": [], "refused": true}',
        '{"tone": "none", "topic": "N/A"}',
        "{}",
        "Dear [Your Name], " + "thank you for the kind letter. " * 20,
    ],
)
def test_answers_are_not_taken_for_stand_ins(reply):
    assert find_placeholder(reply) is None


def test_made_up_prompts_are_recognised():
    assert has_placeholder("Content: [Generated content from a book]")
    assert not has_placeholder("Content: [1] a real source")


@pytest.mark.parametrize(
    "reply",
    [
        '{"answer": "Ther',
        '{"answer": "done", "citations": [1',
        "[1, 2, {",
        "Look:\n```python\nprint(1)\n",
        "<think>\nFirst we need to",
        "It was a long day for everybody who had come to the summer fair, and when it ended at last the "
        "visitors went home with the",
    ],
)
def test_cut_replies_are_recognised(reply):
    assert find_cut(reply)


def test_the_log_is_believed_when_it_says_that_the_limit_ended_it():
    assert find_cut("A whole sentence.", finish_reason="length")


def test_a_sentence_that_stops_near_the_token_limit_is_cut():
    words = "word " * 100
    assert find_cut(words, max_tokens=100)
    assert find_cut(words, max_tokens=4000) is None
    assert find_cut(words + "end.", max_tokens=100) is None


@pytest.mark.parametrize(
    "reply",
    [
        "Paris",
        "[1] The museum opens at nine.",
        "```\nprint(1)\n```",
        "<think>short</think> Yes.",
        "{name} is the variable to use here.",
        "The list is open, as they say, and so are we",
    ],
)
def test_whole_replies_are_not_called_cut(reply):
    assert find_cut(reply) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@example({"": "<THINK>"})
@example({"": "\n```"})
@given(st.dictionaries(st.text(max_size=5), JSON, min_size=1, max_size=4))
def test_whole_json_is_never_called_cut_and_any_beginning_of_it_is(value):
    text = json.dumps(value)
    assert find_cut(text, finish_reason="stop") is None
    for end in range(2, len(text)):
        assert find_cut(text[:end].strip(), finish_reason="stop")


@pytest.mark.parametrize(
    "reply",
    [
        "Traceback (most recent call last):\n  File 'x'",
        "HTTP 502 Bad Gateway",
        "I'm sorry, something went wrong on our side. Please try again later.",
        "Error: context window exceeded",
        "Sorry, I could not reach the search index.",
        "Internal server error (500).",
        "<html><body><h1>503 Service Unavailable</h1></body></html>",
        "ConnectionResetError: [Errno 104] Connection reset by peer",
        '{"error": {"message": "overloaded"}}',
    ],
)
def test_failures_in_words_are_recognised(reply):
    assert find_failure(reply)


@pytest.mark.parametrize(
    "reply",
    [
        "I'm sorry, but the sources do not say.",
        '{"answer": null, "refused": true}',
        '{"error": null, "answer": "yes"}',
        "Errors are values in Go.",
        "To fix it, read the last line of:\n```\nTraceback (most recent call last):\n```",
    ],
)
def test_refusals_and_explanations_are_no_failures(reply):
    assert find_failure(reply) is None


@given(st.text(max_size=200))
def test_any_text_can_be_checked(text):
    find_placeholder(text)
    find_cut(text, max_tokens=10)
    find_failure(text)


def cut_by_reading(text):
    """Whether JSON is open at the end of `text`, sign by sign."""
    depth, inside, escaped = 0, False, False
    for sign in text:
        if inside:
            inside, escaped = (escaped or sign != '"'), (sign == "\\" and not escaped)
        elif sign == '"':
            inside = True
        elif sign in "{[":
            depth += 1
        elif sign in "}]":
            depth -= 1
            if depth == 0:
                return False
    return inside or depth > 0


@given(st.text(alphabet='"\\{}[]a,1 ', max_size=30))
def test_json_is_called_cut_exactly_if_it_is_open_at_its_end(rest):
    text = ('{"' + rest).strip()
    assert (find_cut(text, finish_reason="stop") == "JSON that is never closed") == cut_by_reading(text)


@pytest.mark.parametrize(
    ("reply", "is_cut"),
    [
        ("```a\n~~~\n```", True),
        ("  ```\nx\n   ```", False),
        ("text ``` in a line", False),
        ("~~~\nx", True),
    ],
)
def test_code_fences_count_at_the_start_of_a_line(reply, is_cut):
    assert (find_cut(reply, finish_reason="stop") is not None) == is_cut


@pytest.mark.parametrize(
    "part", ["`", "test ", "[[", '{"a":', '\\"', "\n```", "<think>", "...", "[generated ", "todo "]
)
def test_time_grows_with_hostile_text_and_not_faster(part):
    short, long = (part * (size // len(part)) for size in (125_000, 1_000_000))
    # Eight times the text: eight times as long, or sixty-four times if it grew with the square. What
    # lies between is for the neighbours on the machine, as is whatever takes next to no time.
    assert _seconds(long) < 24 * max(_seconds(short), 0.01)


def _seconds(text):
    def measure():
        began = time.thread_time()
        find_placeholder(text)
        find_cut(text)
        find_failure(text)
        return time.thread_time() - began

    return min(measure() for _ in range(2))
