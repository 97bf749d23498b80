"""Formats of traces that hold many spans in a row: OTLP JSON, and traces of MLflow.

In: a parsed row that fits. Out: one interaction per call of a model, what is left out by which rule, and a
fault for each span that cannot be read: it does not stop the others.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from graftwork.data.ingest.blocks import ReadFault, RowResult, SkippedPart
from graftwork.data.ingest.fields import (
    BadRow,
    explain,
    first_of,
    open_json,
    take_fact,
    take_list,
    take_object,
)
from graftwork.data.ingest.llm_spans import (
    IN_OTHER_SPAN,
    NO_CONTENT,
    OTHER_SPAN,
    LeftOutCall,
    is_agent_call,
    is_model_call,
    read_call,
)
from graftwork.data.ingest.spans import (
    PlacedSpan,
    Span,
    list_log_records,
    list_spans,
    read_span,
    to_nanoseconds,
)
from graftwork.records.interaction import Interaction, Origin
from graftwork.text.numbers import take_figure


def fits_otlp(row: dict[str, Any]) -> bool:
    return any(isinstance(row.get(key), list) for key in ("resourceSpans", "batches", "resourceLogs")) or (
        _is_span(row)
    )


def read_otlp(row: dict[str, Any], origin: Origin) -> list[RowResult]:
    """Read a line of OTLP JSON, spans or log records, or a span of the console exporter."""
    if _is_span(row):
        return _read_spans([PlacedSpan("the span", read_span(row))], origin)
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
    held = attributes if isinstance(attributes, dict) else {}
    if any(key in row or key in held or f"attributes.{key}" in row for key in _MARKS):
        return True
    has_attributes = isinstance(attributes, dict | list) or any(key.startswith("attributes.") for key in row)
    return has_attributes and any(key in row for key in _SPAN_IDS)


def _join_log_records(row: dict[str, Any]) -> list[PlacedSpan]:
    """Gather the events of each call into one span."""
    placed: list[PlacedSpan] = []
    by_call: dict[tuple[str, str], int] = {}
    for path, record in list_log_records(row):
        if isinstance(record, BadRow):
            placed.append(PlacedSpan(path, record))
            continue
        place = by_call.setdefault((record.trace, record.id), len(placed))
        if place == len(placed):
            # Events per message do not name the operation, and are written for calls of models only.
            is_message = (
                record.name.startswith("gen_ai.") and "gen_ai.operation.name" not in record.attributes
            )
            named = (
                {"gen_ai.operation.name": "chat", **record.attributes} if is_message else record.attributes
            )
            placed.append(PlacedSpan(path, record._replace(attributes=named)))
        else:
            first = placed[place].span
            assert isinstance(first, Span)
            first.events.extend(record.events)
    return placed


def _read_spans(
    placed: Iterable[PlacedSpan], origin: Origin, *, session: str | None = None
) -> list[RowResult]:
    found: list[RowResult] = []
    left_out: Counter[str] = Counter()
    empty: list[RowResult] = []
    agents: list[PlacedSpan] = []
    traces: set[str] = set()
    for path, span in placed:
        if isinstance(span, BadRow):
            found.append(_fault(origin, path, span))
        elif is_agent_call(span):
            agents.append(PlacedSpan(path, span))
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
                found.append(row)
    # Some libraries put the messages on the span of the agent, and none on those of its calls.
    for path, span in agents:
        assert isinstance(span, Span)
        row = IN_OTHER_SPAN if span.trace in traces else _try_call(span, origin, path, session)
        if isinstance(row, str):
            left_out[OTHER_SPAN if row == NO_CONTENT else row] += 1
        else:
            found.append(row)
    found += empty
    found += [SkippedPart(origin=origin, rule=rule, count=count) for rule, count in sorted(left_out.items())]
    return found


def _try_call(span: Span, origin: Origin, path: str, session: str | None) -> Interaction | ReadFault | str:
    """Return the row of a call, why it cannot be read, or the rule that leaves it out."""
    try:
        return read_call(span, origin, session=session)
    except LeftOutCall as left:
        return left.rule
    except (BadRow, ValidationError) as error:
        return _fault(origin, path, error)


def _fault(origin: Origin, path: str, error: BadRow | ValidationError) -> ReadFault:
    return ReadFault(origin=origin, code="schema", message=f"`{path}`: {explain(error)}")


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
    placed: list[PlacedSpan] = []
    for place, item in enumerate(take_list(open_json(data.get("spans")), "data.spans")):
        path = f"data.spans[{place}]"
        try:
            span = _to_mlflow_span(take_object(open_json(item), path), trace)
            placed.append(PlacedSpan(path, span))
        except BadRow as error:
            placed.append(PlacedSpan(path, error))
    found = _read_spans(placed, origin, session=session)
    return _add_assessments(found, take_list(open_json(first_of(info, "assessments")), "info.assessments"))


def _to_mlflow_span(span: dict[str, Any], trace: str | None) -> Span:
    status = open_json(span.get("status"))
    code = first_of(status, "code", "status_code") if isinstance(status, dict) else span.get("status_code")
    held = span.get("context")
    context = held if isinstance(held, dict) else {}
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


def _add_assessments(found: list[RowResult], assessments: list[Any]) -> list[RowResult]:
    """Give each call the mean of its own assessments, else that of its trace."""
    by_span: dict[str | None, list[float]] = {}
    for item in assessments:
        held = item if isinstance(item, dict) else {}
        feedback = held.get("feedback")
        value = feedback.get("value") if isinstance(feedback, dict) else None
        number = float(value) if isinstance(value, bool) else take_figure(value)
        if number is not None and held.get("valid") is not False:
            by_span.setdefault(take_fact(held.get("span_id")), []).append(number)
    if not by_span:
        return found
    rated: list[RowResult] = []
    for row in found:
        own = by_span.get(row.id) if isinstance(row, Interaction) else None
        scores = own or by_span.get(None)
        if not isinstance(row, Interaction) or not scores:
            rated.append(row)
            continue
        level = "call" if own else "trace"
        rated.append(row.model_copy(update={"reward": sum(scores) / len(scores), "reward_level": level}))
    return rated
