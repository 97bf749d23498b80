"""One exchange while it runs: who asks whom, what has arrived, and what captures and logs will keep.

Each of several choices is a request of its own to the engine, and all run at once. `PrefixReader` is a
streamed reply whose beginning is read before any of it is sent.
"""

import asyncio
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from graftwork.engines.protocol import PieceData
from graftwork.http.messages import ApiError, Headers
from graftwork.serve.api.call import (
    NO_TOKENS,
    AnswerHead,
    ApiFormat,
    ChatCall,
    GenerationOptions,
    TokenUsage,
    describe_reply,
)
from graftwork.serve.budgets import Reservation
from graftwork.serve.captures import EscalatedAnswer, ServedExchange
from graftwork.serve.chains import ChainMark, add_usage
from graftwork.serve.fallbacks import Fallbacks, FallbackTarget, describe_fallback
from graftwork.serve.keys import ANYONE, KeyHolder
from graftwork.serve.replica_pool import failure_code
from graftwork.serve.request_log import CLIENT_LEFT, OTHER_MODEL, FinishedRequest
from graftwork.serve.routing import ArmAssignment, Routes, choose_release
from graftwork.serve.serving_engine import ReplyStream, ServingEngine


class PrefixReader:
    """Call `read_more` until enough is known, then use it as the stream, or `read_rest` if it is not sent."""

    def __init__(self, stream: ReplyStream, *, hide_logprobs: bool = False) -> None:
        self._stream, self._hide_logprobs = stream, hide_logprobs
        self._held: list[PieceData] = []
        self._reading: asyncio.Task[list[PieceData] | None] | None = None
        self.replica = getattr(stream, "replica", None)
        self.text = ""
        self.logprobs: list[float] = []
        self.tokens = 0
        """Tokens that have arrived; without log-probabilities each piece with text counts as one."""
        self.ended = False

    async def read_more(self, seconds: float | None) -> bool:
        """Wait for the next pieces; False where none came in `seconds`. Raises what the stream raises."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())
        if seconds is not None:
            done, _ = await asyncio.wait({self._reading}, timeout=max(seconds, 0.0))
            if not done:
                return False
        await self._read_on()
        return True

    async def _read(self) -> list[PieceData] | None:
        pieces = await self._stream.next_pieces()
        if pieces is None and not self.ended:
            raise ConnectionError("the reply broke off")
        return None if pieces is None else [self._note(piece) for piece in pieces]

    def _note(self, piece: PieceData) -> PieceData:
        found = [token["logprob"] for token in piece.get("logprobs") or []]
        self.text += piece["text"]
        self.logprobs += found
        self.tokens += len(found) or bool(piece["text"])
        self.ended = self.ended or piece.get("finish_reason") is not None
        if self._hide_logprobs and "logprobs" in piece:
            piece = {**piece}
            piece.pop("logprobs")
        return piece

    async def next_pieces(self) -> list[PieceData] | None:
        if not self._held and not await self._read_on():
            return None
        pieces, self._held = self._held, []
        return pieces

    async def _read_on(self) -> bool:
        """Whether more was read; False at the end of the stream."""
        if self._reading is None:
            pieces = await self._read()
        else:
            reading, self._reading = self._reading, None
            pieces = await reading
        self._held += pieces or []
        return pieces is not None

    async def read_rest(self) -> str | None:
        """The whole text; None where the stream breaks off before its end."""
        with suppress(OSError, ApiError):
            while not self.ended:
                await self._read_on()
            return self.text
        return None

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        self._stream.close()


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
    key: KeyHolder = ANYONE
    reservation: Reservation | None = None
    """Of the key's tokens; given back when those of the answer are counted."""
    engine: ServingEngine | None = None
    """The engine that is asked instead of the gateway's own."""
    model: str = ""
    """What the engine is asked for."""
    asked_for: str = ""
    """The name that the client gave; for a family, `call.model` is the alias of its member."""
    shown_model: str = OTHER_MODEL
    """The model that was asked for, in metrics and logs: a known name, never a client's text."""
    passed: int = 0
    """How many names of the fallback chain were passed."""
    fallback: str = ""
    """Why another model answers than the one that was asked for: the response header."""
    why: str = ""
    replica: str | None = None
    deadline: float | None = None
    """When the client stops waiting, on the clock of `time.monotonic`; None if it did not say."""
    asked: bool = False
    """Whether the engine was asked. If not, a missing answer is not the fault of the release."""
    texts: list[str] = field(default_factory=list)
    endings: list[PieceData] = field(default_factory=list)
    """The last pieces of the choices that ended."""
    first_token_at: float | None = None
    finish_reason: str | None = None
    usage: TokenUsage = NO_TOKENS
    disconnected: bool = False
    queue_seconds: float | None = None
    body_bytes: int = 0
    path: str = ""
    route: str = ""
    """The member of the family that answers, and why; for the response header."""
    is_held: bool = False
    """The answer is checked before its first byte is sent, also where it is streamed."""
    is_prefixed: bool = False
    """The answer is streamed once its beginning has been checked."""
    checked: str = ""
    """What of a streamed answer was checked before its first byte; for the response header."""
    failed_check: str | None = None
    """The check that the answer failed although it is sent."""
    wants_logprobs: bool = False
    """The check of the answer needs log-probabilities, whether or not the client asked for them."""
    escalation: str = ""
    """Which check failed and who answers; for the response header."""
    small: PrefixReader | None = None
    """The small model's stream, where the large one's is sent instead."""
    escalated: EscalatedAnswer | None = None
    """The small model's answer, where the large one answers instead."""
    chain: ChainMark | None = None
    """The step of a chain that this exchange is."""
    chain_steps: str = ""
    """What became of each step of the chain; for the response header."""
    earlier_usage: TokenUsage = NO_TOKENS
    """Tokens of the steps of the chain before this one."""

    @property
    def names(self) -> tuple[str, str]:
        """The names that settings may give the model, the most specific first."""
        return (self.call.model, self.asked_for)

    def headers(self, *, captured: bool) -> Headers:
        headers: Headers = (("x-graft-release", self.head.release),)
        if self.route:
            headers += (("x-graft-route", self.route),)
        if captured:
            headers += (("x-graft-capture", self.capture_id),)
        if self.replica is not None:
            headers += (("x-graft-replica", self.replica),)
        if self.checked:
            headers += (("x-graft-checked", self.checked),)
        if self.escalation:
            headers += (("x-graft-escalation", self.escalation),)
        if self.chain is not None:
            headers += (("x-graft-trace", self.chain.trace), ("x-graft-chain", self.chain_steps))
        return (*headers, ("x-graft-fallback", self.fallback)) if self.fallback else headers

    @property
    def first_comment(self) -> bytes:
        """What of the answer was checked and who answers, for clients that see events and no headers."""
        if not self.checked:
            return b""
        why = f"; {self.escalation}" if self.escalation else ""
        return f": {self.head.release} answers; checked {self.checked}{why}\n\n".encode()

    @property
    def offers_tools(self) -> bool:
        return self.call.options is not None and bool(self.call.options.tools)

    @property
    def client_wants_logprobs(self) -> bool:
        return self.call.options is not None and self.call.options.logprobs is not None

    @property
    def shown_usage(self) -> TokenUsage:
        """The tokens that the answer states: of all steps of a chain."""
        return self.usage if self.chain is None else add_usage(self.usage, self.earlier_usage)

    def escalate_to(self, target: FallbackTarget, *, check: str, answer: str | None) -> None:
        """The large model answers; the small one's answer is kept, and counts in an experiment."""
        self.escalated = EscalatedAnswer(self.head.release, check, answer)
        self.head = replace(self.head, release=target.release)
        self.engine, self.model = target.engine, target.model

    def keep_small(self, small: "RunningExchange") -> None:
        """The large model failed: the small one's answer is sent after all."""
        self.escalated = None
        self.head, self.engine, self.model = small.head, small.engine, small.model

    def answer_by(self, target: FallbackTarget, why: str) -> None:
        """Another model answers. It is no part of an experiment, and the capture is its own."""
        self.head = replace(self.head, release=target.release)
        self.engine, self.model, self.passed = target.engine, target.model, target.passed
        self.why, self.fallback = why, describe_fallback(self.call.model, why)
        if self.assignment is not None:
            self.assignment, self.capture_id = None, make_id()

    def note(self, piece: PieceData) -> None:
        """Keep what the capture and the metrics need. Of several choices the first one is captured."""
        if self.first_token_at is None and piece["text"]:
            self.first_token_at = time.perf_counter()
        is_first = piece.get("index", 0) == 0
        if is_first:
            self.texts.append(piece["text"])
        if piece.get("finish_reason") is not None:
            self.endings.append(piece)
            if (waited := piece.get("queue_ms")) is not None:
                self.queue_seconds = waited / 1000
            self.usage = count_usage(self.call, self.endings)
            if is_first:
                self.finish_reason = piece["finish_reason"]
                if calls := piece.get("tool_calls"):
                    self.texts = [describe_reply("".join(self.texts), calls)]

    @property
    def ended(self) -> bool:
        return len(self.endings) == self.call.choices

    def count_tokens(self) -> int:
        """The tokens that count against the budget; estimated for an answer that broke off."""
        if self.ended or not self.asked:
            return sum(self.usage)
        return max(sum(self.usage), self.call.estimate_prompt() + len(self.texts))

    def to_finished(self, elapsed: float) -> FinishedRequest:
        first = self.first_token_at
        return FinishedRequest(
            at=self.at,
            seconds=elapsed,
            method="POST",
            path=self.path,
            status=CLIENT_LEFT if self.disconnected else 200,
            key=self.key.name,
            model=self.shown_model,
            release=self.head.release,
            capture=self.capture_id,
            prompt_tokens=self.usage.prompt,
            reply_tokens=self.usage.reply,
            first_token_seconds=None if first is None else first - self.started,
            queue_seconds=self.queue_seconds,
            finish_reason=self.finish_reason,
            stream=self.call.stream,
            max_tokens=self.call.max_tokens,
            temperature=self.call.temperature,
        )

    def to_exchange(self, elapsed: float) -> ServedExchange:
        first = self.first_token_at
        small = "" if self.escalated is None else self.escalated.reply or ""
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
            user=self.call.user,
            size=self.body_bytes + sum(map(len, self.texts)) + len(small),
            escalated=self.escalated,
            failed_check=self.failed_check,
            chain=self.chain,
        )


