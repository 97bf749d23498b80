"""The endpoint that users call: the OpenAI API in front, an engine behind it, captures off the hot path.

Checks the API key, chooses the release, relays the request and gives each finished exchange to the capture
writer. Every answer names its release. Loads no weights and no torch; answers 503 while the engine is down.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from graftwork.serve.api.call import (
    ApiFormat,
    ChatCall,
    ChatLimits,
    PieceData,
)
from graftwork.serve.api.chat import CHAT, encode_models
from graftwork.serve.api.completions import COMPLETIONS
from graftwork.serve.api.embeddings import EMBEDDINGS
from graftwork.serve.api.messages import MESSAGES
from graftwork.serve.api.responses import RESPONSES
from graftwork.serve.captures import CaptureWriter
from graftwork.serve.cors import allow_origins, is_preflight
from graftwork.serve.deadline import TIMEOUT_HEADER, with_deadline
from graftwork.serve.engine_protocol import ReplyStream, ServingEngine
from graftwork.serve.escalation import OUTCOMES, Escalator, HeldReply
from graftwork.serve.exchange import RunningExchange, ask_engine, begin_exchange
from graftwork.serve.failover.chain import NoReplica, failure_code
from graftwork.serve.failover_metrics import FallbackCounts, render_failover
from graftwork.serve.fallbacks import Fallbacks
from graftwork.serve.feedback import FeedbackEndpoint, FeedbackSink
from graftwork.serve.http_messages import (
    JSON_TYPE,
    Answer,
    ApiError,
    Request,
    Response,
    StreamResponse,
    json_response,
)
from graftwork.serve.http_server import HttpLimits, Server
from graftwork.serve.keys import KeyRing, Scope, render_keys
from graftwork.serve.metrics import Metrics
from graftwork.serve.otlp import TracedCalls, TraceIntake
from graftwork.serve.request_log import CLIENT_LEFT, FinishedRequest, RequestObserver
from graftwork.serve.routing import RETRY, Routes
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
_SCOPES: dict[str, Scope] = {"/v1/feedback": "feedback", "/v1/traces": "feedback", "/metrics": "metrics"}
"""What the key of a request needs; for all other paths it is `models`."""
_ADMIN_CONNECTIONS = 64


class Gateway:
    def __init__(
        self,
        engine: ServingEngine,
        *,
        settings: ServeSettings,
        routes: Callable[[], Routes],
        captures: CaptureWriter | None,
        feedback: FeedbackSink | None = None,
        read_traces: Callable[[dict[str, Any]], TracedCalls] | None = None,
        keys: KeyRing | None = None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._routes = routes
        self._captures = captures
        self._keys = keys or KeyRing()
        self._limits = _read_limits(settings)
        self.metrics = Metrics()
        self._feedback = None
        if feedback is not None and captures is not None:
            self._feedback = FeedbackEndpoint(feedback, captures=captures)
        self._traces = None
        if read_traces is not None and captures is not None and settings.traces:
            most = settings.traces_max_unpacked_bytes
            self._traces = TraceIntake(read_traces, captures=captures, most_bytes=most)
        self.observers: tuple[RequestObserver, ...] = ()
        self.fallbacks: Fallbacks | None = None
        self.escalator: Escalator | None = None
        self._fallback_counts: FallbackCounts = Counter()
        self.draining = False
        self._idle = asyncio.Event()
        self._streaming: set[str] = set()
        """Capture ids of answers that are still streaming."""

    def revise(self, settings: ServeSettings) -> None:
        """Use other settings from the next request on."""
        self._settings, self._limits = settings, _read_limits(settings)
        if self.fallbacks is not None:
            self.fallbacks.chains = dict(settings.failover.fallback)

    def open_server(self) -> Server:
        """A server that checks the head of each request before it reads the body."""
        limits = HttpLimits(
            max_connections=self._settings.max_connections, max_body_bytes=self._settings.max_body_bytes
        )
        origins = self._settings.cors_origins
        handler = allow_origins(self._handle, origins) if origins else self._handle
        server = Server(handler, admit=self._check_head, limits=limits)
        server.on_refused = self._note_refused
        return server

    def open_admin_server(self) -> Server:
        """A server for metrics and the details of /health alone."""
        limits = HttpLimits(max_connections=_ADMIN_CONNECTIONS, max_body_bytes=0)
        return Server(self._handle_admin, admit=self._check_head, limits=limits)

    def _check_head(self, head: Request) -> None:
        """Refuse unauthorized requests, and bodies where none is expected, at the end of the headers."""
        self._require_host(head)
        if head.path == "/health" and head.method in ("GET", "HEAD"):
            head.require_no_body("/health")
            return
        if self._settings.cors_origins and is_preflight(head):
            head.require_no_body("a preflight request")
            return
        self._keys.require(head).require(_SCOPES.get(head.path, "models"))

    async def _handle(self, request: Request) -> Answer:
        if not self.observers or request.path in APIS:
            return await self._dispatch(request)
        at, started, status, error = time.time(), time.perf_counter(), 500, None
        try:
            answer = await self._dispatch(request)
            status = answer.status
        except asyncio.CancelledError:
            status = CLIENT_LEFT
            raise
        except ApiError as refused:
            status, error = refused.status, refused
            raise
        finally:
            self._note_request(request, at=at, started=started, status=status, error=error)
        return answer

    async def _handle_admin(self, request: Request) -> Answer:
        if request.method == "GET" and request.path == "/health":
            return self._health(request, details=True)
        if request.method == "GET" and request.path == "/metrics":
            return self._answer_metrics()
        raise ApiError(404, f"there is no {request.path} here; available: /health, /metrics")

    async def _dispatch(self, request: Request) -> Answer:
        route = (request.method, request.path)
        if route == ("GET", "/health"):
            return self._health(request, details=self._settings.admin_port is None)
        if request.method == "POST" and (api := APIS.get(request.path)) is not None:
            return await self._generate(request, api)
        if route == ("GET", "/v1/models"):
            routes = self._routes()
            routes.require_loaded()
            own = self._keys.require(request).models
            names = {name: to for name, to in routes.names().items() if not own or name in own}
            return Response(200, encode_models(names))
        if route == ("GET", "/metrics") and self._settings.admin_port is None:
            return self._answer_metrics()
        if route == ("POST", "/v1/feedback"):
            return await self._take_feedback(request)
        if route == ("POST", "/v1/traces"):
            return await self._take_traces(request)
        if request.path in _KNOWN and not (
            request.path == "/metrics" and self._settings.admin_port is not None
        ):
            allowed = _KNOWN[request.path]
            raise ApiError(405, f"{request.path} takes {allowed}", headers=(("allow", allowed),))
        raise ApiError(404, f"there is no {request.path}; available: {', '.join(_KNOWN)}")

    # -- access --------------------------------------------------------------------------------

    def _require_host(self, request: Request) -> None:
        # Without a key, a web page could reach this server through a host name of its own: check the name.
        if self._keys.required or not is_loopback(self._settings.host):
            return
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name and not is_loopback(name.strip("[]")):
            raise ApiError(403, f"this server answers only on this machine, not as {name!r}")

    # -- health and metrics --------------------------------------------------------------------

    def _health(self, request: Request, *, details: bool) -> Response:
        engine, routes = self._engine.describe(), self._routes()
        ready = engine["state"] == "ready" and routes.loaded
        starting = engine["state"] == "ready" and not routes.loaded
        health: dict[str, Any] = {"status": "ok" if ready else "starting" if starting else engine["state"]}
        if self.draining:
            ready, health["status"] = False, "stopping"
        holder = self._keys.find(request)
        if details and holder is not None and "admin" in holder.scopes:
            health |= {"engine": engine, "aliases": routes.aliases, "pending": routes.pending}
            health["refused"] = routes.refused
            health |= {"releases": sorted(routes.releases), "captures": self._count_captures()}
            if self._keys.required:
                health["keys"] = {key.name: key.usage.describe() for key in self._keys.holders}
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
            "lost_when_killed": self._captures.counts["killed"],
        }
        if self._feedback is not None:
            counts["feedback"] = self._feedback.kept
        if self._traces is not None:
            counts |= {"traced_calls": self._traces.calls, "traced_rejected": self._traces.rejected}
        return counts

    def _answer_metrics(self) -> Response:
        return Response(200, self._render_metrics(), (("content-type", "text/plain; version=0.0.4"),))

    def _render_metrics(self) -> bytes:
        engine = self._engine.describe()
        gauges = {
            "graft_engine_up": float(engine["state"] == "ready"),
            "graft_engine_restarts_total": float(engine["restarts"]),
            **{f"graft_captures_{k}_total": float(v) for k, v in self._count_captures().items()},
        }
        more = render_failover(engine, self._fallback_counts) + render_keys(self._keys)
        return (self.metrics.render(gauges) + more).encode()

    # -- completions ---------------------------------------------------------------------------

    async def _generate(self, request: Request, api: ApiFormat) -> Answer:
        label, running = "unknown", None
        at, started = time.time(), time.perf_counter()
        try:
            key = self._keys.require(request)
            key.usage.take_request()
            call = with_deadline(self._admit(request, api), request)
            key.require_model(call.model)
            session = request.headers.get("x-session-id") or call.user or None
            member, route = self._choose_member(call, request)
            running = begin_exchange(
                member,
                api=api,
                routes=self._routes(),
                session=session,
                fallbacks=self.fallbacks,
                asked_for=call.model,
            )
            running.route = route
            label, running.key, running.body_bytes = running.head.release, key, len(request.body)
            running.path, running.traceparent = request.path, request.headers.get("traceparent")
            if running.fallback:
                self._count_fallback(running)
            if running.assignment is not None:
                self.metrics.assigned[running.assignment.experiment, running.assignment.arm] += 1
            answer = await self._answer(running)
            label = running.head.release
        except ApiError as error:
            self.metrics.count_request(label, error.status)
            if self.observers:
                self._note_request(request, at=at, started=started, status=error.status, error=error)
            if running is not None and running.asked and error.code == "timeout":
                running.key.usage.add_tokens(running.count_tokens())
            if running is not None and error.status >= 500:
                running.finish_reason = "error"
                self._note_failure(running)
            return Response(error.status, api.encode_error(error), (JSON_TYPE, *error.headers))
        except asyncio.CancelledError:
            self.metrics.disconnects += 1
            if running is not None:
                running.disconnected = True
                running.key.usage.add_tokens(running.count_tokens())
                self._note_failure(running)
            if self.observers:
                self._note_request(request, at=at, started=started, status=CLIENT_LEFT)
            raise
        self.metrics.count_request(label, 200)
        return answer

    def _choose_member(self, call: ChatCall, request: Request) -> tuple[ChatCall, str]:
        """The call for the family's member, and why it was chosen; other calls as they are."""
        routes = self._routes()
        if routes.family is None or call.model != routes.family.name:
            return call, ""
        chosen = routes.family.choose(call, request.headers, loaded=routes.aliases)
        self.metrics.routed[chosen.model, chosen.by] += 1
        return replace(call, model=chosen.alias), f"{chosen.model} ({chosen.why})"

    async def _answer(self, running: RunningExchange) -> Answer:
        self.metrics.in_flight += 1
        streaming = False
        try:
            running.is_held = self.escalator is not None and self.escalator.applies_to(running)
            async with asyncio.timeout(self._seconds_left(running)):
                result = await self._ask(running)
            if running.is_held and isinstance(result, list):
                result = await self._check(result, running)
            if isinstance(result, list):
                if not running.call.stream:
                    return self._answer_whole(result, running)
                result = HeldReply(result)
            running.replica = getattr(result, "replica", None)
            headers = (*_EVENT_STREAM, *running.headers(captured=self._is_captured(running)))
            streaming = True  # from here on, `_events` decrements the counter
            return StreamResponse(200, self._events(result, running), headers)
        except TimeoutError as error:
            raise self._too_slow(running) from error
        except OSError as error:
            raise self._engine_down() from error
        finally:
            if not streaming:
                self._end_one()

    async def _ask(self, running: RunningExchange) -> list[PieceData] | ReplyStream:
        """Ask the release; if it fails, the models of its fallback chain in turn. Raises the first error."""
        first: Exception | None = None
        while True:
            engine = running.engine or self._engine
            try:
                if engine.state != "ready":
                    raise NoReplica("the engine is not ready")
                running.asked = True
                return await ask_engine(engine, running)
            except (OSError, ApiError) as error:
                first = first or error
                why = failure_code(error)
                if why is None or not self._fall_back(running, why):
                    raise first from None

    async def _check(self, choices: list[PieceData], running: RunningExchange) -> list[PieceData]:
        """The answer if it passes the project's checks, else that of the large model if it can be asked."""
        assert self.escalator is not None
        found = await self.escalator.judge(running.call.messages, choices[0]["text"])
        if found is None:
            return choices
        target = None
        if found.allowed and self.fallbacks is not None:
            target = self.fallbacks.resolve(self.escalator.settings.to, self._routes())
        outcome = "escalated" if target is not None else "unavailable" if found.allowed else "over budget"
        if target is not None:
            small = replace(running)
            running.escalate_to(target, check=found.check, answer=choices[0]["text"])
            try:
                async with asyncio.timeout(self._seconds_left(running)):
                    asked = await ask_engine(target.engine, running)
                choices = asked if isinstance(asked, list) else choices
            except (OSError, ApiError):
                running.keep_small(small)
                outcome = "failed"
        self.metrics.escalated[found.check, outcome] += 1
        running.escalation = f"{found.check} failed, {self.escalator.settings.to} {OUTCOMES[outcome]}"
        return choices

    def _fall_back(self, running: RunningExchange, why: str) -> bool:
        """Whether another model can be asked; if so, the exchange becomes its own."""
        if self.fallbacks is None:
            return False
        target = self.fallbacks.find_next(
            running.names, self._routes(), passed=running.passed, failed=running.head.release
        )
        if target is None:
            return False
        self._note_failure(running)
        running.answer_by(target, why)
        self._count_fallback(running)
        return True

    def _count_fallback(self, running: RunningExchange) -> None:
        self._fallback_counts[running.shown_model, running.head.release, running.why] += 1

    def _seconds_left(self, running: RunningExchange) -> float:
        longest = self._settings.request_timeout_seconds
        if running.deadline is None:
            return longest
        return min(longest, max(running.deadline - time.monotonic(), 0.0))

    def _end_one(self) -> None:
        self.metrics.in_flight -= 1
        if self.draining and not self.metrics.in_flight:
            self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests from now on; return when the running ones have ended, or after `seconds`."""
        self.draining = True
        if self.metrics.in_flight:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)

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
        if self.draining:
            raise ApiError(503, "the server is stopping; ask another one", code="stopping", headers=RETRY)
        if self.metrics.in_flight >= self._settings.queue_limit:
            raise ApiError(429, "the server is full; try again soon", code="full", headers=RETRY)
        return api.parse(request.body, self._limits)

    def _answer_whole(self, choices: list[PieceData], running: RunningExchange) -> Response:
        running.replica = choices[0].get("replica")
        for place, piece in enumerate(choices):
            running.note(piece if place == 0 else {**piece, "index": place})
        body = running.api.encode(running.head, running.call, choices, running.usage)
        if self._captures is not None and running.api.is_captured:
            self._captures.expect()
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
        if self._captures is not None and running.api.is_captured:
            self._captures.expect()
        try:
            yield encoder.opening()
            try:
                while (pieces := await self._next_pieces(stream, running)) is not None:
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
            self._end_one()
            self._finish(running)
            self._streaming.discard(running.capture_id)

    async def _next_pieces(self, stream: ReplyStream, running: RunningExchange) -> list[PieceData] | None:
        try:
            async with asyncio.timeout(self._seconds_left(running)):
                return await stream.next_pieces()
        except TimeoutError as error:
            raise self._too_slow(running) from error
        except OSError as error:
            raise self._engine_down() from error

    def _engine_down(self) -> ApiError:
        why = self._engine.describe()["reason"] or "it has just stopped"
        message = f"the engine is not ready: {why}; try again soon"
        return ApiError(503, message, code="engine_down", headers=RETRY)

    def _too_slow(self, running: RunningExchange) -> ApiError:
        if running.deadline is not None and time.monotonic() >= running.deadline:
            return ApiError(504, f"no answer within the time that {TIMEOUT_HEADER} allows", code="timeout")
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
        if running.first_token_at is not None:
            self.metrics.first_token_seconds.add(running.first_token_at - running.started)
        if running.queue_seconds is not None:
            self.metrics.queue_seconds.add(running.queue_seconds)
        running.key.usage.add_tokens(running.count_tokens())
        if self.observers:
            self._observe(running.to_finished(elapsed))
        if running.assignment is not None and running.finish_reason == "error":
            self.metrics.assigned_failures[running.assignment.experiment, running.assignment.arm] += 1
        if self._captures is not None and running.api.is_captured:
            self._captures.offer(running.to_exchange(elapsed), expected=True)

    # -- logs ----------------------------------------------------------------------------------

    def _note_request(
        self, request: Request, *, at: float, started: float, status: int, error: ApiError | None = None
    ) -> None:
        """Report a request without an answer of a model."""
        holder = self._keys.find(request)
        self._observe(
            FinishedRequest(
                at=at,
                seconds=time.perf_counter() - started,
                method=request.method,
                path=_name_path(request.path),
                status=status,
                key="" if holder is None else holder.name,
                error=None if error is None else error.code or str(error.status),
                traceparent=request.headers.get("traceparent"),
            )
        )

    def _note_refused(self, path: str, error: ApiError) -> None:
        self._observe(
            FinishedRequest(
                time.time(), 0.0, "", _name_path(path), error.status, error=error.code or "refused"
            )
        )

    def _observe(self, request: FinishedRequest) -> None:
        for observer in self.observers:
            observer.note(request)


def _name_path(path: str) -> str:
    """Clients must not be able to write into logs what they like."""
    return path if path in _KNOWN else "other"


def _read_limits(settings: ServeSettings) -> ChatLimits:
    return ChatLimits(
        settings.default_model,
        settings.max_new_tokens,
        settings.max_new_tokens_limit,
        settings.max_schema_bytes,
    )


def _require_json(request: Request) -> None:
    if not request.headers.get("content-type", "").startswith("application/json"):
        # Also keeps other web pages out: browsers send a preflight request for this type.
        raise ApiError(415, "send the request as content-type: application/json")
