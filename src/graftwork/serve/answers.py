"""Answers checked calls: chooses who answers, asks, falls back, escalates, runs chains, and captures.

In: a call of a client, whatever API it speaks. Out: an answer, whole or streamed. Counts and captures it once
it has ended. Knows nothing of paths, keys or bodies: `gateway.py` is in front of it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

from graftwork.engines.protocol import PieceData
from graftwork.http.messages import (
    JSON_TYPE,
    TIMEOUT_HEADER,
    Answer,
    ApiError,
    Request,
    Response,
    StreamResponse,
)
from graftwork.serve.api.call import ApiFormat, ChatCall, describe_choice
from graftwork.serve.budgets import Reservation
from graftwork.serve.captures import CaptureWriter
from graftwork.serve.chains import (
    AnsweredStep,
    ChainFailed,
    ChainMark,
    ChainRun,
    StepCheck,
    add_usage,
    read_trace,
    require_chainable,
)
from graftwork.serve.escalation import OUTCOMES, TOO_LATE, Escalation, Escalator, HeldReply, mean_logprob
from graftwork.serve.exchange import PrefixReader, RunningExchange, ask_engine, begin_exchange
from graftwork.serve.fallbacks import Fallbacks, FallbackTarget
from graftwork.serve.keys import KeyHolder
from graftwork.serve.metrics import Metrics
from graftwork.serve.replica_pool import NoReplica, failure_code
from graftwork.serve.request_log import FinishedRequest
from graftwork.serve.routing import RETRY, Routes
from graftwork.serve.serving_engine import ReplyStream, ServingEngine
from graftwork.serve.settings import ChainSettings, ServeSettings
from graftwork.serve.shadow import Shadow

_EVENT_STREAM = (("content-type", "text/event-stream; charset=utf-8"), ("cache-control", "no-cache"))


class ClientRequest(NamedTuple):
    """Who asks, and how."""

    request: Request
    api: ApiFormat
    key: KeyHolder
    reservation: Reservation | None = None


class AnswerService:
    """Everything between a checked call and its answer."""

    def __init__(
        self,
        engine: ServingEngine,
        *,
        settings: ServeSettings,
        routes: Callable[[], Routes],
        captures: CaptureWriter | None,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._routes = routes
        self._captures = captures
        self.metrics = Metrics()
        self.observe: Callable[[FinishedRequest], None] | None = None
        """Gets each finished request. Must return at once."""
        self.fallbacks: Fallbacks | None = None
        self.escalator: Escalator | None = None
        self.shadow: Shadow | None = None
        self.chains: Mapping[str, ChainSettings] = {}
        self.chain_checks: Mapping[str, StepCheck] = {}
        self.draining = False
        self._idle = asyncio.Event()
        self._finishing: dict[str, asyncio.Task[None]] = {}
        """By capture id: answers that were given and wait for their check or the small model's answer."""
        self._streaming: set[str] = set()
        """Capture ids of answers that are still streaming."""

    def _begin(
        self, call: ChatCall, client: "ClientRequest", *, direct: FallbackTarget | None = None
    ) -> RunningExchange:
        """The exchange of a call with the release that is to answer it. Raises ApiError if none can."""
        request = client.request
        member, route, endpoint = self._choose_member(call, request)
        if endpoint is not None and self.fallbacks is not None:
            direct = self.fallbacks.resolve(endpoint, self._routes())
        running = begin_exchange(
            member,
            api=client.api,
            routes=self._routes(),
            session=request.headers.get("x-session-id") or call.user or None,
            fallbacks=self.fallbacks,
            asked_for=call.model,
            direct=direct,
        )
        running.route, running.key, running.body_bytes = route, client.key, len(request.body)
        running.path = request.path
        if running.fallback:
            self._count_fallback(running)
        if running.assignment is not None:
            self.metrics.assigned[running.assignment.experiment, running.assignment.arm] += 1
        return running

    async def _answer_chain(self, call: ChatCall, client: "ClientRequest") -> Answer:
        """The answer of the chain's last step; the steps before it are captured here."""
        name, chain = call.model, self.chains[call.model]
        require_chainable(call)
        run = ChainRun(
            self.chains,
            lambda asked, mark: self._ask_step(asked, mark, client),
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
                run.outcomes.append((mark.name, last.release))
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
                if step is not last:
                    self._finish_step(step)
            if last is None:
                self._end_one()
        running = last.exchange
        running.reservation = client.reservation
        running.call = replace(running.call, stream=call.stream)
        running.head = replace(running.head, model=name)
        running.chain_steps = run.describe(name)
        running.earlier_usage = add_usage(*(step.exchange.usage for step in run.answered if step is not last))
        result = [last.reply] if isinstance(last.reply, dict) else last.reply
        return self._send(result, running)

    async def _ask_step(
        self, call: ChatCall, mark: ChainMark, client: "ClientRequest"
    ) -> AnsweredStep[RunningExchange]:
        direct = None
        if self.fallbacks is not None and self.fallbacks.has_endpoint(call.model):
            direct = self.fallbacks.resolve(call.model, self._routes())
            if direct is None:
                raise ApiError(503, f"the endpoint {call.model} is not ready", code="engine_down")
        running = self._begin(call, client, direct=direct)
        running.chain = mark
        try:
            async with asyncio.timeout(self._seconds_left(running)):
                result = await self._ask(running)
        except (asyncio.CancelledError, OSError, ApiError) as error:
            if isinstance(error, asyncio.CancelledError | TimeoutError):
                # No exchange comes of this step that could count what it has used.
                running.key.usage.add_tokens(running.count_tokens())
            if isinstance(error, OSError) or (isinstance(error, ApiError) and error.status >= 500):
                self._note_failure(replace(running, finish_reason="error"))
            raise
        reply = result[0] if isinstance(result, list) else result
        return AnsweredStep(running, running.head.release, reply)

    def _finish_step(self, step: AnsweredStep[RunningExchange]) -> None:
        if isinstance(step.reply, dict):
            step.exchange.replica = step.reply.get("replica")
            step.exchange.note(step.reply)
            if self._is_captured(step.exchange) and self._captures is not None:
                self._captures.expect()
            self._finish(step.exchange)

    def _send(self, result: list[PieceData] | ReplyStream, running: RunningExchange) -> Answer:
        """Send what was answered; from here on the request counts as answered or streaming."""
        if isinstance(result, list):
            if not running.call.stream:
                self._end_one()
                return self._answer_whole(result, running)
            result = HeldReply(result)
        running.replica = getattr(result, "replica", None)
        headers = (*_EVENT_STREAM, *running.headers(captured=self._is_captured(running)))
        return StreamResponse(200, self._events(result, running), headers)

    def _choose_member(self, call: ChatCall, request: Request) -> tuple[ChatCall, str, str | None]:
        """The call for the family's member, why it was chosen, and its server; other calls as they are."""
        routes = self._routes()
        if routes.family is None or call.model != routes.family.name:
            return call, "", None
        servers = [] if self.fallbacks is None else self.fallbacks.ready_endpoints()
        chosen = routes.family.choose(call, request.headers, loaded={*routes.aliases, *servers})
        self.metrics.routed[chosen.model, chosen.by] += 1
        return replace(call, model=chosen.alias), f"{chosen.model} ({chosen.why})", chosen.endpoint

    async def _answer(self, running: RunningExchange) -> Answer:
        self._begin_one()
        sent = False
        try:
            if self.escalator is not None:
                checked = self.escalator.applies_to(running)
                # A call is checked whole.
                begins = running.call.stream and self.escalator.streams_prefixes and not running.offers_tools
                running.is_prefixed = checked and begins
                running.is_held = checked and not running.is_prefixed
                running.wants_logprobs = checked and self.escalator.needs_logprobs
            async with asyncio.timeout(self._seconds_left(running)):
                result = await self._ask(running)
            if running.is_held and isinstance(result, list):
                result = await self._check(result, running)
            elif running.is_prefixed and not isinstance(result, list):
                result = await self._check_prefix(result, running)
            sent = True  # from here on, `_send` or `_events` decrements the counter
            return self._send(result, running)
        except TimeoutError as error:
            raise self._too_slow(running) from error
        except OSError as error:
            raise self._engine_down() from error
        finally:
            if not sent:
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
        settings = self.escalator.settings
        # With `stream: prefix`, the threshold is one for the mean over the first tokens.
        first = settings.prefix_tokens if self.escalator.streams_prefixes else None
        logprob = mean_logprob(choices[0], first=first)
        if running.wants_logprobs and not running.client_wants_logprobs:
            choices = [{**choices[0]}]
            choices[0].pop("logprobs", None)
        small_answer = describe_choice(choices[0])
        found = await self.escalator.judge(running.call.checked_messages, small_answer, logprob=logprob)
        if found is None:
            return choices
        target, outcome = self._find_large(found)
        if target is not None:
            small = replace(running)
            running.wants_logprobs = False
            running.escalate_to(target, check=found.check, answer=small_answer)
            try:
                async with asyncio.timeout(self._seconds_left(running)):
                    asked = await ask_engine(target.engine, running)
                if isinstance(asked, list):
                    _require_text(describe_choice(asked[0]))
                    choices = asked
            except (OSError, ApiError):
                running.keep_small(small)
                outcome = "failed"
        self._note_escalation(running, found.check, outcome)
        return choices

    async def _check_prefix(self, stream: ReplyStream, running: RunningExchange) -> ReplyStream:
        """The stream if its beginning passes, else that of the large model if it answers."""
        assert self.escalator is not None
        small = PrefixReader(stream, hide_logprobs=not running.client_wants_logprobs)
        try:
            async with asyncio.timeout(self._seconds_left(running)):
                judged = await self.escalator.judge_prefix(running.call.messages, small)
            running.checked = judged.describe()
            running.is_prefixed = not judged.is_whole
            if judged.found is None:
                return small
            return await self._escalate_stream(small, judged.found, running)
        except BaseException as error:
            small.close()
            # Nothing was sent yet: the fallback chain can still answer.
            why = None if isinstance(error, TimeoutError) else failure_code(error)
            if why is None or not self._fall_back(running, why):
                raise
        running.is_prefixed = running.wants_logprobs = False
        async with asyncio.timeout(self._seconds_left(running)):
            found = await self._ask(running)
        return HeldReply(found) if isinstance(found, list) else found

    async def _escalate_stream(
        self, small: PrefixReader, found: Escalation, running: RunningExchange
    ) -> ReplyStream:
        """The large model's stream once its first piece has come; until then the small one can go on."""
        target, outcome = self._find_large(found)
        answer: ReplyStream = small
        if target is not None:
            before = replace(running)
            running.wants_logprobs = running.is_prefixed = False
            running.escalate_to(target, check=found.check, answer=None)
            large: PrefixReader | None = None
            try:
                async with asyncio.timeout(self._seconds_left(running)):
                    asked = await ask_engine(target.engine, running)
                    large = PrefixReader(HeldReply(asked) if isinstance(asked, list) else asked)
                    await large.read_more(None)
                if large.ended:
                    _require_text(large.text)
                running.small, answer = small, large
            except (OSError, ApiError):
                if large is not None:
                    large.close()
                running.keep_small(before)
                running.is_prefixed = before.is_prefixed
                outcome = "failed"
            except BaseException:
                # The client is gone: nothing else would end the request of the large model.
                if large is not None:
                    large.close()
                raise
        self._note_escalation(running, found.check, outcome)
        return answer

    def _find_large(self, found: Escalation) -> tuple[FallbackTarget | None, str]:
        """The large model, and what becomes of the answer that failed a check."""
        assert self.escalator is not None
        if not found.allowed:
            return None, "over budget"
        to = self.escalator.settings.to
        target = None if self.fallbacks is None else self.fallbacks.resolve(to, self._routes())
        if target is None:
            # Else an outage of the large model would use up the budget of the day.
            self.escalator.give_back()
        return target, "unavailable" if target is None else "escalated"

    def _note_escalation(self, running: RunningExchange, check: str, outcome: str) -> None:
        assert self.escalator is not None
        self.metrics.escalated[check, outcome] += 1
        if running.escalated is None:
            running.failed_check = check
        running.escalation = f"{check} failed, {self.escalator.settings.to} {OUTCOMES[outcome]}"

    def _fall_back(self, running: RunningExchange, why: str) -> bool:
        """Whether another model can be asked; if so, the exchange becomes its own."""
        if self.fallbacks is None:
            return False
        target = self.fallbacks.find_next(
            running.names, self._routes(), passed=running.passed, failed=running.head.release
        )
        if target is None:
            return False
        self._note_failure(replace(running, finish_reason="error"))
        running.answer_by(target, why)
        self._count_fallback(running)
        return True

    def _count_fallback(self, running: RunningExchange) -> None:
        self.metrics.fell_back[running.shown_model, running.head.release, running.why] += 1

    def _seconds_left(self, running: RunningExchange) -> float:
        longest = self._settings.request_timeout_seconds
        if running.deadline is None:
            return longest
        return min(longest, max(running.deadline - time.monotonic(), 0.0))

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

    def _is_captured(self, running: RunningExchange) -> bool:
        return self._captures is not None and running.api.is_captured

    def _note_failure(self, running: RunningExchange) -> None:
        """In an experiment a missing answer counts for its arm: else a slow or broken release would win."""
        if running.asked and running.assignment is not None:
            self.metrics.assigned_failures[running.assignment.experiment, running.assignment.arm] += 1
            if self._captures is not None and running.api.is_captured:
                self._captures.offer(running.to_exchange(time.perf_counter() - running.started))

    def _answer_whole(self, choices: list[PieceData], running: RunningExchange) -> Response:
        running.replica = choices[0].get("replica")
        for place, piece in enumerate(choices):
            running.note(piece if place == 0 else {**piece, "index": place})
        body = running.api.encode(running.head, running.call, choices, running.shown_usage)
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
            if running.small is not None or running.is_prefixed:
                self._finish_later(running)
            else:
                self._end_one()
                self._finish(running)

    def _finish_later(self, running: RunningExchange) -> None:
        """Finish the exchange when the small model's answer has ended, or the whole one is checked."""
        self._streaming.discard(running.capture_id)
        task = asyncio.create_task(self._finish_checked(running))
        self._finishing[running.capture_id] = task
        task.add_done_callback(lambda _: self._finishing.pop(running.capture_id, None))

    async def _finish_checked(self, running: RunningExchange) -> None:
        elapsed = time.perf_counter() - running.started
        try:
            if running.small is not None and running.escalated is not None and not running.disconnected:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._settings.request_timeout_seconds):
                        reply = await running.small.read_rest()
                        running.escalated = replace(running.escalated, reply=reply)
            elif (
                running.is_prefixed
                and running.ended
                and running.failed_check is None
                and self.escalator is not None
            ):
                text = "".join(running.texts)
                running.failed_check = await self.escalator.find_failing(running.call.messages, text)
                if running.failed_check is not None:
                    self.metrics.escalated[running.failed_check, TOO_LATE] += 1
        finally:
            if running.small is not None:
                running.small.close()
            self._end_one()
            self._finish(running, elapsed)

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
        running.key.usage.add_tokens(running.count_tokens())
        if running.reservation is not None:
            running.reservation.release()
        if self.observe is not None:
            self.observe(running.to_finished(elapsed))
        if running.assignment is not None and running.finish_reason == "error":
            self.metrics.assigned_failures[running.assignment.experiment, running.assignment.arm] += 1
        self._streaming.discard(running.capture_id)
        if self._captures is not None and running.api.is_captured:
            exchange = running.to_exchange(elapsed)
            self._captures.offer(exchange, expected=True)
            if self.shadow is not None and running.chain is None:
                self.shadow.offer(running.call, exchange, running.names)


def _require_text(text: str) -> None:
    """Raise where the large model said nothing: the small one's answer is better than none."""
    if not text:
        raise ApiError(502, "the large model's answer is empty", code="engine_error")
