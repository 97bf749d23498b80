"""Metrics of tool calls: the right functions, with the right arguments, in the right order.

In: a case whose reference holds calls, or whose prompt defines tools, and an answer. Out: a grade. Calling
where the reference does not is as wrong as not calling where it does.
"""

from typing import Any

from graftwork.grading.answers import AnswerFields
from graftwork.grading.interface import Grade
from graftwork.records.report import Case
from graftwork.text.tool_calls import TOOLS_MARK, ToolCall, read_calls

MOST_CALLS = 200
"""More calls than this in one answer are wrong, and not compared one by one."""


def grade_tool_calls(case: Case, text: str, _fields: AnswerFields) -> Grade:
    """The same calls in the same order, with equal arguments."""
    expected = _expected(case)
    return None if expected is None else float(read_calls(text) == expected)


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
        return float(wanted == given)
    names = wanted.keys() | given.keys()
    if not names:
        return 1.0
    equal = [name for name in wanted.keys() & given.keys() if wanted[name] == given[name]]
    return len(equal) / len(names)
