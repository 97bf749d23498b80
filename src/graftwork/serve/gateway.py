"""The endpoint that users call: the OpenAI API in front, an engine behind it, captures off the hot path.

Checks the API key and the origin of web pages, admits the request, and has it answered by `answers.py`. Every
answer names its release. Loads no weights and no torch;
answers 503 while the engine is down.
"""

import asyncio
import math
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any
from urllib.parse import unquote

from graftwork.http.messages import (
    JSON_TYPE,
    RETRY,
    TIMEOUT_HEADER,
    Answer,
    ApiError,
    Handler,
    Headers,
    Request,
    Response,
    error_response,
    json_response,
)
from graftwork.http.server import HttpLimits, Server
from graftwork.records.base import MIB
from graftwork.serve.answers import AnswerService
from graftwork.serve.api.call import (
    ApiFormat,
    ChatCall,
)
from graftwork.serve.api.chat import CHAT, describe_model, encode_models
from graftwork.serve.api.completions import COMPLETIONS, EMBEDDINGS
from graftwork.serve.api.messages import MESSAGES
from graftwork.serve.api.responses import RESPONSES
from graftwork.serve.budgets import Reservation, most_tokens
from graftwork.serve.exchange import ClientRequest
from graftwork.serve.feedback import FeedbackEndpoint, FeedbackSink
from graftwork.serve.keys import KeyHolder, KeyRing, Scope, render_keys
from graftwork.serve.metrics import Metrics, render_replicas
from graftwork.serve.otlp import TracedCalls, TraceIntake
from graftwork.serve.request_log import CLIENT_LEFT, FinishedRequest
from graftwork.serve.routing import Routes
from graftwork.serve.settings import ServeSettings, is_loopback

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
    "/health": "GET, HEAD",
}
_MODEL_PATH = "/v1/models/"
_SCOPES: dict[str, Scope] = {"/v1/feedback": "feedback", "/v1/traces": "traces", "/metrics": "metrics"}
"""What the key of a request needs; for all other paths it is `models`."""
_ADMIN_CONNECTIONS = 64
MOST_BODY_BYTES = 4 * MIB


