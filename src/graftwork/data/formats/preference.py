"""Preference pairs: `chosen` and `rejected`, as text or as messages, for one `prompt`.

The prompt may stand apart, or in both conversations, whose last turns differ; as text, such
conversations are written with `Human:` and `Assistant:` at the beginning of paragraphs.
"""

import re
from typing import Any

from graftwork.data.formats.completion import take_prompt
from graftwork.data.formats.facts import take_facts
from graftwork.data.formats.fields import BadRow, first_of, open_json, take_text
from graftwork.data.formats.turns import (
    Turn,
    cut_behind_reply,
    require_user,
    take_turns,
    to_messages,
    write_reply,
)
from graftwork.records.interaction import Interaction, Origin

PREFERENCE_EXPECTS = "prompt, chosen and rejected"
_SPEAKER = re.compile(r"(?:^|\n\n)(Human|Assistant): ?")


def fits_preference(row: dict[str, Any]) -> bool:
    return row.get("chosen") is not None and row.get("rejected") is not None


def read_preference(row: dict[str, Any], origin: Origin) -> Interaction:
    chosen = _take_side(row["chosen"], "chosen")
    rejected = _take_side(row["rejected"], "rejected")
    asked = first_of(row, "prompt", "question", "instruction", "messages")
    if len(chosen) > 1:
        if chosen[:-1] != rejected[:-1]:
            raise BadRow("`chosen` and `rejected` do not answer the same conversation")
        turns = chosen[:-1]
    elif asked is not None:
        turns = take_prompt(asked, "prompt", system=first_of(row, "system", "system_prompt"))
    else:
        raise BadRow("`prompt` is missing, and `chosen` holds only the reply")
    require_user(turns, "prompt")
    reply, lost = write_reply(chosen[-1]), write_reply(rejected[-1])
    if reply == lost:
        raise BadRow("`chosen` and `rejected` are the same")
    messages = to_messages(turns, tools=first_of(row, "tools", "functions"))
    return Interaction(messages=messages, reply=reply, rejected=lost, **take_facts(row, origin))


def _take_side(value: Any, key: str) -> list[Turn]:
    """The conversation of one side; its last turn is the reply."""
    opened = open_json(value)
    if isinstance(opened, dict) and "role" in opened:
        opened = [opened]
    if isinstance(opened, list) and opened and isinstance(opened[0], dict) and "role" in opened[0]:
        turns = take_turns(opened, key)
    else:
        turns = _split_transcript(take_text(value, key))
    return cut_behind_reply(turns, key)


def _split_transcript(text: str) -> list[Turn]:
    before, *rest = _SPEAKER.split(text)
    if before or len(rest) < 4:
        return [Turn("assistant", text)]
    return [
        Turn("user" if speaker == "Human" else "assistant", said)
        for speaker, said in zip(rest[::2], rest[1::2], strict=True)
    ]
