"""Metrics of tool calls: the right functions, with the right arguments, in the right order.

Input: a case whose reference holds calls, or whose prompt defines tools, and an answer. Output: a grade.
Calling where the reference does not is as wrong as not calling where it does. Whether a call could be run at
all (it parses, names a known tool and fits its schema) is seen without a reference, also by the endpoint and
the audit; a schema that is not understood refuses nothing. Arguments are equal as JSON values; in SQL, white
space and the case of keywords do not count.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from graftwork.grading.answers import AnswerFields, same_value
from graftwork.grading.interface import CannotGrade, Grade
from graftwork.grading.matching import PatternTooSlow, Schema, find_misfit, keep_known, require_schema
from graftwork.records.interaction import Message
from graftwork.records.report import Case
from graftwork.text.redact import redact
from graftwork.text.tool_calls import TOOLS_MARK, ToolCall, define_tool, read_calls, split_tools

_BEGUN = re.compile(r"<tool_call>\s*[{\[]")

Tools = Mapping[str, Schema | None]
"""The schema of each tool's arguments; None if it has none, or none that is understood."""


def find_call_fault(messages: Sequence[Message], text: str) -> str | None:
    if "<tool_call>" not in text:
        return None
    calls = read_calls(text)
    if calls is None:
        return "a call is not JSON with a name and arguments" if _BEGUN.search(text) else None
    tools = read_tools(messages)
    return next((fault for call in calls if (fault := _judge(call, tools)) is not None), None)


def read_tools(messages: Sequence[Message]) -> Tools | None:
    """Return the tools that the prompt defines; None if it defines none, or in an unknown form."""
    for message in messages:
        if message.role == "system" and TOOLS_MARK in message.content:
            return _read_tools(message.content)
    return None


@lru_cache(maxsize=256)
def _read_tools(system: str) -> Tools | None:
    defined = split_tools(system)
    if defined is None:
        return None
    tools: dict[str, Schema | None] = {}
    for tool in map(define_tool, defined[1]):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        try:
            schema: Schema | None = keep_known(function.get("parameters"))
            require_schema(schema)
        except (ValueError, RecursionError):
            schema = None
        tools[function["name"]] = schema
    return tools


def _judge(call: ToolCall, tools: Tools | None) -> str | None:
    if not isinstance(call.arguments, dict):
        return "the arguments are not a JSON object"
    if tools is None:
        return None
    name = redact(call.name).text[:40]
    if call.name not in tools:
        return f"the prompt defines no tool {name}"
    schema = tools[call.name]
    misfit = None if schema is None else find_misfit(call.arguments, schema)
    return None if misfit is None else f"the schema of {name} refuses the arguments ({misfit})"


