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

from graftwork.serve.api.call import (
    NO_TOKENS,
    AnswerHead,
    ApiFormat,
    ChatCall,
    ChatLimits,
    PieceData,
    TokenUsage,
    describe_reply,
)
from graftwork.serve.api.chat import CHAT, encode_models
from graftwork.serve.api.completions import COMPLETIONS
from graftwork.serve.api.embeddings import EMBEDDINGS
from graftwork.serve.api.messages import MESSAGES
from graftwork.serve.api.responses import RESPONSES
from graftwork.serve.captures import CaptureWriter, FeedbackEndpoint, FeedbackSink, ServedExchange
from graftwork.serve.choices import complete_choices, count_usage, stream_choices
from graftwork.serve.engine_protocol import ReplyStream, ServingEngine
from graftwork.serve.http_messages import (
    JSON_TYPE,
    Answer,
    ApiError,
    Headers,
    Request,
    Response,
    StreamResponse,
    json_response,
)
from graftwork.serve.http_server import HttpLimits, Server
from graftwork.serve.metrics import Metrics
from graftwork.serve.otlp import TracedCalls, TraceIntake
from graftwork.serve.routing import RETRY, ArmAssignment, Routes, choose_release
from graftwork.serve.settings import ServeSettings, is_loopback

_EVENT_STREAM = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))
APIS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETIONS,
    "/v1/responses": RESPONSES,
    "/v1/messages": MESSAGES,
    "/v1/embeddings": EMBEDDINGS,
}
_KNOWN = {
    **dict.fromkeys(APIS, "POST"),
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
    api: ApiFormat
    head: AnswerHead
    capture_id: str
    session: str | None
    started: float
    at: float
    assignment: ArmAssignment | None = None
    asked: bool = False
    """Whether the engine was asked. If not, a missing answer is not the fault of the release."""
    texts: list[str] = field(default_factory=list)
    endings: list[PieceData] = field(default_factory=list)
    """The last pieces of the choices that ended."""
    first_token_at: float | None = None
    finish_reason: str | None = None
    usage: TokenUsage = NO_TOKENS
    disconnected: bool = False

    def headers(self, *, captured: bool) -> Headers:
        release = ("x-graft-release", self.head.release)
        return (release, ("x-graft-capture", self.capture_id)) if captured else (release,)

    def note(self, piece: PieceData) -> None:
        """Keep what the capture and the metrics need. Of several choices the first one is captured."""
        if self.first_token_at is None and piece["text"]:
            self.first_token_at = time.perf_counter()
        is_first = piece.get("index", 0) == 0
        if is_first:
            self.texts.append(piece["text"])
        if piece.get("finish_reason") is not None:
            self.endings.append(piece)
            self.usage = count_usage(self.call, self.endings)
            if is_first:
                self.finish_reason = piece["finish_reason"]
                if calls := piece.get("tool_calls"):
                    self.texts = [describe_reply("".join(self.texts), calls)]

    @property
    def ended(self) -> bool:
        return len(self.endings) == self.call.choices

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
            prompt_tokens=self.usage.prompt,
            reply_tokens=self.usage.reply,
            first_token_ms=None if first is None else (first - self.started) * 1000,
            total_ms=elapsed * 1000,
            disconnected=self.disconnected,
            assignment=self.assignment,
        )


