"""Tools in OpenAI's form: definitions, choices and calls.

In: fields of a request. Out: definitions as chat templates take them, and turns with their calls in tags, the
form that interactions keep.
"""

import re
from typing import Any, NamedTuple

import orjson

from graftwork.engines.protocol import CallData
from graftwork.serve.api.fields import is_nested_deeper, take, unsupported, wrong
from graftwork.text.tool_calls import TextAndCalls, ToolCall, define_tool, write_calls

MOST_TOOLS = 128
MOST_SCHEMA_BYTES = 64 * 1024
"""Of the JSON Schema of `response_format`, and of all tools of a request."""
DEEPEST_SCHEMA = 48
"""Levels of nesting in a schema."""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class ToolUse(NamedTuple):
    tools: tuple[dict[str, Any], ...] = ()
    choice: str = "auto"
    parallel: bool = True
    strict: bool = False


def parse_tools(body: dict[str, Any]) -> ToolUse:
    """The tools of a chat request; none of them if `tool_choice` is `none`."""
    parallel = take(body, "parallel_tool_calls", bool, True)
    listed = take(body, "tools", list, [])
    if len(listed) > MOST_TOOLS:
        raise wrong("tools", f"has {len(listed)} tools; the limit is {MOST_TOOLS}")
    tools = [_parse_tool(tool, f"tools[{place}]") for place, tool in enumerate(listed)]
    require_small(listed, "tools")
    names = [tool["function"]["name"] for tool in tools]
    for place, name in enumerate(names):
        if name in names[:place]:
            raise wrong(f"tools[{place}].function.name", f"repeats {name!r}")
    choice = _parse_choice(body.get("tool_choice", "auto"), names)
    if choice == "none" or not tools:
        return ToolUse()
    strict = any(tool["function"].get("strict") is True for tool in listed)
    return ToolUse(tuple(tools), choice, parallel, strict)


def require_small(value: Any, param: str) -> None:
    """Refuse schemas that are large or deeply nested: they are compiled and rendered for each request."""
    if is_nested_deeper(value, DEEPEST_SCHEMA):
        raise wrong(param, f"is nested deeper than {DEEPEST_SCHEMA} levels")
    size = len(orjson.dumps(value))
    if size > MOST_SCHEMA_BYTES:
        raise wrong(param, f"has {size} bytes; the limit is {MOST_SCHEMA_BYTES}")


def _parse_tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise wrong(where, 'must be {"type": "function", "function": {…}}')
    if tool["type"] != "function":
        raise unsupported(f"{where}.type", f"{tool['type'][:80]!r} is not supported: only functions are")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise wrong(f"{where}.function", "must be an object with a name")
    for key in (*(tool.keys() - {"type", "function"}), *(function.keys() - _FUNCTION_KEYS)):
        raise unsupported(f"{where}.{key[:80]}")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(f"{where}.function.name", "must be 1 to 64 letters, digits, _ or -")
    if not isinstance(function.get("description", ""), str | None):
        raise wrong(f"{where}.function.description", "must be a string")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong(f"{where}.function.parameters", "must be a JSON Schema object")
    if not isinstance(function.get("strict", False), bool | None):
        raise wrong(f"{where}.function.strict", "must be true or false")
    return define_tool(tool)


_FUNCTION_KEYS = {"name", "description", "parameters", "strict"}


def _parse_choice(choice: Any, names: list[str]) -> str:
    if isinstance(choice, str) and choice in ("none", "auto"):
        return choice
    if choice == "required":
        if not names:
            raise wrong("tool_choice", "is required, but there are no tools")
        return "required"
    if (
        isinstance(choice, dict)
        and choice.get("type") == "function"
        and choice.keys() <= {"type", "function"}
    ):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or name not in names:
            raise wrong(
                "tool_choice.function.name", f"must be one of the tools: {', '.join(names) or 'none'}"
            )
        return f"={name}"
    if isinstance(choice, dict):
        raise unsupported("tool_choice.type", "is not supported: only `function` is")
    raise wrong("tool_choice", "must be none, auto, required or a function")


class Turns:
    """Checks tool calls and their results as a conversation goes on."""

    def __init__(self) -> None:
        self._open: set[str] = set()

    def write_calls(self, text: str, calls: Any, where: str) -> str:
        """An assistant's turn with its calls in tags."""
        if not isinstance(calls, list):
            raise wrong(where, "must be a list")
        made = [self._parse_call(call, f"{where}[{place}]") for place, call in enumerate(calls)]
        return write_calls(TextAndCalls(text, tuple(made)))

    def _parse_call(self, call: Any, where: str) -> ToolCall:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or call.get("type", "function") != "function":
            raise wrong(where, 'must be {"id": …, "type": "function", "function": {…}}')
        name, text = function.get("name"), function.get("arguments")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise wrong(f"{where}.function.name", "must be 1 to 64 letters, digits, _ or -")
        try:
            # Some servers write nothing for a call without arguments, and clients send it back.
            arguments = orjson.loads(text or "{}") if isinstance(text, str) else None
        except orjson.JSONDecodeError:
            arguments = None
        if not isinstance(arguments, dict) or is_nested_deeper(arguments, DEEPEST_SCHEMA):
            raise wrong(f"{where}.function.arguments", "must be a JSON object as a string")
        if not isinstance(call.get("id"), str):
            raise wrong(f"{where}.id", "must be a string")
        self._open.add(call["id"])
        return ToolCall(name, arguments)

    def check_result(self, call_id: Any, where: str) -> None:
        if not isinstance(call_id, str) or call_id not in self._open:
            raise wrong(where, "must be the id of a tool call in an earlier message")


def encode_call(call: CallData, call_id: str) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call_id, "type": "function", "function": function}


def call_id(unique: str, choice: int, place: int) -> str:
    """The id of a call, the same in a stream and in a whole answer."""
    return f"call_{unique[:20]}{choice:02d}{place:02d}"
