"""Checks: what each rule holds against a text, whom it is about, and what is refused when it is read."""

import re
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from graftwork.grading.checks import KINDS, GradeCheck, grade
from graftwork.grading.interface import GradeContext
from graftwork.grading.matching import PatternTooSlow, matches
from graftwork.grading.rules import follows_template, numbers_in
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case

CONTEXT = GradeContext()

PATTERNS = [
    "a", "^a", "[ab]$", "a b", r"\d", r"x\.y", r"\w+\b", r"(?i)Ä+", r"(?m)^b.*$", r"(?s)a.b", r"(a)|\1b",
    r"(?<!a)b(?=1)", r"a{1,2}?b", r"[^\W\d_]+", r"\s\S", r"(?P<x>a)(?P=x)",
]  # fmt: skip


def make_case(reference="The total is 42 euros.", **more):
    return Case(
        id="c",
        origin=Origin(file="log.jsonl", line=1),
        messages=(Message(role="user", content="How much?"),),
        reference=reference,
        **more,
    )


def check(text, case=None, **given_check):
    return GradeCheck.model_validate(given_check).grade(case or make_case(), text, CONTEXT)


@pytest.mark.parametrize(
    ("rule", "right", "wrong"),
    [
        ({"exact": "yes"}, ["yes", " yes\n"], ["Yes", "yes.", ""]),
        ({"exact": "Yes  it is", "ignore_case": True, "ignore_space": True}, ["yes it\nis"], ["yes"]),
        ({"exact": True}, ["The total is 42 euros."], ["42"]),
        ({"contains": "Total"}, ["the total"], ["sum"]),
        ({"contains": "Total", "ignore_case": False}, ["Total"], ["total"]),
        ({"contains": ["a", "b"]}, ["ab"], ["a"]),
        ({"contains": ["a", "b"], "need": "any"}, ["b"], ["c"]),
        ({"contains": ["sorry", "cannot"], "need": "none"}, ["fine"], ["I cannot"]),
        ({"regex": r"\b\d{4}-\d{2}\b"}, ["on 2024-05 it"], ["2024"]),
        ({"regex": r"[a-z]+", "whole": True}, ["abc"], ["abc1"]),
        ({"regex": "(?i)^OK$"}, ["ok"], ["okay"]),
        ({"numeric": 3.14, "tolerance": 0.01}, ["about 3.14", "3.15", "pi is 3.13"], ["3.16", "none", ""]),
        ({"numeric": 1000, "relative": 0.05}, ["1,049", "9.6e2"], ["1,051"]),
        ({"numeric": None}, ["It is 42.", "42 euros"], ["41"]),
        ({"numeric": 2, "which": "first"}, ["2 of 9"], ["9 of 2"]),
        ({"numeric": 2, "which": "only"}, ["2"], ["2 of 9"]),
        ({"numeric": 2, "which": "any"}, ["1, 2, 3"], ["1, 3"]),
        ({"numeric": 0.3}, [str(0.1 + 0.2)], ["0.31"]),
        ({"numeric": -5}, ["-5", "\u22125 degrees"], ["5"]),
        ({"json_schema": {"type": "array"}}, ["[]", "[1]"], ["{}", "x", ""]),
        ({"json_schema": {"const": None}}, ["null"], ["0", ""]),
        ({"numeric": 7, "field": "a.b"}, ['{"a": {"b": 7}}'], ['{"a": 7}', "7"]),
        ({"contains": "x", "field": "a"}, ['{"a": "x"}', '{"a": ["x"]}'], ['{"b": "x"}']),
        (
            {"format": {"sections": ["Answer", "Sources"]}},
            ["## Answer\na\n**Sources:** b"],
            ["Sources\nAnswer"],
        ),
        (
            {"format": {"template": "Answer: {a}\nSources: {s}"}},
            ["Answer: x\nSources: y"],
            ["Answer: x", "Answer: \nSources: y"],
        ),
        ({"format": {"max_words": 3, "min_words": 2}}, ["a b", "a b c"], ["a", "a b c d"]),
        ({"format": {"max_lines": 1, "max_characters": 5}}, ["abc"], ["a\nb", "abcdef"]),
        ({"format": {"starts_with": "Dear", "ends_with": "."}}, ["Dear you."], ["dear you.", "Dear you"]),
        ({"format": {"without": ["As an AI"]}}, ["Fine"], ["as an ai model"]),
        ({"format": {"pattern": r"(\w+, )*\w+"}}, ["a, b"], ["a; b"]),
        ({"metric": "token_f1", "at_least": 0.5}, ["total is 42"], ["no"]),
    ],
)
def test_a_rule_separates_right_from_wrong(rule, right, wrong):
    for text in right:
        assert check(text, **rule) == 1.0, text
    for text in wrong:
        assert check(text, **rule) == 0.0, text


