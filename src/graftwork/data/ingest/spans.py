"""Spans of OpenTelemetry traces, from OTLP JSON, the SDK's console exporter and tables of spans.

Input: a parsed row. Output: spans with plain attributes, each with its path in the row for error messages,
and log records that hold the content of calls. Does not know what an attribute means.
"""

from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from typing import Any, NamedTuple

from pydantic import ValidationError

from graftwork.data.ingest.fields import (
    BadRow,
    first_of,
    name_type,
    open_json,
    plain_text,
    read_each,
    take_list,
    take_object,
)
from graftwork.text.wording import take_figure

DEEPEST_VALUE = 64
_SCALARS = ("stringValue", "boolValue", "doubleValue", "bytesValue")
_FAILED = (2, "2", "STATUS_CODE_ERROR", "ERROR", "Error", "error")


class SpanEvent(NamedTuple):
    name: str
    attributes: dict[str, Any]
    body: Any = None


class Span(NamedTuple):
    """`started` and `ended` are nanoseconds; None if the trace does not state them."""

    trace: str
    id: str
    parent: str
    name: str
    started: float | None
    ended: float | None
    attributes: dict[str, Any]
    events: list[SpanEvent]
    failed: bool
    service: str | None = None

    @property
    def duration_ms(self) -> float | None:
        if self.started is None or self.ended is None or self.ended < self.started:
            return None
        return (self.ended - self.started) / 1e6


ReadSpan = tuple[str, Span | BadRow | ValidationError]
"""The path of a span in its row, and the span or why it cannot be read."""


def list_spans(row: dict[str, Any]) -> Iterator[ReadSpan]:
    """Yield the spans of a line of OTLP JSON. A span that cannot be read does not stop the others."""
    for path, resource, scope in _list_scopes(row, ("resourceSpans", "batches"), "scopeSpans"):
        service = resource.get("service.name")
        to_span = partial(_to_span, service=service if isinstance(service, str) else None)
        yield from _read_list(scope, "spans", path, to_span)


def list_log_records(row: dict[str, Any]) -> Iterator[ReadSpan]:
    """Yield the log records of a line of OTLP JSON as spans with one event; only those of one call each."""
    for path, _, scope in _list_scopes(row, ("resourceLogs",), "scopeLogs"):
        yield from _read_list(scope, "logRecords", path, _to_log_span)


def _read_list(
    scope: dict[str, Any], name: str, path: str, read: Callable[[Any], Span]
) -> Iterator[ReadSpan]:
    listed = scope.get(name) or []
    if isinstance(listed, list):
        yield from read_each(listed, f"{path}.{name}", read)
    else:
        yield f"{path}.{name}", BadRow(f"it must be a list, not {name_type(listed)}")


def require_object(value: Any, key: str) -> dict[str, Any]:
    if value is None:
        raise BadRow(f"`{key}` must be an object, and is missing")
    return take_object(value, key)


def read_span(row: dict[str, Any]) -> Span:
    """Read a span that is a row: of the SDK's console exporter, of Phoenix, or only attributes."""
    context = _take_columns(row, "context")
    trace = first_of(context, "trace_id") or first_of(row, "trace_id", "traceId")
    span = first_of(context, "span_id") or first_of(row, "span_id", "spanId")
    status = _take_columns(row, "status")
    attributes = _flatten(_take_columns(row, "attributes") or row)
    kind = row.get("span_kind")
    if isinstance(kind, str) and kind.upper() in _OPENINFERENCE_KINDS:
        attributes.setdefault("openinference.span.kind", kind.upper())
    listed = open_json(row.get("events"))
    if not isinstance(listed, list | None):
        raise BadRow(f"`events` must be a list, not {name_type(listed)}")
    events = []
    for item in listed or ():
        event = require_object(item, "event")
        event_attributes = to_attributes(event.get("attributes") or {}, "event.attributes")
        events.append(SpanEvent(plain_text(event.get("name")), event_attributes))
    resource = _take_columns(row, "resource").get("attributes")
    service = resource.get("service.name") if isinstance(resource, dict) else None
    code = first_of(status, "status_code", "code") or row.get("status_code")
    return Span(
        trace=plain_text(trace).removeprefix("0x"),
        id=plain_text(span).removeprefix("0x"),
        parent=plain_text(first_of(row, "parent_id", "parent_span_id", "parentSpanId")).removeprefix("0x"),
        name=plain_text(row.get("name")),
        started=to_nanoseconds(first_of(row, "start_time", "startTime", "startTimeUnixNano")),
        ended=to_nanoseconds(first_of(row, "end_time", "endTime", "endTimeUnixNano")),
        attributes=attributes,
        events=events,
        failed=code in _FAILED or row.get("status") in ("ERROR", "error"),
        service=service if isinstance(service, str) else None,
    )


