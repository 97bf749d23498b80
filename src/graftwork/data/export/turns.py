"""The turns of a row in the shapes that several formats share.

In: a row whose tool calls stand as `<tool_call>` blocks in the text, and the definitions of its tools
as a block in the system prompt. Out: plain messages, or text, calls and definitions apart. What cannot
be taken apart without loss stays text.
"""

import json
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

from graftwork.data.formats.fields import BadRow
from graftwork.data.formats.turns import write_tools
from graftwork.records.dataset import Row
from graftwork.records.interaction import Message
from graftwork.text.json_size import has_too_many_values

OPENS, CLOSES = "<tool_call>", "</tool_call>"


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]


class Turn(NamedTuple):
    """What an assistant says, and the tools that it calls after it."""

    text: str
    calls: tuple[ToolCall, ...] = ()


class Conversation(NamedTuple):
    """Turns, and apart from them the functions that may be called: name, description, parameters."""

    messages: tuple[Message, ...]
    functions: tuple[dict[str, Any], ...] = ()


def take_calls_apart(content: str) -> Turn:
    """Calls count only where they end the turn: a list of calls beside the text has no other place."""
    text, calls = content.rstrip(), list[ToolCall]()
    while text.endswith(CLOSES):
        before, opened, block = text.removesuffix(CLOSES).rpartition(OPENS)
        call = _read_call(block) if opened else None
        if call is None:
            return Turn(content)
        calls.insert(0, call)
        text = before.rstrip()
    return Turn(text, tuple(calls)) if calls and OPENS not in text else Turn(content)


def take_tools_apart(messages: Sequence[Message]) -> Conversation:
    """Only a block that would be written again to the letter is taken out of the system prompt."""
    if not messages or messages[0].role != "system" or "<tools>" not in messages[0].content:
        return Conversation(tuple(messages))
    system = messages[0].content
    try:
        listed = [_read_json(line) for line in _between(system, "<tools>\n", "\n</tools>").split("\n")]
        functions = tuple(_to_function(tool) for tool in listed)
        before, found, behind = system.partition(write_tools(listed))
    except ValueError:
        return Conversation(tuple(messages))
    if not found or not functions:
        return Conversation(tuple(messages))
    rest = f"{before.rstrip()}{behind}"
    kept = (Message(role="system", content=rest),) if rest.strip() else ()
    return Conversation((*kept, *messages[1:]), functions)


def plain(message: Message) -> dict[str, str]:
    return {"role": message.role, "content": message.content}


def prompt_and_completion(row: Row) -> dict[str, Any]:
    """The last turn apart from those before it, which is how a trainer knows what to train on."""
    return {"prompt": [plain(one) for one in row.messages], "completion": [assistant(row.reply)]}


def prompt_and_pair(row: Row) -> dict[str, Any]:
    return {
        "prompt": [plain(one) for one in row.messages],
        "chosen": [assistant(row.reply)],
        "rejected": [assistant(row.rejected or "")],
    }


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _read_call(block: str) -> ToolCall | None:
    try:
        value = _read_json(block)
    except ValueError:
        return None
    if not isinstance(value, dict) or not value.keys() <= {"id", "name", "arguments"}:
        return None
    name, arguments = value.get("name"), value.get("arguments", {})
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return None
    return ToolCall(name, arguments)


def write_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _read_json(text: str) -> Any:
    """What can be written again as it was read: large numbers whole, no NaN, no half characters."""
    if has_too_many_values(text):
        raise BadRow("holds too many values")
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        write_json(value).encode()
    except RecursionError:
        raise BadRow("nested too deeply") from None
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise BadRow(f"{name} is no JSON")


def _between(text: str, before: str, behind: str) -> str:
    return text.partition(before)[2].partition(behind)[0]


def _to_function(tool: Any) -> dict[str, Any]:
    """The definition of a function as OpenAI writes it, whoever wrote it."""
    function = tool.get("function", tool) if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRow("no definition of a function")
    parameters = function.get("parameters", function.get("input_schema"))
    described = {key: function[key] for key in ("name", "description", "strict") if function.get(key)}
    return {**described, "parameters": parameters or {"type": "object", "properties": {}}}