def test_a_rule_without_a_value_does_not_apply_where_the_reference_has_none():
    assert check("42", make_case("no number"), numeric=None) is None
    assert check("x", make_case(" "), exact=True) is None


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("1,234.5 and 2e3", [1234.5, 2000.0]),
        ("see [1] and [22]: 7", [7.0]),
        ("1. first\n2) second 5", [5.0]),
        ("v2 x86 3rd", []),
        ("1e999", []),
        ("at 3.", [3.0]),
        ("1.2.3", []),
    ],
)
def test_numbers_are_read_as_people_write_them(text, numbers):
    assert numbers_in(text) == numbers


@given(st.floats(-1e9, 1e9, allow_nan=False).map(lambda x: round(x, 3)), st.floats(0, 100))
def test_a_number_is_right_just_within_its_tolerance(value, tolerance):
    rule = {"numeric": value, "tolerance": tolerance}
    assert check(f"It is {value:.3f} in all", **rule) == 1.0
    assert check(f"It is {value + tolerance + 1:.3f} in all", **rule) == 0.0


@given(st.text(max_size=50))
def test_no_text_breaks_a_rule(text):
    rules = [
        {"exact": "a"},
        {"contains": "a"},
        {"regex": "a+b?"},
        {"numeric": 1},
        {"json_schema": {"type": "object"}},
        {"format": {"max_words": 3, "sections": ["a"], "template": "a {x} b"}},
    ]
    for rule in rules:
        assert check(text, **rule) in (0.0, 1.0)


@given(st.lists(st.text(alphabet="ab: \n", max_size=4), min_size=2, max_size=4), st.text("xy", min_size=1))
def test_a_filled_template_follows_it(pieces, filling):
    template = "{blank}".join(pieces)
    assert follows_template(filling.join(pieces), template)


def test_an_unfilled_template_does_not_follow_it():
    assert not follows_template("Answer: {a}", "Answer: {a} end")
    assert not follows_template("ab", "a{x}b")
    assert follows_template("fixed", "fixed")
    assert not follows_template("fixed!", "fixed")


def test_a_catastrophic_pattern_is_stopped_and_reported_and_the_next_one_works():
    context = GradeContext(
        checks={"slow": GradeCheck.model_validate({"name": "slow", "regex": r"(a|aa)+$", "seconds": 0.2})}
    )
    assert grade("slow", make_case(), "a" * 80 + "b", context=context) is None
    [failed] = context.failed
    assert (failed.metric, failed.case_id) == ("slow", "c")
    assert "took over 0.2 s" in failed.reason
    assert grade("slow", make_case(), "aaa", context=context) == 1.0
    with pytest.raises(PatternTooSlow):
        matches(r"(x|xx)+y", "x" * 60, seconds=0.1)


