"""A running exchange: its client and model, the pieces so far, and the data for captures and logs.

Each of several choices is a request of its own to the engine, and all run at once.
"""

import asyncio
import math
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from graftwork.engines.protocol import PieceData
from graftwork.http.messages import ApiError, Headers, Request
from graftwork.serve.api.call import (
    NO_TOKENS,
    AnswerHead,
    ApiFormat,
    ChatCall,
    GenerationOptions,
    TokenUsage,
    add_usage,
    describe_reply,
)
from graftwork.serve.budgets import Reservation
from graftwork.serve.captures import ChainMark, ServedExchange
from graftwork.serve.engine_interface import ReplyStream, ServingEngine
from graftwork.serve.keys import KeyHolder
from graftwork.serve.request_log import CLIENT_LEFT, FinishedRequest
from graftwork.serve.routing import Target

_NOTES = (
    "x-graft-route",
    "x-graft-capture",
    "x-graft-replica",
    "x-graft-checked",
    "x-graft-escalation",
    "x-graft-trace",
    "x-graft-chain",
    "x-graft-fallback",
)
"""Response headers in their order."""


@dataclass(slots=True)
class ClientRequest:
    """Who asks, and how."""

    request: Request
    api: ApiFormat
    key: KeyHolder
    reservation: Reservation | None = None
    """Reserved tokens of the key; released when those of the answer are counted."""
    label: str = "unknown"
    """What it is counted as in metrics: the release that answers, or a chain."""


class HeldReply:
    """An answer that was checked before it is streamed: sent all at once."""

    def __init__(self, choices: list[PieceData]) -> None:
        self.replica = choices[0].get("replica")
        self._choices: list[PieceData] | None = choices

    async def next_pieces(self) -> list[PieceData] | None:
        pieces, self._choices = self._choices, None
        return pieces

    def close(self) -> None:
        self._choices = None


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
        """Wait for the next pieces; False if none arrived in `seconds`. Raises what the stream raises."""
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
        logprobs = [token["logprob"] for token in piece.get("logprobs") or []]
        self.text += piece["text"]
        self.logprobs += logprobs
        self.tokens += len(logprobs) or bool(piece["text"])
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
        """The whole text; None if the stream breaks off before its end."""
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
class CheckedReply:
    """What `serve.escalate` adds to an exchange."""

    is_prefixed: bool
    """The answer is streamed once its beginning has been checked."""
    is_held: bool
    """The answer is checked before its first byte is sent, even if it is streamed."""
    wants_logprobs: bool
    """The check of the answer needs log-probabilities, whether or not the client asked for them."""
    failed: str | None = None
    """The check that the answer failed, although it is sent or so that the large model answers."""
    escalated_from: str | None = None
    """The release of the small model, where the large one answers instead."""
    rejected: str | None = None
    """The small model's whole answer, where the large one answers instead."""
    small: PrefixReader | None = None
    """The small model's stream, where the large one's is sent instead."""


