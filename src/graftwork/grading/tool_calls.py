"""Metrics of tool calls: the right functions, with the right arguments, in the right order.

In: a case whose reference holds calls, or whose prompt defines tools, and an answer. Out: a grade. Calling
where the reference does not is as wrong as not calling where it does. Whether a call could be run at all is
seen without a reference, also by the endpoint.
"""

import json
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from graftwork.grading.answers import AnswerFields
from graftwork.grading.interface import CannotGrade, Grade
from graftwork.grading.matching import PatternTooSlow, Schema, fits, require_schema
from graftwork.records.report import Case
from graftwork.text.tool_calls import TOOLS_MARK, ToolCall, define_tool, read_calls, split_tools

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


def grade_tool_calls_valid(case: Case, text: str, _fields: AnswerFields) -> Grade:
    """Every call is JSON and names a tool of the prompt, with arguments that its schema accepts."""
    listed = [split_tools(turn.content) for turn in case.messages if turn.role == "system"]
    tools = [tool for found in listed if found is not None for tool in found.tools]
    try:
        return float(find_wrong_call(text, tools) is None) if tools else None
    except PatternTooSlow as error:
        raise CannotGrade(str(error)) from error


def find_wrong_call(text: str, tools: Sequence[dict[str, Any]]) -> str | None:
    """What is wrong with the first call in a text that could not be run; None if there is none.

    A schema with keywords that cannot be checked accepts all arguments. Raises PatternTooSlow.
    """
    calls = read_calls(text)
    if calls is None:
        return "a call is no JSON with a name and arguments"
    functions = [define_tool(tool).get("function", {}) for tool in tools]
    schemas = {function.get("name"): function.get("parameters", {}) for function in functions}
    for call in calls:
        if call.name not in schemas:
            return f"there is no tool {call.name}"
        if not isinstance(call.arguments, dict):
            return f"the arguments of {call.name} are no object"
        schema = _find_schema(json.dumps(schemas[call.name]))
        if schema is not None and not fits(call.arguments, schema):
            return f"the arguments of {call.name} do not fit its schema"
    return None


@lru_cache(maxsize=256)
def _find_schema(written: str) -> Schema | None:
    schema: Schema = json.loads(written)
    try:
        require_schema(schema)
    except ValueError:
        return None
    return schema


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
