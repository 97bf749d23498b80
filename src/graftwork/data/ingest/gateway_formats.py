"""Formats of gateways and of APIs that keep calls: LiteLLM, Helicone, stored completions and Responses.

In: a parsed row that fits. Out: its interaction, or the rule that leaves it out.
"""

from typing import Any

from graftwork.data.ingest.api_bodies import take_limit
from graftwork.data.ingest.blocks import RowResult, SkippedPart
from graftwork.data.ingest.fields import (
    BadRow,
    first_of,
    open_json,
    take_cost,
    take_duration,
    take_fact,
    take_list,
    take_object,
    take_tokens,
    take_usage,
)
from graftwork.data.ingest.llm_spans import INCOMPLETE, NO_CONTENT, NO_REPLY, read_bodies
from graftwork.data.ingest.turns import require_user, to_messages, write_reply
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.numbers import take_figure

_CALLS_OF_MODELS = ("completion", "responses", "messages", "generate_content")


def fits_litellm(row: dict[str, Any]) -> bool:
    """Standard logging payloads, and rows of the proxy's table of spend."""
    return "call_type" in row and "messages" in row and "response" in row


def read_litellm(row: dict[str, Any], origin: Origin) -> list[RowResult]:
    kind = row["call_type"]
    if (
        isinstance(kind, str)
        and "completion" not in kind
        and "responses" not in kind
        and "messages" not in kind
    ):
        return [SkippedPart(origin=origin, rule="other_call", count=1)]
    asked = row["messages"]
    if asked in (None, "", [], {}) or asked == "redacted-by-litellm":
        request = open_json(row.get("proxy_server_request"))
        asked = request.get("messages") if isinstance(request, dict) else None
    failed = row.get("status") == "failure"
    began, ended = take_figure(row.get("startTime")), take_figure(row.get("endTime"))
    first = take_figure(row.get("completionStartTime"))
    seconds = {"duration_ms": (began, ended), "first_token_ms": (began, first)}
    times = {
        key: (high - low) * 1000
        for key, (low, high) in seconds.items()
        if low is not None and high is not None and high >= low and 0 < low < 1e11
    }
    if not row.get("stream"):
        times.pop("first_token_ms", None)
    parameters = take_object(open_json(row.get("model_parameters")), "model_parameters")
    facts = {
        "id": take_fact(first_of(row, "litellm_call_id", "request_id", "id")) or str(origin),
        "trace": take_fact(first_of(row, "trace_id", "litellm_call_id", "id")) or str(origin),
        "session": take_fact(row.get("session_id")),
        "model": take_fact(row.get("model")),
        "cost": None if failed else take_cost(first_of(row, "response_cost", "spend")),
        "max_tokens": take_limit(parameters),
        **times,
        **({} if failed else take_usage(row)),
        **take_usage({"usage": _usage_of(row)}),
    }
    request = {"messages": asked, "tools": first_of(parameters, "tools", "functions")} if asked else None
    return [_read(request, row["response"], origin, failed=failed, facts=facts)]


def _usage_of(row: dict[str, Any]) -> Any:
    metadata = open_json(row.get("metadata"))
    return metadata.get("usage_object") if isinstance(metadata, dict) else None


def fits_helicone(row: dict[str, Any]) -> bool:
    return "request_id" in row and ("request_body" in row or "signed_body_url" in row)


def read_helicone(row: dict[str, Any], origin: Origin) -> list[RowResult]:
    properties = take_object(
        open_json(first_of(row, "request_properties", "properties")), "request_properties"
    )
    status = take_figure(row.get("response_status"))
    failed = status is not None and status >= 400
    first = take_figure(row.get("time_to_first_token"))
    facts = {
        "id": take_fact(row["request_id"]) or str(origin),
        "trace": take_fact(first_of(properties, "Helicone-Session-Id") or row["request_id"]) or str(origin),
        "session": take_fact(first_of(properties, "Helicone-Session-Id", "session")),
        "group": take_fact(first_of(properties, "Helicone-Session-Name", "agent")),
        "model": take_fact(first_of(row, "response_model", "model_override", "request_model", "model")),
        "duration_ms": take_duration(row.get("delay_ms")),
        "first_token_ms": first if first is not None and first >= 0 else None,
        "cost": take_cost(first_of(row, "costUSD", "cost_usd", "cost")),
        "cached_tokens": take_tokens(row.get("prompt_cache_read_tokens")),
        **{key: value for key, value in take_usage(row).items() if key != "cost"},
        **_take_rating(row),
    }
    request = open_json(row.get("request_body"))
    facts["max_tokens"] = take_limit(request)
    return [_read(request, open_json(row.get("response_body")), origin, failed=failed, facts=facts)]


