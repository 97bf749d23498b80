import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.text.shape import KNOWN_CONTROL_TOKENS, find_control_tokens


@pytest.mark.parametrize("token", KNOWN_CONTROL_TOKENS)
def test_every_known_token_is_found_inside_text(token):
    assert find_control_tokens(f"before{token}after", KNOWN_CONTROL_TOKENS) == [token]


def test_tokens_come_once_and_in_the_order_of_first_occurrence():
    text = "a<|im_end|>b<|im_start|>c<|im_end|>[INST]"
    assert find_control_tokens(text, KNOWN_CONTROL_TOKENS) == ["<|im_end|>", "<|im_start|>", "[INST]"]


@pytest.mark.parametrize(
    "text", ["", "plain", "a < b and c[0] > d", "<div><b>bold</b></div>", "<think>hm</think>", "[1] a source"]
)
def test_text_that_looks_alike_holds_none(text):
    assert find_control_tokens(text, KNOWN_CONTROL_TOKENS) == []


def test_the_longest_of_nested_tokens_is_taken():
    assert find_control_tokens("<a><b>", ("<a>", "<a><b>")) == ["<a><b>"]


def test_tokens_of_any_form_can_be_asked_for():
    assert find_control_tokens("one .* two", (".*", "")) == [".*"]
    assert find_control_tokens("one", ()) == []


@given(st.lists(st.text(min_size=1, max_size=4), max_size=5), st.text(max_size=30))
def test_something_is_found_exactly_if_a_token_is_in_the_text(tokens, text):
    found = find_control_tokens(text, tuple(tokens))
    assert bool(found) == any(token in text for token in tokens)
    assert all(token in text for token in found)