class Gateway:
    """Paths, keys and limits of the endpoint, in front of `answers`."""

    def __init__(
        self,
        answers: AnswerService,
        *,
        feedback: FeedbackSink | None = None,
        read_traces: Callable[[dict[str, Any]], TracedCalls] | None = None,
        keys: KeyRing | None = None,
    ) -> None:
        self.answers = answers
        settings, captures = answers.settings, answers.captures
        self._keys = keys or KeyRing()
        self.feedback = None
        if feedback is not None and captures is not None:
            self.feedback = FeedbackEndpoint(feedback, captures=captures)
        self._traces = None
        if read_traces is not None and captures is not None and settings.traces:
            self._traces = TraceIntake(read_traces, captures=captures)

    def revise(self, settings: ServeSettings) -> None:
        """Use other settings from the next request on."""
        self.answers.revise(settings)

    @property
    def _settings(self) -> ServeSettings:
        return self.answers.settings

    def open_server(self) -> Server:
        """A server that checks the headers of each request before it reads the body."""
        origins = self._settings.cors_origins
        handler = allow_origins(self._handle, origins) if origins else self._handle
        server = Server(handler, admit=self._check_head, limits=HttpLimits(max_body_bytes=MOST_BODY_BYTES))
        server.on_refused = self._note_refused
        return server

    def open_admin_server(self) -> Server:
        """A server only for metrics and the details of /health."""
        limits = HttpLimits(max_connections=_ADMIN_CONNECTIONS, max_body_bytes=0)
        return Server(self._handle_admin, admit=self._check_head, limits=limits)

    def _check_head(self, head: Request) -> None:
        """Refuse unauthorized requests, and bodies if none is expected, at the end of the headers."""
        self._require_host(head)
        if head.path == "/health" and head.method in ("GET", "HEAD"):
            head.require_no_body("/health")
            return
        if self._settings.cors_origins and is_preflight(head):
            head.require_no_body("a preflight request")
            return
        self._keys.require(head).require(_SCOPES.get(head.path, "models"))

    async def _handle(self, request: Request) -> Answer:
        if self.answers.observe is None or request.path in APIS:
            return await self._dispatch(request)
        arrived_at, started, status, error = time.time(), time.perf_counter(), 500, None
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
            self._note_request(request, at=arrived_at, started=started, status=status, error=error)
        return answer

    async def _handle_admin(self, request: Request) -> Answer:
        if request.method in ("GET", "HEAD") and request.path == "/health":
            return self._health(request, details=True)
        if request.method == "GET" and request.path == "/metrics":
            return self._answer_metrics()
        raise ApiError(404, f"there is no {request.path} here; available: /health, /metrics")

    async def _dispatch(self, request: Request) -> Answer:
        route = (request.method, request.path)
        if request.path == "/health" and request.method in ("GET", "HEAD"):
            return self._health(request, details=self._settings.admin_port is None)
        if request.method == "POST" and (api := APIS.get(request.path)) is not None:
            return await self._generate(request, api)
        if request.method == "GET" and f"{request.path}/".startswith(_MODEL_PATH):
            return self._show_models(request)
        if route == ("GET", "/metrics") and self._settings.admin_port is None:
            return self._answer_metrics()
        if route == ("POST", "/v1/feedback"):
            return await self._take_feedback(request)
        if route == ("POST", "/v1/traces"):
            return await self._take_traces(request)
        paths = [path for path in _KNOWN if path != "/metrics" or self._settings.admin_port is None]
        if request.path in paths:
            allowed = _KNOWN[request.path]
            raise ApiError(405, f"{request.path} takes {allowed}", headers=(("allow", allowed),))
        raise ApiError(404, f"there is no {request.path}; available: {', '.join(paths)}")

    def _show_models(self, request: Request) -> Response:
        """The names that the key of the request may ask for, or one of them."""
        routes = self.answers.routes()
        routes.require_loaded()
        allowed = self._keys.require(request).models
        names = {name: target for name, target in routes.names().items() if not allowed or name in allowed}
        name = unquote(request.path[len(_MODEL_PATH) :])
        if not name:
            return Response(200, encode_models(names))
        if name not in names:
            message = f"there is no model {name!r}; available: {', '.join(names)}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return json_response(describe_model(name, names[name]))

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
        engine, routes = self.answers.engine.describe(), self.answers.routes()
        ready = engine["state"] == "ready" and routes.loaded
        starting = engine["state"] == "ready" and not routes.loaded
        health: dict[str, Any] = {"status": "ok" if ready else "starting" if starting else engine["state"]}
        if self.answers.draining:
            ready, health["status"] = False, "stopping"
        holder = self._keys.find(request)
        if details and holder is not None and "admin" in holder.scopes:
            health |= {"engine": engine, "aliases": routes.aliases, "pending": routes.pending}
            health["refused"] = routes.refused
            health |= {"releases": sorted(routes.releases), "captures": self._count_captures()}
            if self._keys.required:
                health["keys"] = {key.name: key.usage.describe() for key in self._keys.holders}
            if self.answers.shadow is not None:
                health["shadow"] = dict(self.answers.shadow.counts)
            if routes.experiment is not None or routes.experiment_off:
                health["split"] = describe_split(routes, self.answers.metrics)
        return json_response(health, status=200 if ready else 503)

    def _count_captures(self) -> dict[str, int]:
        captures = self.answers.captures
        if captures is None:
            return {}
        counts = {
            "kept": captures.kept,
            "dropped": captures.dropped,
            "lost": captures.lost,
            "lost_when_killed": captures.counts["killed"],
        }
        if self.feedback is not None:
            counts["feedback"] = self.feedback.kept
        if self._traces is not None:
            counts |= {"traced_calls": self._traces.calls, "traced_rejected": self._traces.rejected}
        return counts

    def _answer_metrics(self) -> Response:
        engine, captures = self.answers.engine.describe(), self.answers.captures
        gauges = {
            "graft_engine_up": float(engine["state"] == "ready"),
            "graft_engine_restarts_total": float(engine["restarts"]),
            **{f"graft_captures_{k}_total": float(v) for k, v in self._count_captures().items()},
            **({} if captures is None else {"graft_captures_waiting": float(captures.waiting)}),
        }
        samples = render_replicas(engine) + render_keys(self._keys)
        text = (self.answers.metrics.render(gauges) + samples).encode()
        return Response(200, text, (("content-type", "text/plain; version=0.0.4"),))

    # -- completions ---------------------------------------------------------------------------

    async def _generate(self, request: Request, api: ApiFormat) -> Answer:
        answers, client, answer = self.answers, None, None
        arrived_at, started = time.time(), time.perf_counter()
        try:
            key = self._keys.require(request)
            key.usage.take_request()
            call = self._admit(request, api)
            key.require_model(call.model)
            client = ClientRequest(request, api, key)
            if key.usage.limits_tokens:
                client.reservation = await self._reserve(key, call, request)
            answer = await answers.answer(call, client)
        except ApiError as error:
            answers.metrics.count_request("unknown" if client is None else client.label, error.status)
            self._note_request(request, at=arrived_at, started=started, status=error.status, error=error)
            return Response(error.status, api.encode_error(error), (JSON_TYPE, *error.headers))
        except asyncio.CancelledError:
            answers.metrics.disconnects += 1
            self._note_request(request, at=arrived_at, started=started, status=CLIENT_LEFT)
            raise
        finally:
            # An answer gives the tokens back when it has been sent.
            if answer is None and client is not None and client.reservation is not None:
                client.reservation.release()
        answers.metrics.count_request(client.label, 200)
        return answer

    async def _reserve(self, key: KeyHolder, call: ChatCall, request: Request) -> Reservation:
        """Reserve the tokens of the call, after running requests of the key if they may use the rest."""
        chain = self.answers.chains.get(call.model)
        most = call.choices * call.max_tokens if chain is None else chain.max_tokens
        if key.usage.waiting >= self._settings.queue_limit:
            raise ApiError(429, "the server is full; try again soon", code="full", headers=RETRY)
        seconds = self._settings.request_timeout_seconds
        if call.deadline is not None:
            seconds = min(seconds, call.deadline - time.monotonic())
        try:
            async with asyncio.timeout(seconds):
                reservation = await key.usage.reserve(most_tokens(len(request.body), most))
        except TimeoutError:
            message = f"other requests of the key {key.name!r} may use the rest of its tokens; try again soon"
            raise ApiError(429, message, code="rate_limit_exceeded", headers=RETRY) from None
        if self.answers.draining:
            reservation.release()
            raise ApiError(503, "the server is stopping; ask another one", code="stopping", headers=RETRY)
        return reservation

    async def _take_feedback(self, request: Request) -> Answer:
        _require_json(request)
        if self.feedback is None:
            message = "there is nothing to give feedback on: this server keeps no captures (serve.capture)"
            raise ApiError(404, message, code="captures_off")
        return await self.feedback.take(
            request, is_running=self.answers.streaming.__contains__, finishing=self.answers.finishing
        )

    async def _take_traces(self, request: Request) -> Answer:
        if self._traces is None:
            message = "this server takes no traces: serve.traces or serve.capture is off"
            raise ApiError(404, message, code="traces_off")
        usage = self._keys.require(request).usage
        usage.take_request()
        return await self._traces.take(request, usage)

    def _admit(self, request: Request, api: ApiFormat) -> ChatCall:
        """The request as a checked call with the client's deadline, unless too many are in flight."""
        _require_json(request)
        if self.answers.draining:
            raise ApiError(503, "the server is stopping; ask another one", code="stopping", headers=RETRY)
        if self.answers.metrics.in_flight >= self._settings.queue_limit:
            raise ApiError(429, "the server is full; try again soon", code="full", headers=RETRY)
        call, timeout = api.parse(request.body, self._settings), request.headers.get(TIMEOUT_HEADER)
        if timeout is None:
            return call
        try:
            milliseconds = float(timeout)
        except ValueError:
            milliseconds = math.nan
        if not 0 < milliseconds < math.inf:
            message = f"the header {TIMEOUT_HEADER} must be a positive number of milliseconds"
            raise ApiError(400, message, param=TIMEOUT_HEADER)
        return replace(call, deadline=time.monotonic() + milliseconds / 1000)

    # -- logs ----------------------------------------------------------------------------------

    def _note_request(
        self, request: Request, *, at: float, started: float, status: int, error: ApiError | None = None
    ) -> None:
        """Report a request without an answer of a model."""
        if self.answers.observe is None:
            return
        holder = self._keys.find(request)
        self.answers.observe(
            FinishedRequest(
                at=at,
                seconds=time.perf_counter() - started,
                method=request.method,
                path=_name_path(request.path),
                status=status,
                key="" if holder is None else holder.name,
                error=None if error is None else error.code or str(error.status),
            )
        )

    def _note_refused(self, path: str, error: ApiError) -> None:
        if self.answers.observe is not None:
            why = error.code or "refused"
            self.answers.observe(
                FinishedRequest(time.time(), 0.0, "", _name_path(path), error.status, error=why)
            )


