"""Formats of observability tools that keep one call per row: Langfuse observations and LangSmith runs.

In: a parsed row that fits. Out: its interaction, a score of another row, or the rule that leaves it out.
"""

from typing import Any

from pydantic import ValidationError

from graftwork.data.ingest.api_bodies import take_limit
from graftwork.data.ingest.blocks import ReadFault, RowResult, SkippedPart, TraceScore
from graftwork.data.ingest.fields import (
    BadRow,
    explain,
    first_of,
    open_json,
    take_cost,
    take_fact,
    take_object,
    take_usage,
)
from graftwork.data.ingest.llm_spans import INCOMPLETE, NO_CONTENT, NO_REPLY, OTHER_SPAN, read_bodies
from graftwork.data.ingest.spans import to_nanoseconds
from graftwork.data.ingest.turns import require_user, to_messages, write_reply
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.numbers import take_figure


def fits_langfuse(row: dict[str, Any]) -> bool:
    """Observations, traces and scores, under the names of the export and of the API."""
    is_observation = "type" in row and first_of(row, "trace_id", "traceId") is not None and "input" in row
    is_trace = _is_langfuse_trace(row) or bool(_list_observations(row))
    return is_observation or is_trace or _is_langfuse_score(row)


def _list_observations(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the observations that a trace holds: the API returns them in it, exports next to it."""
    if "messages" in row or not (isinstance(row.get("trace"), dict) or "id" in row):
        return []
    listed = open_json(row.get("observations"))
    listed = listed if isinstance(listed, list) else []
    return [item for item in listed if isinstance(item, dict) and "type" in item]


def _is_langfuse_score(row: dict[str, Any]) -> bool:
    has_value = "value" in row or "string_value" in row or "stringValue" in row
    return has_value and "name" in row and ("trace_id" in row or "traceId" in row)


def _is_langfuse_trace(row: dict[str, Any]) -> bool:
    return (
        "input" in row
        and "output" in row
        and "timestamp" in row
        and ("session_id" in row or "sessionId" in row)
    )


def read_langfuse(row: dict[str, Any], origin: Origin) -> list[RowResult]:
    if _is_langfuse_score(row) and "type" not in row:
        return _read_langfuse_score(row, origin)
    if "type" not in row and (listed := _list_observations(row)):
        return _read_langfuse_trace(row, listed, origin)
    trace = take_fact(first_of(row, "trace_id", "traceId"))
    kind = row.get("type")
    if trace is None or not isinstance(kind, str) or kind.upper() != "GENERATION":
        return [SkippedPart(origin=origin, rule=OTHER_SPAN, count=1)]
    bodies = read_bodies(row.get("input"), row.get("output"))
    failed = row.get("level") == "ERROR"
    rule = _left_out(bodies.turns, bodies.reply, failed=failed)
    if rule:
        return [SkippedPart(origin=origin, rule=rule, count=1)]
    require_user(bodies.turns, "input")
    reply = write_reply(bodies.reply) if bodies.reply else ""
    parameters = open_json(first_of(row, "model_parameters", "modelParameters"))
    details = open_json(first_of(row, "usage_details", "usageDetails", "usage"))
    costs = open_json(first_of(row, "cost_details", "costDetails"))
    first_token = take_figure(first_of(row, "time_to_first_token", "timeToFirstToken"))
    latency = take_figure(row.get("latency"))
    tools = bodies.tools or open_json(first_of(row, "tool_definitions", "toolDefinitions"))
    facts = {
        **{key: value for key, value in bodies.facts.items() if value},
        **take_usage({"usage": details}),
    }
    facts["model"] = take_fact(
        first_of(row, "provided_model_name", "providedModelName", "model")
    ) or facts.get("model")
    facts["cost"] = take_cost(
        first_of(row, "total_cost", "totalCost", "calculated_total_cost", "calculatedTotalCost")
    ) or take_cost(costs)
    facts["finish_reason"] = INCOMPLETE if failed and reply else facts.get("finish_reason")
    return [
        Interaction(
            id=take_fact(row.get("id")) or str(origin),
            origin=origin,
            messages=to_messages(bodies.turns, tools=tools),
            reply=reply,
            status="failed" if failed and not reply else None,
            session=take_fact(first_of(row, "session_id", "sessionId")),
            trace=trace,
            duration_ms=latency * 1000 if latency is not None and latency >= 0 else _span_of(row),
            first_token_ms=first_token * 1000 if first_token is not None and first_token >= 0 else None,
            max_tokens=take_limit(parameters),
            extra=_keep(row, "environment", "prompt_name", "prompt_version", "version", "name"),
            **facts,
        )
    ]


def _read_langfuse_trace(
    row: dict[str, Any], observations: list[dict[str, Any]], origin: Origin
) -> list[RowResult]:
    """Read the observations and scores of a trace. One that cannot be read does not stop the others."""
    held = row.get("trace")
    trace = held if isinstance(held, dict) else row
    shared = {"traceId": trace.get("id"), "sessionId": first_of(trace, "sessionId", "session_id")}
    results: list[RowResult] = []
    for place, item in enumerate(observations):
        try:
            results += read_langfuse({**shared, **item}, origin)
        except (BadRow, ValidationError) as error:
            message = f"`observations[{place}]`: {explain(error)}"
            results.append(ReadFault(origin=origin, code="schema", message=message))
    scores = open_json(first_of(row, "scores") or trace.get("scores"))
    for score in scores if isinstance(scores, list) else ():
        if isinstance(score, dict):
            results += _read_langfuse_score({**shared, **score}, origin)
    return results


def _read_langfuse_score(row: dict[str, Any], origin: Origin) -> list[RowResult]:
    trace = take_fact(first_of(row, "trace_id", "traceId"))
    value = take_figure(row.get("value"))
    if trace is None or value is None:
        return [SkippedPart(origin=origin, rule="score_without_number", count=1)]
    call = take_fact(first_of(row, "observation_id", "observationId"))
    return [TraceScore(origin=origin, trace=trace, call=call, value=value)]


def _between(row: dict[str, Any], began: tuple[str, ...], ended: tuple[str, ...]) -> float | None:
    """Return the milliseconds between two times of a row."""
    first, last = to_nanoseconds(first_of(row, *began)), to_nanoseconds(first_of(row, *ended))
    return None if first is None or last is None or last < first else (last - first) / 1e6


def _span_of(row: dict[str, Any]) -> float | None:
    return _between(row, ("start_time", "startTime"), ("end_time", "endTime"))


def _left_out(turns: Any, reply: Any, *, failed: bool) -> str | None:
    if not turns:
        return NO_CONTENT
    return NO_REPLY if reply is None and not failed else None


def _keep(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    kept = {key: row[key] for key in keys if isinstance(row.get(key), str | int) and row[key] != ""}
    return {key: value for key, value in kept.items() if len(str(value)) <= 200 and "\0" not in str(value)}


def fits_langsmith(row: dict[str, Any]) -> bool:
    return isinstance(row.get("run_type"), str) and "inputs" in row


_LANGCHAIN_ROLES = {"human": "user", "ai": "assistant", "function": "tool"}


def read_langsmith(row: dict[str, Any], origin: Origin) -> list[RowResult]:
    """Read a run. Its `session_id` is the project; the conversation is in its metadata."""
    if row["run_type"] != "llm":
        return [SkippedPart(origin=origin, rule=OTHER_SPAN, count=1)]
    extra = take_object(open_json(row.get("extra")), "extra")
    metadata = take_object(open_json(extra.get("metadata")), "extra.metadata")
    parameters = take_object(open_json(extra.get("invocation_params")), "extra.invocation_params")
    inputs = take_object(open_json(row["inputs"]), "inputs")
    outputs = take_object(open_json(row.get("outputs")), "outputs")
    failed = bool(row.get("error"))
    bodies = read_bodies(_open_langchain_inputs(inputs), _open_langchain_outputs(outputs))
    rule = _left_out(bodies.turns, bodies.reply, failed=failed)
    if rule:
        return [SkippedPart(origin=origin, rule=rule, count=1)]
    require_user(bodies.turns, "inputs")
    reply = write_reply(bodies.reply) if bodies.reply else ""
    tools = bodies.tools or first_of(parameters, "tools", "functions")
    usage = first_of(outputs, "usage_metadata") or metadata.get("usage_metadata")
    facts = {
        **{key: value for key, value in bodies.facts.items() if value},
        **take_usage({"usage": usage}),
        **take_usage(row),
    }
    facts["model"] = take_fact(facts.get("model")) or take_fact(
        first_of(metadata, "ls_model_name") or first_of(parameters, "model", "model_name")
    )
    facts["finish_reason"] = INCOMPLETE if failed and reply else facts.get("finish_reason")
    return [
        Interaction(
            id=take_fact(row.get("id")) or str(origin),
            origin=origin,
            messages=to_messages(bodies.turns, tools=tools),
            reply=reply,
            status="failed" if failed and not reply else None,
            session=take_fact(first_of(metadata, "session_id", "thread_id", "conversation_id")),
            trace=take_fact(first_of(row, "trace_id", "id")) or str(origin),
            duration_ms=_span_of(row),
            first_token_ms=_between(row, ("start_time",), ("first_token_time",)),
            max_tokens=take_limit(inputs) or take_limit(parameters),
            extra=_keep(row, "name", "session_name"),
            **facts,
            **_take_feedback(row),
        )
    ]


def _take_feedback(row: dict[str, Any]) -> dict[str, Any]:
    """Return the mean of a run's feedback, whose averages LangSmith exports by name."""
    stats = open_json(row.get("feedback_stats"))
    held = stats.values() if isinstance(stats, dict) else ()
    means = [take_figure(item.get("avg")) for item in held if isinstance(item, dict)]
    scores = [mean for mean in means if mean is not None]
    return {"reward": sum(scores) / len(scores), "reward_level": "call"} if scores else {}


def _open_langchain_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return inputs with messages as chat APIs write them; LangChain nests and serializes them."""
    listed = open_json(inputs.get("messages"))
    if isinstance(listed, list) and listed and isinstance(listed[0], list):
        listed = listed[0]
    if isinstance(listed, list):
        return {**inputs, "messages": [_open_langchain_message(item) for item in listed]}
    prompts = open_json(inputs.get("prompts"))
    if isinstance(prompts, list) and prompts:
        return {**inputs, "prompt": prompts[0]}
    return inputs


def _open_langchain_outputs(outputs: dict[str, Any]) -> Any:
    listed = open_json(outputs.get("generations"))
    while isinstance(listed, list) and listed:
        listed = listed[0]
    if isinstance(listed, dict):
        if isinstance(listed.get("message"), dict):
            return _open_langchain_message(listed["message"])
        return listed.get("text")
    if set(outputs) == {"output"}:
        return outputs["output"]
    message = outputs.get("message")
    return _open_langchain_message(message) if isinstance(message, dict) else outputs


def _open_langchain_message(item: Any) -> Any:
    """Return a message under `role` and `content`; the class or the type names the role."""
    if not isinstance(item, dict) or "role" in item:
        return item
    held = first_of(item, "kwargs", "data") if first_of(item, "kwargs", "data") else item
    if not isinstance(held, dict):
        return item
    kind = held.get("type") or item.get("type")
    if kind in ("constructor", None):
        names = item.get("id")
        name = names[-1] if isinstance(names, list) and names and isinstance(names[-1], str) else ""
        kind = name.removesuffix("Chunk").removesuffix("Message").lower()
    if not isinstance(kind, str):
        return item
    added = held.get("additional_kwargs")
    calls = held.get("tool_calls") or (added.get("tool_calls") if isinstance(added, dict) else None)
    message = {"role": _LANGCHAIN_ROLES.get(kind, kind), "content": held.get("content")}
    return {**message, "tool_calls": calls} if calls else message
