"""Fields of a JSON answer, held against the same fields of the reference."""

import json

import pytest
from pydantic import ValidationError

from graftwork.evaluate.settings import EvaluateSettings
from graftwork.grading.checks import GradeCheck, grade
from graftwork.grading.interface import GradeContext
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case

REFERENCE = {
    "queue": "billing",
    "priority": 2,
    "urgent": True,
    "total": 1200.5,
    "tags": ["refund", "card"],
    "customer": {"name": "Dr. Ana Kovač"},
    "note": "The card was charged twice.",
    "due": None,
}


def make_case(reference=REFERENCE):
    text = reference if isinstance(reference, str) else json.dumps(reference)
    return Case(
        id="1",
        origin=Origin(file="log", line=1),
        messages=(Message(role="user", content="a ticket"),),
        reference=text,
    )


def graded(rule, answer, case=None):
    check = GradeCheck.model_validate({"name": "it", **rule})
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return grade("it", case or make_case(), text, context=GradeContext(checks={"it": check}))


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        ({"metric": "exact", "field": "queue"}, {"queue": " billing "}, {"queue": "Billing"}),
        ({"metric": "exact", "field": "queue", "ignore_case": True}, {"queue": "BILLING"}, {"queue": "bill"}),
        ({"metric": "exact", "field": "priority"}, {"priority": 2.0}, {"priority": "2"}),
        ({"metric": "exact", "field": "urgent"}, {"urgent": True}, {"urgent": 1}),
        ({"metric": "exact", "field": "due"}, {"due": None}, {"due": "null"}),
        (
            {"metric": "exact", "field": "customer"},
            {"customer": {"name": "Dr. Ana Kovač"}},
            {"customer": {"name": "Dr. Ana Kovač", "id": 1}},
        ),
        ({"metric": "numeric", "field": "total", "relative": 0.001}, {"total": "1,201 EUR"}, {"total": 1203}),
        ({"metric": "numeric", "field": "total", "tolerance": 1}, {"total": 1201}, {"total": "about"}),
        ({"metric": "set", "field": "tags"}, {"tags": ["Card", "refund"]}, {"tags": ["card"]}),
        ({"metric": "set", "field": "tags"}, {"tags": "card, refund"}, {"tags": ["card", "refund", "x"]}),
        (
            {"metric": "normalised", "field": "customer.name"},
            {"customer": {"name": "dr ana  kovac"}},
            {"customer": {"name": "Ana Kovač"}},
        ),
        (
            {"metric": "token_f1", "field": "note", "at_least": 0.6},
            {"note": "Card charged twice, it was."},
            {"note": "Hello."},
        ),
        (
            {"all_fields": ["queue", "priority"]},
            {"queue": "billing", "priority": 2, "more": 1},
            {"queue": "billing", "priority": 3},
        ),
        (
            {"all_fields": {"queue": "normalised", "total": {"metric": "numeric", "tolerance": 1}}},
            {"queue": "Billing!", "total": 1200},
            {"queue": "Billing!", "total": 1000},
        ),
        ({"all_fields": True}, REFERENCE, {**REFERENCE, "extra": 1}),
    ],
)
def test_a_field_is_right_where_it_agrees_with_the_references(rule, right, wrong):
    assert graded(rule, right) == 1.0
    assert graded(rule, wrong) == 0.0
    assert graded(rule, "no JSON at all") == 0.0
    assert graded(rule, {}) == 0.0


@pytest.mark.parametrize("metric", ["exact", "numeric", "set", "normalised", "token_f1", "chrf"])
def test_a_field_that_the_reference_lacks_is_not_graded(metric):
    assert graded({"metric": metric, "field": "nothing"}, {"nothing": "x"}) is None
    assert graded({"metric": metric, "field": "queue"}, {"queue": "x"}, make_case("plain words")) is None


def test_all_fields_wants_a_field_left_out_where_the_reference_leaves_it_out():
    rule = {"all_fields": ["queue", "reason"]}
    assert graded(rule, {"queue": "billing"}) == 1.0
    assert graded(rule, {"queue": "billing", "reason": "invented"}) == 0.0
    assert graded({"all_fields": ["reason"]}, {"queue": "billing"}) is None


def test_without_a_field_sets_and_normalised_texts_compare_whole_replies():
    assert graded({"metric": "set"}, '["b", "a"]', make_case('["a", "b"]')) == 1.0
    assert graded({"metric": "set"}, "b", make_case("a, b")) == 0.0
    assert graded({"metric": "normalised"}, "the BILLING queue.", make_case("Billing queue")) == 1.0


def test_exact_compares_a_whole_json_reply_that_has_no_answer_in_words():
    # It graded nothing before: the empty `answer` of such a reply was taken for what must be said.
    assert graded({"metric": "exact"}, '{"queue": "billing"}', make_case({"queue": "billing"})) == 1.0
    assert graded({"metric": "exact"}, '{"queue": "other"}', make_case({"queue": "billing"})) == 0.0


@pytest.mark.parametrize(
    ("check", "reported"),
    [
        ({"metric": "answer_match", "field": "queue"}, "reads the whole answer"),
        ({"metric": "json_valid", "field": "queue"}, "reads the whole answer"),
        ({"all_fields": ["a"], "field": "queue"}, "reads the whole answer"),
        ({"all_fields": []}, "at least one field"),
        ({"all_fields": {"a": "nearly"}}, "known rules are exact"),
        ({"all_fields": {"a": {"metric": "numeric", "tolerance": -1}}}, "fields.a: tolerance"),
        ({"all_fields": {"a": {"metric": "exact", "value": "x"}}}, "takes no value"),
    ],
)
def test_a_field_check_that_could_grade_nothing_is_refused_when_settings_are_read(check, reported):
    with pytest.raises(ValidationError, match=reported):
        EvaluateSettings.model_validate({"checks": [{"name": "it", **check}]})


def test_schema_valid_without_a_schema_is_refused_when_settings_are_read():
    with pytest.raises(ValidationError, match="schema_valid needs a schema"):
        EvaluateSettings.model_validate({"metrics": ["schema_valid"]})
