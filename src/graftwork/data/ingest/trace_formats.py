"""Formats of traces: many spans in a row (OTLP JSON, MLflow), or one call per row (Langfuse, LangSmith).

Input: a parsed row that fits. Output: one interaction per call of a model, scores of other rows, what is left
out by which rule, and a fault for each span that cannot be read: it does not stop the others.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from graftwork.data.ingest.blocks import ReadFault, RowResult, SkippedPart, TraceScore
from graftwork.data.ingest.fields import (
    BadRow,
    first_of,
    open_json,
    rate_call,
    read_each,
    report_bad_row,
    take_cost,
    take_fact,
    take_list,
    take_object,
    take_usage,
)
from graftwork.data.ingest.llm_spans import (
    IN_OTHER_SPAN,
    NO_CONTENT,
    OTHER_SPAN,
    LeftOutCall,
    is_agent_call,
    is_model_call,
    read_bodies,
    read_call,
    to_row,
)
from graftwork.data.ingest.spans import (
    ReadSpan,
    Span,
    list_log_records,
    list_spans,
    read_span,
    to_nanoseconds,
)
from graftwork.data.ingest.turns import take_limit
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.wording import take_figure


def fits_otlp(row: dict[str, Any]) -> bool:
    return any(isinstance(row.get(key), list) for key in ("resourceSpans", "batches", "resourceLogs")) or (
        _is_span(row)
    )


def read_otlp(row: dict[str, Any], origin: Origin) -> list[RowResult]:
    """Read a line of OTLP JSON, spans or log records, or a span of the console exporter."""
    if _is_span(row):
        return _read_spans([("the span", read_span(row))], origin)
    if row.get("resourceLogs") is not None:
        return _read_spans(_join_log_records(row), origin)
    return _read_spans(list_spans(row), origin)


_SPAN_IDS = ("context.span_id", "context.trace_id", "span_id", "spanId")
_MARKS = (
    *("openinference.span.kind", "ai.operationId", "ai.prompt.messages", "gen_ai.input.messages"),
    *("llm.input_messages", "llm.input_messages.0.message.role"),
)
"""Attributes that only the span of a call has."""
SPAN_KEYS = ("context", "attributes", *_SPAN_IDS, *_MARKS)
_KEYS_OF_OTHERS = ("messages", "conversations", "completion", "response", "output", "run_type", "spans")


def _is_span(row: dict[str, Any]) -> bool:
    """Whether the row is a span: of the SDK's console exporter, of Phoenix, or the attributes of one."""
    context, attributes = row.get("context"), open_json(row.get("attributes"))
    if isinstance(context, dict) and "trace_id" in context and "attributes" in row:
        return True
    if not row.keys().isdisjoint(_KEYS_OF_OTHERS):
        return False
    values = attributes if isinstance(attributes, dict) else {}
    if any(key in row or key in values or f"attributes.{key}" in row for key in _MARKS):
        return True
    has_attributes = isinstance(attributes, dict | list) or any(key.startswith("attributes.") for key in row)
    return has_attributes and any(key in row for key in _SPAN_IDS)


def _join_log_records(row: dict[str, Any]) -> list[ReadSpan]:
    """Gather the events of each call into one span."""
    placed: list[ReadSpan] = []
    by_call: dict[tuple[str, str], int] = {}
    for path, record in list_log_records(row):
        if not isinstance(record, Span):
            placed.append((path, record))
            continue
        index = by_call.setdefault((record.trace, record.id), len(placed))
        if index == len(placed):
            # Events per message do not name the operation, and are written for calls of models only.
            is_message = (
                record.name.startswith("gen_ai.") and "gen_ai.operation.name" not in record.attributes
            )
            merged = (
                {"gen_ai.operation.name": "chat", **record.attributes} if is_message else record.attributes
            )
            placed.append((path, record._replace(attributes=merged)))
        else:
            first = placed[index][1]
            assert isinstance(first, Span)
            first.events.extend(record.events)
    return placed