def _take_rating(row: dict[str, Any]) -> dict[str, Any]:
    """Return the mean of the scores, else the rating of a user."""
    scores = open_json(row.get("scores"))
    held = scores.values() if isinstance(scores, dict) else ()
    values = [take_figure(item.get("value") if isinstance(item, dict) else item) for item in held]
    stated = [value for value in values if value is not None]
    rating = row.get("feedback_rating")
    if not stated and isinstance(rating, bool):
        stated = [float(rating)]
    return {"reward": sum(stated) / len(stated), "reward_level": "call"} if stated else {}


def fits_stored(row: dict[str, Any]) -> bool:
    kind = row.get("object")
    return (kind == "chat.completion" and "choices" in row) or (kind == "response" and "output" in row)


def read_stored(row: dict[str, Any], origin: Origin) -> list[RowResult]:
    """Read a completion with its messages, or a response with its input.

    The API returns both apart: `chat.completions.messages.list` and `responses.input_items.list`.
    """
    is_completion = row["object"] == "chat.completion"
    names = ("messages", "input") if is_completion else ("input", "input_items", "messages")
    asked = open_json(first_of(row, *names))
    if isinstance(asked, dict) and "data" in asked:
        asked = take_list(asked["data"], f"{names[0]}.data")
    if asked in (None, "", [], {}):
        raise BadRow(f"the answer is stored without its question; join it under `{names[0]}`")
    request = {"messages" if is_completion else "input": asked, "instructions": row.get("instructions")}
    failed = row.get("status") in ("failed", "cancelled") or bool(row.get("error"))
    metadata = row.get("metadata")
    held = metadata if isinstance(metadata, dict) else {}
    facts = {
        "id": take_fact(row.get("id")) or str(origin),
        "trace": take_fact(first_of(row, "previous_response_id", "id")) or str(origin),
        "session": take_fact(first_of(held, "session_id", "conversation_id", "thread_id"))
        or take_fact(row.get("conversation")),
        "group": take_fact(first_of(held, "agent", "role")),
        "model": take_fact(row.get("model")),
        "max_tokens": take_limit(row),
        **take_usage(row),
    }
    body = {key: row.get(key) for key in ("choices", "output", "status", "incomplete_details") if key in row}
    found = _read({**request, "tools": row.get("tools")}, body, origin, failed=failed, facts=facts)
    return [found]


def _read(
    request: Any, response: Any, origin: Origin, *, failed: bool, facts: dict[str, Any]
) -> Interaction | SkippedPart:
    bodies = read_bodies(request, None if failed and response in ({}, "{}", "") else response)
    if not bodies.turns:
        return SkippedPart(origin=origin, rule=NO_CONTENT, count=1)
    reply = write_reply(bodies.reply) if bodies.reply else ""
    if bodies.reply is None and not failed:
        return SkippedPart(origin=origin, rule=NO_REPLY, count=1)
    require_user(bodies.turns, "request")
    stated = {key: value for key, value in bodies.facts.items() if value is not None}
    known = {**stated, **{key: value for key, value in facts.items() if value is not None}}
    known["finish_reason"] = INCOMPLETE if failed and reply else stated.get("finish_reason")
    return Interaction(
        origin=origin,
        messages=to_messages(bodies.turns, tools=bodies.tools),
        reply=reply,
        status="failed" if failed and not reply else None,
        **known,
    )
