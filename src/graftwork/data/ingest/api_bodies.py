"""Bodies of requests and responses of OpenAI-compatible and Anthropic APIs.

In: the parsed body, however a log wraps it. Out: the turns that were asked, and the answer with its finish
reason. Raises `BadRow` that names the key.
"""

from typing import Any, NamedTuple

from graftwork.data.ingest.dataset_formats import lead_by, open_system, take_prompt
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
)

FINISH_REASONS = {
    **{"max_output_tokens": "length", "max_tokens": "length", "end_turn": "stop"},
    **{"MAX_TOKENS": "length", "STOP": "stop", "tool-calls": "tool_calls"},
}
_PROMPTS = ("prompt", "inputText")
_TEXTS = ("generation", "completion", "outputText", "text")
"""Where models of Bedrock put plain text."""


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
    config = request.get("config")
    held = {**config, **request} if isinstance(config, dict) else request
    system = open_system(first_of(held, "instructions", "system", "systemInstruction", "system_instruction"))
    for name in ("messages", "input", "contents"):
        asked = request.get(name)
        if asked is None:
            continue
        listed = [asked] if isinstance(asked, dict) else open_json(asked)
        if not isinstance(listed, list):
            return take_prompt(asked, f"request.{name}", system=system)
        if name == "contents":
            listed = [{"parts": [{"text": item}]} if isinstance(item, str) else item for item in listed]
        return lead_by(system, take_turns(listed, f"request.{name}"), key="request.system")
    return take_prompt(first_of(request, *_PROMPTS), "request.prompt", system=system)


def take_tools(request: dict[str, Any]) -> Any:
    """Return the tools of a request, wherever an API lists them."""
    for held in (request, request.get("config"), request.get("toolConfig")):
        tools = first_of(held, "tools", "functions") if isinstance(held, dict) else None
        if tools is not None:
            return tools
    return None


def has_answer(response: dict[str, Any]) -> bool:
    """Whether this is the body of a response of a chat API."""
    output, candidates = response.get("output"), response.get("candidates")
    return (
        response.get("choices") is not None
        or isinstance(output, list)
        or isinstance(candidates, list)
        or (isinstance(output, dict) and "message" in output)
        or (isinstance(response.get("content"), list) and "stop_reason" in response)
    )


def take_answer(response: dict[str, Any]) -> ModelAnswer:
    if response.get("choices") is not None:
        return _take_choice(response["choices"])
    output, content = response.get("output"), response.get("content")
    reason = take_fact(first_of(response, "stop_reason", "stopReason", "finishReason", "completionReason"))
    if response.get("candidates") is not None:  # Gemini
        candidates = take_list(response["candidates"], "response.candidates")
        first = take_object(candidates[0] if candidates else None, "response.candidates[0]")
        reason = take_fact(first.get("finishReason"))
        message = {"parts": [], **take_object(first.get("content"), "response.candidates[0].content")}
        [turn] = take_message({**message, "role": "assistant"}, "response.candidates[0].content")
    elif isinstance(output, dict):  # Bedrock's Converse
        message = take_object(output.get("message"), "response.output.message")
        [turn] = take_message({**message, "role": "assistant"}, "response.output.message")
    elif output is not None:
        return _take_output(response)
    elif isinstance(content, list):
        turn = take_assistant_parts(content, "response.content")
    else:
        listed = first_of(response, "results", "outputs")
        held = listed[0] if isinstance(listed, list) and listed else response
        text = first_of(held, *_TEXTS) if isinstance(held, dict) else None
        if text is None:
            raise BadRow("`response` holds neither choices nor output nor content")
        turn = LogTurn("assistant", take_text(text, "response"))
    return ModelAnswer(turn, FINISH_REASONS.get(reason or "", reason))


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
