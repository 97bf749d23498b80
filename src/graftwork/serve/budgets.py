"""Counts what a key uses against its budget: requests and tokens by the clock minute and by the UTC day.

In memory and from the event loop only: a check is a few comparisons. `key_usage.py` carries the counts over a
restart. Tokens are known when an answer ends, so answers that run at the same time may together exceed a
budget of tokens.
"""

import math
import time
from collections.abc import Callable

from pydantic import Field

from graftwork.records.base import Record
from graftwork.serve.http_messages import ApiError

_MINUTE_SECONDS, DAY_SECONDS = 60, 86_400
_LONGEST_RETRY = 60
"""Clients of OpenAI wait by themselves for so many seconds at most."""
_CHARACTERS_PER_TOKEN = 4


class KeyBudget(Record):
    """The most that a key may use; None is no limit."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    requests_per_day: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of prompts and answers together."""
    tokens_per_day: int | None = Field(default=None, ge=1)


class _Window:
    """What was used in the current window."""

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


class KeyUsage:
    """What one key has used, and whether it may use more."""

    __slots__ = ("_clock", "_day", "_limits", "_minute", "_name", "budget", "requests", "tokens")

    def __init__(self, name: str, budget: KeyBudget, *, clock: Callable[[], float] = time.time) -> None:
        self._name = name
        self.budget = budget
        self._clock = clock
        self._minute, self._day = _Window(_MINUTE_SECONDS), _Window(DAY_SECONDS)
        self._limits = (
            (self._minute, "minute", budget.requests_per_minute, budget.tokens_per_minute),
            (self._day, "day", budget.requests_per_day, budget.tokens_per_day),
        )
        self.requests = 0
        self.tokens = 0

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
        """Go on from a snapshot; a minute or day that has passed meanwhile begins at zero."""
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


def estimate_tokens(characters: int) -> int:
    """About how many tokens a text has, for an answer that broke off before it said so."""
    return -(-characters // _CHARACTERS_PER_TOKEN)
