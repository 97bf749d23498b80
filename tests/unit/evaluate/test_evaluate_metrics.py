"""What each metric grades, and that no answer can break one."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.evaluate.settings import EvaluateSettings
from graftwork.grading.answers import AnswerFields, numbered_sources, parse_object, read_answer
from graftwork.grading.metrics import METRICS
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case

FIELDS = AnswerFields()


def make_case(*, refused=False, citations=(1,), answer="The oven opens at six.", system="Be brief [9]."):
    reference = {"answer": answer, "citations": list(citations), "refused": refused}
    return Case(
        id="c",
        origin=Origin(file="log.jsonl", line=1),
        messages=(
            Message(role="system", content=system),
            Message(role="user", content="Sources:\n[1] The oven opens at six.\n[2] Rain.\nWhen?"),
        ),
        reference=json.dumps(reference),
    )


def reply(answer="At six.", citations=(1,), refused=False):
    return json.dumps({"answer": answer, "citations": list(citations), "refused": refused})


def grade(name, case, text, fields=FIELDS):
    return METRICS[name](case, text, fields)


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ('{"answer": 1}', 1.0),
        (' {"a": []}\n', 1.0),
        ("[1]", 0.0),
        ("null", 0.0),
        ("", 0.0),
        ('{"answer": "cut of', 0.0),
        ('```json\n{"answer": 1}\n```', 0.0),
        ('{"a": NaN}', 0.0),
        ("[" * 100_000, 0.0),
    ],
)
def test_only_a_whole_json_object_is_valid(text, valid):
    assert grade("json_valid", make_case(), text) == valid


def test_required_keys_must_be_there():
    fields = AnswerFields(required=("answer", "meta.version"))
    assert grade("json_valid", make_case(), '{"answer": ""}', fields) == 0.0
    assert grade("json_valid", make_case(), '{"answer": "", "meta": {"version": 1}}', fields) == 1.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (reply(citations=[1]), 1.0),
        (reply(citations=[2]), 1.0),
        (reply(citations=[1, 2]), 1.0),
        (reply(citations=["[1]", "2"]), 1.0),
        (reply(citations=[]), 0.0),
        (reply(citations=[3]), 0.0),
        (reply(citations=[9]), 0.0),
        (reply(citations=[True]), 0.0),
        (reply(citations=[[1]]), 0.0),
        (reply(refused=True), 0.0),
        ("no json", 0.0),
    ],
)
def test_an_answer_covers_when_it_cites_sources_of_the_prompt(text, expected):
    assert grade("citation_coverage", make_case(), text) == expected


def test_coverage_does_not_apply_where_the_reference_refuses():
    assert grade("citation_coverage", make_case(refused=True), reply()) is None
    assert grade("citation_coverage", make_case(refused=True), "no json") is None


def test_citations_are_correct_when_they_are_the_references():
    case = make_case(citations=[1, 2])
    assert grade("citation_correct", case, reply(citations=[2, 1])) == 1.0
    assert grade("citation_correct", case, reply(citations=[1])) == 0.0


@pytest.mark.parametrize(
    ("should", "text", "expected"),
    [
        (True, reply(refused=True), 1.0),
        (True, reply(refused=False), 0.0),
        (False, reply(refused=False), 1.0),
        (False, reply(refused=True), 0.0),
        (False, '{"answer": "no word about refusing"}', 0.0),
        (False, '{"refused": "false"}', 0.0),
        (True, "I cannot answer", 0.0),
    ],
)
def test_a_refusal_is_correct_where_the_reference_refuses(should, text, expected):
    assert grade("refusal_correct", make_case(refused=should), text) == expected


def test_a_format_without_the_key_means_not_refused():
    case = make_case().model_copy(update={"reference": '{"answer": "x"}'})
    assert grade("refusal_correct", case, '{"answer": "y"}') == 1.0
    assert grade("refusal_correct", case, '{"refused": true}') == 0.0


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (reply("the oven OPENS at six"), 1.0),
        (reply("I read that the oven opens at six, today."), 1.0),
        (reply("The oven opens at seven."), 1.0),  # F1 0.75: words shared, informational only
        (reply("Rain."), 0.0),
        (reply("The oven opens at six.", refused=True), 0.0),
    ],
)
def test_an_answer_matches_by_its_words(text, expected):
    assert grade("answer_match", make_case(), text) == expected


def test_inner_fields_and_inline_citations_are_read():
    fields = AnswerFields(answer="answer.text", citations="answer.text")
    answer = read_answer('{"answer": {"text": "Lost [1] and [2]."}}', fields=fields)
    assert answer is not None
    assert answer.citations == {1, 2}


def test_sources_in_the_system_turn_count_only_without_others():
    assert numbered_sources(make_case()) == {1, 2}
    alone = make_case().model_copy(update={"messages": (Message(role="system", content="[4] x"),)})
    assert numbered_sources(alone) == {4}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["answer", "citations", "refused", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(st.text() | json_values.map(json.dumps), st.booleans())
def test_no_answer_breaks_a_metric_and_applicability_is_the_cases_alone(text, refused):
    case = make_case(refused=refused)
    for name, metric in METRICS.items():
        given_grade = metric(case, text, FIELDS)
        assert given_grade in (None, 0.0, 1.0)
        assert (given_grade is None) == (metric(case, "", FIELDS) is None), name
    if parse_object(text) is None:
        assert grade("json_valid", case, text) == 0.0
        assert grade("refusal_correct", case, text) == 0.0


def test_the_reference_itself_is_right_by_every_metric():
    case = make_case()
    assert {grade(name, case, case.reference) for name in METRICS} == {1.0}


def test_an_unknown_metric_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="did you mean json_valid"):
        EvaluateSettings(metrics=("json_vald",))