def test_patterns_are_matched_in_any_thread():
    found = []
    threads = [
        threading.Thread(target=lambda n=n: found.append(matches(rf"(\d)+{n}$", f"12{n}"))) for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


@pytest.mark.parametrize(
    "pattern", ["a{e}", "a{i<=2}b", "{d}", r"\{s}", "[{e}]", "a{2}", "a{,2}b", "{}", "a{1,}"]
)
@pytest.mark.parametrize("text", ["a{e}", "ab", "a{i<=2}b", "{d}", "{s}", "aa", "aab", "{}", "e", "xyz", ""])
def test_braces_that_are_no_repetition_are_literals_as_in_python(pattern, text):
    assert matches(pattern, text) == (re.search(pattern, text) is not None)


@given(st.text(alphabet="ab1 .-_\nÄé", max_size=12), st.sampled_from(PATTERNS))
def test_patterns_match_the_same_texts_as_those_of_python(text, pattern):
    assert matches(pattern, text) == (re.search(pattern, text) is not None)
    assert matches(pattern, text, whole=True) == (re.fullmatch(pattern, text) is not None)


def test_where_picks_the_cases():
    rule = {"contains": "x", "where": {"role": "planner", "domain": ["a", "b"]}}
    assert check("x", make_case(group="planner", domain="b"), **rule) == 1.0
    assert check("", make_case(group="planner", domain="b"), **rule) == 0.0
    assert check("x", make_case(group="planner", domain="c"), **rule) is None
    assert check("x", make_case(group="coder", domain="a"), **rule) is None
    assert check("x", make_case(), **rule) is None
    assert check("x", make_case(), contains="x", where={"file": "log.jsonl", "id": "c"}) == 1.0


def test_the_checks_of_a_case_are_its_task():
    case = make_case(
        checks=(
            {"contains": "total"},
            {"json_schema": {"type": "object"}},
            {"numeric": 3.14, "tolerance": 0.01},
            {"regex": "t.t"},
        )
    )
    right, half = '{"total": 3.14}', "total"
    assert grade("task_success", case, right, context=CONTEXT) == 1.0
    assert grade("checks_passed", case, right, context=CONTEXT) == 1.0
    assert grade("task_success", case, half, context=CONTEXT) == 0.0
    assert grade("checks_passed", case, half, context=CONTEXT) == 0.5
    assert grade("task_success", make_case(), right, context=CONTEXT) is None


def test_a_check_of_a_case_that_makes_no_sense_is_reported_and_stops_nothing():
    context = GradeContext()
    case = make_case(checks=({"contains": "a"}, {"contians": "b"}))
    assert grade("task_success", case, "a", context=context) is None
    assert "checks.1 of the case" in context.failed[0].reason
    assert "did you mean contains" in context.failed[0].reason


def test_reviewers_may_have_a_scale_of_their_own():
    five = {"name": "rated", "metric": "reviewer_score", "least": 1, "most": 5}
    assert check("said", make_case("said", reward=4.0), **five) == 0.75
    context = GradeContext()
    assert grade("reviewer_score", make_case("said", reward=4.0), "said", context=context) is None
    assert "outside the scale" in context.failed[0].reason


@pytest.mark.parametrize(
    ("given_check", "reported"),
    [
        ({"name": "x", "metric": "contain"}, "did you mean contains"),
        ({"contans": "x"}, "did you mean contains"),
        ({"contains": "x", "regex": "y"}, "one rule"),
        ({"name": "x", "metric": "contains", "vlaue": "a"}, "did you mean value"),
        ({"contains": ""}, "contains the empty text"),
        ({"contains": "x", "need": "most"}, "need"),
        ({"regex": "("}, "not a regular expression"),
        ({"json_schema": {"typ": "x"}}, "did you mean type"),
        ({"numeric": "seven"}, "value"),
        ({"numeric": float("inf")}, "finite"),
        ({"numeric": 1, "tolerance": -1}, "tolerance"),
        ({"format": {}}, "at least one of"),
        ({"format": "short"}, "keys and values"),
        ({"format": {"min_words": 5, "max_words": 2}}, "min_words 5 is over"),
        ({"contains": "x", "where": {"rol": "y"}}, "did you mean role"),
        ({"contains": "x", "name": "No Spaces"}, "name"),
        ({"name": "x", "metric": "json_valid", "value": 3}, "takes no value"),
        ({"name": "x", "metric": "../up.py"}, "no metric"),
        ({"name": "x", "metric": "a b:c"}, "names no function"),
        ({"name": "x", "metric": "token_f1", "at_least": 2}, "at_least"),
    ],
)
def test_a_check_that_makes_no_sense_is_refused_with_a_hint(given_check, reported):
    with pytest.raises(ValidationError, match=reported):
        GradeCheck.model_validate(given_check)


def test_every_kind_of_check_comes_back_from_json_as_it_was():
    brief = {
        "exact": "x",
        "contains": ["x"],
        "regex": "x",
        "numeric": 1.5,
        "json_schema": {"type": "object"},
        "format": {"max_words": 2},
        "reviewer_score": {"least": 1, "most": 5},
    }
    for kind, value in brief.items():
        one = GradeCheck.model_validate({"name": "n", kind: value, "where": {"group": "g"}})
        again = GradeCheck.from_json(one.to_json())
        assert again == one
        assert again.grade(make_case(group="g"), "x", CONTEXT) == one.grade(
            make_case(group="g"), "x", CONTEXT
        )
    assert set(brief) <= set(KINDS)
