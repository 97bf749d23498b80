"""Shadow traffic: a challenger answers copies of live requests; users never see it and never wait for it.

Input: finished exchanges, and who the challenger is. Output: captures that name the exchange they copy. A
challenger on the gateway's own engine is asked only while no user waits, and interrupted when one comes.
"""

import asyncio
import logging
import random
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

from graftwork.engines.protocol import PieceData
from graftwork.http.messages import ApiError
from graftwork.records.interaction import INTERRUPTED
from graftwork.serve.api.call import ChatCall
from graftwork.serve.budgets import RequestBudget
from graftwork.serve.captures import CaptureWriter, ServedExchange
from graftwork.serve.routing import Target
from graftwork.serve.settings import ShadowSettings

log = logging.getLogger(__name__)

MOST_WAITING = 64
_LONGEST_COPY_SECONDS = 120.0


class Shadow:
    """`offer` finished exchanges; `make_way` when a user asks; `close` at the end."""

    def __init__(
        self,
        settings: ShadowSettings,
        *,
        resolve: Callable[[str], Target | None],
        is_remote: bool,
        captures: CaptureWriter,
        is_idle: Callable[[], bool],
    ) -> None:
        self._settings = settings
        self._resolve, self._captures = resolve, captures
        self._is_idle, self._is_remote = is_idle, is_remote
        self._waiting: deque[tuple[ChatCall, ServedExchange]] = deque(maxlen=MOST_WAITING)
        self._running: set[asyncio.Task[None]] = set()
        self._budget = RequestBudget(settings.per_minute)
        self._chance = random.Random()
        self.counts: Counter[str] = Counter()
        """Copies by what became of them: answered, failed, interrupted, dropped, not ready."""

    def offer(self, call: ChatCall, exchange: ServedExchange, names: tuple[str, ...]) -> None:
        """Possibly copy an exchange that a user received. Returns immediately."""
        settings = self._settings
        if names[0] == settings.to or not any(name in settings.models for name in names):
            return
        if exchange.finish_reason == "error" or exchange.disconnected or call.choices != 1:
            return
        if self._chance.random() >= settings.share:
            return
        if len(self._waiting) == MOST_WAITING:
            self.counts["dropped"] += 1
        self._waiting.append((call, exchange))
        self.go_on()

    def make_way(self) -> None:
        """A user sent a request: interrupt copies on the same engine."""
        if not self._is_remote:
            for task in self._running:
                task.cancel()

    def go_on(self) -> None:
        """Start copies as far as the limits allow."""
        while self._waiting and not self._running:
            if not self._is_remote and not self._is_idle():
                return
            call, exchange = self._waiting.popleft()
            if not self._budget.take():
                self.counts["dropped"] += 1
                continue
            task = asyncio.create_task(self._ask(call, exchange))
            self._running.add(task)
            task.add_done_callback(self._end)

    async def close(self) -> None:
        self._waiting.clear()
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    def _end(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        self.go_on()

    async def _ask(self, call: ChatCall, exchange: ServedExchange) -> None:
        target = self._resolve(self._settings.to)
        if target is None or target.release == exchange.asked_release:
            self.counts["not ready"] += 1
            return
        started = time.perf_counter()
        call = replace(call, stream=False, deadline=None, is_copy=True)
        try:
            async with asyncio.timeout(_LONGEST_COPY_SECONDS):
                piece = await target.engine.complete(call, model=target.model)
        except asyncio.CancelledError:
            # Kept as well: long answers are interrupted most, so the others are not a fair sample.
            self.counts["interrupted"] += 1
            self._keep(exchange, target, _without_answer(INTERRUPTED), started)
            raise
        except (OSError, ApiError) as error:
            # Counted and kept: a challenger that fails must not look better for it.
            log.debug("shadow: %s failed (%s)", target.release, type(error).__name__)
            self.counts["failed"] += 1
            self._keep(exchange, target, _without_answer("error"), started)
            return
        self.counts["answered"] += 1
        self._keep(exchange, target, piece, started)

    def _keep(self, exchange: ServedExchange, target: Target, piece: PieceData, started: float) -> None:
        took = time.perf_counter() - started
        self._captures.offer(
            replace(
                exchange,
                id=uuid.uuid4().hex,
                at=time.time(),
                model=self._settings.to,
                release=target.release,
                reply=piece["text"],
                finish_reason=piece.get("finish_reason"),
                prompt_tokens=piece.get("prompt_tokens", 0),
                reply_tokens=piece.get("reply_tokens", 0),
                first_token_ms=None,
                total_ms=took * 1000,
                assignment=None,
                failed_check=None,
                escalated_from=None,
                rejected=None,
                upstream=target.upstream,
                cost=None,
                cached_tokens=None,
                shadow_of=exchange.id,
            )
        )


def _without_answer(reason: str) -> PieceData:
    return {"text": "", "finish_reason": reason, "prompt_tokens": 0, "reply_tokens": 0}
