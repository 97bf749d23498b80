"""Small first, large when needed: checks of an answer or its start, and how many requests may escalate.

Input: the settings, a function that grades an answer, and a clock. Output: the answer of the small model, or
that of the large one where a check fails and the budget allows it. `AnswerService` asks the models.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from graftwork.engines.protocol import BASE, PieceData
from graftwork.http.messages import ApiError
from graftwork.serve.api.call import ChatCall, describe_choice
from graftwork.serve.budgets import RequestBudget
from graftwork.serve.engine_interface import ReplyStream, failure_code
from graftwork.serve.exchange import CheckedReply, HeldReply, PrefixReader, RunningExchange, ask_engine
from graftwork.serve.metrics import Metrics
from graftwork.serve.routing import Target
from graftwork.serve.settings import EscalateSettings, ServeSettings

log = logging.getLogger(__name__)

T = TypeVar("T")

CHECK_SECONDS = 2.0
"""A check that takes longer counts as failed."""
PREFIX_SECONDS = 2.0
"""Maximum time to hold back the first token of a stream whose start is judged."""
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
    """The verdict of the checks on the start of an answer."""

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


class Escalation(NamedTuple):
    """Why the large model answers, or would have if the budget allowed it."""

    check: str
    allowed: bool


class JudgedPrefix(NamedTuple):
    """The decision about the start of a streamed answer."""

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
    """The mean log-probability of the answer's tokens, or of its first ones; None if there are none."""
    return mean_of([token["logprob"] for token in (piece.get("logprobs") or [])[:first]])


def mean_of(logprobs: Sequence[float]) -> float | None:
    return math.fsum(logprobs) / len(logprobs) if logprobs else None


