"""The teacher: asks an endpoint within a budget and a rate, and keeps every answer by what was asked.

In: messages. Out: a reply, from the journal where the same was asked before. Each request is journaled before
it is sent and after it is answered, so that a kill loses no answer and the budget counts what was lost.
"""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from graftwork.data.audit.row_checks import CHARACTERS_PER_TOKEN
from graftwork.data.settings import TeacherSettings
from graftwork.engines.endpoint import EndpointEngine, EndpointPolicy, EndpointRole, TryAgain
from graftwork.engines.interface import DecodingSettings, EngineReply
from graftwork.files.disk import Journal
from graftwork.process.http_client import FIRST_PAUSE, Retries
from graftwork.records.base import fingerprint
from graftwork.records.correction import TeacherSpending
from graftwork.records.errors import EnvironmentLacks
from graftwork.records.interaction import Message
from graftwork.records.report import Endpoint

JOURNAL_FILE = "answers.jsonl"
LONGEST_PAUSE = 30.0
GIVE_UP_AFTER = 5
"""Requests in a row without an answer: the teacher is away, and nothing more is asked."""
BUDGET_PAUSE = 1.0
"""Seconds after which a request that waits for budget looks again."""
WARM = 0.7
"""The lowest temperature of further samples: at 0 they would all be the same."""
TOKENS_PER_MESSAGE = 4
TEACHER = EndpointRole(
    name="the teacher",
    key_fix="check the key, or name its variable as data.repair.teacher.api_key_env",
    fix="check data.repair.teacher.url and data.repair.teacher.model",
    refusal=EnvironmentLacks,
)


class TeacherReply(NamedTuple):
    text: str
    tokens_in: int
    tokens_out: int
    finish_reason: str
    at: str


class TeacherUnavailable(Exception):
    """No answer for now, after all attempts. The next run asks again."""


class TeacherBudgetSpent(Exception):
    """Nothing more is asked. A later run with a larger budget goes on."""


class TeacherClient(Protocol):
    """One attempt at one request. Raises `TryAgain` where another attempt makes sense."""

    def ask_once(self, messages: Sequence[Message], decoding: DecodingSettings) -> EngineReply: ...


def estimate_tokens(messages: Sequence[Message]) -> int:
    """Estimate the tokens of a prompt by its characters: the teacher's tokenizer is not known."""
    characters = sum(len(message.content) for message in messages)
    return round(characters / CHARACTERS_PER_TOKEN) + TOKENS_PER_MESSAGE * len(messages)


def price(settings: TeacherSettings | None, tokens_in: int, tokens_out: int) -> float | None:
    """Return the cost in dollars; None without prices."""
    if settings is None or settings.price_in is None or settings.price_out is None:
        return None
    return (tokens_in * settings.price_in + tokens_out * settings.price_out) / 1e6


def decoding_of(settings: TeacherSettings, sample: int) -> DecodingSettings:
    warm = settings.temperature if sample == 0 else max(settings.temperature, WARM)
    return DecodingSettings(settings.max_tokens, temperature=warm, seed=sample)


def key_of(settings: TeacherSettings, prompt_hash: str, sample: int) -> str:
    """A hash of all that decides the answer."""
    decoding = decoding_of(settings, sample)
    return fingerprint([settings.address, settings.model, prompt_hash, *decoding])


