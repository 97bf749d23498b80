"""Beginnings of JSON: every one is accepted, and what is refused cannot be continued to JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.grading.prefix import read_json_prefix

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def reads(text):
    def refuse(name):
        raise ValueError(name)

    try:
        json.loads(text, parse_constant=refuse)
    except ValueError:
        return False
    return True


@given(VALUES, st.booleans(), st.sampled_from([None, 1]), st.data())
def test_every_beginning_of_a_document_can_become_json(value, ascii_only, indent, data):
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    end = data.draw(st.integers(0, len(text)))
    assert read_json_prefix(text[:end]) is not None


@given(VALUES, st.data())
def test_a_text_that_is_refused_is_no_json_and_no_continuation_is(value, data):
    text = json.dumps(value)
    at = data.draw(st.integers(0, len(text)))
    broken = (
        text[:at] + data.draw(st.text(alphabet='{}[]",:0123.eE+-truefalsn \\u\x01', max_size=3)) + text[at:]
    )
    for end in range(len(broken) + 1):
        if read_json_prefix(broken[:end]) is None:
            assert not reads(broken)
            for rest in ("", "}", "]", '"', '"}', "]}", " ", "0", ":1}", ",1]"):
                assert not reads(broken[:end] + rest)
            return
    # Never refused: then it is JSON, or the text ends within a value.
    assert reads(broken) or read_json_prefix(broken) is not None


@given(st.dictionaries(st.text(), VALUES, max_size=4))
def test_members_are_those_of_the_object_once_it_has_ended(value):
    text = json.dumps(value)
    found = read_json_prefix(text)
    assert found is not None
    assert found.members == json.loads(text)
    assert found.kind == "object"


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ('{"refused": tru', {}),
        ('{"refused": true', {}),
        ('{"refused": true,', {"refused": True}),
        ('{"a": {"refused": true}, "b": [1', {"a": {"refused": True}}),
        ('{"n": 12', {}),
    ],
)
def test_a_member_counts_once_what_follows_shows_that_it_is_complete(text, members):
    found = read_json_prefix(text)
    assert found is not None
    assert found.members == members


@pytest.mark.parametrize(
    "text", ["Sure", "{'a'", '{"a" 1', "[1,]", "{,", "01", "1.e", "NaN", "{} x", '"\x01', "nulx"]
)
def test_what_cannot_become_json_is_refused(text):
    assert read_json_prefix(text) is None


def test_deep_nesting_is_read_without_recursion():
    assert read_json_prefix("[" * 100_000) is not None
