"""ShareGPT rows: `conversations` of turns with `from` and `value`; `system` and `tools` beside them."""

from typing import Any

from graftwork.data.formats.facts import take_facts
from graftwork.data.formats.fields import (
    BadRow,
    first_of,
    name_type,
    open_json,
    take_object,
    take_optional_text,
    take_text,
)
from graftwork.data.formats.turns import ROLES, Turn, take_message, to_exchange, write_call
from graftwork.records.interaction import Interaction, Origin

SHAREGPT_EXPECTS = "conversations with from and value"


def fits_sharegpt(row: dict[str, Any]) -> bool:
    return first_of(row, "conversations", "conversation") is not None


def read_sharegpt(row: dict[str, Any], origin: Origin) -> Interaction:
    listed = open_json(first_of(row, "conversations", "conversation"))
    if not isinstance(listed, list) or not listed:
        raise BadRow(f"`conversations` must be a list of turns, and is {name_type(listed)}")
    turns: list[Turn] = []
    for place, item in enumerate(listed):
        turns += _take_turn(item, f"conversations[{place}]")
    system = take_optional_text(first_of(row, "system", "system_prompt"), "system")
    if system and turns and turns[0].role != "system":
        turns.insert(0, Turn("system", system))
    exchange = to_exchange(turns, "conversations", tools=row.get("tools"))
    return Interaction(messages=exchange.messages, reply=exchange.reply, **take_facts(row, origin))


def _take_turn(value: Any, key: str) -> list[Turn]:
    turn = take_object(value, key)
    if "from" not in turn:
        return take_message(turn, key)  # some hold messages under this name
    speaker = turn["from"]
    if not isinstance(speaker, str) or speaker.lower() not in ROLES:
        raise BadRow(f"`{key}.from` must be one of system, human, gpt, tool, function_call, observation")
    said = turn.get("value")
    if speaker.lower() == "function_call":
        call = open_json(said)
        calls = call if isinstance(call, list) else [call]
        return [Turn("assistant", "\n".join(_write_call(item, f"{key}.value") for item in calls))]
    return [Turn(ROLES[speaker.lower()], take_text(said, f"{key}.value"))]


def _write_call(value: Any, key: str) -> str:
    if isinstance(value, str):
        return f"<tool_call>\n{take_text(value, key)}\n</tool_call>"
    call = take_object(value, key)
    return write_call(call.get("name"), first_of(call, "arguments", "parameters"), key)