def begin_exchange(call: ChatCall, *, api: ApiFormat, routes: Routes, session: str | None) -> RunningExchange:
    unique = uuid.uuid4().hex
    now = time.time()
    # A request without a session id is a session of its own.
    release, assignment = choose_release(routes, call.model, session=session or unique)
    head = AnswerHead(unique=unique, created=int(now), model=call.model, release=release)
    return RunningExchange(
        call=call,
        api=api,
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
            settings.default_model,
            settings.max_new_tokens,
            settings.max_new_tokens_limit,
            settings.max_schema_bytes,
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
        if request.method == "POST" and (api := APIS.get(request.path)) is not None:
            return await self._generate(request, api)
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
        given = request.headers.get("authorization") or f"Bearer {request.headers.get('x-api-key', '')}"
        return self._bearer is None or hmac.compare_digest(given.encode(), self._bearer)

    def _require_key(self, request: Request) -> None:
        if not self._is_authorized(request):
            message = "the API key is missing or wrong; send it as `Authorization: Bearer …` or `x-api-key`"
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

    # -- completions ---------------------------------------------------------------------------

    async def _generate(self, request: Request, api: ApiFormat) -> Answer:
        label, running = "unknown", None
        try:
            call = self._admit(request, api)
            session = request.headers.get("x-session-id") or call.user or None
            running = begin_exchange(call, api=api, routes=self._routes(), session=session)
            label = running.head.release
            if running.assignment is not None:
                self.metrics.assigned[running.assignment.experiment, running.assignment.arm] += 1
            answer = await self._answer(running)
        except ApiError as error:
            self.metrics.count_request(label, error.status)
            if running is not None and error.status >= 500:
                running.finish_reason = "error"
                self._note_failure(running)
            return Response(error.status, api.encode_error(error), (JSON_TYPE, *error.headers))
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
                    return self._answer_whole(await self._complete(call, model), running)
                stream = await self._stream(call, model)
            headers = (*_EVENT_STREAM, *running.headers(captured=self._is_captured(running)))
            streaming = True  # from here on, `_events` decrements the counter
            return StreamResponse(200, self._events(stream, running), headers)
        except TimeoutError as error:
            raise self._too_slow() from error
        except OSError as error:
            raise self._engine_down() from error
        finally:
            if not streaming:
                self.metrics.in_flight -= 1

    async def _complete(self, call: ChatCall, model: str) -> list[PieceData]:
        if call.options is None:
            return [await self._engine.complete(call, model=model)]
        return await complete_choices(self._engine, call, model=model)

    async def _stream(self, call: ChatCall, model: str) -> ReplyStream:
        if call.options is None:
            return await self._engine.stream(call, model=model)
        return await stream_choices(self._engine, call, model=model)

    def _is_captured(self, running: RunningExchange) -> bool:
        return self._captures is not None and running.api.is_captured

    def _note_failure(self, running: RunningExchange) -> None:
        """In an experiment a missing answer counts for its arm: else a slow or broken release would win."""
        if running.asked and running.assignment is not None:
            self.metrics.assigned_failures[running.assignment.experiment, running.assignment.arm] += 1
            if self._captures is not None and running.api.is_captured:
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

    def _admit(self, request: Request, api: ApiFormat) -> ChatCall:
        """The request as a checked call, unless too many are in flight."""
        _require_json(request)
        if self.metrics.in_flight >= self._settings.queue_limit:
            raise ApiError(429, "the server is full; try again soon", code="full", headers=RETRY)
        return api.parse(request.body, self._limits)

    def _answer_whole(self, choices: list[PieceData], running: RunningExchange) -> Response:
        for place, piece in enumerate(choices):
            running.note(piece if place == 0 else {**piece, "index": place})
        body = running.api.encode(running.head, running.call, choices, running.usage)
        return Response(
            200,
            body,
            (JSON_TYPE, *running.headers(captured=self._is_captured(running))),
            after=lambda: self._finish(running),
        )

    async def _events(self, stream: ReplyStream, running: RunningExchange) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. However it ends, it is counted and the stream closed."""
        encoder = running.api.open_stream(running.head, running.call)
        self._streaming.add(running.capture_id)
        try:
            yield encoder.opening()
            try:
                while (pieces := await self._next_pieces(stream)) is not None:
                    for piece in pieces:
                        running.note(piece)
                    yield b"".join([encoder.piece(piece) for piece in pieces])
                if not running.ended:
                    raise self._engine_down()
            except ApiError as error:
                # The head is already sent: the error goes into the stream, where clients look for it.
                running.finish_reason = "error"
                yield encoder.error(error)
                return
            yield encoder.closing(running.usage)
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
            prompt_tokens=running.usage.prompt,
            reply_tokens=running.usage.reply,
            seconds=elapsed,
        )
        if running.assignment is not None and running.finish_reason == "error":
            self.metrics.assigned_failures[running.assignment.experiment, running.assignment.arm] += 1
        if self._captures is not None and running.api.is_captured:
            self._captures.offer(running.to_exchange(elapsed))


def _require_json(request: Request) -> None:
    if not request.headers.get("content-type", "").startswith("application/json"):
        # Also keeps other web pages out: browsers send a preflight request for this type.
        raise ApiError(415, "send the request as content-type: application/json")
