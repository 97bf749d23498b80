"""Tool calls and tool definitions as text, in the one form that interactions keep them.

A call is JSON in <tool_call> tags; the tools that a model may call are a `# Tools` block of the system turn
(both as in Qwen's template). Training, evaluation and serving write and read them here, so that a model is
asked as it was trained. Input: calls and definitions, or text. Output: the other. Reading back gives None for
text that is not exactly in this form, so that nothing is lost by writing it again.
"""

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from graftwork.records.interaction import Message

OPEN, CLOSE = "<tool_call>\n", "\n</tool_call>"
TOOLS_MARK = "<tools>"
TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


ANY_ARGUMENTS = {"type": "object", "properties": {}}
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


class ToolCall(NamedTuple):
    name: str
    arguments: Any


class TextAndCalls(NamedTuple):
    """What an assistant wrote: text, then calls."""

    text: str
    calls: tuple[ToolCall, ...]


def write_call(call: ToolCall) -> str:
    """Write a call as chat templates do: keys in order, a space after each separator."""
    return f"{OPEN}{_write({'name': call.name, 'arguments': call.arguments})}{CLOSE}"


def write_calls(answer: TextAndCalls) -> str:
    calls = [write_call(call) for call in answer.calls]
    return "\n".join([answer.text, *calls] if answer.text else calls)


def split_calls(content: str) -> TextAndCalls | None:
    """Split text and the calls after it; None if there are none, or not in this form."""
    start = content.find(OPEN)
    if start < 0 or not content.endswith(CLOSE):
        return None
    calls = _parse_calls(content[start + len(OPEN) : -len(CLOSE)].split(f"{CLOSE}\n{OPEN}"))
    if calls is None:
        return None
    text = content[: start - 1] if start and content[start - 1] == "\n" else content[:start]
    answer = TextAndCalls(text, calls)
    try:
        return answer if write_calls(answer) == content else None
    except (ValueError, RecursionError):
        return None


def read_calls(text: str) -> tuple[ToolCall, ...] | None:
    """Read every call in a text, however it is spaced; None if one of them is not a call."""
    return _parse_calls(_TAGGED.findall(text))


def _parse_calls(parts: list[str]) -> tuple[ToolCall, ...] | None:
    calls = []
    for part in parts:
        try:
            call = json.loads(part)
        except (ValueError, RecursionError):
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        calls.append(ToolCall(call["name"], call.get("arguments")))
    return tuple(calls)


def write_tools(tools: Sequence[dict[str, Any]]) -> str:
    """Write tool definitions in OpenAI's nested form; empty if there are none."""
    lines = [_write(define_tool(tool)) for tool in tools]
    return TOOLS_BEFORE + "\n".join(lines) + TOOLS_AFTER if tools else ""


def define_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A definition in OpenAI's nested form, from that, its flat form or Anthropic's; any other is kept."""
    nested = tool.get("function")
    function = nested if isinstance(nested, dict) else tool
    if tool.get("type", "function") not in ("function", "custom") or not isinstance(
        function.get("name"), str
    ):
        return tool
    schemas = [function[key] for key in ("parameters", "input_schema", "inputSchema") if function.get(key)]
    described = {key: function[key] for key in ("name", "description") if function.get(key) is not None}
    return {
        "type": "function",
        "function": {**described, "parameters": schemas[0] if schemas else ANY_ARGUMENTS},
    }


def add_tools(messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> tuple[Message, ...]:
    """The messages with the tools at the end of the system turn, unless it lists tools already."""
    system = messages[0].content if messages and messages[0].role == "system" else None
    if not tools or TOOLS_MARK in (system or ""):
        return tuple(messages)
    block = write_tools(tools)
    led = Message(role="system", content=f"{system}\n\n{block}" if system else block)
    return (led, *messages[system is not None :])


def split_tools(system: str) -> tuple[str, list[dict[str, Any]]] | None:
    """Split a system prompt and the tools that its end defines; None if it has no such block."""
    start = system.find(TOOLS_BEFORE)
    if start < 0 or not system.endswith(TOOLS_AFTER):
        return None
    tools = []
    for line in system[start + len(TOOLS_BEFORE) : -len(TOOLS_AFTER)].split("\n"):
        try:
            tool = json.loads(line)
        except (ValueError, RecursionError):
            return None
        if not isinstance(tool, dict):
            return None
        tools.append(tool)
    prompt = system[:start]
    if prompt and not prompt.endswith("\n\n"):
        return None
    return prompt.removesuffix("\n\n"), tools


def _write(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
