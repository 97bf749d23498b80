"""Checks that judge a beginning: what they say of it holds for every continuation."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftwork.grading.answers import AnswerFields
from graftwork.grading.checks import GradeCheck, grade
from graftwork.grading.interface import GradeContext
from graftwork.grading.prefix import find_prefix_judge
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case

CASE = Case(
    id="c", origin=Origin(file="f", line=1), messages=(Message(role="user", content="?"),), reference=""
)
CHECKS = [
    {"name": "c", "contains": "yes"},
    {"name": "c", "contains": ["yes", "no"], "need": "any"},
    {"name": "c", "contains": ["no", "I c"], "need": "none"},
    {"name": "c", "contains": "YES", "ignore_case": False},
    {"name": "c", "exact": "yes no", "ignore_space": True},
    {"name": "c", "exact": "Yes", "ignore_case": True},
    {"name": "c", "regex": "^(?!no)"},
    {"name": "c", "regex": "^yes"},
    {"name": "c", "regex": "yes( no)*", "whole": True},
    {"name": "c", "regex": "(?i)y.s$"},
    {"name": "c", "regex": r"\d+ (yes|no)"},
    {"name": "c", "format": {"starts_with": "yes"}},
    {"name": "c", "format": {"starts_with": "yes "}},
    {"name": "c", "format": {"without": ["no", " I"], "max_words": 3}},
    {"name": "c", "format": {"max_characters": 5, "max_lines": 2, "min_words": 2}},
    {"name": "c", "format": {"template": "yes: {answer} no"}},
    {"name": "c", "format": {"pattern": "yes( no)*"}},
    {"name": "c", "json_schema": {"type": "object"}},
    {"name": "c", "json_schema": {"type": ["string", "object"]}},
    {"name": "c", "json_schema": {"enum": [1, "yes"]}},
]
PIECES = st.lists(
    st.sampled_from(["yes", "no", " ", "\n", ":", "I c", "Y", "e", "s", "1", '"', "{", "}", "a", "YES"]),
    max_size=7,
).map("".join)


def holds(judge, context, name, text, rest):
    found = judge(CASE, text, context)
    if found is None:
        return
    whole = grade(name, CASE, text + rest, context=context)
    if found == "fails":
        assert whole is not None, (text, rest)
        assert whole < 1, (text, rest)
    else:
        assert whole is None or whole >= 1, (text, rest)


@pytest.mark.parametrize("given_check", CHECKS, ids=str)
@given(text=PIECES, rest=PIECES)
def test_what_a_check_says_of_a_beginning_holds_for_its_continuations(given_check, text, rest):
    check = GradeCheck.model_validate(given_check)
    context = GradeContext(checks={"c": check})
    judge = find_prefix_judge("c", context)
    assert judge is not None
    holds(judge, context, "c", text, rest)


JSON_TEXTS = st.lists(
    st.sampled_from(
        ["{", "}", '"refused"', ": true", ": false", ",", '"answer"', ': "x"', " ", "I don't know", "no"]
    ),
    max_size=8,
).map("".join)


@pytest.mark.parametrize("name", ["json_valid", "not_refused", "schema_valid"])
@pytest.mark.parametrize("form", ["json", "text"])
@given(text=JSON_TEXTS, rest=JSON_TEXTS)
def test_what_a_metric_says_of_a_beginning_holds_for_its_continuations(name, form, text, rest):
    if (text + rest).count('"refused"') > 1:
        return  # a key that comes twice: the last one counts
    context = GradeContext(fields=AnswerFields(form=form, json_schema={"type": "object"}))
    judge = find_prefix_judge(name, context)
    assert judge is not None
    found = judge(CASE, text, context)
    whole = grade(name, CASE, text + rest, context=context)
    if found == "fails":
        assert whole is None or whole < 1
    if found == "passes":
        assert whole is None or whole >= 1


@pytest.mark.parametrize(
    ("given_check", "text", "verdict"),
    [
        ({"name": "c", "format": {"starts_with": "Answer:"}}, "Ans", None),
        ({"name": "c", "format": {"starts_with": "Answer:"}}, "Answer: so", "passes"),
        ({"name": "c", "format": {"starts_with": "Answer:"}}, "Well", "fails"),
        ({"name": "c", "format": {"max_words": 3}}, "one two three four", "fails"),
        ({"name": "c", "contains": "i cannot", "need": "none"}, "I cannot say", "fails"),
        ({"name": "c", "regex": "^(?!I cannot)"}, "I cannot", "fails"),
        ({"name": "c", "regex": r"\d+ apples", "whole": True}, "some", "fails"),
        ({"name": "c", "json_schema": {"type": "object"}}, "[", "fails"),
    ],
)
def test_a_beginning_is_judged_as_soon_as_it_can_be(given_check, text, verdict):
    context = GradeContext(checks={"c": GradeCheck.model_validate(given_check)})
    judge = find_prefix_judge("c", context)
    assert judge is not None
    assert judge(CASE, text, context) == verdict


def test_json_and_refusals_are_judged_by_the_beginning():
    context = GradeContext()
    valid, refused = find_prefix_judge("json_valid", context), find_prefix_judge("not_refused", context)
    assert valid is not None
    assert refused is not None
    assert valid(CASE, "Sure", context) == "fails"
    assert valid(CASE, '{"answer": "', context) is None
    assert refused(CASE, '{"refused": true, ', context) == "fails"
    assert refused(CASE, '{"refused": false, ', context) == "passes"
    assert refused(CASE, '{"answer": "x', context) is None


@pytest.mark.parametrize(
    "given_check",
    [
        {"name": "c", "numeric": 3},
        {"name": "c", "contains": "x", "field": "answer"},
        {"name": "c", "regex": r"\bno\b"},
        {"name": "c", "regex": r"(?!no$)\w+"},
    ],
)
def test_a_check_that_needs_the_whole_answer_says_so(given_check):
    context = GradeContext(checks={"c": GradeCheck.model_validate(given_check)})
    assert find_prefix_judge("c", context) is None


def test_an_own_function_declares_what_judges_a_beginning(tmp_path):
    (tmp_path / "own.py").write_text(
        "def polite(case, text):\n    return 'please' in text\n"
        "def _so_far(case, text):\n    return True if 'please' in text else None\n"
        "polite.prefix = _so_far\n"
        "def other(case, text):\n    return True\n"
    )
    checks = {name: GradeCheck(name=name, metric=f"own.py:{name}") for name in ("polite", "other")}
    context = GradeContext(checks=checks, folder=tmp_path)
    judge = find_prefix_judge("polite", context)
    assert judge is not None
    assert judge(CASE, "would you", context) is None
    assert judge(CASE, "would you please", context) == "passes"
    assert find_prefix_judge("other", context) is None


def test_a_check_that_is_not_about_the_case_passes():
    given_check = {"name": "c", "contains": "x", "need": "none", "where": {"role": "court"}}
    context = GradeContext(checks={"c": GradeCheck.model_validate(given_check)})
    judge = find_prefix_judge("c", context)
    assert judge is not None
    assert judge(CASE, "x", context) == "passes"


def test_the_members_of_a_refusal_are_read_with_their_own_names():
    context = GradeContext(fields=AnswerFields(refused="declined"))
    judge = find_prefix_judge("not_refused", context)
    assert judge is not None
    assert judge(CASE, json.dumps({"declined": True})[:-1] + ",", context) == "fails"
