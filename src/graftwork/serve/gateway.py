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

from graftwork.serve.capture import CaptureWriter, Exchange
from graftwork.serve.client import Client, ClientReply
from graftwork.serve.messages import (
    JSON_TYPE,
    Answer,
    ApiError,
    Headers,
    Request,
    Response,
    StreamResponse,
    encode_error,
    json_response,
    refuse,
)
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
from graftwork.serve.routes import Routes
from graftwork.serve.settings import ServeSettings, is_loopback

_EVENT_STREAM = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))
_RETRY = (("retry-after", "1"),)


class EnginePort(Protocol):
    """The engine as the gateway sees it: where to ask, and whether asking makes sense."""

    @property
    def client(self) -> Client | None: ...

    def describe(self) -> dict[str, Any]:
        """At least `state` ("starting", "ready", "down"), `reason` and `restarts`."""
        ...


@dataclass(slots=True)
class _Record:
    """What is known of one exchange while it runs."""

    call: ChatCall
    head: AnswerHead
    capture_id: str
    session: str | None
    started: float
    at: float
    texts: list[str] = field(default_factory=list)
    first_token_at: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    reply_tokens: int = 0
    disconnected: bool = False

    def headers(self, *, captured: bool) -> Headers:
        release = ("x-graft-release", self.head.release)
        return (release, ("x-graft-capture", self.capture_id)) if captured else (release,)