_STATEMENT = re.compile(
    r"\s*(?:SELECT\b.*\bFROM\b|WITH\b.*\bAS\b|INSERT\s+INTO\b|REPLACE\s+INTO\b|MERGE\s+INTO\b"
    r"|UPDATE\b.*\bSET\b|DELETE\s+FROM\b|TRUNCATE\s+TABLE\b"
    r"|(?:CREATE|ALTER|DROP)\s+(?:\w+\s+)?(?:TABLE|VIEW|INDEX)\b)",
    re.IGNORECASE | re.DOTALL,
)
_TOKEN = re.compile(
    r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|--[^\n]*|/\*.*?\*/|\d+(?:\.\d+)?\w*|[^\W\d][\w$]*"""
    r"""|<=>|<>|<=|>=|!=|==|=>|:=|::|\|\||->>|->|[^\s\w]""",
    re.DOTALL,
)
_QUOTES = {"'", '"', "`"}
_LISTED = """
    ALL ALTER AND ANY AS ASC AVG BEGIN BETWEEN BY CASE CAST COALESCE COLUMN COMMIT COUNT CREATE CROSS DEFAULT
    DELETE DESC DISTINCT DROP ELSE END EXCEPT EXISTS FALSE FETCH FIRST FOR FOREIGN FROM FULL GROUP HAVING IF
    ILIKE IN INDEX INNER INSERT INTERSECT INTERVAL INTO IS JOIN KEY LAST LEFT LIKE LIMIT MAX MERGE MIN NATURAL
    NEXT NOT NULL NULLS OFFSET ON ONLY OR ORDER OUTER OVER PARTITION PRIMARY RECURSIVE REFERENCES REPLACE
    RETURNING RIGHT ROLLBACK ROW ROWS SELECT SET SUM TABLE THEN TRUE TRUNCATE UNION UNIQUE UPDATE USING VALUES
    VIEW WHEN WHERE WINDOW WITH
    """
_KEYWORDS = frozenset(_LISTED.split())


def read_sql(text: str) -> tuple[str, ...] | None:
    """Return the tokens of a statement; None for other text and for an unclosed quote."""
    if _STATEMENT.match(text) is None:
        return None
    tokens = _TOKEN.findall(text)
    if any(token in _QUOTES for token in tokens):
        return None
    return tuple(token.upper() if token.upper() in _KEYWORDS else token for token in tokens)


MOST_CALLS = 200
"""More calls than this in one answer are wrong, and not compared one by one."""


def grade_tool_calls(case: Case, text: str, _fields: AnswerFields) -> Grade:
    """The same calls in the same order, with equal arguments."""
    expected = _expected(case)
    if expected is None:
        return None
    calls = read_calls(text)
    if calls is None or len(calls) != len(expected):
        return 0.0
    return float(
        all(
            expected_call.name == call.name and _same_argument(expected_call.arguments, call.arguments)
            for expected_call, call in zip(expected, calls, strict=True)
        )
    )


def grade_no_call_where_due(case: Case, text: str, _fields: AnswerFields) -> Grade:
    """If tools are offered and the reference calls none: neither does the answer."""
    return None if _expected(case) != () else float(read_calls(text) == ())


def grade_tool_call_f1(case: Case, text: str, _fields: AnswerFields) -> Grade:
    """The share of calls that agree, in order; half of a call is its name, half its arguments."""
    expected = _expected(case)
    if expected is None:
        return None
    calls = read_calls(text)
    if calls is None or len(calls) > MOST_CALLS:
        return 0.0
    if not calls and not expected:
        return 1.0
    # The most agreement of calls that keep their order.
    best = [0.0] * (len(calls) + 1)
    for expected_call in expected:
        row = [0.0]
        for column, call in enumerate(calls):
            agreement = 0.0
            if expected_call.name == call.name:
                agreement = 0.5 + 0.5 * _share(expected_call.arguments, call.arguments)
            row.append(max(best[column + 1], row[-1], best[column] + agreement))
        best = row
    return 2 * best[-1] / (len(expected) + len(calls))


def grade_tool_calls_valid(case: Case, text: str, _fields: AnswerFields) -> Grade:
    """Every call is JSON and names a tool of the prompt, with arguments that its schema accepts."""
    if read_tools(case.messages) is None:
        return None
    try:
        return float(find_call_fault(case.messages, text) is None)
    except PatternTooSlow as error:
        raise CannotGrade(str(error)) from error


def _expected(case: Case) -> tuple[ToolCall, ...] | None:
    """Return the calls of the reference; None if the metric does not apply."""
    calls = read_calls(case.reference)
    if calls is None or len(calls) > MOST_CALLS:
        return None
    offers_tools = any(turn.role == "system" and TOOLS_MARK in turn.content for turn in case.messages)
    return calls if calls or offers_tools else None


def _share(expected: Any, answered: Any) -> float:
    """The share of arguments that are equal."""
    if not isinstance(expected, dict) or not isinstance(answered, dict):
        return float(_same_argument(expected, answered))
    names = expected.keys() | answered.keys()
    if not names:
        return 1.0
    equal = [
        name for name in expected.keys() & answered.keys() if _same_argument(expected[name], answered[name])
    ]
    return len(equal) / len(names)


def _same_argument(expected: Any, answered: Any) -> bool:
    def same_text(one: str, two: str) -> bool:
        statement = None if one == two else read_sql(one)
        return one == two or (statement is not None and statement == read_sql(two))

    return same_value(expected, answered, same_text)
