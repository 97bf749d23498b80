"""Takes traces over OTLP/HTTP: calls of models that other programs made become captures.

Input: the body of `POST /v1/traces`, protobuf or JSON, gzip or not. Output: exchanges for the capture writer,
which redacts them, and an answer that says how many spans were not taken. Decoding runs in a thread, one
request after another, so that chat requests do not wait for it. Does not know what a span means: `read` does.
"""

import asyncio
import gc
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson

from graftwork.engines.protocol import estimate_tokens
from graftwork.http.messages import RETRY, ApiError, Request, Response, json_response
from graftwork.records.base import MIB
from graftwork.serve.budgets import KeyUsage
from graftwork.serve.captures import CaptureWriter, ServedExchange
from graftwork.text.shape import has_too_many_values

PROTOBUF, JSON = "application/x-protobuf", "application/json"
MOST_UNPACKED_BYTES = 32 * MIB
"""A compressed trace that unpacks to more is refused with 413."""
_AT_ONCE = 2
_DEEPEST = 64
_SLICE = 1 << 16
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10
_MOST_FIELDS = 1 << 19
"""Limit on the fields of one protobuf request. An attribute has four; 512 spans, the usual batch, have some
ten thousand.
"""


TracedCalls = tuple[list[ServedExchange], list[str]]
"""What a request holds: calls of models, and why each span cannot be read that cannot."""


class BadTrace(ValueError):
    """The body is not OTLP."""


