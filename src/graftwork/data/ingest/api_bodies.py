"""Bodies of requests and responses of OpenAI-compatible and Anthropic APIs.

In: the parsed body, however a log wraps it. Out: the turns that were asked, and the answer with its finish
reason. Raises `BadRow` that names the key.
"""

from typing import Any, NamedTuple

from graftwork.data.ingest.dataset_formats import lead_by, take_prompt
from graftwork.data.ingest.fields import (
    BadRow,
    first_of,
    open_json,
    take_count,
    take_fact,
    take_list,
    take_object,
    take_text,
)
from graftwork.data.ingest.turns import (
    LogTurn,
    take_assistant_parts,
    take_message,
    take_turns,
    write_call,
    write_result,
)

FINISH_REASONS = {"max_output_tokens": "length", "max_tokens": "length", "end_turn": "stop"}


class ModelAnswer(NamedTuple):
    turn: LogTurn
    finish_reason: str | None = None


def unwrap(value: Any, key: str) -> dict[str, Any]:
    """Return the body of a request or response, however the log wraps it."""
    opened = take_object(open_json(value), key)
    inner = open_json(first_of(opened, "body", "json"))
    return inner if isinstance(inner, dict) else opened


def take_limit(parameters: Any) -> int | None:
    """Return the most tokens that a request asks for."""
    if not isinstance(parameters, dict):
        return None
    return take_count(first_of(parameters, "max_completion_tokens", "max_output_tokens", "max_tokens"))


def take_question(request: dict[str, Any]) -> list[LogTurn]:
    system = first_of(request, "instructions", "system")
    if request.get("messages") is not None:
        turns = take_turns(request["messages"], "request.messages")
    elif request.get("input") is not None:
        asked = request["input"]
        if not isinstance(asked, list):
            return take_prompt(asked, "request.input", system=system)
        turns = _take_items(asked, "request.input")
    else:
        return take_prompt(request.get("prompt"), "request.prompt", system=system)
    return lead_by(system, turns, key="request.system")


def _take_items(items: list[Any], key: str) -> list[LogTurn]:
    """Read the input of the Responses API: messages, tool calls and their results."""
    turns: list[LogTurn] = []
    for place, item in enumerate(items):
        name = f"{key}[{place}]"
        kind = take_object(item, name).get("type", "message")
        if kind == "function_call":
            turns.append(LogTurn("assistant", write_call(item.get("name"), item.get("arguments"), name)))
        elif kind == "function_call_output":
            turns.append(LogTurn("tool", write_result(item.get("output"), f"{name}.output")))
        elif kind != "reasoning":
            turns += take_message(item, name)
    return turns


def take_answer(response: dict[str, Any]) -> ModelAnswer:
    if response.get("choices") is not None:
        return _take_choice(response["choices"])
    if response.get("output") is not None:
        return _take_output(response)
    content = response.get("content")
    if isinstance(content, list):
        reason = take_fact(response.get("stop_reason"))
        turn = take_assistant_parts(content, "response.content")
        return ModelAnswer(turn, FINISH_REASONS.get(reason or "", reason))
    raise BadRow("`response` holds neither choices nor output nor content")


def _take_choice(value: Any) -> ModelAnswer:
    choices = take_list(value, "response.choices")
    if not choices:
        raise BadRow("`response.choices` is empty")
    choice = take_object(choices[0], "response.choices[0]")
    reason = take_fact(choice.get("finish_reason"))
    if "message" not in choice:
        return ModelAnswer(
            LogTurn("assistant", take_text(choice.get("text"), "response.choices[0].text")), reason
        )
    message = take_object(choice["message"], "response.choices[0].message")
    [turn] = take_message({**message, "role": "assistant"}, "response.choices[0].message")
    return ModelAnswer(turn, reason)


def _take_output(response: dict[str, Any]) -> ModelAnswer:
    """Read the output of the Responses API: reasoning, messages and tool calls in order."""
    parts: list[Any] = []
    for place, item in enumerate(take_list(response["output"], "response.output")):
        name = f"response.output[{place}]"
        kind = take_object(item, name).get("type")
        if kind == "message":
            content = item.get("content")
            parts += content if isinstance(content, list) else [take_text(content, f"{name}.content")]
        elif kind == "function_call":
            opened = open_json(item.get("arguments"))
            parts.append({"type": "tool_use", "name": item.get("name"), "input": opened})
        elif kind == "reasoning":
            parts.append(item)
        else:
            raise BadRow(f"`{name}` is neither a message, reasoning nor a call of a function")
    turn = take_assistant_parts(parts, "response.output")
    details = response.get("incomplete_details")
    reason = take_fact(details.get("reason")) if isinstance(details, dict) else None
    finished = "stop" if response.get("status") == "completed" else None
    return ModelAnswer(turn, FINISH_REASONS.get(reason, reason) if reason else finished)


def keep_usage(response: dict[str, Any]) -> dict[str, Any]:
    usage = response.get("usage")
    if not isinstance(usage, dict):
        return {}
    counts = {
        "prompt_tokens": first_of(usage, "prompt_tokens", "input_tokens"),
        "reply_tokens": first_of(usage, "completion_tokens", "output_tokens"),
    }
    return {key: value for key, value in counts.items() if isinstance(value, int)}
