"""Sends a span for each request to an OpenTelemetry collector: OTLP over HTTP as JSON, GenAI conventions.

In: finished requests. Out: batches that a thread posts. Bounded: what a collector does not take in time is
dropped and counted, and no request waits for it. Spans hold no prompts and no answers.
"""

import logging
import os
import re
import secrets
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from typing import Any

import orjson

from graftwork.process.http_client import HttpClient, NoAnswer
from graftwork.serve.background import BackgroundBatches
from graftwork.serve.request_log import CLIENT_LEFT, FinishedRequest
from graftwork.version import __version__

log = logging.getLogger(__name__)

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}
_SERVER_KIND, _ERROR = 2, 2
_BATCH = 512
_SEND_SECONDS = 10.0
_PAUSES = (0.5, 2.0)
_WARN_SECONDS = 60.0
_TEMPORARY = (429, 502, 503, 504)


class SpanExporter:
    """Start it, `note` requests, close it."""

    def __init__(self, url: str, *, service: str, headers: dict[str, str], limit: int = 2048) -> None:
        self._url = url
        self._service = service
        self._headers = headers
        self._client = HttpClient()
        self._spans: BackgroundBatches[FinishedRequest] = BackgroundBatches(
            self._send_all, name="spans", limit=limit, seconds=1.0
        )
        self._warned_at = float("-inf")
        self.sent = 0
        self._failed = 0

    @property
    def dropped(self) -> int:
        return self._spans.dropped + self._failed

    def note(self, request: FinishedRequest) -> None:
        if request.release or request.error is not None:
            self._spans.offer(request)

    def start(self) -> None:
        self._spans.start()

    def close(self) -> None:
        self._spans.close()

    def _send_all(self, requests: list[FinishedRequest]) -> None:
        for start in range(0, len(requests), _BATCH):
            batch = requests[start : start + _BATCH]
            if self._send(encode_spans(batch, service=self._service)):
                self.sent += len(batch)
            else:
                self._failed += len(batch)

    def _send(self, body: bytes) -> bool:
        headers = {**self._headers, "content-type": "application/json"}
        request = urllib.request.Request(self._url, data=body, headers=headers, method="POST")
        why = ""
        for pause in (*_PAUSES, None):
            try:
                with self._client.send(request, seconds=_SEND_SECONDS) as answer:
                    if answer.status < 300:
                        return True
                    why = f"status {answer.status}"
                    if answer.status not in _TEMPORARY:
                        break
            except NoAnswer as error:
                why = str(error)
            if pause is None or self._spans.closing.wait(pause):
                break
        if time.monotonic() - self._warned_at >= _WARN_SECONDS:
            self._warned_at = time.monotonic()
            log.warning("spans: the collector does not take them: %s", why)
        return False


def read_headers(variable: str | None) -> dict[str, str]:
    """Headers in the form of OTEL_EXPORTER_OTLP_HEADERS: name=value, separated by commas."""
    text = os.environ.get(variable, "") if variable else ""
    pairs = (part.partition("=") for part in text.split(",") if "=" in part)
    return {name.strip().lower(): urllib.parse.unquote(value.strip()) for name, _, value in pairs}


def encode_spans(requests: Sequence[FinishedRequest], *, service: str) -> bytes:
    """An ExportTraceServiceRequest in OTLP's JSON."""
    resource = {"service.name": service, "service.version": __version__}
    scope = {"name": "graftwork.serve", "version": __version__}
    spans = [_encode_span(request) for request in requests]
    groups = [{"scope": scope, "spans": spans}]
    return orjson.dumps(
        {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": groups}]}
    )


def _encode_span(request: FinishedRequest) -> dict[str, Any]:
    operation = _OPERATIONS.get(request.path, "chat")
    parent = _TRACEPARENT.fullmatch(request.traceparent or "")
    failed = request.error is not None or request.finish_reason == "error" or request.status == CLIENT_LEFT
    attributes = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "graftwork",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.release,
        "gen_ai.response.id": request.capture,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": request.reply_tokens,
        "gen_ai.response.finish_reasons": [request.finish_reason] if request.finish_reason else None,
        "gen_ai.server.time_to_first_token": request.first_token_seconds,
        "graft.queue_seconds": request.queue_seconds,
        "graft.key": request.key,
        "http.request.method": request.method,
        "http.route": request.path,
        "http.response.status_code": request.status,
        "error.type": (request.error or request.finish_reason or str(request.status)) if failed else None,
    }
    span = {
        "traceId": parent[1] if parent else secrets.token_hex(16),
        "spanId": secrets.token_hex(8),
        "name": f"{operation} {request.model}".strip(),
        "kind": _SERVER_KIND,
        "startTimeUnixNano": str(int(request.at * 1e9)),
        "endTimeUnixNano": str(int((request.at + request.seconds) * 1e9)),
        "attributes": _attributes({name: v for name, v in attributes.items() if v not in (None, "")}),
        "status": {"code": _ERROR} if failed else {},
    }
    return {**span, "parentSpanId": parent[2]} if parent else span


def _attributes(values: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _any_value(value)} for key, value in values.items()]


def _any_value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_any_value(item) for item in value]}}
    return {"stringValue": str(value)}