@dataclass(slots=True)
class RunningExchange:
    """What is known of one exchange while it runs."""

    call: ChatCall
    client: ClientRequest
    target: Target
    """Who answers; replaced as a whole where another model does."""
    asked_for: str
    """The name that the client gave; for a family, `call.model` is the alias of its member."""
    unique: str
    """The part of the answer's id without a prefix."""
    capture_id: str
    session: str | None
    started: float
    at: float
    notes: dict[str, str] = field(default_factory=dict)
    """Response headers that say what checks and a chain did with the request."""
    check: CheckedReply | None = None
    """Where `serve.escalate` checks the answer."""
    chain: ChainMark | None = None
    """The step of a chain that this exchange is."""
    earlier_usage: TokenUsage = NO_TOKENS
    """Tokens of the steps of the chain before this one."""
    answers_as: str | None = None
    """The chain that the answer names as its model; None for the model that was asked for."""
    replica: str | None = None
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

    @property
    def names(self) -> tuple[str, str]:
        """The names that settings may give the model, the most specific first."""
        return (self.call.model, self.asked_for)

    @property
    def head(self) -> AnswerHead:
        model = self.call.model if self.answers_as is None else self.answers_as
        return AnswerHead(self.unique, created=int(self.at), model=model, release=self.target.release)

    def headers(self, *, captured: bool) -> Headers:
        headers: Headers = (("x-graft-release", self.target.release),)
        capture = (("x-graft-capture", self.capture_id),) if captured else ()
        if not self.notes and not self.target.notes and self.replica is None:  # the hot path
            return (*headers, *capture)
        notes = {**self.target.notes, **self.notes, **dict(capture)}
        if self.replica is not None:
            notes["x-graft-replica"] = self.replica
        return (*headers, *((name, notes[name]) for name in _NOTES if name in notes))

    @property
    def first_comment(self) -> bytes:
        """What was checked and who answers, for clients that see events but no headers."""
        if "x-graft-checked" not in self.notes:
            return b""
        escalation = self.notes.get("x-graft-escalation")
        why = f"; {escalation}" if escalation else ""
        checked = self.notes["x-graft-checked"]
        return f": {self.target.release} answers; checked {checked}{why}\n\n".encode()

    @property
    def client_wants_logprobs(self) -> bool:
        return self.call.options is not None and self.call.options.logprobs is not None

    @property
    def shown_usage(self) -> TokenUsage:
        """The token usage that the answer states: for a chain, of all steps."""
        return self.usage if self.chain is None else add_usage(self.usage, self.earlier_usage)

    def fall_back_to(self, target: Target, why: str) -> None:
        """Another model answers. The capture is its own where the one before was part of an experiment."""
        if self.target.assignment is not None:
            self.capture_id = make_id()
        self.target = self.target.fall_back_to(target, why)

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

    @property
    def cost(self) -> float | None:
        """Dollars: what the server states, else its tokens at their price; None where neither is known."""
        price, costs = self.target.price, list[float]()
        for piece in self.endings:
            if (stated := piece.get("cost")) is not None:
                costs.append(stated)
            elif price is not None and not piece.get("estimated"):
                cached = piece.get("cached_tokens", 0)
                costs.append(price.cost_of(piece["prompt_tokens"], piece["reply_tokens"], cached))
        # Of an answer that broke off, and of several of which one is not priced, the whole is not known.
        return math.fsum(costs) if costs and len(costs) == self.call.choices else None

    def charge(self) -> None:
        """Count its tokens against the budget of the key."""
        self.client.key.usage.add_tokens(self.count_tokens())

    def to_finished(self, elapsed: float) -> FinishedRequest:
        first = self.first_token_at
        return FinishedRequest(
            at=self.at,
            seconds=elapsed,
            method="POST",
            path=self.client.request.path,
            status=CLIENT_LEFT if self.disconnected else 200,
            key=self.client.key.name,
            model=self.target.label,
            release=self.target.release,
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
        first, check = self.first_token_at, self.check
        rejected = None if check is None else check.rejected
        texts_size = sum(map(len, self.texts)) + len(rejected or "")
        return ServedExchange(
            id=self.capture_id,
            at=self.at,
            session=self.session,
            model=self.call.model,
            release=self.target.release,
            request=self.call.body,
            reply="".join(self.texts),
            finish_reason=self.finish_reason,
            prompt_tokens=self.usage.prompt,
            reply_tokens=self.usage.reply,
            first_token_ms=None if first is None else (first - self.started) * 1000,
            total_ms=elapsed * 1000,
            disconnected=self.disconnected,
            assignment=self.target.assignment,
            user=self.call.user,
            size=len(self.client.request.body) + texts_size,
            failed_check=None if check is None else check.failed,
            escalated_from=None if check is None else check.escalated_from,
            rejected=rejected,
            chain=self.chain,
            upstream=self.target.upstream,
            cost=self.cost,
            cached_tokens=self.endings[0].get("cached_tokens") if len(self.endings) == 1 else None,
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
    """The answer has begun, but nobody needs it: another choice was refused, or the client has
    disconnected."""
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
            for index in range(len(self._streams)):
                self._read(index)
        while self._reading:
            done, _ = await asyncio.wait(self._reading, return_when=asyncio.FIRST_COMPLETED)
            merged: list[PieceData] = []
            for task in done:
                index = self._reading.pop(task)
                pieces = task.result()
                if pieces is not None:
                    merged += [{**piece, "index": index} for piece in pieces]
                    self._read(index)
            if merged:
                return merged
        return None

    def _read(self, index: int) -> None:
        task = asyncio.create_task(self._streams[index].next_pieces())
        self._reading[task] = index

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


async def ask_engine(running: RunningExchange) -> list[PieceData] | ReplyStream:
    call, check = running.call, running.check
    engine, model = running.target.engine, running.target.model
    if check is not None and check.is_held:
        call = replace(call, stream=False)
    if check is not None and check.wants_logprobs and not running.client_wants_logprobs:
        call = replace(call, options=replace(call.options or GenerationOptions(), logprobs=0))
    if call.stream:
        if call.options is None:
            return await engine.stream(call, model=model)
        return await stream_choices(engine, call, model=model)
    if call.options is None:
        return [await engine.complete(call, model=model)]
    # One whole piece for each choice. If one fails, the others are cancelled.
    tasks = [asyncio.create_task(engine.complete(single, model=model)) for single in call.fan_out()]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