class TraceIntake:
    """`read` turns a parsed request into exchanges; it is called in a thread."""

    def __init__(
        self,
        read: Callable[[dict[str, Any]], TracedCalls],
        *,
        captures: CaptureWriter,
    ) -> None:
        self._read = read
        self._captures = captures
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="traces")
        self._under_way = 0
        self.calls = 0
        self.rejected = 0

    async def take(self, request: Request, usage: KeyUsage) -> Response:
        """`usage` is charged with the tokens of the calls, which are estimated."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        packing = request.headers.get("content-encoding", "identity").strip().lower()
        if kind not in (PROTOBUF, JSON):
            raise ApiError(415, f"send traces as {PROTOBUF} or {JSON}")
        if packing not in ("gzip", "identity", ""):
            raise ApiError(415, "send traces with content-encoding gzip, or without")
        if self._under_way >= _AT_ONCE:
            raise ApiError(429, "too many traces at once; try again soon", code="full", headers=RETRY)

        def end_one(_decoding: "asyncio.Future[TracedCalls]") -> None:
            self._under_way -= 1

        self._under_way += 1
        loop = asyncio.get_running_loop()
        decoding = loop.run_in_executor(self._thread, self._decode, request.body, kind, packing == "gzip")
        # A client that leaves does not end the thread: it counts until it is done.
        decoding.add_done_callback(end_one)
        try:
            exchanges, faults = await asyncio.shield(decoding)
        except BadTrace as error:
            raise ApiError(400, str(error), code="bad_trace") from None
        usage.add_tokens(sum(estimate_tokens(exchange.size) for exchange in exchanges))
        dropped = sum(not self._captures.offer(exchange) for exchange in exchanges)
        self.calls += len(exchanges) - dropped
        self.rejected += len(faults) + dropped
        why = faults[0] if faults else "the queue of captures is full" if dropped else ""
        return _answer(kind, rejected=len(faults) + dropped, why=why)

    def _decode(self, body: bytes, kind: str, packed: bool) -> TracedCalls:
        data = unpack(body, most=MOST_UNPACKED_BYTES) if packed else body
        # A collection looks at all values of a large trace at once, and requests wait for it.
        gc.disable()
        try:
            return self._read(parse_json(data) if kind == JSON else parse_protobuf(data))
        finally:
            gc.enable()


def unpack(body: bytes, *, most: int) -> bytes:
    """Decompress gzip up to a size."""
    unpacker = zlib.decompressobj(wbits=31)
    pieces: list[bytes] = []
    size = 0
    remaining = body
    try:
        while remaining and not unpacker.eof:
            piece = unpacker.decompress(remaining, _SLICE)
            size += len(piece)
            if size > most:
                raise ApiError(413, f"the trace unpacks to more than {most:,} bytes")
            pieces.append(piece)
            remaining = unpacker.unconsumed_tail
    except zlib.error:
        raise BadTrace("the body is not gzip") from None
    if not unpacker.eof:
        raise BadTrace("the gzip stream ends too early")
    return b"".join(pieces)


def parse_json(data: bytes) -> dict[str, Any]:
    if has_too_many_values(data):
        raise BadTrace("the body holds too many values")
    try:
        row = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise BadTrace(f"the body is not valid JSON: {error}") from None
    if not isinstance(row, dict) or not isinstance(row.get("resourceSpans"), list):
        raise BadTrace("the body must be an object with resourceSpans")
    return row


_IDS = {1: "traceId", 2: "spanId", 4: "parentSpanId"}
_TIMES = {7: "startTimeUnixNano", 8: "endTimeUnixNano"}


def parse_protobuf(data: bytes) -> dict[str, Any]:
    """Decode an ExportTraceServiceRequest to the form of OTLP JSON, with plain attributes."""
    reader = _ProtobufReader()
    spans = [reader.resource_spans(value) for number, value in reader.fields(data) if number == 1]
    return {"resourceSpans": spans}


class _ProtobufReader:
    """Reads one request. Counts its fields: an empty message has two bytes and takes hundreds in memory."""

    def __init__(self) -> None:
        self._left = _MOST_FIELDS

    def fields(self, data: Any) -> Iterator[tuple[int, Any]]:
        for field in _fields(data):
            self._left -= 1
            if self._left < 0:
                raise BadTrace("the body holds too many values")
            yield field

    def resource_spans(self, data: Any) -> dict[str, Any]:
        resource: dict[str, Any] = {"resource": {}, "scopeSpans": []}
        for number, value in self.fields(data):
            if number == 1:
                # Attributes come as a list of pairs, as in JSON.
                pairs = [self._pair(item) for field, item in self.fields(value) if field == 1]
                resource["resource"] = {"attributes": pairs}
            elif number == 2:
                spans = [self._span(item) for field, item in self.fields(value) if field == 2]
                resource["scopeSpans"].append({"spans": spans})
        return resource

    def _span(self, data: Any) -> dict[str, Any]:
        span: dict[str, Any] = {"attributes": [], "events": [], "status": {}}
        for number, value in self.fields(data):
            if number in _IDS:
                span[_IDS[number]] = _raw(value).hex()
            elif number == 5:
                span["name"] = _text(value)
            elif number in _TIMES:
                span[_TIMES[number]] = value
            elif number == 9:
                span["attributes"].append(self._pair(value))
            elif number == 11:
                span["events"].append(self._event(value))
            elif number == 15:
                codes = [code for field, code in self.fields(value) if field == 3]
                span["status"] = {"code": codes[-1]} if codes else {}
        return span

    def _event(self, data: Any) -> dict[str, Any]:
        event: dict[str, Any] = {"name": "", "attributes": []}
        for number, value in self.fields(data):
            if number == 2:
                event["name"] = _text(value)
            elif number == 3:
                event["attributes"].append(self._pair(value))
        return event

    def _pair(self, data: Any, depth: int = 0) -> dict[str, Any]:
        pair: dict[str, Any] = {"key": "", "value": {}}
        for number, value in self.fields(data):
            if number == 1:
                pair["key"] = _text(value)
            elif number == 2:
                pair["value"] = self._any_value(value, depth)
        return pair

    def _any_value(self, data: Any, depth: int) -> dict[str, Any]:
        """Decode an AnyValue under the names that OTLP JSON has for its kinds."""
        if depth >= _DEEPEST:
            raise BadTrace("an attribute is nested too deeply")
        kind: dict[str, Any] = {}
        for number, value in self.fields(data):
            if number == 1:
                kind = {"stringValue": _text(value)}
            elif number == 2:
                kind = {"boolValue": bool(value)}
            elif number == 3:
                number_bits = _bits(value)
                kind = {"intValue": number_bits - (1 << 64) if number_bits >> 63 else number_bits}
            elif number == 4:
                kind = {"doubleValue": struct.unpack("<d", struct.pack("<Q", _bits(value)))[0]}
            elif number == 5:
                values = [
                    self._any_value(item, depth + 1) for field, item in self.fields(value) if field == 1
                ]
                kind = {"arrayValue": {"values": values}}
            elif number == 6:
                pairs = [self._pair(item, depth + 1) for field, item in self.fields(value) if field == 1]
                kind = {"kvlistValue": {"values": pairs}}
        return kind


def _bits(value: Any) -> int:
    if not isinstance(value, int):
        raise BadTrace("the body is not an OTLP message")
    return value


def _fields(data: Any) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message: numbers as integers, everything else as bytes."""
    view = memoryview(_raw(data))
    offset, end = 0, len(view)
    while offset < end:
        tag, offset = _read_varint(view, offset)
        kind, number = tag & 7, tag >> 3
        value: Any
        if kind == _VARINT:
            value, offset = _read_varint(view, offset)
        elif kind in (_FIXED64, _FIXED32):
            width = 8 if kind == _FIXED64 else 4
            if offset + width > end:
                raise BadTrace("the body ends within a message")
            value = int.from_bytes(view[offset : offset + width], "little")
            offset += width
        elif kind == _BYTES:
            size, offset = _read_varint(view, offset)
            if offset + size > end:
                raise BadTrace("the body ends within a message")
            value = view[offset : offset + size]
            offset += size
        else:
            raise BadTrace("the body is not an OTLP message")
        yield number, value


def _read_varint(view: memoryview, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(_LONGEST_VARINT):
        if offset >= len(view):
            raise BadTrace("the body ends within a message")
        byte = view[offset]
        offset += 1
        value |= (byte & 0x7F) << (7 * shift)
        if byte < 0x80:
            return value & 0xFFFFFFFFFFFFFFFF, offset
    raise BadTrace("the body is not an OTLP message")


def _raw(value: Any) -> bytes | memoryview:
    if isinstance(value, int):
        raise BadTrace("the body is not an OTLP message")
    return value  # type: ignore[no-any-return]


def _text(value: Any) -> str:
    return bytes(_raw(value)).decode("utf-8", errors="replace")


def _answer(kind: str, *, rejected: int, why: str) -> Response:
    """The answer that OTLP asks for: empty, or how many spans were not taken and why."""
    if kind == JSON:
        partial = {"partialSuccess": {"rejectedSpans": str(rejected), "errorMessage": why[:500]}}
        return json_response(partial if rejected else {})
    body = b""
    if rejected:
        message = why[:500].encode()
        inner = b"\x08" + _write_varint(rejected) + b"\x12" + _write_varint(len(message)) + message
        body = b"\x0a" + _write_varint(len(inner)) + inner
    return Response(200, body, (("content-type", PROTOBUF),))


def _write_varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