def _name_path(path: str) -> str:
    """Clients must not be able to write arbitrary text into logs."""
    return path if path in _KNOWN else "other"


def _require_json(request: Request) -> None:
    if not request.headers.get("content-type", "").lower().startswith("application/json"):
        # Also keeps other web pages out: browsers send a preflight request for this type.
        raise ApiError(415, "send the request as content-type: application/json")


def describe_split(routes: Routes, metrics: Metrics) -> dict[str, Any]:
    running = routes.experiment
    if running is None:
        return {"state": "off", "why": routes.experiment_off, "experiment": None}
    name = running.experiment
    arms = {
        "champion": {"release": running.champion, "share": 1 - running.share},
        "challenger": {"release": running.challenger, "share": running.share},
    }
    for arm, counts in arms.items():
        counts["requests"] = metrics.assigned[name, arm]
        counts["failures"] = metrics.assigned_failures[name, arm]
    return {"state": "on", "alias": running.alias, "experiment": name, "arms": arms}


_ALLOWED = (
    ("access-control-allow-methods", "GET, POST"),
    (
        "access-control-allow-headers",
        "authorization, content-type, x-api-key, x-session-id, anthropic-version",
    ),
    ("access-control-max-age", "600"),
)
_EXPOSED = ("access-control-expose-headers", "x-graft-release, x-graft-capture, retry-after")


def is_preflight(request: Request) -> bool:
    return request.method == "OPTIONS" and "access-control-request-method" in request.headers


def allow_origins(handler: Handler, origins: Collection[str]) -> Handler:
    """The handler with CORS headers for requests of these origins. Browsers send no key with a preflight."""

    async def answer(request: Request) -> Answer:
        origin = request.headers.get("origin", "")
        allowed = origin in origins
        if is_preflight(request):
            if not allowed:
                raise ApiError(403, "this origin is not allowed", code="origin_not_allowed")
            return Response(204, headers=(*_origin(origin), *_ALLOWED))
        try:
            response = await handler(request)
        except ApiError as error:
            response = error_response(error)
        return (
            replace(response, headers=(*response.headers, *_origin(origin), _EXPOSED))
            if allowed
            else response
        )

    return answer


def _origin(origin: str) -> Headers:
    return (("access-control-allow-origin", origin), ("vary", "origin"))