class Gateway:
    def __init__(
        self,
        engine: EnginePort,
        *,
        settings: ServeSettings,
        routes: Callable[[], Routes],
        captures: CaptureWriter | None,
        api_key: str | None,
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

    async def handle(self, request: Request) -> Answer:
        """The one handler of the server."""
        self._require_host(request)
        route = (request.method, request.path)
        if route == ("GET", "/health"):
            return self._health(request)
        self._require_key(request)
        if route == ("POST", "/v1/chat/completions"):
            return await self._chat(request)
        if route == ("GET", "/v1/models"):
            return Response(200, encode_models(self._routes().names()))
        if route == ("GET", "/metrics"):
            return Response(200, self._render_metrics(), (("content-type", "text/plain; version=0.0.4"),))
        known = {"/v1/chat/completions": "POST", "/v1/models": "GET", "/metrics": "GET", "/health": "GET"}
        if request.path in known:
            allowed = known[request.path]
            raise ApiError(405, f"{request.path} takes {allowed}", headers=(("allow", allowed),))
        raise ApiError(404, f"there is no {request.path}; known are: {', '.join(known)}")

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
        engine = self._engine.describe()
        ready = engine["state"] == "ready"
        health: dict[str, Any] = {"status": "ok" if ready else engine["state"]}
        if self._may_ask(request):
            routes = self._routes()
            health |= {"engine": engine, "aliases": routes.aliases, "pending": routes.pending}
            health |= {"releases": sorted(routes.releases), "captures": self._count_captures()}
        return json_response(health, status=200 if ready else 503)

    def _count_captures(self) -> dict[str, int]:
        if self._captures is None:
            return {}
        return {
            "kept": self._captures.kept,
            "dropped": self._captures.dropped,
            "lost": self._captures.lost,
        }

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
        label = "unknown"
        try:
            call = self._admit(request)
            label = self._routes().resolve(call.model)
            record = _begin(call, release=label, session=request.headers.get("x-session-id") or call.user)
            self.metrics.in_flight += 1
            streaming = False
            try:
                reply, body = await self._ask_engine(call, label)
                if call.stream:
                    headers = (*_EVENT_STREAM, *record.headers(captured=self._captures is not None))
                    answer: Answer = StreamResponse(200, self._events(reply, record), headers)
                    streaming = True  # from here on, the stream counts itself out
                else:
                    answer = self._answer_whole(orjson.loads(body), record)
            finally:
                if not streaming:
                    self.metrics.in_flight -= 1
        except ApiError as error:
            self.metrics.count_request(label, error.status)
            return refuse(error)
        except asyncio.CancelledError:
            self.metrics.disconnects += 1
            raise
        self.metrics.count_request(label, 200)
        return answer

    def _admit(self, request: Request) -> ChatCall:
        """The request as a checked call, if there is room for it."""
        if not request.headers.get("content-type", "").startswith("application/json"):
            # Also what keeps other web pages out: a browser asks before it sends this type.
            raise ApiError(415, "send the request as content-type: application/json")
        if self.metrics.in_flight >= self._settings.queue_limit:
            raise ApiError(429, "the server is full; try again soon", code="full", headers=_RETRY)
        return parse_chat(request.body, self._limits)

    async def _ask_engine(self, call: ChatCall, model: str) -> tuple[ClientReply, bytes]:
        """Send the call; gives back a reply that is no refusal, and its body unless it is streamed."""
        client = self._engine.client
        if client is None:
            raise self._engine_down()
        body = call.encode_for_engine(model)
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
        refusal = orjson.loads(answer)["error"]
        headers = _RETRY if reply.status in (429, 503) else ()
        raise ApiError(
            reply.status, refusal["message"], param=refusal["param"], code=refusal["code"], headers=headers
        )

    def _answer_whole(self, piece: dict[str, Any], record: _Record) -> Response:
        record.texts.append(piece["text"])
        _note_end(record, piece)
        body = encode_completion(
            record.head,
            text=piece["text"],
            finish_reason=piece["finish_reason"],
            prompt_tokens=record.prompt_tokens,
            reply_tokens=record.reply_tokens,
        )
        return Response(
            200,
            body,
            (JSON_TYPE, *record.headers(captured=self._captures is not None)),
            after=lambda: self._finish(record),
        )

    async def _events(self, reply: ClientReply, record: _Record) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. However it ends, it is recorded and the engine let go."""
        encoder = ChunkEncoder(record.head)
        try:
            yield encoder.opening()
            try:
                async with aclosing(self._pieces(reply)) as pieces:
                    async for batch in pieces:
                        yield b"".join([_encode_piece(encoder, piece, record) for piece in batch])
                if record.finish_reason is None:
                    raise self._engine_down()
            except ApiError as error:
                # The head is out: the error goes into the stream, where clients look for it.
                record.finish_reason = "error"
                yield encode_error_event(encode_error(error))
                return
            if record.call.include_usage:
                yield encoder.usage(record.prompt_tokens, record.reply_tokens)
            yield DONE_EVENT
        except (asyncio.CancelledError, GeneratorExit):
            record.disconnected = True
            self.metrics.disconnects += 1
            raise
        finally:
            reply.close()
            self.metrics.in_flight -= 1
            self._finish(record)

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
        return ApiError(503, message, code="engine_down", headers=_RETRY)

    def _too_slow(self) -> ApiError:
        seconds = self._settings.request_timeout_seconds
        return ApiError(504, f"the engine did not answer within {seconds:g} s", code="timeout")

    def _finish(self, record: _Record) -> None:
        """Count the exchange and hand it to the captures."""
        elapsed = time.perf_counter() - record.started
        self.metrics.count_answer(
            record.head.release,
            prompt_tokens=record.prompt_tokens,
            reply_tokens=record.reply_tokens,
            seconds=elapsed,
        )
        if self._captures is not None:
            self._captures.offer(_make_exchange(record, elapsed))


def _begin(call: ChatCall, *, release: str, session: str | None) -> _Record:
    unique = uuid.uuid4().hex
    now = time.time()
    head = AnswerHead(id=f"chatcmpl-{unique}", created=int(now), model=call.model, release=release)
    return _Record(
        call=call, head=head, capture_id=unique, session=session, started=time.perf_counter(), at=now
    )


def _encode_piece(encoder: ChunkEncoder, piece: dict[str, Any], record: _Record) -> bytes:
    out = b""
    if piece["text"]:
        if record.first_token_at is None:
            record.first_token_at = time.perf_counter()
        record.texts.append(piece["text"])
        out = encoder.text(piece["text"])
    if piece.get("finish_reason") is not None:
        _note_end(record, piece)
        out += encoder.ending(piece["finish_reason"])
    return out


def _note_end(record: _Record, piece: dict[str, Any]) -> None:
    record.finish_reason = piece["finish_reason"]
    record.prompt_tokens = piece["prompt_tokens"]
    record.reply_tokens = piece["reply_tokens"]


def _make_exchange(record: _Record, elapsed: float) -> Exchange:
    first = record.first_token_at
    return Exchange(
        id=record.capture_id,
        at=record.at,
        session=record.session,
        model=record.call.model,
        release=record.head.release,
        request=record.call.body,
        reply="".join(record.texts),
        finish_reason=record.finish_reason,
        prompt_tokens=record.prompt_tokens,
        reply_tokens=record.reply_tokens,
        first_token_ms=None if first is None else (first - record.started) * 1000,
        total_ms=elapsed * 1000,
        disconnected=record.disconnected,
    )
