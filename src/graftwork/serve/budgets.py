"""Counts what is used against a budget: requests and tokens by the clock minute and by the UTC day.

In memory and from the event loop only: a check is a few comparisons. `keys.py` carries the counts over a
restart. The tokens of an answer are known when it ends. Until then the most that it may have is reserved: a
request that does not fit next to those that run waits for them. One that runs alone may exceed what is left.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from pydantic import Field

from graftwork.http.messages import ApiError
from graftwork.records.base import Record

MINUTE_SECONDS, DAY_SECONDS = 60, 86_400
_LONGEST_RETRY = 60
"""Clients of OpenAI wait by themselves for this many seconds at most."""
_BYTES_PER_TOKEN = 3


class KeyBudget(Record):
    """Limits of a key; None means no limit."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    requests_per_day: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of prompts and answers together."""
    tokens_per_day: int | None = Field(default=None, ge=1)


class UsageWindow:
    """Usage in the current window."""

    __slots__ = ("number", "requests", "seconds", "tokens")

    def __init__(self, seconds: int) -> None:
        self.seconds = seconds
        self.number = -1
        self.requests = 0
        self.tokens = 0

    def move_to(self, now: float) -> None:
        number = int(now // self.seconds)
        if number != self.number:
            self.number, self.requests, self.tokens = number, 0, 0

    def seconds_left(self, now: float) -> int:
        return max(1, math.ceil((self.number + 1) * self.seconds - now))


class RequestBudget:
    """Requests that may be sent in a minute and in a UTC day; None means no limit."""

    def __init__(
        self, per_minute: int | None, per_day: int | None = None, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._minute, self._day = UsageWindow(MINUTE_SECONDS), UsageWindow(DAY_SECONDS)
        self._limits = ((self._minute, per_minute), (self._day, per_day))

    def take(self) -> bool:
        """Whether one more may be sent; counts it if so."""
        now = self._clock()
        for window, most in self._limits:
            window.move_to(now)
            if most is not None and window.requests >= most:
                return False
        for window, _ in self._limits:
            window.requests += 1
        return True

    def give_back(self) -> None:
        """Undo the last one taken: it was not used."""
        for window, _ in self._limits:
            window.requests = max(window.requests - 1, 0)

    def snapshot(self) -> tuple[int, int]:
        """The number of the day that was counted last, and how many it had."""
        return (self._day.number, self._day.requests)

    def restore(self, counts: tuple[int, int]) -> None:
        """Continue from a snapshot; if the day has passed in the meantime, start at zero."""
        self._day.number, self._day.requests = counts


class KeyUsage:
    """What one key has used, and whether it may use more."""

    __slots__ = (
        "_clock",
        "_day",
        "_limits",
        "_minute",
        "_name",
        "_waiting",
        "budget",
        "limits_tokens",
        "requests",
        "reserved",
        "tokens",
    )

    def __init__(self, name: str, budget: KeyBudget, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._minute, self._day = UsageWindow(MINUTE_SECONDS), UsageWindow(DAY_SECONDS)
        self.requests = 0
        self.tokens = 0
        self.reserved = 0
        """Tokens that running requests may still use."""
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self.revise(name, budget)

    def revise(self, name: str, budget: KeyBudget) -> None:
        """Use another budget from now on, including for waiting requests."""
        self._name, self.budget = name, budget
        self._limits = (
            (self._minute, "minute", budget.requests_per_minute, budget.tokens_per_minute),
            (self._day, "day", budget.requests_per_day, budget.tokens_per_day),
        )
        self.limits_tokens = budget.tokens_per_minute is not None or budget.tokens_per_day is not None
        self._admit_waiting()

    @property
    def waiting(self) -> int:
        """How many requests wait for running ones."""
        return len(self._waiting)

    async def reserve(self, tokens: int) -> "Reservation":
        """Reserve what a request may use, after those that came before it.

        Raises ApiError 429 where the budget is used up by then.
        """
        if not self._waiting and self._has_room(tokens):
            self.reserved += tokens
            return Reservation(self, tokens)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((turn, tokens))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self._give_back(tokens)
            else:
                with suppress(ValueError):
                    self._waiting.remove((turn, tokens))
                self._admit_waiting()
            raise
        return Reservation(self, tokens)

    def _has_room(self, tokens: int) -> bool:
        now = self._clock()
        for window, unit, _, most in self._limits:
            window.move_to(now)
            if most is None:
                continue
            if window.tokens >= most:
                raise self._used_up(f"{most:,} tokens a {unit}", window.seconds_left(now))
            # Alone it may exceed the rest: clients without max_tokens could not use it otherwise.
            if self.reserved and window.tokens + self.reserved + tokens > most:
                return False
        return True

    def _give_back(self, tokens: int) -> None:
        self.reserved -= tokens
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        while self._waiting:
            turn, tokens = self._waiting[0]
            if not turn.done():
                try:
                    if not self._has_room(tokens):
                        return
                    self.reserved += tokens
                    turn.set_result(None)
                except ApiError as error:
                    turn.set_exception(error)
            self._waiting.popleft()

    def take_request(self) -> None:
        """Count a request. Raises ApiError 429, and counts nothing, where a budget is used up."""
        now = self._clock()
        for window, unit, requests, tokens in self._limits:
            window.move_to(now)
            if requests is not None and window.requests >= requests:
                raise self._used_up(f"{requests:,} requests a {unit}", window.seconds_left(now))
            if tokens is not None and window.tokens >= tokens:
                raise self._used_up(f"{tokens:,} tokens a {unit}", window.seconds_left(now))
        self._minute.requests += 1
        self._day.requests += 1
        self.requests += 1

    def add_tokens(self, tokens: int) -> None:
        now = self._clock()
        for window in (self._minute, self._day):
            window.move_to(now)
            window.tokens += tokens
        self.tokens += tokens

    def snapshot(self) -> tuple[int, int, int, int, int, int]:
        """Number, requests and tokens of the minute and of the day that were counted last."""
        minute, day = self._minute, self._day
        return (minute.number, minute.requests, minute.tokens, day.number, day.requests, day.tokens)

    def restore(self, counts: tuple[int, ...]) -> None:
        """Continue from a snapshot; if the minute or day has passed in the meantime, start at zero."""
        minute, day = self._minute, self._day
        minute.number, minute.requests, minute.tokens, day.number, day.requests, day.tokens = counts

    def describe(self) -> dict[str, int]:
        now = self._clock()
        self._minute.move_to(now)
        self._day.move_to(now)
        return {
            "requests_this_minute": self._minute.requests,
            "requests_today": self._day.requests,
            "tokens_this_minute": self._minute.tokens,
            "tokens_today": self._day.tokens,
        }

    def _used_up(self, what: str, seconds: int) -> ApiError:
        headers = [("retry-after", str(seconds))]
        if seconds > _LONGEST_RETRY:
            headers.append(("x-should-retry", "false"))
        message = f"the key {self._name!r} has used its {what}; try again in {seconds} s"
        return ApiError(429, message, code="rate_limit_exceeded", headers=tuple(headers))


class Reservation:
    """Tokens that a running request may use; returned when it ends and its tokens are counted."""

    __slots__ = ("_tokens", "_usage")

    def __init__(self, usage: KeyUsage, tokens: int) -> None:
        self._usage: KeyUsage | None = usage
        self._tokens = tokens

    def release(self) -> None:
        """Return the tokens; a second call does nothing."""
        usage, self._usage = self._usage, None
        if usage is not None:
            usage._give_back(self._tokens)


def most_tokens(body_bytes: int, reply_tokens: int) -> int:
    """About the most tokens that a request may use: JSON has at least three bytes per token."""
    return -(-body_bytes // _BYTES_PER_TOKEN) + reply_tokens
