"""The endpoint that users call: the OpenAI API in front, an engine behind it, captures off the hot path.

Checks the API key, chooses the release, relays the request and gives each finished exchange to the capture
writer. Every answer names its release. Loads no weights and no torch; answers 503 while the engine is down.
"""

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from graftwork.serve.captures import CaptureWriter, FeedbackEndpoint, FeedbackSink, ServedExchange
from graftwork.serve.engine_protocol import PieceData, ReplyStream, ServingEngine
from graftwork.serve.http_messages import (
    JSON_TYPE,
    Answer,
    ApiError,
    Headers,
    Request,
    Response,
    StreamResponse,
    encode_error,
    error_response,
    json_response,
)
from graftwork.serve.http_server import HttpLimits, Server
from graftwork.serve.metrics import Metrics
from graftwork.serve.openai_api import (
    DONE_EVENT,
    AnswerHead,
    ChatCall,
    ChatLimits,
    ChunkEncoder,
    encode_completion,
    encode_error_event,
    encode_models,
    parse_chat,
)
from graftwork.serve.otlp import TracedCalls, TraceIntake
from graftwork.serve.routing import RETRY, ArmAssignment, Routes, choose_release
from graftwork.serve.settings import ServeSettings, is_loopback

_EVENT_STREAM = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))
_KNOWN = {
    "/v1/chat/completions": "POST",
    "/v1/models": "GET",
    "/v1/feedback": "POST",
    "/v1/traces": "POST",
    "/metrics": "GET",
    "/health": "GET",
}


@dataclass(slots=True)
class RunningExchange:
    """What is known of one exchange while it runs."""

    call: ChatCall
    head: AnswerHead
    capture_id: str
    session: str | None
    started: float
    at: float
    assignment: ArmAssignment | None = None
    asked: bool = False
    """Whether the engine was asked. If not, a missing answer is not the fault of the release."""
    texts: list[str] = field(default_factory=list)
    first_token_at: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    reply_tokens: int = 0
    disconnected: bool = False

    def headers(self, *, captured: bool) -> Headers:
        release = ("x-graft-release", self.head.release)
        return (release, ("x-graft-capture", self.capture_id)) if captured else (release,)

    def note_end(self, piece: PieceData) -> None:
        self.finish_reason = piece["finish_reason"]
        self.prompt_tokens = piece["prompt_tokens"]
        self.reply_tokens = piece["reply_tokens"]

    def encode_piece(self, encoder: ChunkEncoder, piece: PieceData) -> bytes:
        out = b""
        if piece["text"]:
            if self.first_token_at is None:
                self.first_token_at = time.perf_counter()
            self.texts.append(piece["text"])
            out = encoder.text(piece["text"])
        reason = piece.get("finish_reason")
        if reason is not None:
            self.note_end(piece)
            out += encoder.ending(reason)
        return out

    def to_exchange(self, elapsed: float) -> ServedExchange:
        first = self.first_token_at
        return ServedExchange(
            id=self.capture_id,
            at=self.at,
            session=self.session,
            model=self.call.model,
            release=self.head.release,
            request=self.call.body,
            reply="".join(self.texts),
            finish_reason=self.finish_reason,
            prompt_tokens=self.prompt_tokens,
            reply_tokens=self.reply_tokens,
            first_token_ms=None if first is None else (first - self.started) * 1000,
            total_ms=elapsed * 1000,
            disconnected=self.disconnected,
            assignment=self.assignment,
        )


def begin_exchange(call: ChatCall, *, routes: Routes, session: str | None) -> RunningExchange:
    unique = uuid.uuid4().hex
    now = time.time()
    # A request without a session id is a session of its own.
    release, assignment = choose_release(routes, call.model, session=session or unique)
    head = AnswerHead(id=f"chatcmpl-{unique}", created=int(now), model=call.model, release=release)
    return RunningExchange(
        call=call,
        head=head,
        capture_id=unique,
        session=session,
        started=time.perf_counter(),
        at=now,
        assignment=assignment,
    )