def _read_spans(placed: Iterable[ReadSpan], origin: Origin, *, session: str | None = None) -> list[RowResult]:
    results: list[RowResult] = []
    left_out: Counter[str] = Counter()
    empty: list[RowResult] = []
    agents: list[tuple[str, Span]] = []
    traces: set[str] = set()
    for path, span in placed:
        if not isinstance(span, Span):
            results.append(report_bad_row(span, origin, path=path))
        elif is_agent_call(span):
            agents.append((path, span))
        elif not is_model_call(span):
            left_out[OTHER_SPAN] += 1
        else:
            row = _try_call(span, origin, path, session)
            if row == NO_CONTENT and span.trace and span.id:
                empty.append(
                    SkippedPart(origin=origin, rule=NO_CONTENT, count=1, trace=span.trace, call=span.id)
                )
            elif isinstance(row, str):
                left_out[row] += 1
            else:
                traces.add(span.trace)
                results.append(row)
    # Some libraries put the messages on the span of the agent, and none on those of its calls.
    for path, span in agents:
        row = IN_OTHER_SPAN if span.trace in traces else _try_call(span, origin, path, session)
        if isinstance(row, str):
            left_out[OTHER_SPAN if row == NO_CONTENT else row] += 1
        else:
            results.append(row)
    results += empty
    results += [
        SkippedPart(origin=origin, rule=rule, count=count) for rule, count in sorted(left_out.items())
    ]
    return results


def _try_call(span: Span, origin: Origin, path: str, session: str | None) -> Interaction | ReadFault | str:
    """Return the row of a call, why it cannot be read, or the rule that leaves it out."""
    try:
        return read_call(span, origin, session=session)
    except LeftOutCall as left:
        return left.rule
    except (BadRow, ValidationError) as error:
        return report_bad_row(error, origin, path=path)


def fits_mlflow(row: dict[str, Any]) -> bool:
    info, data = open_json(row.get("info")), open_json(row.get("data"))
    if isinstance(info, dict) and isinstance(data, dict):
        return "spans" in data
    return "trace_id" in row and isinstance(open_json(row.get("spans")), list)


def read_mlflow(row: dict[str, Any], origin: Origin) -> list[RowResult]:
    """Read a trace of MLflow 3, as `Trace.to_json` and `search_traces` write it."""
    info = take_object(open_json(row.get("info")), "info") or row
    data = take_object(open_json(row.get("data")), "data") or row
    metadata = take_object(open_json(first_of(info, "trace_metadata", "request_metadata")), "trace_metadata")
    session = take_fact(metadata.get("mlflow.trace.session"))
    trace = take_fact(first_of(info, "trace_id", "request_id"))
    listed = take_list(open_json(data.get("spans")), "data.spans")
    spans = read_each(listed, "data.spans", lambda item: _to_mlflow_span(item, trace))
    results = _read_spans(spans, origin, session=session)
    return _add_assessments(results, take_list(open_json(first_of(info, "assessments")), "info.assessments"))


def _to_mlflow_span(item: Any, trace: str | None) -> Span:
    span = take_object(open_json(item), "the span")
    status = open_json(span.get("status"))
    code = first_of(status, "code", "status_code") if isinstance(status, dict) else span.get("status_code")
    stated = span.get("context")
    context = stated if isinstance(stated, dict) else {}
    return Span(
        trace=trace or take_fact(first_of(span, "trace_id") or context.get("trace_id")) or "",
        id=take_fact(first_of(span, "span_id") or context.get("span_id")) or "",
        parent=take_fact(first_of(span, "parent_span_id", "parent_id")) or "",
        name=take_fact(span.get("name")) or "",
        started=to_nanoseconds(first_of(span, "start_time_unix_nano", "start_time")),
        ended=to_nanoseconds(first_of(span, "end_time_unix_nano", "end_time")),
        attributes=take_object(open_json(span.get("attributes")), "attributes"),
        events=[],
        failed=code in ("STATUS_CODE_ERROR", "ERROR", 2),
    )


def _add_assessments(results: list[RowResult], assessments: list[Any]) -> list[RowResult]:
    """Give each call the mean of its own assessments, else that of its trace."""
    by_span: dict[str | None, list[float]] = {}
    for item in assessments:
        fields = item if isinstance(item, dict) else {}
        feedback = fields.get("feedback")
        value = feedback.get("value") if isinstance(feedback, dict) else None
        number = float(value) if isinstance(value, bool) else take_figure(value)
        if number is not None and fields.get("valid") is not False:
            by_span.setdefault(take_fact(fields.get("span_id")), []).append(number)
    if not by_span:
        return results
    rated: list[RowResult] = []
    for row in results:
        span_scores = by_span.get(row.id) if isinstance(row, Interaction) else None
        scores = span_scores or by_span.get(None)
        if not isinstance(row, Interaction) or not scores:
            rated.append(row)
            continue
        level = "call" if span_scores else "trace"
        rated.append(row.model_copy(update={"reward": sum(scores) / len(scores), "reward_level": level}))
    return rated


