"""Rows of a `prompt` and its `completion`: plain text, or lists of messages on both sides."""

from typing import Any

from graftwork.data.formats.facts import take_facts
from graftwork.data.formats.fields import BadRow, first_of, take_optional_text, take_text
from graftwork.data.formats.turns import (
    Turn,
    require_user,
    take_turns,
    to_exchange,
    to_messages,
    write_reply,
)
from graftwork.records.interaction import Interaction, Origin

COMPLETION_EXPECTS = "prompt and completion"
_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("question", "response"),
)


def fits_completion(row: dict[str, Any]) -> bool:
    return any(row.get(asked) is not None and said in row for asked, said in _PAIRS)


def read_completion(row: dict[str, Any], origin: Origin) -> Interaction:
    asked, said = next(pair for pair in _PAIRS if row.get(pair[0]) is not None and pair[1] in row)
    turns = take_prompt(row[asked], asked, system=first_of(row, "system", "system_prompt"))
    tools = first_of(row, "tools", "functions")
    reply = row[said]
    if isinstance(reply, list) and reply and isinstance(reply[0], dict) and "role" in reply[0]:
        exchange = to_exchange([*turns, *take_turns(reply, said)], said, tools=tools)
        return Interaction(messages=exchange.messages, reply=exchange.reply, **take_facts(row, origin))
    require_user(turns, asked)
    reasoning = (
        take_optional_text(first_of(row, "reasoning_content", "reasoning", "thinking"), "reasoning") or ""
    )
    answer = Turn("assistant", "" if reply is None else take_text(reply, said), reasoning)
    return Interaction(
        messages=to_messages(turns, tools=tools), reply=write_reply(answer), **take_facts(row, origin)
    )


def take_prompt(value: Any, key: str, *, system: Any = None) -> list[Turn]:
    """What was asked: text, which may not be empty, or the turns so far; a system prompt before it."""
    if isinstance(value, list) and value and isinstance(value[0], dict) and "role" in value[0]:
        turns = take_turns(value, key)
    else:
        text = take_text(value, key)
        if not text.strip():
            raise BadRow(f"`{key}` is empty")
        turns = [Turn("user", text)]
    led = take_optional_text(system, "system")
    return [Turn("system", led), *turns] if led and turns[0].role != "system" else turns
