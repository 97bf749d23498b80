"""The endpoint that users see: OpenAI's API in front, the engine behind, captures at the side.

In: HTTP requests. Out: answers that name the release which gave them. Checks the key, finds the
model, relays, and hands each exchange to the captures once it is over. Holds no weights and knows
no torch; an engine that is down is answered with 503.
"""

import asyncio
import hmac
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from graftwork.serve.captures import CaptureWriter, FeedbackEndpoint, FeedbackSink, ServedExchange
from graftwork.serve.http_client import Client, ClientReply
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
from graftwork.serve.routing import RETRY, ArmAssignment, Routes
from graftwork.serve.settings import ServeSettings, is_loopback


@dataclass(slots=True)
class RunningExchange:
    """What is known of one exchange while it runs."""

    call: ChatCall
    head: AnswerHead
    capture_id: str
    session: str | None
    started: float
    at: float
    lot: ArmAssignment | None = None
    """Who answers was drawn; None where it was not."""
    asked: bool = False
    """Whether the engine was asked: if not, it is not the release's fault that there is no answer."""
    texts: list[str] = field(default_factory=list)
    first_token_at: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    reply_tokens: int = 0
    disconnected: bool = False

    def headers(self, *, captured: bool) -> Headers:
        release = ("x-graft-release", self.head.release)
        return (release, ("x-graft-capture", self.capture_id)) if captured else (release,)

    def note_end(self, piece: dict[str, Any]) -> None:
        self.finish_reason = piece["finish_reason"]
        self.prompt_tokens = piece["prompt_tokens"]
        self.reply_tokens = piece["reply_tokens"]

    def encode_piece(self, encoder: ChunkEncoder, piece: dict[str, Any]) -> bytes:
        out = b""
        if piece["text"]:
            if self.first_token_at is None:
                self.first_token_at = time.perf_counter()
            self.texts.append(piece["text"])
            out = encoder.text(piece["text"])
        if piece.get("finish_reason") is not None:
            self.note_end(piece)
            out += encoder.ending(piece["finish_reason"])
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
            lot=self.lot,
        )


def begin(call: ChatCall, *, routes: Routes, session: str | None) -> RunningExchange:
    """Find who answers, by lot where there is an experiment. Raises ApiError where nobody can."""
    unique = uuid.uuid4().hex
    now = time.time()
    release, deal, lot = routes.resolve(call.model), routes.deal, None
    if deal is not None and call.model == deal.alias:
        # Who names no session is dealt one of his own.
        lot = ArmAssignment(deal.experiment, deal.draw(session or unique), deal.share)
        release = deal.release_of(lot.arm)
    head = AnswerHead(id=f"chatcmpl-{unique}", created=int(now), model=call.model, release=release)
    return RunningExchange(
        call=call,
        head=head,
        capture_id=unique,
        session=session,
        started=time.perf_counter(),
        at=now,
        lot=lot,
    )


_EVENT_STREAM = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))
_KNOWN = {
    "/v1/chat/completions": "POST",
    "/v1/models": "GET",
    "/v1/feedback": "POST",
    "/metrics": "GET",
    "/health": "GET",
}


class EnginePort(Protocol):
    """The engine as the gateway sees it: where to ask, and whether asking makes sense."""

    @property
    def client(self) -> Client | None: ...

    def describe(self) -> dict[str, Any]:
        """At least `state` ("starting", "ready", "down"), `reason` and `restarts`."""
        ...


