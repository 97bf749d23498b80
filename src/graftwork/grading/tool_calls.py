"""Metrics of tool calls: the right functions, with the right arguments, in the right order.

In: a case whose reference holds calls, or whose prompt defines tools, and an answer. Out: a grade. Calling
where the reference does not is as wrong as not calling where it does. Whether a call could be run at all is
seen without a reference, also by the endpoint. Arguments are equal as JSON values; in SQL, white space and
the case of keywords do not count.
"""

from typing import Any

from graftwork.grading.answers import AnswerFields, same_value
from graftwork.grading.call_faults import find_call_fault, read_tools
from graftwork.grading.interface import CannotGrade, Grade
from graftwork.grading.matching import PatternTooSlow
from graftwork.records.report import Case
from graftwork.text.sql import read_sql
from graftwork.text.tool_calls import TOOLS_MARK, ToolCall, read_calls

MOST_CALLS = 200
"""More calls than this in one answer are wrong, and not compared one by one."""


def grade_tool_calls(case: Case, text: str, _fields: AnswerFields) -> Grade:
    """The same calls in the same order, with equal arguments."""
    expected = _expected(case)
    if expected is None:
        return None
    given = read_calls(text)
    return float(given is not None and len(given) == len(expected) and all(map(_same_call, expected, given)))


def grade_no_call_where_due(case: Case, text: str, _fields: AnswerFields) -> Grade:
    """Where tools are offered and the reference calls none: neither does the answer."""
    return None if _expected(case) != () else float(read_calls(text) == ())


def grade_tool_call_f1(case: Case, text: str, _fields: AnswerFields) -> Grade:
    """The share of calls that agree, in order; half of a call is its name, half its arguments."""
    expected = _expected(case)
    if expected is None:
        return None
    given = read_calls(text)
    if given is None or len(given) > MOST_CALLS:
        return 0.0
    if not given and not expected:
        return 1.0
    return 2 * _align(expected, given) / (len(expected) + len(given))


def grade_tool_calls_valid(case: Case, text: str, _fields: AnswerFields) -> Grade:
    """Every call is JSON and names a tool of the prompt, with arguments that its schema accepts."""
    if read_tools(case.messages) is None:
        return None
    try:
        return float(find_call_fault(case.messages, text) is None)
    except PatternTooSlow as error:
        raise CannotGrade(str(error)) from error


def _expected(case: Case) -> tuple[ToolCall, ...] | None:
    """The calls of the reference; None where no call is in question."""
    calls = read_calls(case.reference)
    if calls is None or len(calls) > MOST_CALLS:
        return None
    offers_tools = any(turn.role == "system" and TOOLS_MARK in turn.content for turn in case.messages)
    return calls if calls or offers_tools else None


def _align(expected: tuple[ToolCall, ...], given: tuple[ToolCall, ...]) -> float:
    """The most agreement of calls that keep their order."""
    best = [0.0] * (len(given) + 1)
    for wanted in expected:
        row = [0.0]
        for place, call in enumerate(given):
            row.append(max(best[place + 1], row[-1], best[place] + _agree(wanted, call)))
        best = row
    return best[-1]


def _agree(wanted: ToolCall, call: ToolCall) -> float:
    if wanted.name != call.name:
        return 0.0
    return 0.5 + 0.5 * _share(wanted.arguments, call.arguments)


def _share(wanted: Any, given: Any) -> float:
    """The share of arguments that are equal."""
    if not isinstance(wanted, dict) or not isinstance(given, dict):
        return float(_same_argument(wanted, given))
    names = wanted.keys() | given.keys()
    if not names:
        return 1.0
    equal = [name for name in wanted.keys() & given.keys() if _same_argument(wanted[name], given[name])]
    return len(equal) / len(names)


def _same_call(wanted: ToolCall, given: ToolCall) -> bool:
    return wanted.name == given.name and _same_argument(wanted.arguments, given.arguments)


def _same_argument(wanted: Any, given: Any) -> bool:
    return same_value(wanted, given, _same_text)


def _same_text(wanted: str, given: str) -> bool:
    if wanted == given:
        return True
    statement = read_sql(wanted)
    return statement is not None and statement == read_sql(given)
