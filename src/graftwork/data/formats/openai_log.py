"""Logged requests and responses of an OpenAI-compatible API, or of the Anthropic one.

The request stands under `request` or `body` (itself, or below `body` as proxies log it): `messages`,
`input` with `instructions`, or `prompt`. The response stands under `response`, again itself or below
`body` as in the result files of batches: `choices`, the `output` list of the Responses API, or
`content` parts. An error in place of an answer becomes an empty reply with the status `failed`. A
result file of a batch has no questions in it: join it with its requests by `custom_id` first.
"""

from typing import Any, NamedTuple

from graftwork.data.formats.completion import take_prompt
from graftwork.data.formats.facts import take_facts
from graftwork.data.formats.fields import (
    BadRow,
    first_of,
    open_json,
    take_count,
    take_fact,
    take_list,
    take_object,
    take_text,
)
from graftwork.data.formats.turns import (
    Turn,
    require_user,
    take_message,
    take_parts_of_assistant,
    take_turns,
    to_messages,
    write_call,
    write_reply,
    write_result,
)
from graftwork.records.interaction import Interaction, Origin

OPENAI_EXPECTS = "request and response"
_FINISHED = {"max_output_tokens": "length", "max_tokens": "length", "end_turn": "stop"}


class _Answer(NamedTuple):
    turn: Turn
    finish_reason: str | None = None


def fits_openai_log(row: dict[str, Any]) -> bool:
    if not ("response" in row or "error" in row):
        return False
    asked = first_of(row, "request", "body")
    answered = open_json(row.get("response"))
    return isinstance(open_json(asked), dict) or ("custom_id" in row and isinstance(answered, dict))


def read_openai_log(row: dict[str, Any], origin: Origin) -> Interaction:
    request = _unwrap(first_of(row, "request", "body"), "request")
    if not request:
        raise BadRow("the response stands without its request; join the two by `custom_id`")
    outer = take_object(open_json(row.get("response")), "response")
    response = _unwrap(outer, "response")
    turns = _take_question(request)
    require_user(turns, "request")
    failed = _find_error(row, outer, response)
    answer = _Answer(Turn("assistant", "")) if failed else _take_answer(response)
    facts = take_facts(row, origin)
    facts["id"] = take_fact(first_of(row, "id", "custom_id") or response.get("id")) or str(origin)
    facts["model"] = take_fact(response.get("model")) or take_fact(request.get("model"))
    facts["finish_reason"] = answer.finish_reason or facts["finish_reason"]
    limit = first_of(request, "max_completion_tokens", "max_output_tokens", "max_tokens")
    facts["max_tokens"] = take_count(limit)
    if failed:
        facts["status"] = "failed"
    facts["extra"] = {**_take_usage(response), **facts["extra"]}
    facts["extra"].pop("custom_id", None)
    tools = first_of(request, "tools", "functions")
    return Interaction(messages=to_messages(turns, tools=tools), reply=write_reply(answer.turn), **facts)


def _unwrap(value: Any, key: str) -> dict[str, Any]:
    """The body of a request or response, however the log wraps it."""
    opened = take_object(open_json(value), key)
    inner = open_json(first_of(opened, "body", "json"))
    return inner if isinstance(inner, dict) else opened


def _find_error(row: dict[str, Any], outer: dict[str, Any], response: dict[str, Any]) -> bool:
    code = first_of(outer, "status_code", "status")
    refused = isinstance(code, int) and code >= 400
    failed = response.get("status") in ("failed", "cancelled")
    return bool(refused or failed or row.get("error") or response.get("error"))


def _take_question(request: dict[str, Any]) -> list[Turn]:
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
    led = None if system is None else take_text(system, "request.system")
    return [Turn("system", led), *turns] if led and turns and turns[0].role != "system" else turns


def _take_items(items: list[Any], key: str) -> list[Turn]:
    """The input of the Responses API: messages, calls of tools and their results."""
    turns: list[Turn] = []
    for place, item in enumerate(items):
        name = f"{key}[{place}]"
        kind = take_object(item, name).get("type", "message")
        if kind == "function_call":
            turns.append(Turn("assistant", write_call(item.get("name"), item.get("arguments"), name)))
        elif kind == "function_call_output":
            turns.append(Turn("tool", write_result(item.get("output"), f"{name}.output")))
        elif kind != "reasoning":
            turns += take_message(item, name)
    return turns


def _take_answer(response: dict[str, Any]) -> _Answer:
    if response.get("choices") is not None:
        return _take_choice(response["choices"])
    if response.get("output") is not None:
        return _take_output(response)
    content = response.get("content")
    if isinstance(content, list):
        reason = take_fact(response.get("stop_reason"))
        turn = take_parts_of_assistant(content, "response.content")
        return _Answer(turn, _FINISHED.get(reason or "", reason))
    raise BadRow("`response` holds neither choices nor output nor content")


def _take_choice(value: Any) -> _Answer:
    choices = take_list(value, "response.choices")
    if not choices:
        raise BadRow("`response.choices` is empty")
    choice = take_object(choices[0], "response.choices[0]")
    reason = take_fact(choice.get("finish_reason"))
    if "message" not in choice:
        return _Answer(Turn("assistant", take_text(choice.get("text"), "response.choices[0].text")), reason)
    message = take_object(choice["message"], "response.choices[0].message")
    [turn] = take_message({**message, "role": "assistant"}, "response.choices[0].message")
    return _Answer(turn, reason)


def _take_output(response: dict[str, Any]) -> _Answer:
    """The output of the Responses API: reasoning, messages and calls of tools, one behind the other."""
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
    turn = take_parts_of_assistant(parts, "response.output")
    details = response.get("incomplete_details")
    reason = take_fact(details.get("reason")) if isinstance(details, dict) else None
    finished = "stop" if response.get("status") == "completed" else None
    return _Answer(turn, _FINISHED.get(reason, reason) if reason else finished)


def _take_usage(response: dict[str, Any]) -> dict[str, Any]:
    usage = response.get("usage")
    if not isinstance(usage, dict):
        return {}
    counts = {
        "prompt_tokens": first_of(usage, "prompt_tokens", "input_tokens"),
        "reply_tokens": first_of(usage, "completion_tokens", "output_tokens"),
    }
    return {key: value for key, value in counts.items() if isinstance(value, int)}
