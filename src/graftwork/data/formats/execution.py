"""Rows of a multi-agent tool: `task`, `agent`, `llm`, and an `execution` with its messages and output."""

from typing import Any

from graftwork.data.formats.fields import (
    BadRow,
    take_messages,
    take_object,
    take_optional_count,
    take_optional_number,
    take_optional_text,
    take_text,
)
from graftwork.records.interaction import Interaction, Message, Origin


def fits(row: dict[str, Any]) -> bool:
    execution = row.get("execution")
    return isinstance(execution, dict) and "output" in execution


def to_interaction(row: dict[str, Any], origin: Origin) -> Interaction:
    execution = take_object(row["execution"], "execution")
    llm = take_object(row.get("llm"), "llm")
    config = take_object(llm.get("config"), "llm.config")
    output = execution.get("output")
    errors = execution.get("errors")
    return Interaction(
        id=take_optional_text(row.get("id"), "id") or str(origin),
        origin=origin,
        messages=_take_prompt(row, execution),
        # A failed call has no output; the status says so, and the empty reply is seen by its rule.
        reply="" if output is None else take_text(output, "execution.output"),
        status=take_optional_text(execution.get("status"), "execution.status"),
        finish_reason=take_optional_text(execution.get("finish_reason"), "execution.finish_reason"),
        group=take_optional_text(take_object(row.get("agent"), "agent").get("role"), "agent.role"),
        session=take_optional_text(row.get("session"), "session"),
        model=take_optional_text(llm.get("model") or llm.get("provider"), "llm.model"),
        duration_ms=take_optional_number(execution.get("duration_ms"), "execution.duration_ms"),
        max_tokens=take_optional_count(config.get("max_tokens"), "llm.config.max_tokens"),
        extra={"errors": len(errors)} if isinstance(errors, list) and errors else {},
    )


def _take_prompt(row: dict[str, Any], execution: dict[str, Any]) -> tuple[Message, ...]:
    if execution.get("input_messages"):
        messages = take_messages(execution["input_messages"], "execution.input_messages")
        if not any(message.role == "user" for message in messages):
            raise BadRow("`execution.input_messages` holds no turn of the user")
        return messages
    task = take_object(row.get("task"), "task")
    return (Message(role="user", content=take_text(task.get("description"), "task.description")),)