class Gateway:
    def __init__(
        self,
        engine: EnginePort,
        *,
        settings: ServeSettings,
        routes: Callable[[], Routes],
        captures: CaptureWriter | None,
        api_key: str | None,
        feedback: FeedbackSink | None = None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._routes = routes
        self._captures = captures
        self._bearer = None if api_key is None else f"Bearer {api_key}".encode()
        # Without a key, a web page could reach this machine by a name of its own: only ours answer.
        self._check_host = api_key is None and is_loopback(settings.host)
        self._limits = ChatLimits(
            settings.default_model, settings.max_new_tokens, settings.max_new_tokens_limit
        )
        self.metrics = Metrics()
        self._desk = None
        if feedback is not None and captures is not None:
            self._desk = FeedbackEndpoint(feedback, captures=captures)
        self._streaming: set[str] = set()
        """Captures of answers that are still being given, and whose ids are known already."""

    def open_server(self) -> Server:
        """A server that checks each request before its body arrives, then lets the gateway answer it."""
        limits = HttpLimits(
            max_connections=self._settings.max_connections, max_body_bytes=self._settings.max_body_bytes
        )
        return Server(self._handle, admit=self._check_head, limits=limits)

    def _check_head(self, head: Request) -> None:
        """Refuse who may not ask, and bodies where there is nothing to read, at the end of the headers."""
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
        if request.path in _KNOWN:
            allowed = _KNOWN[request.path]
            raise ApiError(405, f"{request.path} takes {allowed}", headers=(("allow", allowed),))
        raise ApiError(404, f"there is no {request.path}; known are: {', '.join(_KNOWN)}")

    # -- who may ask ---------------------------------------------------------------------------

    def _require_host(self, request: Request) -> None:
        if not self._check_host:
            return
        host = request.headers.get("host", "")
        name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() else host
        if name and not is_loopback(name.strip("[]")):
            raise ApiError(403, f"this server answers only on this machine, not as {name!r}")

    def _may_ask(self, request: Request) -> bool:
        given = request.headers.get("authorization", "").encode()
        return self._bearer is None or hmac.compare_digest(given, self._bearer)

    def _require_key(self, request: Request) -> None:
        if not self._may_ask(request):
            message = "the API key is missing or wrong; send it as `Authorization: Bearer …`"
            raise ApiError(401, message, code="invalid_api_key")

    # -- how it is -----------------------------------------------------------------------------

    def _health(self, request: Request) -> Response:
        engine, routes = self._engine.describe(), self._routes()
        ready = engine["state"] == "ready" and routes.loaded
        starting = engine["state"] == "ready" and not routes.loaded
        health: dict[str, Any] = {"status": "ok" if ready else "starting" if starting else engine["state"]}
        if self._may_ask(request):
            health |= {"engine": engine, "aliases": routes.aliases, "pending": routes.pending}
            health |= {"releases": sorted(routes.releases), "captures": self._count_captures()}
            if self._settings.split is not None:
                health["split"] = self._describe_split(routes)
        return json_response(health, status=200 if ready else 503)

    def _describe_split(self, routes: Routes) -> dict[str, Any]:
        split, deal = self._settings.split, routes.deal
        if split is None or deal is None:
            return {"state": "off", "why": routes.no_deal, "experiment": None}
        arms = {
            "champion": {"release": deal.champion, "share": 1 - deal.share},
            "challenger": {"release": deal.challenger, "share": deal.share},
        }
        for arm, shown in arms.items():
            shown["requests"] = self.metrics.dealt[deal.experiment, arm]
            shown["failures"] = self.metrics.dealt_failures[deal.experiment, arm]
        return {"state": "on", "alias": deal.alias, "experiment": deal.experiment, "arms": arms}

    def _count_captures(self) -> dict[str, int]:
        if self._captures is None:
            return {}
        counts = {
            "kept": self._captures.kept,
            "dropped": self._captures.dropped,
            "lost": self._captures.lost,
        }
        return counts if self._desk is None else {**counts, "feedback": self._desk.kept}

    def _render_metrics(self) -> bytes:
        engine = self._engine.describe()
        gauges = {
            "graft_engine_up": float(engine["state"] == "ready"),
            "graft_engine_restarts_total": float(engine["restarts"]),
            **{f"graft_captures_{k}_total": float(v) for k, v in self._count_captures().items()},
        }
        return self.metrics.render(gauges).encode()

    # -- the exchange --------------------------------------------------------------------------

    async def _chat(self, request: Request) -> Answer:
        label, running = "unknown", None
        try:
            call = self._admit(request)
            session = request.headers.get("x-session-id") or call.user or None
            running = begin(call, routes=self._routes(), session=session)
            label = running.head.release
            if running.lot is not None:
                self.metrics.dealt[running.lot.experiment, running.lot.arm] += 1
            answer = await self._answer(running)
        except ApiError as error:
            self.metrics.count_request(label, error.status)
            if running is not None and running.lot is not None and error.status >= 500:
                running.finish_reason = "error"
                self._note_failure(running)
            return error_response(error)
        except asyncio.CancelledError:
            self.metrics.disconnects += 1
            if running is not None and running.lot is not None:
                running.disconnected = True
                self._note_failure(running)
            raise
        self.metrics.count_request(label, 200)
        return answer

    async def _answer(self, running: RunningExchange) -> Answer:
        self.metrics.in_flight += 1
        streaming = False
        try:
            reply, body = await self._ask_engine(running)
            if running.call.stream:
                headers = (*_EVENT_STREAM, *running.headers(captured=self._captures is not None))
                answer: Answer = StreamResponse(200, self._events(reply, running), headers)
                streaming = True  # from here on, the stream counts itself out
            else:
                answer = self._answer_whole(orjson.loads(body), running)
        finally:
            if not streaming:
                self.metrics.in_flight -= 1
        return answer

    def _note_failure(self, running: RunningExchange) -> None:
        """In an experiment, who got no answer counts for the arm that was drawn: else slow ones would win."""
        if running.asked and running.lot is not None:
            self.metrics.dealt_failures[running.lot.experiment, running.lot.arm] += 1
            if self._captures is not None:
                self._captures.offer(running.to_exchange(time.perf_counter() - running.started))

    async def _take_feedback(self, request: Request) -> Answer:
        _require_json(request)
        if self._desk is None:
            message = "there is nothing to give feedback on: this server keeps no captures (serve.capture)"
            raise ApiError(404, message, code="captures_off")
        return await self._desk.take(request, is_running=self._streaming.__contains__)

    def _admit(self, request: Request) -> ChatCall:
        """The request as a checked call, if there is room for it."""
        _require_json(request)
        if self.metrics.in_flight >= self._settings.queue_limit:
            raise ApiError(429, "the server is full; try again soon", code="full", headers=RETRY)
        return parse_chat(request.body, self._limits)

    async def _ask_engine(self, running: RunningExchange) -> tuple[ClientReply, bytes]:
        """Send the call; gives back a reply that is no refusal, and its body unless it is streamed."""
        client = self._engine.client
        if client is None:
            raise self._engine_down()
        call, running.asked = running.call, True
        body = call.encode_for_engine(running.head.release)
        try:
            async with asyncio.timeout(self._settings.request_timeout_seconds):
                reply = await client.send("POST", "/generate", body=body)
                if call.stream and reply.status == 200:
                    return reply, b""
                answer = await reply.read()
        except TimeoutError as error:
            raise self._too_slow() from error
        except OSError as error:
            raise self._engine_down() from error
        if reply.status == 200:
            return reply, answer
        raise _pass_on(reply.status, answer)

    def _answer_whole(self, piece: dict[str, Any], running: RunningExchange) -> Response:
        running.texts.append(piece["text"])
        running.note_end(piece)
        body = encode_completion(
            running.head,
            text=piece["text"],
            finish_reason=piece["finish_reason"],
            prompt_tokens=running.prompt_tokens,
            reply_tokens=running.reply_tokens,
        )
        return Response(
            200,
            body,
            (JSON_TYPE, *running.headers(captured=self._captures is not None)),
            after=lambda: self._finish(running),
        )

    async def _events(self, reply: ClientReply, running: RunningExchange) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. However it ends, it is recorded and the engine let go."""
        encoder = ChunkEncoder(running.head)
        self._streaming.add(running.capture_id)
        try:
            yield encoder.opening()
            try:
                async with aclosing(self._pieces(reply)) as pieces:
                    async for batch in pieces:
                        yield b"".join([running.encode_piece(encoder, piece) for piece in batch])
                if running.finish_reason is None:
                    raise self._engine_down()
            except ApiError as error:
                # The head is out: the error goes into the stream, where clients look for it.
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
            reply.close()
            self.metrics.in_flight -= 1
            self._finish(running)
            self._streaming.discard(running.capture_id)

    async def _pieces(self, reply: ClientReply) -> AsyncGenerator[list[dict[str, Any]], None]:
        """The engine's lines as they come; several that arrived together stay together."""
        rest = b""
        chunks = reply.chunks()
        async with aclosing(chunks):
            while True:
                try:
                    async with asyncio.timeout(self._settings.request_timeout_seconds):
                        chunk = await anext(chunks, None)
                except TimeoutError as error:
                    raise self._too_slow() from error
                except OSError as error:
                    raise self._engine_down() from error
                if chunk is None:
                    return
                *lines, rest = (rest + chunk).split(b"\n")
                if lines:
                    yield [orjson.loads(line) for line in lines]

    def _engine_down(self) -> ApiError:
        engine = self._engine.describe()
        why = engine["reason"] or "it has just stopped"
        message = f"the engine is not ready: {why}; try again soon"
        return ApiError(503, message, code="engine_down", headers=RETRY)

    def _too_slow(self) -> ApiError:
        seconds = self._settings.request_timeout_seconds
        return ApiError(504, f"the engine did not answer within {seconds:g} s", code="timeout")

    def _finish(self, running: RunningExchange) -> None:
        """Count the exchange and hand it to the captures."""
        elapsed = time.perf_counter() - running.started
        self.metrics.count_answer(
            running.head.release,
            prompt_tokens=running.prompt_tokens,
            reply_tokens=running.reply_tokens,
            seconds=elapsed,
        )
        if running.lot is not None and running.finish_reason == "error":
            self.metrics.dealt_failures[running.lot.experiment, running.lot.arm] += 1
        if self._captures is not None:
            self._captures.offer(running.to_exchange(elapsed))


def _require_json(request: Request) -> None:
    if not request.headers.get("content-type", "").startswith("application/json"):
        # Also what keeps other web pages out: a browser asks before it sends this type.
        raise ApiError(415, "send the request as content-type: application/json")


def _pass_on(status: int, body: bytes) -> ApiError:
    """What the engine refused, in its own words; one that has none is broken."""
    try:
        said = orjson.loads(body)["error"]
        headers = RETRY if status in (429, 503) else ()
        return ApiError(status, said["message"], param=said["param"], code=said["code"], headers=headers)
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ApiError(502, f"the engine answered with status {status} and no reason", code="engine_error")
