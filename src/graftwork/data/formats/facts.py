"""What a log says about an exchange beside its text, under the keys that most logs use.

In: a row. Out: the values of an `Interaction` but for its text. What is not stated is None, never
guessed; short values under other keys go to `extra`, so that rows can be grouped by them.
"""

import re
from typing import Any

from graftwork.data.formats.fields import (
    BadRow,
    first_of,
    take_object,
    take_optional_count,
    take_optional_number,
    take_optional_text,
)
from graftwork.records.interaction import Origin

_STAGE = re.compile(
    r"\s*(?:(?:tank|training|curriculum)?[ _-]*stage[ _-]*)?(\d{1,4})\s*", re.IGNORECASE | re.ASCII
)
_LONGEST_EXTRA = 200
_TAKEN = frozenset(
    (
        *("id", "uid", "uuid", "status", "success", "finish_reason", "stop_reason", "agent"),
        *("agent_role", "role", "group", "domain", "category", "topic", "session", "session_id"),
        *("conversation_id", "thread_id", "stage", "model", "model_name", "duration_ms"),
        *("latency_ms", "max_tokens", "reward", "score", "split", "messages", "prompt", "completion"),
        *("response", "question", "answer", "instruction", "input", "output", "system", "history"),
        *("chosen", "rejected", "conversations", "tools", "functions", "errors", "text", "content"),
        *("reply", "reasoning_content", "reasoning", "thinking", "system_prompt"),
    )
)


def take_facts(row: dict[str, Any], origin: Origin) -> dict[str, Any]:
    """Keyword arguments of an `Interaction`, all but `messages`, `reply` and `rejected`."""
    return {
        "id": take_optional_text(first_of(row, "id", "uid", "uuid"), "id") or str(origin),
        "origin": origin,
        "status": take_status(row),
        "finish_reason": take_optional_text(first_of(row, "finish_reason", "stop_reason"), "finish_reason"),
        "group": take_group(row),
        "domain": _take_name(first_of(row, "domain", "category", "topic")),
        "session": take_session(row),
        "stage": take_stage(row.get("stage")),
        "model": take_optional_text(first_of(row, "model", "model_name"), "model"),
        "duration_ms": take_optional_number(first_of(row, "duration_ms", "latency_ms"), "duration_ms"),
        "max_tokens": take_optional_count(row.get("max_tokens"), "max_tokens"),
        "reward": take_reward(row),
        "split": _take_name(row.get("split")),
        "extra": take_extra(row),
    }


def take_status(row: dict[str, Any]) -> str | None:
    """The outcome in words, also where the log has it as true or false, or as a code of HTTP."""
    status = first_of(row, "status", "success")
    if isinstance(status, bool):
        return "success" if status else "failed"
    if isinstance(status, int) and 100 <= status < 600:
        return "success" if 200 <= status < 300 else "failed"
    return take_optional_text(row.get("status"), "status")


def take_group(row: dict[str, Any]) -> str | None:
    """The role of the agent. Some logs name the agent, others describe it."""
    agent = row.get("agent")
    if agent is None:
        return _take_name(first_of(row, "agent_role", "role", "group"))
    if isinstance(agent, str):
        return take_optional_text(agent, "agent")
    described = take_object(agent, "agent")
    return take_optional_text(first_of(described, "role", "name"), "agent.role")


def take_session(row: dict[str, Any]) -> str | None:
    session = first_of(row, "session", "session_id", "conversation_id", "thread_id")
    if isinstance(session, dict):
        session = first_of(session, "id", "session_id")
    return take_optional_text(session, "session")


def take_stage(value: Any) -> int | None:
    """The place in a curriculum: 2, "2", "stage 2". A stage that has only a name has no place."""
    if isinstance(value, str):
        match = _STAGE.fullmatch(value)
        return int(match.group(1)) if match else None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 9999:
        return None
    return int(value)


def take_reward(row: dict[str, Any]) -> float | None:
    if row.get("reward") is not None:
        return take_optional_number(row["reward"], "reward")
    try:
        return take_optional_number(row.get("score"), "score")
    except BadRow:
        return None  # a score may be anything; only a reward must be a number


def take_extra(row: dict[str, Any]) -> dict[str, Any]:
    """Short values under keys that mean nothing to us, those of `metadata` under a dotted name."""
    extra: dict[str, Any] = {}
    for key, value in row.items():
        if key in _TAKEN:
            continue
        if isinstance(value, str | int | float):
            _keep(extra, key, value)
        elif key in ("metadata", "meta") and isinstance(value, dict):
            for inner, inner_value in value.items():
                if isinstance(inner_value, str | int | float):
                    _keep(extra, f"{key}.{inner}", inner_value)
    stage = row.get("stage")
    if isinstance(stage, str) and take_stage(stage) is None:
        _keep(extra, "stage", stage)
    errors = row.get("errors")
    if isinstance(errors, list) and errors:
        extra["errors"] = len(errors)
    return extra


def _keep(extra: dict[str, Any], key: str, value: str | float) -> None:
    if not isinstance(value, str) or (len(value) <= _LONGEST_EXTRA and "\0" not in value):
        extra[key] = value


def _take_name(value: Any) -> str | None:
    """A name where the log gives one; under such common keys other things are not wrong."""
    if isinstance(value, str) and value and len(value) <= _LONGEST_EXTRA and "\0" not in value:
        return value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else None