def fits_langfuse(row: dict[str, Any]) -> bool:
    """Observations, traces and scores, under the names of the export and of the API."""
    is_observation = "type" in row and first_of(row, "trace_id", "traceId") is not None and "input" in row
    is_trace = row.keys() >= {"input", "output", "timestamp"} and not row.keys().isdisjoint(
        ("session_id", "sessionId")
    )
    return is_observation or is_trace or bool(_list_observations(row)) or _is_langfuse_score(row)


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
    parameters = open_json(first_of(row, "model_parameters", "modelParameters"))
    details = open_json(first_of(row, "usage_details", "usageDetails", "usage"))
    costs = open_json(first_of(row, "cost_details", "costDetails"))
    total = first_of(row, "total_cost", "totalCost", "calculated_total_cost", "calculatedTotalCost")
    first_token = take_figure(first_of(row, "time_to_first_token", "timeToFirstToken"))
    latency = take_figure(row.get("latency"))
    facts = {
        "id": take_fact(row.get("id")) or str(origin),
        "session": take_fact(first_of(row, "session_id", "sessionId")),
        "trace": trace,
        "model": take_fact(first_of(row, "provided_model_name", "providedModelName", "model")),
        "duration_ms": latency * 1000 if latency is not None and latency >= 0 else _span_of(row),
        "first_token_ms": first_token * 1000 if first_token is not None and first_token >= 0 else None,
        "max_tokens": take_limit(parameters),
        "extra": _keep(row, "environment", "prompt_name", "prompt_version", "version", "name"),
        **take_usage({"usage": details}),
        "cost": take_cost(total) or take_cost(costs),
    }
    tools = open_json(first_of(row, "tool_definitions", "toolDefinitions"))
    return [to_row(bodies, origin, facts, failed=row.get("level") == "ERROR", key="input", tools=tools)]


def _read_langfuse_trace(
    row: dict[str, Any], observations: list[dict[str, Any]], origin: Origin
) -> list[RowResult]:
    """Read the observations and scores of a trace. One that cannot be read does not stop the others."""
    nested = row.get("trace")
    trace = nested if isinstance(nested, dict) else row
    shared = {"traceId": trace.get("id"), "sessionId": first_of(trace, "sessionId", "session_id")}
    results: list[RowResult] = []
    for path, read in read_each(
        observations, "observations", lambda item: read_langfuse({**shared, **item}, origin)
    ):
        results += read if isinstance(read, list) else [report_bad_row(read, origin, path=path)]
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


def _keep(row: dict[str, Any], *keys: str) -> dict[str, Any]:
    fields = {key: row[key] for key in keys if isinstance(row.get(key), str | int) and row[key] != ""}
    return {key: value for key, value in fields.items() if len(str(value)) <= 200 and "\0" not in str(value)}


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
    bodies = read_bodies(_open_langchain_inputs(inputs), _open_langchain_outputs(outputs))
    model = take_fact(bodies.facts.get("model")) or take_fact(
        first_of(metadata, "ls_model_name") or first_of(parameters, "model", "model_name")
    )
    usage = first_of(outputs, "usage_metadata") or metadata.get("usage_metadata")
    stats = open_json(row.get("feedback_stats"))
    feedback = stats.values() if isinstance(stats, dict) else ()
    facts = {
        "id": take_fact(row.get("id")) or str(origin),
        "session": take_fact(first_of(metadata, "session_id", "thread_id", "conversation_id")),
        "trace": take_fact(first_of(row, "trace_id", "id")) or str(origin),
        "model": model,
        "duration_ms": _span_of(row),
        "first_token_ms": _between(row, ("start_time",), ("first_token_time",)),
        "max_tokens": take_limit(inputs) or take_limit(parameters),
        "extra": _keep(row, "name", "session_name"),
        **take_usage({"usage": usage}),
        **take_usage(row),
        # The averages of a run's feedback, by name.
        **rate_call(item.get("avg") for item in feedback if isinstance(item, dict)),
    }
    tools = first_of(parameters, "tools", "functions")
    return [to_row(bodies, origin, facts, failed=bool(row.get("error")), key="inputs", tools=tools)]


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
    body = first_of(item, "kwargs", "data") if first_of(item, "kwargs", "data") else item
    if not isinstance(body, dict):
        return item
    kind = body.get("type") or item.get("type")
    if kind in ("constructor", None):
        names = item.get("id")
        name = names[-1] if isinstance(names, list) and names and isinstance(names[-1], str) else ""
        kind = name.removesuffix("Chunk").removesuffix("Message").lower()
    if not isinstance(kind, str):
        return item
    added = body.get("additional_kwargs")
    calls = body.get("tool_calls") or (added.get("tool_calls") if isinstance(added, dict) else None)
    message = {"role": _LANGCHAIN_ROLES.get(kind, kind), "content": body.get("content")}
    return {**message, "tool_calls": calls} if calls else message
