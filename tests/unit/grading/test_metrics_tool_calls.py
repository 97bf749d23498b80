import json

import pytest

from graftwork.grading.answers import AnswerFields
from graftwork.grading.tool_calls import (
    grade_no_call_where_due,
    grade_tool_call_f1,
    grade_tool_calls,
    grade_tool_calls_valid,
)
from graftwork.records.interaction import Message, Origin
from graftwork.records.report import Case
from graftwork.text.tool_calls import TextAndCalls, ToolCall, write_calls, write_tools

FIND = ToolCall("find", {"a": 1, "b": 2})
READ = ToolCall("read", {})
TOOLS = write_tools([{"type": "function", "function": {"name": "find"}}])


def case(reference, *, system="Be brief."):
    messages = (Message(role="system", content=system), Message(role="user", content="Where?"))
    return Case(id="1", origin=Origin(file="f", line=1), messages=messages, reference=reference)


def said(*calls, text=""):
    return write_calls(TextAndCalls(text, calls))


def grades(of, text):
    return grade_tool_calls(of, text, AnswerFields()), grade_tool_call_f1(of, text, AnswerFields())


@pytest.mark.parametrize(
    ("answer", "exact", "partial"),
    [
        (said(FIND, READ), 1.0, 1.0),
        (said(FIND, READ, text="I look it up."), 1.0, 1.0),
        (said(READ, FIND), 0.0, 0.5),
        (said(FIND), 0.0, 2 / 3),
        (said(FIND, READ, READ), 0.0, 0.8),
        (said(ToolCall("find", {"a": 1, "b": 3}), READ), 0.0, 0.875),
        (said(ToolCall("other", {"a": 1, "b": 2}), READ), 0.0, 0.5),
        ("It is in Bern.", 0.0, 0.0),
        ("<tool_call>\nfind(1, 2)\n</tool_call>", 0.0, 0.0),
    ],
)
def test_calls_are_graded_by_name_arguments_and_order(answer, exact, partial):
    assert grades(case(said(FIND, READ)), answer) == (exact, pytest.approx(partial))


def test_other_spacing_and_order_of_keys_are_the_same_call():
    compact = json.dumps({"arguments": {"b": 2, "a": 1}, "name": "find"}, separators=(",", ":"))
    assert grades(case(said(FIND)), f"<tool_call>{compact}</tool_call>") == (1.0, 1.0)


def test_calling_where_the_reference_does_not_is_wrong():
    offered = case("Here.", system=f"Be brief.\n\n{TOOLS}")
    assert grades(offered, said(FIND)) == (0.0, 0.0)
    assert grades(offered, "There.") == (1.0, 1.0)


def test_the_question_does_not_arise_without_tools_and_calls():
    assert grades(case("Here."), said(FIND)) == (None, None)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
COUNT = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
OFFERED = case("", system=write_tools([COUNT]))


@pytest.mark.parametrize(
    ("text", "valid"),
    [
        ("No call at all.", 1.0),
        ('<tool_call>\n{"name": "count", "arguments": {"n": 1}}\n</tool_call>', 1.0),
        ('<tool_call>\n{"name": "count", "arguments": {"n": "1"}}\n</tool_call>', 0.0),
        ('<tool_call>\n{"name": "count", "arguments": {}}\n</tool_call>', 0.0),
        ('<tool_call>\n{"name": "count", "arguments": "{\\"n\\": 1"}\n</tool_call>', 0.0),
        ('<tool_call>\n{"name": "delete", "arguments": {"n": 1}}\n</tool_call>', 0.0),
        ('<tool_call>\n{"name": "count", "argum', 0.0),
    ],
)
def test_a_valid_call_is_json_of_an_offered_tool_whose_schema_accepts_the_arguments(text, valid):
    assert grade_tool_calls_valid(OFFERED, text, AnswerFields()) == valid


def test_calls_are_not_judged_where_no_tools_are_offered():
    assert grade_tool_calls_valid(case(""), "<tool_call>", AnswerFields()) is None


SQL = "SELECT id, COUNT(*) FROM rides WHERE minutes<13 AND city = 'Old  Town'"


@pytest.mark.parametrize(
    ("query", "right"),
    [
        ("select id, count(*)\n  from rides\n where minutes < 13 and city='Old  Town'", 1.0),
        (SQL.replace("<", ">"), 0.0),
        (SQL.replace("<", "<="), 0.0),
        (SQL.replace("COUNT(*)", "count"), 0.0),
        (SQL.replace("Old  Town", "Old Town"), 0.0),
        (SQL.replace("Old  Town", "old  town"), 0.0),
        (SQL.replace("rides", "bikes"), 0.0),
        (SQL.replace("13", "1 3"), 0.0),
    ],
)
def test_in_sql_only_white_space_and_the_case_of_keywords_do_not_count(query, right):
    def reply(text):
        return said(ToolCall("run_sql", {"query": text, "limit": 5}))

    assert grades(case(reply(SQL)), reply(query)) == (right, pytest.approx(0.75 + 0.25 * right))


@pytest.mark.parametrize(
    ("wanted", "given", "right"),
    [(2, 2.0, 1.0), (1, True, 0.0), (2, "2", 0.0), ("Pay, now!", "pay now", 0.0), ("a  b", "a b", 0.0)],
)
def test_arguments_are_equal_as_values(wanted, given, right):
    reply = said(ToolCall("find", {"list": [wanted]}))
    assert grade_tool_calls(case(reply), said(ToolCall("find", {"list": [given]})), AnswerFields()) == right


def with_tools(reply):
    return case(reply, system=write_tools([COUNT]))


ONE = said(ToolCall("count", {"n": 1}))


@pytest.mark.parametrize(
    ("answer", "right"), [("No.", 1.0), (ONE, 0.0), ('<tool_call>\n{"name": "count"', 0.0)]
)
def test_a_reply_that_must_not_call_is_graded_for_calling_nothing(answer, right):
    assert grade_no_call_where_due(with_tools("I may not."), answer, AnswerFields()) == right
    assert grade_no_call_where_due(with_tools(ONE), answer, AnswerFields()) is None
