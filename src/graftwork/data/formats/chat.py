"""Chat rows: `messages` whose last turn is the assistant's reply, with what the log adds to them."""

from typing import Any

from graftwork.data.formats.fields import (
    BadRow,
    take_messages,
    take_object,
    take_optional_count,
    take_optional_number,
    take_optional_text,
)
from graftwork.records.interaction import Interaction, Origin


def fits(row: dict[str, Any]) -> bool:
    return "messages" in row


def to_interaction(row: dict[str, Any], origin: Origin) -> Interaction:
    *messages, last = take_messages(row["messages"], "messages")
    if last.role != "assistant":
        raise BadRow(f"the last of `messages` must be the assistant's reply, and is the {last.role}'s turn")
    if not any(message.role == "user" for message in messages):
        raise BadRow("`messages` holds no turn of the user")
    agent = row.get("agent")
    # Some logs name the agent, others describe it.
    role = agent if isinstance(agent, str) else take_object(agent, "agent").get("role")
    return Interaction(
        id=take_optional_text(row.get("id"), "id") or str(origin),
        origin=origin,
        messages=tuple(messages),
        reply=last.content,
        status=take_optional_text(row.get("status"), "status"),
        finish_reason=take_optional_text(row.get("finish_reason"), "finish_reason"),
        group=take_optional_text(role, "agent.role"),
        session=take_optional_text(row.get("session", row.get("session_id")), "session"),
        model=take_optional_text(row.get("model"), "model"),
        duration_ms=take_optional_number(row.get("duration_ms"), "duration_ms"),
        max_tokens=take_optional_count(row.get("max_tokens"), "max_tokens"),
        extra={"timestamp": row["timestamp"]} if isinstance(row.get("timestamp"), str) else {},
    )
