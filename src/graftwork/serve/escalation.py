"""Small first, large when needed: checks of an answer or its beginning, and how many requests may escalate.

In: the settings, a function that grades an answer, and a clock. Out: the check that failed, and whether the
budget allows the large model. `PrefixReader` is a streamed reply whose beginning is read before any of it is
sent. The gateway asks the models.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from graftwork.engines.protocol import BASE, PieceData
from graftwork.http.messages import ApiError
from graftwork.serve.api.call import ChatCall
from graftwork.serve.budgets import RequestBudget
from graftwork.serve.serving_engine import ReplyStream
from graftwork.serve.settings import EscalateSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

CHECK_SECONDS = 2.0
"""A check that takes longer counts as failed."""
_CHECK_THREADS = 4
OUTCOMES = {
    "escalated": "answered",
    "failed": "failed too",
    "unavailable": "is not ready",
    "over budget": "is over budget",
}
"""What became of an answer that failed a check, for the response header."""


TOO_LATE = "too late"
"""The outcome of a streamed answer that failed a check after its beginning was sent."""


class PrefixVerdict(NamedTuple):
    """What the checks say of the beginning of an answer."""

    failing: str | None
    """A check that no continuation passes."""
    is_open: bool
    """Whether a check that can judge a beginning is undecided."""


class AnswerChecks(Protocol):
    """The project's own checks of an answer."""

    def find_failing(self, messages: Sequence[Mapping[str, str]], text: str) -> str | None:
        """The name of the first check that the answer fails, or None. May take long, may raise."""
        ...

    def judge_prefix(self, messages: Sequence[Mapping[str, str]], text: str) -> PrefixVerdict:
        """What is known of an answer that begins with this text. May take long, may raise."""
        ...


class HeldReply:
    """An answer that was checked before it is streamed: all of it at once."""

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


class Escalation(NamedTuple):
    """Why the large model answers, or would have if the budget allowed it."""

    check: str
    allowed: bool


class JudgedPrefix(NamedTuple):
    """The decision about the beginning of a streamed answer."""

    escalation: Escalation | None
    tokens: int
    """How many tokens the decision rests on."""
    is_whole: bool
    """The answer ended before anything was sent: all checks have judged all of it."""

    def describe(self) -> str:
        count = "1 token" if self.tokens == 1 else f"{self.tokens} tokens"
        return f"whole answer, {count}" if self.is_whole else count


LOGPROB = "min_logprob"
"""The name of the threshold in headers, captures and metrics."""


def mean_logprob(piece: PieceData, *, first: int | None = None) -> float | None:
    """The mean log-probability of the answer's tokens, or of its first ones; None where there are none."""
    return mean_of([token["logprob"] for token in (piece.get("logprobs") or [])[:first]])


def mean_of(logprobs: Sequence[float]) -> float | None:
    return math.fsum(logprobs) / len(logprobs) if logprobs else None