class AnswerJournal:
    """Answers by key, and what was spent on them, over all runs. Threads may share one."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder / JOURNAL_FILE)
        self._lock = threading.Lock()
        self._answers: dict[str, TeacherReply] = {}
        self._open: dict[str, tuple[int, int]] = {}
        self.requests = self.tokens_in = self.tokens_out = self.lost = 0
        for line in self._journal.read():
            self._apply(line)
        # What was asked and neither answered nor failed was lost by a kill: it may have been paid for.
        for tokens_in, tokens_out in self._open.values():
            self.lost += 1
            self.tokens_in += tokens_in
            self.tokens_out += tokens_out
        self._open.clear()

    def get(self, key: str) -> TeacherReply | None:
        with self._lock:
            return self._answers.get(key)

    def note_asked(self, key: str, *, tokens_in: int, tokens_out: int) -> None:
        self._append({"event": "asked", "key": key, "in": tokens_in, "out": tokens_out})

    def note_failed(self, key: str) -> None:
        self._append({"event": "failed", "key": key})

    def put(self, key: str, reply: TeacherReply) -> None:
        self._append({"event": "answered", "key": key, **reply._asdict()})

    def reserved(self) -> tuple[int, int]:
        """Prompt and answer tokens that requests on their way may still cost."""
        with self._lock:
            waiting = self._open.values()
            return sum(tokens for tokens, _ in waiting), sum(tokens for _, tokens in waiting)

    def _append(self, line: dict[str, object]) -> None:
        with self._lock:
            self._journal.append(line, durable=True)
            self._apply(line)

    def _apply(self, line: dict[str, object]) -> None:
        key = str(line["key"])
        if line["event"] == "asked":
            if key in self._open:
                # Asked again after a kill: the first request may have been paid for too.
                self.lost += 1
                self.tokens_in += self._open[key][0]
                self.tokens_out += self._open[key][1]
            self._open[key] = (int(str(line["in"])), int(str(line["out"])))
            return
        self._open.pop(key, None)
        if line["event"] == "answered":
            fields = {name: line[name] for name in TeacherReply._fields}
            reply = TeacherReply(**fields)  # type: ignore[arg-type]
            self._answers[key] = reply
            self.requests += 1
            self.tokens_in += reply.tokens_in
            self.tokens_out += reply.tokens_out


class RateLimit:
    """Spaces requests evenly. `wait` passes a pause; a true result means: stop."""

    def __init__(
        self,
        per_minute: float | None,
        *,
        wait: Callable[[float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gap = 60 / per_minute if per_minute else 0.0
        self._wait, self._clock = wait, clock
        self._next = 0.0
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Wait for the next slot; False where everything is being stopped."""
        with self._lock:
            now = self._clock()
            slot = max(self._next, now)
            self._next = slot + self._gap
        return not (slot > now and self._wait(slot - now))