class _RandomBytes:
    """Random bytes of the system, fetched for many ids at once: a fetch gives up the interpreter's lock."""

    def __init__(self) -> None:
        self._bytes, self._at = b"", 0

    def take(self, size: int) -> bytes:
        if self._at + size > len(self._bytes):
            self._bytes, self._at = os.urandom(_FETCHED_BYTES), 0
        self._at += size
        return self._bytes[self._at - size : self._at]


_FETCHED_BYTES = 4096
_random = _RandomBytes()


def make_id() -> str:
    """The id of an exchange, which cannot be guessed. Called from the event loop only."""
    return _random.take(16).hex()


def begin_exchange(
    call: ChatCall,
    *,
    api: ApiFormat,
    routes: Routes,
    session: str | None,
    fallbacks: Fallbacks | None = None,
    asked_for: str = "",
    direct: FallbackTarget | None = None,
) -> RunningExchange:
    """`direct` is asked instead of a release, where the model is an endpoint that settings name."""
    unique = make_id()
    now = time.time()
    target, why = None, ""
    try:
        if direct is not None:
            release, assignment = direct.release, None
        else:
            # A request without a session id is a session of its own.
            release, assignment = choose_release(routes, call.model, session=session or unique)
    except ApiError as error:
        # No release yet, or one that is not loaded: a model with a fallback chain is answered all the same.
        why = failure_code(error) or str(error.code)
        names = (call.model, asked_for)
        if fallbacks is not None and fallbacks.may_replace(names, error):
            target = fallbacks.find_next(names, routes)
        if target is None:
            raise
        release, assignment = target.release, None
    running = RunningExchange(
        call=call,
        api=api,
        head=AnswerHead(unique=unique, created=int(now), model=call.model, release=release),
        capture_id=unique,
        session=session,
        started=time.perf_counter(),
        at=now,
        assignment=assignment,
        model=release,
        asked_for=asked_for,
        deadline=call.deadline,
    )
    if direct is not None:
        running.engine, running.model, running.shown_model = direct.engine, direct.model, direct.release
    elif routes.knows(call.model) or (fallbacks is not None and fallbacks.covers(call.model)):
        running.shown_model = call.model
    elif target is None:  # the prefix of a release
        running.shown_model = release
    if target is not None:
        running.answer_by(target, why)
    return running