class DaemonThreads(Generic[T]):
    """Runs calls that may hang without blocking asyncio's threads or the end of the process."""

    def __init__(self, most: int, *, name: str) -> None:
        self._most, self._name = most, name
        self._waiting: dict[Future[T], Callable[[], T]] = {}
        self._changed = threading.Condition()
        self._started = self._busy = 0

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Does not wait. A call that is cancelled before it runs is forgotten immediately."""
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


class ModelAsker(Protocol):
    """How models are asked for an exchange."""

    settings: ServeSettings
    metrics: Metrics

    def seconds_left(self, running: RunningExchange) -> float: ...

    def resolve(self, name: str) -> Target | None:
        """The endpoint, alias or release of this name, if it can be asked now."""
        ...

    def fall_back(self, running: RunningExchange, why: str) -> bool:
        """Whether another model can be asked; if so, the exchange becomes its own."""
        ...

    async def ask(self, running: RunningExchange) -> list[PieceData] | ReplyStream: ...


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

    def begin_check(self, call: ChatCall, names: tuple[str, str], release: str) -> CheckedReply | None:
        """How the answer is checked: one choice of a named model. None if it is not."""
        settings = self.settings
        # A name of clients may go to the large model: it cannot answer in its own place.
        if call.choices != 1 or settings.to in (*names, release):
            return None
        if settings.models and not any(name in settings.models for name in names):
            return None
        if not settings.models and call.model in (BASE, release):
            return None
        # An answer that may be a call of a tool is checked whole.
        offers_tools = call.options is not None and bool(call.options.tools)
        is_prefixed = call.stream and self.streams_prefixes and not offers_tools
        return CheckedReply(
            is_prefixed=is_prefixed, is_held=not is_prefixed, wants_logprobs=self.needs_logprobs
        )

    @property
    def needs_logprobs(self) -> bool:
        return self._least is not None

    @property
    def streams_prefixes(self) -> bool:
        """Whether a streamed answer is sent once its start has been checked."""
        return self.settings.stream == "prefix"

    async def judge(
        self, messages: Sequence[Mapping[str, str]], text: str, *, logprob: float | None = None
    ) -> Escalation | None:
        """None if the answer passes every check."""
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
        """Read until the start has decided, or `prefix_tokens` or `PREFIX_SECONDS` are over."""
        settings = self.settings
        until: float | None = None
        while True:
            arrived = await reader.read_more(None if until is None else until - self._clock())
            logprob = mean_of(reader.logprobs[: settings.prefix_tokens])
            if reader.ended:
                escalation = await self.judge(messages, reader.text, logprob=logprob)
                return JudgedPrefix(escalation, reader.tokens, is_whole=True)
            if until is None:
                until = self._clock() + PREFIX_SECONDS
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

    async def apply(
        self, result: list[PieceData] | ReplyStream, running: RunningExchange, asker: ModelAsker
    ) -> list[PieceData] | ReplyStream:
        """What is sent: the result if it passes the project's checks, else the large model's answer."""
        check = running.check
        if check is not None and check.is_held and isinstance(result, list):
            return await self._check(result, running, check, asker)
        if check is not None and check.is_prefixed and not isinstance(result, list):
            return await self._check_prefix(result, running, check, asker)
        return result

    async def finish(self, running: RunningExchange, asker: ModelAsker) -> None:
        """After the last piece: the rest of the small model's answer, or the verdict on all of a stream."""
        check = running.check
        if check is None:
            return
        try:
            if check.small is not None and not running.disconnected:
                with suppress(TimeoutError):
                    async with asyncio.timeout(asker.settings.request_timeout_seconds):
                        check.rejected = await check.small.read_rest()
            elif check.is_prefixed and running.ended and check.failed is None:
                check.failed = await self.find_failing(running.call.messages, "".join(running.texts))
                if check.failed is not None:
                    asker.metrics.escalated[check.failed, TOO_LATE] += 1
        finally:
            if check.small is not None:
                check.small.close()

    async def _check(
        self, choices: list[PieceData], running: RunningExchange, check: CheckedReply, asker: ModelAsker
    ) -> list[PieceData] | ReplyStream:
        """The answer if it passes the project's checks, else that of the large model if it can be asked."""
        # With `stream: prefix`, the threshold is one for the mean over the first tokens.
        first = self.settings.prefix_tokens if self.streams_prefixes else None
        logprob = mean_logprob(choices[0], first=first)
        if check.wants_logprobs and not running.client_wants_logprobs:
            choices = [{**choices[0]}]
            choices[0].pop("logprobs", None)
        text = describe_choice(choices[0])
        escalation = await self.judge(running.call.checked_messages, text, logprob=logprob)
        if escalation is None:
            return choices
        return await self._escalate(running, check, asker, escalation, text) or choices

    async def _check_prefix(
        self, stream: ReplyStream, running: RunningExchange, check: CheckedReply, asker: ModelAsker
    ) -> ReplyStream:
        """The stream if its start passes, else that of the large model if it answers."""
        small = PrefixReader(stream, hide_logprobs=not running.client_wants_logprobs)
        try:
            async with asyncio.timeout(asker.seconds_left(running)):
                judged = await self.judge_prefix(running.call.messages, small)
            running.notes["x-graft-checked"] = judged.describe()
            check.is_prefixed = not judged.is_whole
            stream = small
            if judged.escalation is not None:
                large = await self._escalate(running, check, asker, judged.escalation, None)
                if isinstance(large, PrefixReader):
                    check.small, stream = small, large
        except BaseException as error:
            small.close()
            # Nothing was sent yet: the fallback chain can still answer.
            why = None if isinstance(error, TimeoutError) else failure_code(error)
            if why is None or not asker.fall_back(running, why):
                raise
        else:
            return stream
        check.is_prefixed = check.wants_logprobs = False
        async with asyncio.timeout(asker.seconds_left(running)):
            result = await asker.ask(running)
        return HeldReply(result) if isinstance(result, list) else result

    async def _escalate(
        self,
        running: RunningExchange,
        check: CheckedReply,
        asker: ModelAsker,
        escalation: Escalation,
        text: str | None,
    ) -> list[PieceData] | PrefixReader | None:
        """The large model's answer, or its stream once its first piece has come; None without one.

        `text` is the small one's whole answer, None if it still streams.
        """
        outcome = "over budget"
        check.failed = escalation.check
        target, large = None, None
        result: list[PieceData] | PrefixReader | None = None
        if escalation.allowed:
            target, outcome = asker.resolve(self.settings.to), "escalated"
        if escalation.allowed and target is None:
            # Else an outage of the large model would use up the budget of the day.
            self.budget.give_back()
            outcome = "unavailable"
        if target is not None:
            small, was_prefixed = running.target, check.is_prefixed
            check.wants_logprobs = check.is_prefixed = False
            # The small one's answer is kept, and counts in an experiment.
            check.escalated_from, check.rejected = small.release, text
            running.target = small.escalate_to(target)
            try:
                async with asyncio.timeout(asker.seconds_left(running)):
                    reply = await ask_engine(running)
                    if isinstance(reply, list):
                        result, answer = reply, describe_choice(reply[0])
                    else:
                        result = large = PrefixReader(reply)
                        await large.read_more(None)
                        answer = large.text
                if large is None or large.ended:
                    _require_text(answer)
            except (OSError, ApiError):
                if large is not None:
                    large.close()
                result, check.is_prefixed = None, was_prefixed
                check.escalated_from = check.rejected = None
                running.target = small
                outcome = "failed"
            except BaseException:
                # The client is gone: nothing else would end the request of the large model.
                if large is not None:
                    large.close()
                raise
        asker.metrics.escalated[escalation.check, outcome] += 1
        note = f"{escalation.check} failed, {self.settings.to} {OUTCOMES[outcome]}"
        running.notes["x-graft-escalation"] = note
        return result


def _require_text(text: str) -> None:
    """Raise if the large model's answer is empty: the small one's answer is better than none."""
    if not text:
        raise ApiError(502, "the large model's answer is empty", code="engine_error")