class Gateway:
    def __init__(
        self,
        engine: ServingEngine,
        *,
        settings: ServeSettings,
        routes: Callable[[], Routes],
        captures: CaptureWriter | None,
        api_key: str | None,
        feedback: FeedbackSink | None = None,
        read_traces: Callable[[dict[str, Any]], TracedCalls] | None = None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._routes = routes
        self._captures = captures
        self._bearer = None if api_key is None else f"Bearer {api_key}".encode()
        # Without a key, a web page could reach this server through a host name of its own: check the name.
        self._check_host = api_key is None and is_loopback(settings.host)
        self._limits = ChatLimits(
            settings.default_model, settings.max_new_tokens, settings.max_new_tokens_limit
        )
        self.metrics = Metrics()
        self._feedback = None
        if feedback is not None and captures is not None:
            self._feedback = FeedbackEndpoint(feedback, captures=captures)
        self._traces = None
        if read_traces is not None and captures is not None and settings.traces:
            most = settings.traces_max_unpacked_bytes
            self._traces = TraceIntake(read_traces, captures=captures, most_bytes=most)
        self._streaming: set[str] = set()
        """Capture ids of answers that are still streaming."""

    def open_server(self) -> Server:
        """A server that checks the head of each request before it reads the body."""
        limits = HttpLimits(
            max_connections=self._settings.max_connections, max_body_bytes=self._settings.max_body_bytes
        )
        return Server(self._handle, admit=self._check_head, limits=limits)

    def _check_head(self, head: Request) -> None:
        """Refuse unauthorized requests, and bodies where none is expected, at the end of the headers."""
        self._require_host(head)
        if head.path == "/health" and head.method in ("GET", "HEAD"):
            if head.headers.get("content-length", "0") != "0" or "transfer-encoding" in head.headers:
                raise ApiError(400, "/health takes no body")
            return
        self._require_key(head)

    async def _handle(self, request: Request) -> Answer:
        route = (request.method, request.path)
        if route == ("GET", "/health"):
            return self._health(request)
        if route == ("POST", "/v1/chat/completions"):
            return await self._chat(request)
        if route == ("GET", "/v1/models"):
            routes = self._routes()
            routes.require_loaded()
            return Response(200, encode_models(routes.names()))
        if route == ("GET", "/metrics"):
            return Response(200, self._render_metrics(), (("content-type", "text/plain; version=0.0.4"),))
        if route == ("POST", "/v1/feedback"):
            return await self._take_feedback(request)
        if route == ("POST", "/v1/traces"):
            return await self._take_traces(request)
        if request.path in _KNOWN:
            allowed = _KNOWN[request.path]
            raise ApiError(405, f"{request.path} takes {allowed}", headers=(("allow", allowed),))
        raise ApiError(404, f"there is no {request.path}; available: {', '.join(_KNOWN)}")

    # -- access --------------------------------------------------------------------------------

    def _require_host(self, request: Request) -> None:
        if not self._check_host:
            return
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name and not is_loopback(name.strip("[]")):
            raise ApiError(403, f"this server answers only on this machine, not as {name!r}")

    def _is_authorized(self, request: Request) -> bool:
        given = request.headers.get("authorization", "").encode()
        return self._bearer is None or hmac.compare_digest(given, self._bearer)

    def _require_key(self, request: Request) -> None:
        if not self._is_authorized(request):
            message = "the API key is missing or wrong; send it as `Authorization: Bearer …`"
            raise ApiError(401, message, code="invalid_api_key")

    # -- health and metrics --------------------------------------------------------------------

    def _health(self, request: Request) -> Response:
        engine, routes = self._engine.describe(), self._routes()
        ready = engine["state"] == "ready" and routes.loaded
        starting = engine["state"] == "ready" and not routes.loaded
        health: dict[str, Any] = {"status": "ok" if ready else "starting" if starting else engine["state"]}
        if self._is_authorized(request):
            health |= {"engine": engine, "aliases": routes.aliases, "pending": routes.pending}
            health |= {"releases": sorted(routes.releases), "captures": self._count_captures()}
            if self._settings.split is not None:
                health["split"] = self._describe_split(routes)
        return json_response(health, status=200 if ready else 503)

    def _describe_split(self, routes: Routes) -> dict[str, Any]:
        running = routes.experiment
        if running is None:
            return {"state": "off", "why": routes.experiment_off, "experiment": None}
        name = running.experiment
        arms = {
            "champion": {"release": running.champion, "share": 1 - running.share},
            "challenger": {"release": running.challenger, "share": running.share},
        }
        for arm, shown in arms.items():
            shown["requests"] = self.metrics.assigned[name, arm]
            shown["failures"] = self.metrics.assigned_failures[name, arm]
        return {"state": "on", "alias": running.alias, "experiment": name, "arms": arms}

    def _count_captures(self) -> dict[str, int]:
        if self._captures is None:
            return {}
        counts = {
            "kept": self._captures.kept,
            "dropped": self._captures.dropped,
            "lost": self._captures.lost,
        }
        if self._feedback is not None:
            counts["feedback"] = self._feedback.kept
        if self._traces is not None:
            counts |= {"traced_calls": self._traces.calls, "traced_rejected": self._traces.rejected}
        return counts

    def _render_metrics(self) -> bytes:
        engine = self._engine.describe()
        gauges = {
            "graft_engine_up": float(engine["state"] == "ready"),
            "graft_engine_restarts_total": float(engine["restarts"]),
            **{f"graft_captures_{k}_total": float(v) for k, v in self._count_captures().items()},
        }
        return self.metrics.render(gauges).encode()

    # -- chat completions ----------------------------------------------------------------------

    async def _chat(self, request: Request) -> Answer:
        label, running = "unknown", None
        try:
            call = self._admit(request)
            session = request.headers.get("x-session-id") or call.user or None
            running = begin_exchange(call, routes=self._routes(), session=session)
            label = running.head.release
            if running.assignment is not None:
                self.metrics.assigned[running.assignment.experiment, running.assignment.arm] += 1
            answer = await self._answer(running)
        except ApiError as error:
            self.metrics.count_request(label, error.status)
            if running is not None and error.status >= 500:
                running.finish_reason = "error"
                self._note_failure(running)
            return error_response(error)
        except asyncio.CancelledError:
            self.metrics.disconnects += 1
            if running is not None:
                running.disconnected = True
                self._note_failure(running)
            raise
        self.metrics.count_request(label, 200)
        return answer

    async def _answer(self, running: RunningExchange) -> Answer:
        if self._engine.state != "ready":
            raise self._engine_down()
        self.metrics.in_flight += 1
        streaming, call, model = False, running.call, running.head.release
        running.asked = True
        try:
            async with asyncio.timeout(self._settings.request_timeout_seconds):
                if not call.stream:
                    return self._answer_whole(await self._engine.complete(call, model=model), running)
                stream = await self._engine.stream(call, model=model)
            headers = (*_EVENT_STREAM, *running.headers(captured=self._captures is not None))
            streaming = True  # from here on, `_events` decrements the counter
            return StreamResponse(200, self._events(stream, running), headers)
        except TimeoutError as error:
            raise self._too_slow() from error
        except OSError as error:
            raise self._engine_down() from error
        finally:
            if not streaming:
                self.metrics.in_flight -= 1

    def _note_failure(self, running: RunningExchange) -> None:
        """In an experiment a missing answer counts for its arm: else a slow or broken release would win."""
        if running.asked and running.assignment is not None:
            self.metrics.assigned_failures[running.assignment.experiment, running.assignment.arm] += 1
            if self._captures is not None:
                self._captures.offer(running.to_exchange(time.perf_counter() - running.started))

    async def _take_feedback(self, request: Request) -> Answer:
        _require_json(request)
        if self._feedback is None:
            message = "there is nothing to give feedback on: this server keeps no captures (serve.capture)"
            raise ApiError(404, message, code="captures_off")
        return await self._feedback.take(request, is_running=self._streaming.__contains__)

    async def _take_traces(self, request: Request) -> Answer:
        if self._traces is None:
            message = "this server takes no traces: serve.traces or serve.capture is off"
            raise ApiError(404, message, code="traces_off")
        return await self._traces.take(request)

    def _admit(self, request: Request) -> ChatCall:
        """The request as a checked call, unless too many are in flight."""
        _require_json(request)
        if self.metrics.in_flight >= self._settings.queue_limit:
            raise ApiError(429, "the server is full; try again soon", code="full", headers=RETRY)
        return parse_chat(request.body, self._limits)

    def _answer_whole(self, piece: PieceData, running: RunningExchange) -> Response:
        running.texts.append(piece["text"])
        running.note_end(piece)
        body = encode_completion(
            running.head,
            text=piece["text"],
            finish_reason=running.finish_reason or "stop",
            prompt_tokens=running.prompt_tokens,
            reply_tokens=running.reply_tokens,
        )
        return Response(
            200,
            body,
            (JSON_TYPE, *running.headers(captured=self._captures is not None)),
            after=lambda: self._finish(running),
        )

    async def _events(self, stream: ReplyStream, running: RunningExchange) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. However it ends, it is counted and the stream closed."""
        encoder = ChunkEncoder(running.head)
        self._streaming.add(running.capture_id)
        try:
            yield encoder.opening()
            try:
                while (pieces := await self._next_pieces(stream)) is not None:
                    yield b"".join([running.encode_piece(encoder, piece) for piece in pieces])
                if running.finish_reason is None:
                    raise self._engine_down()
            except ApiError as error:
                # The head is already sent: the error goes into the stream, where clients look for it.
                running.finish_reason = "error"
                yield encode_error_event(encode_error(error))
                return
            if running.call.include_usage:
                yield encoder.usage(running.prompt_tokens, running.reply_tokens)
            yield DONE_EVENT
        except (asyncio.CancelledError, GeneratorExit):
            running.disconnected = True
            self.metrics.disconnects += 1
            raise
        finally:
            stream.close()
            self.metrics.in_flight -= 1
            self._finish(running)
            self._streaming.discard(running.capture_id)

    async def _next_pieces(self, stream: ReplyStream) -> list[PieceData] | None:
        try:
            async with asyncio.timeout(self._settings.request_timeout_seconds):
                return await stream.next_pieces()
        except TimeoutError as error:
            raise self._too_slow() from error
        except OSError as error:
            raise self._engine_down() from error

    def _engine_down(self) -> ApiError:
        why = self._engine.describe()["reason"] or "it has just stopped"
        message = f"the engine is not ready: {why}; try again soon"
        return ApiError(503, message, code="engine_down", headers=RETRY)

    def _too_slow(self) -> ApiError:
        seconds = self._settings.request_timeout_seconds
        return ApiError(504, f"the engine did not answer within {seconds:g} s", code="timeout")

    def _finish(self, running: RunningExchange) -> None:
        """Count the exchange and give it to the capture writer."""
        elapsed = time.perf_counter() - running.started
        self.metrics.count_answer(
            running.head.release,
            prompt_tokens=running.prompt_tokens,
            reply_tokens=running.reply_tokens,
            seconds=elapsed,
        )
        if running.assignment is not None and running.finish_reason == "error":
            self.metrics.assigned_failures[running.assignment.experiment, running.assignment.arm] += 1
        if self._captures is not None:
            self._captures.offer(running.to_exchange(elapsed))


def _require_json(request: Request) -> None:
    if not request.headers.get("content-type", "").startswith("application/json"):
        # Also keeps other web pages out: browsers send a preflight request for this type.
        raise ApiError(415, "send the request as content-type: application/json")