_OPENINFERENCE_KINDS = frozenset(
    (
        *("LLM", "CHAIN", "TOOL", "AGENT", "RETRIEVER", "EMBEDDING"),
        *("RERANKER", "GUARDRAIL", "EVALUATOR", "PROMPT", "UNKNOWN"),
    )
)
_NUMBERED = ("llm.input_messages", "llm.output_messages", "llm.tools")
"""Attributes whose lists OTLP spells out in numbered keys."""


def _take_columns(row: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an object of a row, or what a table has of it in columns such as `NAME.key`."""
    column = open_json(row.get(name))
    start = f"{name}."
    columns = {key[len(start) :]: value for key, value in row.items() if key.startswith(start)}
    if column is None or (name == "status" and not isinstance(column, dict)):
        return columns
    return {**to_attributes(column, name), **columns}


def _flatten(attributes: dict[str, Any]) -> dict[str, Any]:
    """Spell out nested attributes under dotted keys, as OTLP has them."""
    flat: dict[str, Any] = {}
    waiting = [(key, value, 1) for key, value in reversed(attributes.items())]
    while waiting:
        key, value, depth = waiting.pop()
        if depth > DEEPEST_VALUE:
            raise BadRow("an attribute is nested too deeply")
        is_numbered = key.startswith(_NUMBERED)
        if key in _NUMBERED:
            value = open_json(value)
        inner = list(value.items()) if isinstance(value, dict) else []
        if is_numbered and isinstance(value, list):
            inner = list(enumerate(value))
        if value is not None and not (is_numbered and inner):
            flat.setdefault(key, value)
        waiting += [(f"{key}.{name}", inner_value, depth + 1) for name, inner_value in reversed(inner)]
    return flat


def to_nanoseconds(value: Any) -> float | None:
    """Return a time in nanoseconds since 1970, from nanoseconds or from ISO text."""
    number = take_figure(value)
    if number is not None:
        return number
    if not isinstance(value, str) or not 10 <= len(value) <= 40:
        return None
    try:
        moment = datetime.fromisoformat(value)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1e9
    except (OverflowError, ValueError, OSError):
        return None


def to_plain(value: Any, *, depth: int = 0) -> Any:
    """Return the value that an OTLP `AnyValue` holds."""
    if not isinstance(value, dict):
        return value  # some exporters write plain values
    for name in _SCALARS:
        if name in value:
            return value[name]
    if "intValue" in value:
        number = take_figure(value["intValue"])
        return int(number) if number is not None and abs(number) < 1 << 63 else None
    if depth >= DEEPEST_VALUE:
        raise BadRow("an attribute is nested too deeply")
    if "arrayValue" in value:
        listed = value["arrayValue"].get("values") if isinstance(value["arrayValue"], dict) else None
        return [to_plain(item, depth=depth + 1) for item in listed] if isinstance(listed, list) else []
    if "kvlistValue" in value:
        listed = value["kvlistValue"].get("values") if isinstance(value["kvlistValue"], dict) else None
        return to_attributes(listed or [], "kvlistValue", depth=depth + 1)
    return None


def to_attributes(value: Any, key: str, *, depth: int = 0) -> dict[str, Any]:
    """Return attributes as an object: OTLP lists pairs of key and value."""
    if isinstance(value, dict):
        return value
    if not isinstance(value, list):
        raise BadRow(f"`{key}` must be a list of keys and values, not {name_type(value)}")
    attributes: dict[str, Any] = {}
    for index, pair in enumerate(value):
        name = pair.get("key") if isinstance(pair, dict) else None
        if not isinstance(name, str):
            raise BadRow(f"`{key}[{index}].key` must be text")
        inner = pair.get("value")
        is_text = type(inner) is dict and "stringValue" in inner  # as nearly all are
        attributes[name] = inner["stringValue"] if is_text else to_plain(inner, depth=depth)
    return attributes


def unflatten(attributes: dict[str, Any], prefix: str) -> list[dict[str, Any]]:
    """Return the list that keys such as `PREFIX.0.message.role` spell out, in the order of their numbers."""
    root: dict[str, Any] = {}
    start = f"{prefix}."
    for key, value in attributes.items():
        if not key.startswith(start):
            continue
        parts = key[len(start) :].split(".")
        if len(parts) > DEEPEST_VALUE:
            raise BadRow(f"a key under `{prefix}` is nested too deeply")
        inside = root
        for part in parts[:-1]:
            if not isinstance(inside.get(part), dict):
                inside[part] = {}
            inside = inside[part]
        inside.setdefault(parts[-1], value)
    listed = _to_lists(root)
    return [item for item in listed if isinstance(item, dict)] if isinstance(listed, list) else []


def _to_lists(value: Any) -> Any:
    """Turn objects whose keys are all numbers into lists, inside out."""
    if not isinstance(value, dict):
        return value
    inner = {key: _to_lists(item) for key, item in value.items()}
    if inner and all(key.isdecimal() and len(key) < 10 for key in inner):
        return [inner[key] for key in sorted(inner, key=int)]
    return inner


def _list_scopes(
    row: dict[str, Any], outer: tuple[str, ...], inner: str
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    name = next((key for key in outer if row.get(key) is not None), outer[0])
    for index, item in enumerate(take_list(row.get(name), name)):
        path = f"{name}[{index}]"
        resource = first_of(require_object(item, path), "resource") or {}
        facts = resource.get("attributes") if isinstance(resource, dict) else None
        attributes = to_attributes(facts, f"{path}.resource.attributes") if isinstance(facts, list) else {}
        # The name up to version 0.19 of OTLP.
        scopes = first_of(item, inner, "instrumentationLibrarySpans") or []
        if not isinstance(scopes, list):
            raise BadRow(f"`{path}.{inner}` must be a list, not {name_type(scopes)}")
        for number, scope in enumerate(scopes):
            yield f"{path}.{inner}[{number}]", attributes, require_object(scope, f"{path}.{inner}[{number}]")


def _to_span(item: Any, *, service: str | None) -> Span:
    span = require_object(item, "the span")
    status = take_object(span.get("status"), "status")
    events = []
    for index, event in enumerate(take_list(span.get("events"), "events")):
        fields = require_object(event, f"events[{index}]")
        attributes = to_attributes(fields.get("attributes") or [], f"events[{index}].attributes")
        events.append(SpanEvent(plain_text(fields.get("name")), attributes))
    return Span(
        trace=plain_text(span.get("traceId")),
        id=plain_text(span.get("spanId")),
        parent=plain_text(span.get("parentSpanId")),
        name=plain_text(span.get("name")),
        started=to_nanoseconds(span.get("startTimeUnixNano")),
        ended=to_nanoseconds(span.get("endTimeUnixNano")),
        attributes=to_attributes(span.get("attributes") or [], "attributes"),
        events=events,
        failed=status.get("code") in _FAILED,
        service=service,
    )


def _to_log_span(item: Any) -> Span:
    record = require_object(item, "the log record")
    attributes = to_attributes(record.get("attributes") or [], "attributes")
    body = to_plain(record.get("body"))
    name = first_of(record, "eventName") or attributes.get("event.name")
    return Span(
        trace=plain_text(record.get("traceId")),
        id=plain_text(record.get("spanId")),
        parent="",
        name=plain_text(name),
        started=to_nanoseconds(first_of(record, "timeUnixNano", "observedTimeUnixNano")),
        ended=None,
        attributes=attributes,
        events=[SpanEvent(plain_text(name), attributes, open_json(body))],
        failed=False,
    )
