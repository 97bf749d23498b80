"""Small first, large when needed: checks of a finished answer, and how many requests may escalate.

In: the settings, a function that grades an answer, and a clock. Out: the check that failed, and whether the
budget allows the large model. The gateway asks the models.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from graftwork.serve.api.call import PieceData
from graftwork.serve.background import DaemonThreads
from graftwork.serve.engine_protocol import BASE
from graftwork.serve.settings import EscalateSettings

if TYPE_CHECKING:
    from graftwork.serve.exchange import RunningExchange

log = logging.getLogger(__name__)

MINUTE, DAY = 60.0, 86_400.0
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


class AnswerChecks(Protocol):
    """The project's own checks of an answer."""

    def find_failing(self, messages: Sequence[Mapping[str, str]], text: str) -> str | None:
        """The name of the first check that the answer fails, or None. May take long, may raise."""


@dataclass(slots=True)
class EscalationBudget:
    """Requests that may go to the large model in a minute and in a day. Used from the event loop only."""

    per_minute: int | None
    per_day: int | None
    clock: Callable[[], float]
    _starts: dict[float, float] = field(default_factory=dict)
    _used: dict[float, int] = field(default_factory=dict)

    def take(self) -> bool:
        """Whether one more may go; counts it if so."""
        limits = {MINUTE: self.per_minute, DAY: self.per_day}
        now = self.clock()
        for window in limits:
            if now - self._starts.get(window, -window) >= window:
                self._starts[window], self._used[window] = now, 0
        if any(most is not None and self._used[window] >= most for window, most in limits.items()):
            return False
        for window in limits:
            self._used[window] += 1
        return True


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


class Escalation(NamedTuple):
    """Why the large model answers, or would have if the budget allowed it."""

    check: str
    allowed: bool


class Escalator:
    def __init__(
        self, settings: EscalateSettings, *, checks: AnswerChecks, clock: Callable[[], float]
    ) -> None:
        self.settings = settings
        self._checks = checks
        self._threads: DaemonThreads[str | None] = DaemonThreads(_CHECK_THREADS, name="answer-check")
        self._budget = EscalationBudget(settings.per_minute, settings.per_day, clock)

    def applies_to(self, running: "RunningExchange") -> bool:
        """Whether the answer of this exchange is checked: one choice of a named model, without tools."""
        call, named = running.call, self.settings.models
        if (
            not running.api.is_captured
            or call.choices != 1
            or (call.options is not None and call.options.tools)
        ):
            return False
        if named:
            return any(name in named for name in running.names)
        return call.model not in (BASE, running.head.release)

    async def judge(self, messages: Sequence[Mapping[str, str]], text: str) -> Escalation | None:
        """None where the answer passes every check."""
        try:
            checking = self._threads.submit(partial(self._checks.find_failing, messages, text))
            failing = await asyncio.wait_for(asyncio.wrap_future(checking), CHECK_SECONDS)
        except TimeoutError:
            failing = "a check took too long"
        except Exception as error:
            # Its message may quote the answer.
            log.warning("escalation: a check failed to run (%s): counted as failed", type(error).__name__)
            failing = "a check failed to run"
        return None if failing is None else Escalation(failing, self._budget.take())
