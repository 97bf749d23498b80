"""The way of a checked call to its answer, from top to bottom: route, ask, reply, capture.

In: a call of a client, whatever API it speaks. Out: an answer, whole or streamed. Counts and captures it once
it has ended. What a family, fallbacks, escalation, chains and shadow traffic add is in modules of their own.
Knows nothing of paths, keys or bodies: `gateway.py` is in front of it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from graftwork.engines.protocol import PieceData
from graftwork.http.messages import (
    JSON_TYPE,
    RETRY,
    TIMEOUT_HEADER,
    Answer,
    ApiError,
    Response,
    StreamResponse,
)
from graftwork.serve.api.call import AnswerHead, ChatCall, add_usage
from graftwork.serve.captures import CaptureWriter, ChainMark
from graftwork.serve.chains import (
    AnsweredStep,
    ChainFailed,
    ChainRun,
    StepCheck,
    read_trace,
    require_chainable,
)
from graftwork.serve.escalation import (
    AnswerChecks,
    CheckThreads,
    Escalator,
)
from graftwork.serve.exchange import ClientRequest, HeldReply, RunningExchange, ask_engine, make_id
from graftwork.serve.metrics import Metrics
from graftwork.serve.request_log import FinishedRequest
from graftwork.serve.routing import Fallbacks, FallbackTarget, Routes, choose_release
from graftwork.serve.serving_engine import NoReplica, ReplyStream, ServingEngine, failure_code
from graftwork.serve.settings import ServeSettings
from graftwork.serve.shadow import Shadow

_EVENT_STREAM = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))


class AnswerService:
    """Everything between a checked call and its answer.

    `endpoints` are the remote APIs by name; `checks` those of `serve.escalate`, `chain_checks` those that
    conditions of chains name.
    """

    def __init__(
        self,
        engine: ServingEngine,
        *,
        settings: ServeSettings,
        routes: Callable[[], Routes],
        captures: CaptureWriter | None,
        endpoints: Mapping[str, ServingEngine] = {},
        checks: AnswerChecks | None = None,
        chain_checks: Mapping[str, AnswerChecks] = {},
    ) -> None:
        self.engine, self.settings, self.routes, self.captures = engine, settings, routes, captures
        self.observe: Callable[[FinishedRequest], None] | None = None
        """Gets each finished request. Must return at once."""
        self.metrics = Metrics()
        self.fallbacks = Fallbacks(settings.failover.fallback, engine=engine, endpoints=endpoints)
        self.escalator: Escalator | None = None
        if settings.escalate is not None and checks is not None:
            self.escalator = Escalator(settings.escalate, checks=checks, clock=time.monotonic)
        self.shadow: Shadow | None = None
        if settings.shadow is not None and captures is not None:
            self.shadow = Shadow(
                settings.shadow,
                resolve=self.resolve,
                is_remote=settings.shadow.to in settings.failover.endpoints,
                captures=captures,
                is_idle=lambda: self.metrics.in_flight == 0,
            )
        self.chains = settings.chains
        threads = CheckThreads()
        self.chain_checks: Mapping[str, StepCheck] = {
            name: partial(threads.find_failing, check) for name, check in chain_checks.items()
        }
        self.draining = False
        self._idle = asyncio.Event()
        self.finishing: dict[str, asyncio.Task[None]] = {}
        """By capture id: answers that were given and wait for their check or the small model's answer."""
        self.streaming: set[str] = set()
        """Capture ids of answers that are still streaming."""

    # -- route ---------------------------------------------------------------------------------

    def begin(
        self, call: ChatCall, client: ClientRequest, *, direct: FallbackTarget | None = None
    ) -> RunningExchange:
        """The exchange of a call with the release that is to answer it. Raises ApiError if none can.

        `direct` is asked instead of a release, where the model is an endpoint that settings name.
        """
        routes, asked_for, headers = self.routes(), call.model, client.request.headers
        notes: dict[str, str] = {}
        if routes.family is not None and call.model == routes.family.name:
            loaded = {*routes.aliases, *self.fallbacks.ready_endpoints()}
            member, by, why = routes.family.choose(call, headers, loaded=loaded)
            self.metrics.routed[member, by] += 1
            notes["x-graft-route"] = f"{member} ({why})"
            call = replace(call, model=routes.family.aliases[member])
            if (endpoint := routes.family.settings.remote.get(member)) is not None:
                direct = self.fallbacks.resolve(endpoint, routes)
        unique, session = make_id(), headers.get("x-session-id") or call.user or None
        target, why, assignment = direct, "", None
        release = "" if direct is None else direct.release
        if direct is None:
            try:
                # A request without a session id is a session of its own.
                release, assignment = choose_release(routes, call.model, session=session or unique)
            except ApiError as error:
                # No release yet, or one that is not loaded: a model with a fallback is answered all the same.
                why, names = failure_code(error) or str(error.code), (call.model, asked_for)
                if self.fallbacks.may_replace(names, error):
                    target = self.fallbacks.find_next(names, routes)
                if target is None:
                    raise
                release = target.release
        now = time.time()
        running = RunningExchange(
            call=call,
            client=client,
            head=AnswerHead(unique=unique, created=int(now), model=call.model, release=release),
            capture_id=unique,
            session=session,
            started=time.perf_counter(),
            at=now,
            engine=self.engine if direct is None else direct.engine,
            model=release if direct is None else direct.model,
            asked_for=asked_for,
            assignment=assignment,
            notes=notes,
        )
        if direct is not None:
            running.shown_model = release
        elif routes.knows(call.model) or self.fallbacks.covers(call.model):
            running.shown_model = call.model
        elif target is None:  # the prefix of a release
            running.shown_model = release
        if direct is None and target is not None:
            self._answer_by(running, target, why)
        if running.assignment is not None:
            self.metrics.assigned[running.assignment.experiment, running.assignment.arm] += 1
        return running

    def _answer_by(self, running: RunningExchange, target: FallbackTarget, why: str) -> None:
        running.answer_by(target, why)
        self.metrics.fell_back[running.shown_model, running.head.release, why] += 1

    def fall_back(self, running: RunningExchange, why: str) -> bool:
        """Whether another model can be asked; if so, the exchange becomes its own."""
        target = self.fallbacks.find_next(
            running.names, self.routes(), passed=running.passed, failed=running.head.release
        )
        if target is None:
            return False
        self.note_failure(replace(running, finish_reason="error"))
        self._answer_by(running, target, why)
        return True

    # -- ask -----------------------------------------------------------------------------------

    async def answer(self, running: RunningExchange) -> Answer:
        self._begin_one()
        sent = False
        try:
            if self.escalator is not None and running.client.api.is_captured:
                running.check = self.escalator.begin_check(running.call, running.names, running.head.release)
            async with asyncio.timeout(self.seconds_left(running)):
                result = await self.ask(running)
            if self.escalator is not None:
                result = await self.escalator.apply(result, running, self)
            sent = True  # from here on, `_send` or `_events` decrements the counter
            return self._send(result, running)
        except TimeoutError as error:
            raise self._too_slow(running) from error
        except OSError as error:
            raise self._engine_down() from error
        finally:
            if not sent:
                self._end_one()

    async def ask(self, running: RunningExchange) -> list[PieceData] | ReplyStream:
        """Ask the release; if it fails, the models of its fallback chain in turn. Raises the first error."""
        first: Exception | None = None
        while True:
            try:
                if running.engine.state != "ready":
                    raise NoReplica("the engine is not ready")
                running.asked = True
                return await ask_engine(running)
            except (OSError, ApiError) as error:
                first = first or error
                why = failure_code(error)
                if why is None or not self.fall_back(running, why):
                    raise first from None

    async def answer_chain(self, call: ChatCall, client: ClientRequest) -> Answer:
        """The answer of the chain's last step; the steps before it are captured here."""
        name, chain = call.model, self.chains[call.model]
        require_chainable(call)
        run = ChainRun(
            self.chains,
            lambda step_call, mark: self._ask_step(step_call, mark, client),
            checks=self.chain_checks,
            trace=read_trace(client.request.headers.get("traceparent")),
        )
        self._begin_one()
        outcome, last = "failed", None
        try:
            try:
                last = await run.run(name, call)
                outcome = "answered"
            except ChainFailed:
                if chain.fallback is None:
                    raise
                mark = ChainMark(name, "fallback", run.trace)
                last = await self._ask_step(replace(call, model=chain.fallback), mark, client)
                run.outcomes.append((mark.name, last[0].head.release))
                outcome = "fallback"
        except TimeoutError as error:
            message = f"the fallback of the chain {name} did not answer"
            raise ApiError(504, message, code="timeout", headers=run.headers(name)) from error
        except OSError as error:
            raise self._engine_down() from error
        except ApiError as error:
            error.headers = (*error.headers, *run.headers(name))
            raise
        finally:
            self.metrics.chained[name, outcome] += 1
            for step in run.answered:
                exchange, reply = step
                if step is not last and isinstance(reply, dict):
                    exchange.replica = reply.get("replica")
                    exchange.note(reply)
                    self._expect_capture(exchange)
                    self._finish(exchange)
            if last is None:
                self._end_one()
        running, reply = last
        running.reservation = client.reservation
        running.call = replace(running.call, stream=call.stream)
        running.head = replace(running.head, model=name)
        running.notes |= dict(run.headers(name))
        running.earlier_usage = add_usage(*(step[0].usage for step in run.answered if step is not last))
        return self._send([reply] if isinstance(reply, dict) else reply, running)

    async def _ask_step(self, call: ChatCall, mark: ChainMark, client: ClientRequest) -> AnsweredStep:
        direct = None
        if self.fallbacks.has_endpoint(call.model):
            direct = self.resolve(call.model)
            if direct is None:
                raise ApiError(503, f"the endpoint {call.model} is not ready", code="engine_down")
        running = self.begin(call, client, direct=direct)
        running.chain = mark
        try:
            async with asyncio.timeout(self.seconds_left(running)):
                result = await self.ask(running)
        except (asyncio.CancelledError, OSError, ApiError) as error:
            if isinstance(error, asyncio.CancelledError | TimeoutError):
                # No exchange comes of this step that could count what it has used.
                client.key.usage.add_tokens(running.count_tokens())
            if isinstance(error, OSError) or (isinstance(error, ApiError) and error.status >= 500):
                self.note_failure(replace(running, finish_reason="error"))
            raise
        return running, result[0] if isinstance(result, list) else result

    def resolve(self, name: str) -> FallbackTarget | None:
        """The endpoint, alias or release of this name, if it can be asked now."""
        return self.fallbacks.resolve(name, self.routes())

    def seconds_left(self, running: RunningExchange) -> float:
        longest, deadline = self.settings.request_timeout_seconds, running.call.deadline
        return longest if deadline is None else min(longest, max(deadline - time.monotonic(), 0.0))

    def _engine_down(self) -> ApiError:
        why = self.engine.describe()["reason"] or "it has just stopped"
        message = f"the engine is not ready: {why}; try again soon"
        return ApiError(503, message, code="engine_down", headers=RETRY)

    def _too_slow(self, running: RunningExchange) -> ApiError:
        deadline = running.call.deadline
        if deadline is not None and time.monotonic() >= deadline:
            return ApiError(504, f"no answer within the time that {TIMEOUT_HEADER} allows", code="timeout")
        seconds = self.settings.request_timeout_seconds
        return ApiError(504, f"the engine did not answer within {seconds:g} s", code="timeout")

    # -- reply ---------------------------------------------------------------------------------

    def _send(self, result: list[PieceData] | ReplyStream, running: RunningExchange) -> Answer:
        """Send what was answered; from here on the request counts as answered or streaming."""
        is_captured = self._captures_of(running) is not None
        if isinstance(result, list) and running.call.stream:
            result = HeldReply(result)
        if not isinstance(result, list):
            running.replica = getattr(result, "replica", None)
            headers = (*_EVENT_STREAM, *running.headers(captured=is_captured))
            return StreamResponse(200, self._events(result, running), headers)
        self._end_one()
        running.replica = result[0].get("replica")
        for index, piece in enumerate(result):
            running.note(piece if index == 0 else {**piece, "index": index})
        body = running.client.api.encode(running.head, running.call, result, running.shown_usage)
        self._expect_capture(running)
        return Response(
            200,
            body,
            (JSON_TYPE, *running.headers(captured=is_captured)),
            after=lambda: self._finish(running),
        )

    async def _events(self, stream: ReplyStream, running: RunningExchange) -> AsyncGenerator[bytes, None]:
        """The answer as server-sent events. However it ends, it is counted and the stream closed."""
        encoder = running.client.api.open_stream(running.head, running.call)
        self.streaming.add(running.capture_id)
        self._expect_capture(running)
        try:
            yield running.first_comment + encoder.opening()
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
            yield encoder.closing(running.shown_usage)
        except (asyncio.CancelledError, GeneratorExit):
            running.disconnected = True
            self.metrics.disconnects += 1
            raise
        finally:
            stream.close()
            check, escalator = running.check, self.escalator
            if check is not None and escalator is not None and (check.small is not None or check.is_prefixed):
                # When the small model's answer has ended, or the whole one is checked.
                self.streaming.discard(running.capture_id)
                task = asyncio.create_task(self._finish_checked(running, escalator))
                self.finishing[running.capture_id] = task
                task.add_done_callback(lambda _: self.finishing.pop(running.capture_id, None))
            else:
                self._end_one()
                self._finish(running)

    async def _next_pieces(self, stream: ReplyStream, running: RunningExchange) -> list[PieceData] | None:
        try:
            async with asyncio.timeout(self.seconds_left(running)):
                return await stream.next_pieces()
        except TimeoutError as error:
            raise self._too_slow(running) from error
        except OSError as error:
            raise self._engine_down() from error

    async def _finish_checked(self, running: RunningExchange, escalator: Escalator) -> None:
        elapsed = time.perf_counter() - running.started
        try:
            await escalator.finish(running, self)
        finally:
            self._end_one()
            self._finish(running, elapsed)

    # -- capture -------------------------------------------------------------------------------

    def _captures_of(self, running: RunningExchange) -> CaptureWriter | None:
        return self.captures if running.client.api.is_captured else None

    def _expect_capture(self, running: RunningExchange) -> None:
        if (captures := self._captures_of(running)) is not None:
            captures.expect()

    def note_failure(self, running: RunningExchange) -> None:
        """In an experiment a missing answer counts for its arm: else a slow or broken release would win."""
        if running.asked and running.assignment is not None:
            self.metrics.assigned_failures[running.assignment.experiment, running.assignment.arm] += 1
            if (captures := self._captures_of(running)) is not None:
                captures.offer(running.to_exchange(time.perf_counter() - running.started))

    def _finish(self, running: RunningExchange, elapsed: float | None = None) -> None:
        """Count the exchange and give it to the capture writer."""
        elapsed = time.perf_counter() - running.started if elapsed is None else elapsed
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
        running.client.key.usage.add_tokens(running.count_tokens())
        if running.reservation is not None:
            running.reservation.release()
        if self.observe is not None:
            self.observe(running.to_finished(elapsed))
        if running.assignment is not None and running.finish_reason == "error":
            self.metrics.assigned_failures[running.assignment.experiment, running.assignment.arm] += 1
        self.streaming.discard(running.capture_id)
        if (captures := self._captures_of(running)) is not None:
            exchange = running.to_exchange(elapsed)
            captures.offer(exchange, expected=True)
            if self.shadow is not None and running.chain is None:
                self.shadow.offer(running.call, exchange, running.names)

    # -- under way -----------------------------------------------------------------------------

    def _begin_one(self) -> None:
        self.metrics.in_flight += 1
        if self.shadow is not None:
            self.shadow.make_way()

    def _end_one(self) -> None:
        self.metrics.in_flight -= 1
        if self.shadow is not None and not self.metrics.in_flight:
            self.shadow.go_on()
        if self.draining and not self.metrics.in_flight:
            self._idle.set()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests from now on; return when the running ones have ended, or after `seconds`."""
        self.draining = True
        if self.metrics.in_flight:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), seconds)
