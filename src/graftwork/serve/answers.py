"""From a checked call to its answer: route, ask, reply, capture.

Input: a call of a client, whatever API it speaks. Output: an answer, whole or streamed. Counts and captures
it once it has ended. `routing.py` chooses who answers; escalation, chains and shadow traffic are in modules
of their own. Knows nothing of paths, keys or bodies: `gateway.py` is in front of it.
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
from graftwork.serve.api.call import ChatCall, add_usage
from graftwork.serve.captures import CaptureWriter, ChainMark
from graftwork.serve.chains import (
    AnsweredStep,
    ChainFailed,
    ChainRun,
    StepCheck,
    read_trace,
    require_chainable,
)
from graftwork.serve.engine_interface import OUT_OF_TIME, NoReplica, ReplyStream, ServingEngine, failure_code
from graftwork.serve.escalation import (
    AnswerChecks,
    CheckThreads,
    Escalator,
)
from graftwork.serve.exchange import ClientRequest, HeldReply, RunningExchange, ask_engine, make_id
from graftwork.serve.metrics import Metrics
from graftwork.serve.request_log import FinishedRequest
from graftwork.serve.routing import Fallbacks, Routes, Target, choose_target
from graftwork.serve.settings import ServeSettings
from graftwork.serve.shadow import Shadow

_EVENT_STREAM = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))


class InFlight:
    """One request of a client, from its beginning until its answer is made: whole, or streamed to its end."""

    __slots__ = ("_end", "_ended", "_streams")

    def __init__(self, end: Callable[[], None]) -> None:
        self._end, self._ended, self._streams = end, False, False

    def __enter__(self) -> "InFlight":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._streams:
            self.end()

    def keep(self) -> None:
        """The answer is streamed: `end` is called after its last piece."""
        self._streams = True

    def end(self) -> None:
        """Once; a second call does nothing."""
        if not self._ended:
            self._ended = True
            self._end()


class AnswerService:
    """Everything between a checked call and its answer.

    `fallbacks` knows the remote APIs; `checks` are those of `serve.escalate`, `chain_checks` those that
    conditions of chains name.
    """

    def __init__(
        self,
        engine: ServingEngine,
        *,
        settings: ServeSettings,
        routes: Callable[[], Routes],
        captures: CaptureWriter | None,
        fallbacks: Fallbacks | None = None,
        checks: AnswerChecks | None = None,
        chain_checks: Mapping[str, AnswerChecks] = {},
    ) -> None:
        self.engine, self.settings, self.routes, self.captures = engine, settings, routes, captures
        self.observe: Callable[[FinishedRequest], None] | None = None
        """Gets each finished request. Must return at once."""
        self.metrics = Metrics()
        self.fallbacks = fallbacks or Fallbacks({}, engine=engine, endpoints={})
        self.fallbacks.revise(settings)
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

    def revise(self, settings: ServeSettings) -> None:
        """Use other settings from the next request on."""
        self.settings = settings
        self.fallbacks.revise(settings)

    # -- route ---------------------------------------------------------------------------------

    def begin(
        self, call: ChatCall, client: ClientRequest, *, direct: Target | None = None
    ) -> RunningExchange:
        """The exchange of a call with who is to answer it. Raises ApiError if nobody can.

        `direct` is asked instead of a release, where the model is an endpoint that settings name.
        """
        headers, asked_for = client.request.headers, call.model
        unique, session = make_id(), headers.get("x-session-id") or call.user or None
        target = choose_target(
            call,
            headers,
            routes=self.routes(),
            fallbacks=self.fallbacks,
            # A request without a session id is a session of its own.
            session=session or unique,
            direct=direct,
            metrics=self.metrics,
        )
        return RunningExchange(
            call=call if target.name == asked_for else replace(call, model=target.name),
            client=client,
            target=target,
            asked_for=asked_for,
            unique=unique,
            capture_id=unique,
            session=session,
            started=time.perf_counter(),
            at=time.time(),
        )

    def fall_back(self, running: RunningExchange, why: str) -> bool:
        """Whether another model can be asked; if so, the exchange becomes its own."""
        asked = running.target
        target = self.fallbacks.find_next(
            running.names, self.routes(), passed=asked.passed, failed=asked.release
        )
        if target is None:
            return False
        self.note_failure(replace(running, finish_reason="error"))
        running.fall_back_to(target, why)
        self.metrics.fell_back[asked.label, target.release, why] += 1
        return True

    # -- ask -----------------------------------------------------------------------------------

    async def answer(self, call: ChatCall, client: ClientRequest) -> Answer:
        """The answer of a chain, a release or an endpoint."""
        if call.model in self.chains:
            client.label = call.model
            return await self._answer_chain(call, client)
        running = self.begin(call, client)
        client.label = running.target.release
        with self._begin_one() as in_flight:
            try:
                result = await self._ask_checked(running)
            except asyncio.CancelledError:
                running.disconnected = True
                running.charge()
                self.note_failure(running)
                raise
            except ApiError as error:
                self._fail(running, error)
                raise
            client.label = running.target.release
            return self._send(result, running, in_flight)

    async def _ask_checked(self, running: RunningExchange) -> list[PieceData] | ReplyStream:
        """Ask; where `serve.escalate` checks the answer, perhaps the large model too."""
        try:
            if self.escalator is not None and running.client.api.is_captured:
                release = running.target.release
                running.check = self.escalator.begin_check(running.call, running.names, release)
            async with asyncio.timeout(self.seconds_left(running)):
                result = await self.ask(running)
            return result if self.escalator is None else await self.escalator.apply(result, running, self)
        except TimeoutError as error:
            raise self._too_slow(running) from error
        except OSError as error:
            raise self._engine_down() from error

    def _fail(self, running: RunningExchange, error: OSError | ApiError) -> None:
        """No answer comes of it: charge what was used until the time was over, and count it for its arm."""
        if isinstance(error, TimeoutError) or (isinstance(error, ApiError) and error.code == OUT_OF_TIME):
            running.charge()
        if not isinstance(error, ApiError) or error.status >= 500:
            running.finish_reason = "error"
            self.note_failure(running)

    async def ask(self, running: RunningExchange) -> list[PieceData] | ReplyStream:
        """Ask the release; if it fails, the models of its fallback chain in turn. Raises the first error."""
        first: Exception | None = None
        while True:
            try:
                if running.target.engine.state != "ready":
                    raise NoReplica("the engine is not ready")
                running.asked = True
                return await ask_engine(running)
            except (OSError, ApiError) as error:
                first = first or error
                why = failure_code(error)
                if why is None or not self.fall_back(running, why):
                    raise first from None

    async def _answer_chain(self, call: ChatCall, client: ClientRequest) -> Answer:
        """The answer of the chain's last step; the steps before it are captured here."""
        name, chain = call.model, self.chains[call.model]
        require_chainable(call)
        run = ChainRun(
            self.chains,
            lambda step_call, mark: self._ask_step(step_call, mark, client),
            checks=self.chain_checks,
            trace=read_trace(client.request.headers.get("traceparent")),
        )
        outcome, last = "failed", None
        with self._begin_one() as in_flight:
            try:
                try:
                    last = await run.run(name, call)
                    outcome = "answered"
                except ChainFailed:
                    if chain.fallback is None:
                        raise
                    mark = ChainMark(name, "fallback", run.trace)
                    last = await self._ask_step(replace(call, model=chain.fallback), mark, client)
                    run.outcomes.append((mark.name, last[0].target.release))
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
                        self._count(exchange)
            running, reply = last
            running.call = replace(running.call, stream=call.stream)
            running.answers_as = name
            running.notes |= dict(run.headers(name))
            running.earlier_usage = add_usage(*(step[0].usage for step in run.answered if step is not last))
            return self._send([reply] if isinstance(reply, dict) else reply, running, in_flight)

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
        except asyncio.CancelledError:
            running.charge()
            raise
        except (OSError, ApiError) as error:
            self._fail(running, error)
            raise
        return running, result[0] if isinstance(result, list) else result

    def resolve(self, name: str) -> Target | None:
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

    def _send(
        self, result: list[PieceData] | ReplyStream, running: RunningExchange, in_flight: InFlight
    ) -> Answer:
        """Send what was answered; from here on the request counts as answered or streaming."""
        is_captured = self._captures_of(running) is not None
        if isinstance(result, list) and running.call.stream:
            result = HeldReply(result)
        if not isinstance(result, list):
            running.replica = getattr(result, "replica", None)
            headers = (*_EVENT_STREAM, *running.headers(captured=is_captured))
            in_flight.keep()
            return StreamResponse(200, self._events(result, running, in_flight), headers)
        running.replica = result[0].get("replica")
        for index, piece in enumerate(result):
            running.note(piece if index == 0 else {**piece, "index": index})
        body = running.client.api.encode(running.head, running.call, result, running.shown_usage)
        self._expect_capture(running)
        return Response(
            200,
            body,
            (JSON_TYPE, *running.headers(captured=is_captured)),
            after=lambda: self._finish(running, in_flight),
        )

    async def _events(
        self, stream: ReplyStream, running: RunningExchange, in_flight: InFlight
    ) -> AsyncGenerator[bytes, None]:
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
                task = asyncio.create_task(self._finish_checked(running, escalator, in_flight))
                self.finishing[running.capture_id] = task
                task.add_done_callback(lambda _: self.finishing.pop(running.capture_id, None))
            else:
                self._finish(running, in_flight)

    async def _next_pieces(self, stream: ReplyStream, running: RunningExchange) -> list[PieceData] | None:
        try:
            async with asyncio.timeout(self.seconds_left(running)):
                return await stream.next_pieces()
        except TimeoutError as error:
            raise self._too_slow(running) from error
        except OSError as error:
            raise self._engine_down() from error

    async def _finish_checked(
        self, running: RunningExchange, escalator: Escalator, in_flight: InFlight
    ) -> None:
        elapsed = time.perf_counter() - running.started
        try:
            await escalator.finish(running, self)
        finally:
            self._finish(running, in_flight, elapsed)

    # -- capture -------------------------------------------------------------------------------

    def _captures_of(self, running: RunningExchange) -> CaptureWriter | None:
        return self.captures if running.client.api.is_captured else None

    def _expect_capture(self, running: RunningExchange) -> None:
        if (captures := self._captures_of(running)) is not None:
            captures.expect()

    def note_failure(self, running: RunningExchange) -> None:
        """In an experiment a missing answer counts for its arm: else a slow or broken release would win."""
        if running.asked and (assignment := running.target.assignment) is not None:
            self.metrics.assigned_failures[assignment.experiment, assignment.arm] += 1
            if (captures := self._captures_of(running)) is not None:
                captures.offer(running.to_exchange(time.perf_counter() - running.started))

    def _finish(self, running: RunningExchange, in_flight: InFlight, elapsed: float | None = None) -> None:
        """The client's request has ended: count its exchange, and give back what was reserved."""
        in_flight.end()
        self._count(running, elapsed)
        if running.client.reservation is not None:
            running.client.reservation.release()

    def _count(self, running: RunningExchange, elapsed: float | None = None) -> None:
        """Count an answered exchange, of a client or a step of a chain, and give it to the capture writer."""
        elapsed = time.perf_counter() - running.started if elapsed is None else elapsed
        self.metrics.count_answer(
            running.target.release,
            prompt_tokens=running.usage.prompt,
            reply_tokens=running.usage.reply,
            seconds=elapsed,
        )
        if running.first_token_at is not None:
            self.metrics.first_token_seconds.add(running.first_token_at - running.started)
        if running.queue_seconds is not None:
            self.metrics.queue_seconds.add(running.queue_seconds)
        running.charge()
        if self.observe is not None:
            self.observe(running.to_finished(elapsed))
        assignment = running.target.assignment
        if assignment is not None and running.finish_reason == "error":
            self.metrics.assigned_failures[assignment.experiment, assignment.arm] += 1
        self.streaming.discard(running.capture_id)
        if (captures := self._captures_of(running)) is not None:
            exchange = running.to_exchange(elapsed)
            captures.offer(exchange, expected=True)
            if self.shadow is not None and running.chain is None:
                self.shadow.offer(running.call, exchange, running.names)

    # -- under way -----------------------------------------------------------------------------

    def _begin_one(self) -> InFlight:
        self.metrics.in_flight += 1
        if self.shadow is not None:
            self.shadow.make_way()
        return InFlight(self._end_one)

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
