"""Whether the tool calls of a text can be carried out: they parse, name a known tool and fit its schema.

In: the prompt, which may define tools, and what an assistant wrote. Out: what is wrong with the first bad
call, in words that many rows share, or None; PatternTooSlow where a schema's pattern runs out of time. Where
the prompt defines no tools, only the form is judged; a schema that is not understood refuses nothing. Does
not know whether the call is the right one.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from graftwork.grading.matching import Schema, find_misfit, keep_known, require_schema
from graftwork.records.interaction import Message
from graftwork.text.redact import redact
from graftwork.text.tool_calls import TOOLS_MARK, ToolCall, define_tool, read_calls, split_tools

_BEGUN = re.compile(r"<tool_call>\s*[{\[]")

Tools = Mapping[str, Schema | None]
"""The schema of each tool's arguments; None where it has none that is understood."""


def find_call_fault(messages: Sequence[Message], text: str) -> str | None:
    if "<tool_call>" not in text:
        return None
    calls = read_calls(text)
    if calls is None:
        return "a call is not JSON with a name and arguments" if _BEGUN.search(text) else None
    tools = read_tools(messages)
    return next((fault for call in calls if (fault := _judge(call, tools)) is not None), None)


def read_tools(messages: Sequence[Message]) -> Tools | None:
    """The tools that the prompt defines; None where it defines none, or in no known way."""
    for message in messages:
        if message.role == "system" and TOOLS_MARK in message.content:
            return _read_block(message.content)
    return None


@lru_cache(maxsize=256)
def _read_block(system: str) -> Tools | None:
    defined = split_tools(system)
    if defined is None:
        return None
    tools: dict[str, Schema | None] = {}
    for tool in map(define_tool, defined.tools):
        function = tool.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            return None
        tools[function["name"]] = _read_schema(function.get("parameters"))
    return tools


def _read_schema(schema: Any) -> Schema | None:
    try:
        known: Schema = keep_known(schema)
        require_schema(known)
    except (ValueError, RecursionError):
        return None
    return known


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
