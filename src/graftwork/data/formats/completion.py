"""Rows of a `prompt` and its `completion`, both plain text; instruction and output go by the same rule."""

from typing import Any

from graftwork.data.formats.fields import BadRow, take_optional_text, take_text
from graftwork.records.interaction import Interaction, Message, Origin

_PAIRS = (
    ("prompt", "completion"),
    ("prompt", "response"),
    ("question", "answer"),
    ("instruction", "output"),
)


def fits(row: dict[str, Any]) -> bool:
    return any(asked in row and said in row for asked, said in _PAIRS)


def to_interaction(row: dict[str, Any], origin: Origin) -> Interaction:
    asked, said = next(pair for pair in _PAIRS if pair[0] in row and pair[1] in row)
    prompt = take_text(row[asked], asked)
    added = take_optional_text(row.get("input"), "input") if asked == "instruction" else None
    if not prompt.strip():
        raise BadRow(f"`{asked}` is empty")
    system = take_optional_text(row.get("system"), "system")
    messages = [Message(role="system", content=system)] if system else []
    messages.append(Message(role="user", content=f"{prompt}\n\n{added}" if added else prompt))
    return Interaction(
        id=take_optional_text(row.get("id"), "id") or str(origin),
        origin=origin,
        messages=tuple(messages),
        reply="" if row[said] is None else take_text(row[said], said),
        status=take_optional_text(row.get("status"), "status"),
        finish_reason=take_optional_text(row.get("finish_reason"), "finish_reason"),
        group=take_optional_text(row.get("group"), "group"),
        session=take_optional_text(row.get("session"), "session"),
        model=take_optional_text(row.get("model"), "model"),
    )