class Teacher:
    """Asks each prompt and sample once. Threads may share one."""

    def __init__(
        self,
        settings: TeacherSettings,
        *,
        client: TeacherClient,
        journal: AnswerJournal,
        wait: Callable[[float], object] = time.sleep,
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        self.settings = settings
        self._client, self._journal, self._wait = client, journal, wait
        self._first_pause = first_pause
        self._limit = RateLimit(settings.requests_per_minute, wait=wait)
        self._settled = threading.Condition()
        self._unanswered = 0

    def answer(self, messages: Sequence[Message], prompt_hash: str, sample: int) -> TeacherReply:
        """Raise TeacherUnavailable, TeacherBudgetSpent, or a GraftError that no retry fixes."""
        key = key_of(self.settings, prompt_hash, sample)
        known = self._journal.get(key)
        if known is not None:
            return known
        if self._unanswered >= GIVE_UP_AFTER:
            raise TeacherUnavailable(f"not asked: {GIVE_UP_AFTER} requests in a row had no answer")
        self._reserve(key, messages)
        try:
            return self._ask_and_keep(key, messages, sample)
        finally:
            with self._settled:
                self._settled.notify_all()

    def _ask_and_keep(self, key: str, messages: Sequence[Message], sample: int) -> TeacherReply:
        try:
            reply = self._ask(messages, decoding_of(self.settings, sample))
        except TeacherUnavailable:
            self._unanswered += 1
            self._journal.note_failed(key)
            raise
        except Exception:
            self._journal.note_failed(key)
            raise
        self._unanswered = 0
        at = datetime.now(UTC).isoformat(timespec="seconds")
        tokens_in = reply.prompt_tokens or estimate_tokens(messages)
        tokens_out = reply.tokens or round(len(reply.text) / CHARACTERS_PER_TOKEN)
        found = TeacherReply(reply.text, tokens_in, tokens_out, reply.finish_reason, at)
        self._journal.put(key, found)
        return found

    def give_up(self) -> None:
        """End requests that cost nothing but time: those to an engine on this machine."""
        stop = getattr(self._client, "stop", None)
        if stop is not None:
            stop()

    def is_known(self, prompt_hash: str, sample: int) -> bool:
        return self._journal.get(key_of(self.settings, prompt_hash, sample)) is not None

    def spent(self) -> TeacherSpending:
        return count_spending(self._journal, self.settings)

    def _reserve(self, key: str, messages: Sequence[Message]) -> None:
        """Take the most that the request may cost from the budget, before it is sent."""
        settings, journal = self.settings, self._journal
        most_in, most_out = estimate_tokens(messages), settings.max_tokens
        with self._settled:
            while True:
                waiting_in, waiting_out = journal.reserved()
                total_in = journal.tokens_in + waiting_in + most_in
                total_out = journal.tokens_out + waiting_out + most_out
                exceeded = _exceeded(settings, total_in, total_out)
                if exceeded is None:
                    journal.note_asked(key, tokens_in=most_in, tokens_out=most_out)
                    return
                if not waiting_out:
                    raise TeacherBudgetSpent(exceeded)
                # Requests on their way seldom cost what was set aside for them.
                self._settled.wait(BUDGET_PAUSE)

    def _ask(self, messages: Sequence[Message], decoding: DecodingSettings) -> EngineReply:
        retries = Retries(
            attempts=self.settings.attempts, first_pause=self._first_pause, longest_pause=LONGEST_PAUSE
        )
        sent = _speak_plainly(messages)
        while True:
            if not self._limit.take():
                raise TeacherUnavailable("the run is being stopped")
            try:
                return self._client.ask_once(sent, decoding)
            except TryAgain as trouble:
                pause = 0.0 if trouble.adapted else retries.after_failure(asked=trouble.wait)
                if pause is None:
                    why = f"no answer in {retries.failed} attempts: {trouble}"
                    raise TeacherUnavailable(why) from trouble
                if pause and self._wait(pause):
                    raise TeacherUnavailable("the run is being stopped") from trouble


def _exceeded(settings: TeacherSettings, tokens_in: int, tokens_out: int) -> str | None:
    limit, cost = settings.max_total_tokens, price(settings, tokens_in, tokens_out)
    if limit is not None and tokens_in + tokens_out > limit:
        return f"max_total_tokens {limit:,} would be exceeded"
    if settings.max_cost is not None and cost is not None and cost > settings.max_cost:
        return f"max_cost ${settings.max_cost:g} would be exceeded"
    return None


def count_spending(journal: AnswerJournal, settings: TeacherSettings | None) -> TeacherSpending:
    return TeacherSpending(
        requests=journal.requests,
        tokens_in=journal.tokens_in,
        tokens_out=journal.tokens_out,
        lost=journal.lost,
        cost=price(settings, journal.tokens_in, journal.tokens_out),
    )


def open_client(settings: TeacherSettings) -> TeacherClient:
    """Return the client of a teacher behind an endpoint."""
    assert settings.url is not None
    endpoint = Endpoint(
        url=settings.url,
        model=settings.model,
        api_key_env=settings.api_key_env,
        concurrency=settings.concurrency,
        attempts=settings.attempts,
        timeout_seconds=settings.timeout_seconds,
    )
    return EndpointEngine(endpoint, EndpointPolicy(role=TEACHER, streamed=False))


def _speak_plainly(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Tool results as user turns: endpoints refuse the role `tool` without the id of a call."""
    return tuple(
        Message(role="user", content=f"<tool_response>\n{message.content}\n</tool_response>")
        if message.role == "tool"
        else message
        for message in messages
    )
