"""Turns of a conversation with their tools and calls, as short lines instead of tags and JSON."""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from graftwork.records.interaction import Message
from graftwork.text.tool_calls import ToolCall, read_calls, split_tools

CALL_TAG = "<tool_call>"


class ShownTurn(NamedTuple):
    """`text` is without the tools and calls in it."""

    role: str
    text: str
    calls: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()


def show_call(call: ToolCall) -> str:
    """`lookup(city="Oslo", days=3)`."""
    if not isinstance(call.arguments, dict):
        return f"{call.name}({_value(call.arguments)})"
    return f"{call.name}({', '.join(f'{name}={_value(value)}' for name, value in call.arguments.items())})"


def show_tool(tool: dict[str, Any]) -> str:
    """`lookup(city, days)`."""
    function = tool.get("function")
    described = function if isinstance(function, dict) else tool
    parameters = described.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    names = properties if isinstance(properties, dict) else {}
    return f"{described.get('name', '?')}({', '.join(map(str, names))})"


def split_answer(text: str) -> tuple[str, tuple[ToolCall, ...]]:
    """The text before the first call, and the calls. What cannot be read as calls stays text."""
    before, tag, _ = text.partition(CALL_TAG)
    calls = read_calls(text) if tag else None
    return (before.rstrip(), calls) if calls else (text, ())


def show_turn(turn: Message) -> ShownTurn:
    if turn.role == "system" and (parts := split_tools(turn.content)) is not None:
        return ShownTurn(turn.role, parts[0], tools=tuple(map(show_tool, parts[1])))
    text, calls = split_answer(turn.content) if turn.role == "assistant" else (turn.content, ())
    return ShownTurn(turn.role, text, calls=tuple(map(show_call, calls)))


def show_turns(turns: Sequence[Message]) -> tuple[ShownTurn, ...]:
    return tuple(map(show_turn, turns))


def _value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