class DaemonThreads(Generic[T]):
    """Runs calls that may hang: they block neither asyncio's threads nor the end of the process."""

    def __init__(self, most: int, *, name: str) -> None:
        self._most, self._name = most, name
        self._waiting: dict[Future[T], Callable[[], T]] = {}
        self._changed = threading.Condition()
        self._started = self._busy = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Waits for nothing. A call that is cancelled before it runs is forgotten at once."""
        future: Future[T] = Future()
        with self._changed:
            self._waiting[future] = work
            if len(self._waiting) > self._started - self._busy and self._started < self._most:
                self._started += 1
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
            self._changed.notify()
        # Where all threads hang, nobody would ever take it out.
        future.add_done_callback(self._forget)
        return future

    def _forget(self, future: Future[T]) -> None:
        if future.cancelled():
            with self._changed:
                self._waiting.pop(future, None)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                future = next(iter(self._waiting))
                work = self._waiting.pop(future)
                self._busy += 1
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:
                    future.set_exception(error)
            del future, work
            with self._changed:
                self._busy -= 1


class CheckThreads:
    """Runs checks that may take long or raise, in threads of their own."""

    def __init__(self) -> None:
        self._threads: DaemonThreads[PrefixVerdict] = DaemonThreads(_CHECK_THREADS, name="answer-check")

    async def find_failing(
        self, checks: AnswerChecks, messages: Sequence[Mapping[str, str]], text: str
    ) -> str | None:
        """The check that fails. One that takes too long or raises counts as failed."""
        verdict = await self._run(lambda: PrefixVerdict(checks.find_failing(messages, text), is_open=False))
        return verdict.failing

    async def judge_prefix(
        self, checks: AnswerChecks, messages: Sequence[Mapping[str, str]], text: str
    ) -> PrefixVerdict:
        return await self._run(partial(checks.judge_prefix, messages, text))

    async def _run(self, check: Callable[[], PrefixVerdict]) -> PrefixVerdict:
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._threads.submit(check)), CHECK_SECONDS)
        except TimeoutError:
            return PrefixVerdict("a check took too long", is_open=False)
        except Exception as error:
            # Its message may quote the answer.
            log.warning("a check of an answer failed to run (%s): counted as failed", type(error).__name__)
            return PrefixVerdict("a check failed to run", is_open=False)


@dataclass(slots=True)
class CheckedReply:
    """What `serve.escalate` adds to an exchange."""

    escalator: "Escalator"
    is_prefixed: bool
    """The answer is streamed once its beginning has been checked."""
    is_held: bool
    """The answer is checked before its first byte is sent, also where it is streamed."""
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


class Escalator:
    def __init__(
        self, settings: EscalateSettings, *, checks: AnswerChecks, clock: Callable[[], float]
    ) -> None:
        self.settings = settings
        self._checks = checks
        self._least = settings.min_logprob if isinstance(settings.min_logprob, float) else None
        self._threads = CheckThreads()
        self._clock = clock
        self.budget = RequestBudget(settings.per_minute, settings.per_day)

    def begin_check(self, call: ChatCall, names: tuple[str, str], release: str) -> "CheckedReply | None":
        """How the answer is checked: one choice of a named model. None where it is not."""
        settings = self.settings
        if call.choices != 1 or settings.to in names:
            return None
        if settings.models and not any(name in settings.models for name in names):
            return None
        if not settings.models and call.model in (BASE, release):
            return None
        # An answer that may be a call of a tool is checked whole.
        offers_tools = call.options is not None and bool(call.options.tools)
        is_prefixed = call.stream and self.streams_prefixes and not offers_tools
        return CheckedReply(self, is_prefixed, is_held=not is_prefixed, wants_logprobs=self.needs_logprobs)

    @property
    def needs_logprobs(self) -> bool:
        return self._least is not None

    @property
    def streams_prefixes(self) -> bool:
        """Whether a streamed answer is sent once its beginning has been checked."""
        return self.settings.stream == "prefix"

    async def judge(
        self, messages: Sequence[Mapping[str, str]], text: str, *, logprob: float | None = None
    ) -> Escalation | None:
        """None where the answer passes every check."""
        failing = await self.find_failing(messages, text, logprob=logprob)
        return None if failing is None else Escalation(failing, self.budget.take())

    async def find_failing(
        self, messages: Sequence[Mapping[str, str]], text: str, *, logprob: float | None = None
    ) -> str | None:
        failing = await self._threads.find_failing(self._checks, messages, text)
        if failing is None and self._is_unlikely(logprob):
            return LOGPROB
        return failing

    async def judge_prefix(self, messages: Sequence[Mapping[str, str]], reader: PrefixReader) -> JudgedPrefix:
        """Read until the beginning has decided, or `prefix_tokens` or `prefix_seconds` are over."""
        settings = self.settings
        until: float | None = None
        while True:
            arrived = await reader.read_more(None if until is None else until - self._clock())
            logprob = mean_of(reader.logprobs[: settings.prefix_tokens])
            if reader.ended:
                escalation = await self.judge(messages, reader.text, logprob=logprob)
                return JudgedPrefix(escalation, reader.tokens, is_whole=True)
            if until is None:
                until = self._clock() + settings.prefix_seconds
            verdict = await self._threads.judge_prefix(self._checks, messages, reader.text)
            failing, full = verdict.failing, reader.tokens >= settings.prefix_tokens
            if failing is None and (full or not arrived) and self._is_unlikely(logprob):
                failing = LOGPROB
            if failing is not None:
                return JudgedPrefix(Escalation(failing, self.budget.take()), reader.tokens, is_whole=False)
            waits = verdict.is_open or (self.needs_logprobs and bool(reader.logprobs))
            if full or not arrived or not waits:
                return JudgedPrefix(None, reader.tokens, is_whole=False)

    def _is_unlikely(self, logprob: float | None) -> bool:
        return self._least is not None and logprob is not None and logprob < self._least
