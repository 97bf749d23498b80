"""The teacher: asks an endpoint or an engine within a budget and a rate.

In: messages. Out: a reply, from the journal where the same was asked before.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from graftwork.data.audit.row_checks import CHARACTERS_PER_TOKEN
from graftwork.data.settings import TeacherSettings
from graftwork.engines.endpoint import EndpointEngine, EndpointPolicy, EndpointRole, TryAgain
from graftwork.engines.interface import DecodingSettings, EngineReply
from graftwork.process.asking import Asker, KeptReply, NoReply, ReplyJournal
from graftwork.process.http_client import FIRST_PAUSE, Retries
from graftwork.records.base import fingerprint
from graftwork.records.dataset import TeacherSpending
from graftwork.records.errors import EnvironmentLacks
from graftwork.records.interaction import Message
from graftwork.records.report import Endpoint

JOURNAL_FILE = "answers.jsonl"
LONGEST_PAUSE = 30.0
WARM = 0.7
"""The temperature of further samples: at 0 they would all be the same."""
ANSWER_SECONDS = 120.0
"""The longest time for one request."""
TOKENS_PER_MESSAGE = 4
TEACHER = EndpointRole(
    name="the teacher",
    key_fix="check the key, or name its variable as data.repair.teacher.api_key_env",
    fix="check data.repair.teacher.url and data.repair.teacher.model",
    refusal=EnvironmentLacks,
)


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
    # The first sample is greedy.
    warm = WARM if sample else 0.0
    return DecodingSettings(settings.max_tokens, temperature=warm, seed=sample)


def key_of(settings: TeacherSettings, prompt_hash: str, sample: int) -> str:
    """A hash of all that decides the answer."""
    decoding = decoding_of(settings, sample)
    return fingerprint([settings.address, settings.model, prompt_hash, *decoding])


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
        journal: ReplyJournal,
        wait: Callable[[float], object] = time.sleep,
        first_pause: float = FIRST_PAUSE,
    ) -> None:
        self.settings = settings
        self._client, self._wait = client, wait
        self._first_pause = first_pause
        self._limit = RateLimit(settings.requests_per_minute, wait=wait)
        self._asker = Asker(journal, refuse=self._find_exceeded)

    def _find_exceeded(self, tokens_in: int, tokens_out: int) -> str | None:
        settings = self.settings
        limit, cost = settings.max_total_tokens, price(settings, tokens_in, tokens_out)
        if limit is not None and tokens_in + tokens_out > limit:
            return f"max_total_tokens {limit:,} would be exceeded"
        if settings.max_cost is not None and cost is not None and cost > settings.max_cost:
            return f"max_cost ${settings.max_cost:g} would be exceeded"
        return None

    def answer(self, messages: Sequence[Message], prompt_hash: str, sample: int) -> KeptReply:
        """Raise NoReply, BudgetSpent, or a GraftError that no retry fixes."""
        return self._asker.ask(
            key_of(self.settings, prompt_hash, sample),
            lambda: self._ask(messages, decoding_of(self.settings, sample)),
            most_in=estimate_tokens(messages),
            most_out=self.settings.max_tokens,
        )

    def give_up(self) -> None:
        """End requests that cost nothing but time: those to an engine on this machine."""
        stop = getattr(self._client, "stop", None)
        if stop is not None:
            stop()

    def spent(self) -> TeacherSpending:
        return count_spending(self._asker.journal, self.settings)

    def _ask(self, messages: Sequence[Message], decoding: DecodingSettings) -> KeptReply:
        retries = Retries(
            attempts=self.settings.attempts, first_pause=self._first_pause, longest_pause=LONGEST_PAUSE
        )
        # Tool results as user turns: endpoints refuse the role `tool` without the id of a call.
        sent = tuple(
            Message(role="user", content=f"<tool_response>\n{message.content}\n</tool_response>")
            if message.role == "tool"
            else message
            for message in messages
        )
        while True:
            if not self._limit.take():
                raise NoReply("the run is being stopped")
            try:
                reply = self._client.ask_once(sent, decoding)
            except TryAgain as trouble:
                pause = 0.0 if trouble.adapted else retries.after_failure(asked=trouble.wait)
                if pause is None:
                    why = f"no answer in {retries.failed} attempts: {trouble}"
                    raise NoReply(why) from trouble
                if pause and self._wait(pause):
                    raise NoReply("the run is being stopped") from trouble
            else:
                tokens_in = reply.prompt_tokens or estimate_tokens(messages)
                tokens_out = reply.tokens or round(len(reply.text) / CHARACTERS_PER_TOKEN)
                return KeptReply(reply.text, tokens_in, tokens_out, reply.finish_reason)


def count_spending(journal: ReplyJournal, settings: TeacherSettings | None) -> TeacherSpending:
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
        timeout_seconds=ANSWER_SECONDS,
    )
    return EndpointEngine(endpoint, EndpointPolicy(role=TEACHER, streamed=False))
