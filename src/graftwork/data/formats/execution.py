"""Rows of a multi-agent tool: `task`, `agent`, `llm`, and an `execution` with its messages and output."""

from typing import Any

from graftwork.data.formats.facts import says_error, take_facts, take_status
from graftwork.data.formats.fields import (
    first_of,
    take_count,
    take_duration,
    take_fact,
    take_object,
    take_text,
)
from graftwork.data.formats.turns import (
    Turn,
    require_user,
    take_parts_of_assistant,
    take_turns,
    to_messages,
    write_reply,
)
from graftwork.records.interaction import Interaction, Origin

EXECUTION_EXPECTS = "an execution with its output"


def fits_execution(row: dict[str, Any]) -> bool:
    execution = row.get("execution")
    return isinstance(execution, dict) and "output" in execution


def read_execution(row: dict[str, Any], origin: Origin) -> Interaction:
    execution = take_object(row["execution"], "execution")
    llm = row.get("llm")
    if not isinstance(llm, dict):
        llm = {"model": llm}
    config = llm.get("config")
    facts = take_facts(row, origin)
    errors = execution.get("errors")
    if isinstance(errors, list) and errors:
        facts["extra"]["errors"] = len(errors)
    facts["status"] = take_status(execution) or ("failed" if says_error(row) else None)
    facts["finish_reason"] = take_fact(execution.get("finish_reason"))
    facts["model"] = take_fact(first_of(llm, "model", "provider"))
    facts["duration_ms"] = take_duration(execution.get("duration_ms"))
    facts["max_tokens"] = take_count(config.get("max_tokens")) if isinstance(config, dict) else None
    turns = _take_prompt(row, execution)
    tools = first_of(execution, "tools", "functions")
    return Interaction(
        messages=to_messages(turns, tools=tools), reply=_take_execution_output(execution["output"]), **facts
    )


def _take_execution_output(output: Any) -> str:
    if output is None:
        # A failed call has no output; the status says so, and the empty reply is seen by its rule.
        return ""
    if isinstance(output, list):
        return write_reply(take_parts_of_assistant(output, "execution.output"))
    return take_text(output, "execution.output")


def _take_prompt(row: dict[str, Any], execution: dict[str, Any]) -> list[Turn]:
    if execution.get("input_messages"):
        turns = take_turns(execution["input_messages"], "execution.input_messages")
        require_user(turns, "execution.input_messages")
        return turns
    task = take_object(row.get("task"), "task")
    return [Turn("user", take_text(task.get("description"), "task.description"))]
