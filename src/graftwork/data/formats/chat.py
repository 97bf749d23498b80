"""Chat rows: `messages` whose last turn is the assistant's reply, with what the log adds to them."""

from typing import Any

from graftwork.data.formats.facts import take_facts
from graftwork.data.formats.fields import first_of
from graftwork.data.formats.turns import take_turns, to_exchange
from graftwork.records.interaction import Interaction, Origin

CHAT_EXPECTS = "messages"


def fits_chat(row: dict[str, Any]) -> bool:
    return row.get("messages") is not None


def read_chat(row: dict[str, Any], origin: Origin) -> Interaction:
    turns = take_turns(row["messages"], "messages")
    exchange = to_exchange(turns, "messages", tools=first_of(row, "tools", "functions"))
    return Interaction(messages=exchange.messages, reply=exchange.reply, **take_facts(row, origin))
