"""What keys and escalations have used, on disk: a restart must not give them their budgets again.

In: the key ring and the budget of escalations. Out: a file with the counts of the current minute and day,
written in a thread once a second at most while they change, and read at the start. A killed endpoint loses
the counts of its last second.
"""

import asyncio
import logging
import threading
import time
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, ValidationError

from graftwork.files.disk import write_atomic
from graftwork.records.base import Record
from graftwork.records.errors import GraftError
from graftwork.serve.budgets import DAY_SECONDS
from graftwork.serve.escalation import EscalationBudget
from graftwork.serve.keys import KeyRing

log = logging.getLogger(__name__)

USAGE_FILE = "key_usage.json"
_SAVE_SECONDS = 1.0
_WARN_SECONDS = 60.0
_Counts = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=6, max_length=6)]


class SavedUsage(Record):
    """By the id of the key: number, requests and tokens of its minute, then of its day."""

    keys: dict[str, _Counts] = {}
    escalations: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] | None = None
    """The number of the day, and how many it had."""


class _Usage(NamedTuple):
    keys: dict[str, tuple[int, ...]] = {}
    escalations: tuple[int, int] | None = None


class UsageFile:
    def __init__(self, folder: Path, ring: KeyRing, escalations: EscalationBudget | None = None) -> None:
        self._path = folder / USAGE_FILE
        self._ring = ring
        self._escalations = escalations
        self._saved = _Usage()
        self._lock = threading.Lock()
        self._begun = self._written = 0
        self._warned_at = float("-inf")

    def restore(self) -> None:
        """Go on with what was used when the last endpoint ended."""
        today = int(time.time() // DAY_SECONDS)
        try:
            found = SavedUsage.model_validate_json(self._path.read_bytes())
        except FileNotFoundError:
            return
        except (OSError, ValidationError) as error:
            # Without the counts keys get their budgets again, which is better than no endpoint.
            log.warning(
                "keys: what they have used cannot be read (%s); it starts at zero", type(error).__name__
            )
            return
        keys = {id: counts for id, counts in found.keys.items() if counts[3] == today}
        self._saved = _Usage(keys, found.escalations)
        self._ring.restore_usage(keys)
        if self._escalations is not None and found.escalations is not None:
            self._escalations.restore(found.escalations)

    async def follow(self, seconds: float = _SAVE_SECONDS) -> None:
        while True:
            await asyncio.sleep(seconds)
            await self.save()

    async def save(self) -> None:
        """Write the counts if they have changed. A full disk costs the counts, never an answer."""
        counts = _Usage(self._ring.count_usage(), self._count_escalations())
        if counts == self._saved:
            return
        self._begun += 1
        try:
            await asyncio.to_thread(self._write, counts, self._begun)
        except GraftError as error:
            if time.monotonic() - self._warned_at >= _WARN_SECONDS:
                self._warned_at = time.monotonic()
                log.warning("keys: what they have used cannot be written: %s", error.what)
            return
        self._saved = counts

    def _count_escalations(self) -> tuple[int, int] | None:
        if self._escalations is None:
            # A start without `serve.escalate` must not give the day's budget again.
            return self._saved.escalations
        counts = self._escalations.snapshot()
        return counts if counts[0] >= 0 else None

    def _write(self, counts: _Usage, number: int) -> None:
        # A write that was cancelled still runs in its thread, and must not replace a later one.
        with self._lock:
            if number > self._written:
                data = SavedUsage.model_construct(**counts._asdict()).to_json()
                write_atomic(self._path, data, durable=False, private=True)
                self._written = number