async def complete_choices(engine: ServingEngine, call: ChatCall, *, model: str) -> list[PieceData]:
    """One whole piece for each choice. If one fails, the others are cancelled."""
    tasks = [asyncio.create_task(engine.complete(single, model=model)) for single in call.fan_out()]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def stream_choices(engine: ServingEngine, call: ChatCall, *, model: str) -> "ReplyStream":
    calls = call.fan_out()
    if len(calls) == 1:
        return await engine.stream(calls[0], model=model)
    tasks = [asyncio.create_task(engine.stream(single, model=model)) for single in calls]
    try:
        return MergedStream(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
            task.add_done_callback(_close)
        raise


def _close(starting: "asyncio.Task[ReplyStream]") -> None:
    """Its answer has begun, but nobody wants it: another choice was refused, or the client has left."""
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()


class MergedStream:
    """A ReplyStream whose pieces carry the index of their choice."""

    def __init__(self, streams: list[ReplyStream]) -> None:
        self._streams = streams
        self._reading: dict[asyncio.Task[list[PieceData] | None], int] = {}
        self._begun = False

    async def next_pieces(self) -> list[PieceData] | None:
        if not self._begun:
            self._begun = True
            for place in range(len(self._streams)):
                self._read(place)
        while self._reading:
            done, _ = await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
            found: list[PieceData] = []
            for task in done:
                place = self._reading.pop(task)
                pieces = task.result()
                if pieces is not None:
                    found += [{**piece, "index": place} for piece in pieces]
                    self._read(place)
            if found:
                return found
        return None

    def _read(self, place: int) -> None:
        task = asyncio.create_task(self._streams[place].next_pieces())
        self._reading[task] = place

    def close(self) -> None:
        for task in self._reading:
            task.cancel()
        for stream in self._streams:
            stream.close()


def count_usage(call: ChatCall, endings: Iterable[PieceData]) -> TokenUsage:
    """The tokens of all choices; a prompt counts once, however many choices it has."""
    n = call.options.n if call.options is not None else 1
    prompt = reply = 0
    for piece in endings:
        if piece.get("index", 0) % n == 0:
            prompt += piece["prompt_tokens"]
        reply += piece["reply_tokens"]
    return TokenUsage(prompt, reply)


async def ask_engine(engine: ServingEngine, running: RunningExchange) -> list[PieceData] | ReplyStream:
    call, model = running.call, running.model
    if running.is_held:
        call = replace(call, stream=False)
    if running.wants_logprobs and not running.client_wants_logprobs:
        call = replace(call, options=replace(call.options or GenerationOptions(), logprobs=0))
    if call.stream:
        if call.options is None:
            return await engine.stream(call, model=model)
        return await stream_choices(engine, call, model=model)
    if call.options is None:
        return [await engine.complete(call, model=model)]
    return await complete_choices(engine, call, model=model)
