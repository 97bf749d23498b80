"""Stores what was served, off the hot path.

Exchanges wait in a bounded queue; a thread redacts them and hands them to a sink in batches. A full queue
drops and counts them. What the sink has not taken after half a second goes to a journal on disk and is tried
again, by the next process too. What neither takes is counted as lost. Knows nothing of databases.
"""

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from graftwork.records.base import MIB
from graftwork.records.errors import GraftError
from graftwork.records.interaction import Capture
from graftwork.serve.capture_journal import CaptureCounts, CaptureJournal
from graftwork.serve.chains import ChainMark
from graftwork.serve.routing import ArmAssignment
from graftwork.text.patterns import may_name_secret
from graftwork.text.redact import CleanTexts, Redactor


class CaptureSink(Protocol):
    """Keeps captures for good. Called from one background thread; may be slow, may fail."""

    def add_many(self, captures: list[Capture]) -> None: ...


log = logging.getLogger(__name__)

_BATCH = 64
_FLUSH_SECONDS = 0.1
_WORK_SECONDS, _REST_SECONDS = 0.0003, 0.0001
"""Redaction holds the interpreter's lock, which requests wait for: it rests after so much work."""
_LATE_SECONDS = 0.25
"""It rests no more once an exchange has waited for so long: what waits is lost when the process is killed."""
_PATIENCE_SECONDS = 0.5
_BRIEF_SECONDS = 0.05
"""How long the sink may take before a batch goes to the journal; less while others wait, which a kill would
cost."""
_TRIES_AFTER_SECONDS = (0.05, 0.25, 1.0)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_PRUNE_SECONDS = 3600.0
_WARN_SECONDS = 10.0


class EscalatedAnswer(NamedTuple):
    """The small model's answer that failed a check, so that a large model answered."""

    release: str
    check: str
    reply: str | None
    """None where only its beginning is known: half an answer is no fair half of a pair."""


@dataclass(frozen=True, slots=True)
class ServedExchange:
    """One answer as it went out, not redacted yet."""

    id: str
    at: float
    session: str | None
    model: str
    release: str
    request: dict[str, Any]
    reply: str
    finish_reason: str | None
    prompt_tokens: int
    reply_tokens: int
    first_token_ms: float | None
    total_ms: float
    disconnected: bool = False
    assignment: ArmAssignment | None = None
    trace: str | None = None
    cost: float | None = None
    cached_tokens: int | None = None
    user: str | None = None
    size: int = 0
    """About how many bytes it takes in memory."""
    escalated: EscalatedAnswer | None = None
    failed_check: str | None = None
    """The check that the answer failed although it was sent."""
    chain: ChainMark | None = None
    shadow_of: str | None = None

    @property
    def asked_release(self) -> str:
        """The release that was asked, also where a large model answered in its place."""
        return self.release if self.escalated is None else self.escalated.release


@dataclass(frozen=True, kw_only=True)
class CaptureLimits:
    queue: int = 1024
    """Exchanges that may wait to be kept; beyond it the newest are dropped and counted."""
    queue_bytes: int = 64 * MIB
    journal_bytes: int = 64 * MIB
    """Of the file that keeps captures while the database is slow or fails; beyond it they are lost."""


class CaptureWriter:
    """Start it, `offer` exchanges, close it: what was offered is with the sink or in the journal then.

    `folder` is where journal and counts are kept; without one, both end with the process. `prune` deletes
    what is too old; it is called now and then by the thread that writes.
    """

    def __init__(
        self,
        sink: CaptureSink,
        *,
        limits: CaptureLimits = CaptureLimits(),  # noqa: B008
        folder: Path | None = None,
        prune: Callable[[], object] | None = None,
    ) -> None:
        self._limits = limits
        self._prune = prune
        self._waiting: deque[tuple[ServedExchange, float]] = deque()
        """With the time of arrival on the clock of `time.perf_counter`."""
        self._bytes_in = self._bytes_out = 0
        self._clean = CleanTexts()
        self._wake, self._closing = threading.Event(), threading.Event()
        self._store = _SinkThread(sink)
        self._journal: CaptureJournal | None = None
        self.counts = CaptureCounts()
        if folder is not None:
            try:
                self.counts = CaptureCounts(folder)
                self._journal = CaptureJournal(folder, most_bytes=limits.journal_bytes)
            except OSError as error:
                # A full disk, or a second endpoint of the project: answers and captures go on without.
                log.warning("captures: no journal, captures end with the process (%s)", error.strerror)
            else:
                lost = self.counts.settle_past(journaled=self._journal.waiting)
                if lost:
                    log.warning("captures: %d exchanges were lost when the endpoint was killed", lost)
        self._drain: _SinkCall | None = None
        self._drain_lines = 0
        self._pause, self._drain_at = _FIRST_PAUSE, 0.0
        self._prune_at = 0.0 if prune is not None else float("inf")
        self._warned_at = float("-inf")
        self._thread = threading.Thread(target=self._run, name="captures", daemon=True)

    @property
    def kept(self) -> int:
        return self.counts["kept"]

    @property
    def dropped(self) -> int:
        return self.counts["dropped"]

    @property
    def lost(self) -> int:
        return self.counts["lost"]

    def start(self) -> None:
        self._store.start()
        self._thread.start()

    def expect(self) -> None:
        """Count an exchange before its answer is sent: a kill in between is a loss that is counted."""
        self.counts.add("expected")

    def offer(self, exchange: ServedExchange, *, expected: bool = False) -> bool:
        """Hand over one exchange; returns at once in every case, False if it was dropped."""
        if not expected:
            self.counts.add("expected")
        self.counts.add("offered")
        waiting_bytes = self._bytes_in - self._bytes_out + exchange.size
        if len(self._waiting) >= self._limits.queue or waiting_bytes > self._limits.queue_bytes:
            self.counts.add("dropped")
            self._warn("%d exchanges were dropped so far: the queue is full", self.dropped)
            return False
        self._bytes_in += exchange.size
        self._waiting.append((exchange, time.perf_counter()))
        if not self._wake.is_set():
            self._wake.set()
        return True

    @property
    def idle(self) -> bool:
        """Whether all that was offered is with the sink, dropped or lost."""
        return self.waiting == 0 and (self._journal is None or self._journal.waiting == 0)

    @property
    def waiting(self) -> int:
        """Exchanges that only this process has: a kill would cost them."""
        counts = self.counts
        return counts["offered"] - sum(counts[name] for name in ("kept", "dropped", "lost", "journaled"))

    def close(self, *, seconds: float = 10.0) -> None:
        """Keep what waits, then end. Blocks: call it from a thread of its own."""
        self._closing.set()
        self._wake.set()
        self._thread.join(seconds)
        if self._thread.is_alive():
            log.error("captures: the sink is stuck; %d exchanges are not written", len(self._waiting))
            return
        if self._journal is not None:
            if self._journal.waiting:
                log.warning("captures: %d exchanges wait in the journal", self._journal.waiting)
            self._journal.close()
        self.counts.close()

    def _run(self) -> None:
        while True:
            until_work = None  # only an exchange gives work
            if self._journal is not None and self._journal.waiting:
                until_work = max(0.0, self._drain_at - time.monotonic()) or _FLUSH_SECONDS
            elif self._prune is not None:
                until_work = max(0.0, self._prune_at - time.monotonic())
            self._wake.wait(until_work)
            self._closing.wait(_FLUSH_SECONDS)  # what arrives together is written together
            self._wake.clear()
            closing = self._closing.is_set()
            while self._waiting:
                self._keep(self._take_batch())
            self._move_journal()
            if time.monotonic() >= self._prune_at and not self._store.busy and not closing:
                self._prune_at = time.monotonic() + _PRUNE_SECONDS
                assert self._prune is not None
                self._store.submit(self._prune)
            if closing and not self._waiting:
                while self._journal is not None and self._journal.waiting and self._move_journal():
                    pass
                return

    def _take_batch(self) -> list[Capture]:
        batch: list[Capture] = []
        rested = time.perf_counter()
        while self._waiting and len(batch) < _BATCH:
            exchange, arrived = self._waiting.popleft()
            self._bytes_out += exchange.size
            try:
                batch.append(make_capture(exchange, self._clean))
            except Exception as error:
                # This must neither end the thread nor cost other callers their captures; and nothing
                # unredacted is kept or logged.
                log.warning("captures: %s could not be redacted: %s", exchange.id, type(error).__name__)
                self.counts.add("lost")
            now = time.perf_counter()
            if now - rested < _WORK_SECONDS or self._closing.is_set():
                continue
            if now - arrived < _LATE_SECONDS:
                time.sleep(_REST_SECONDS)
            rested = now
        return batch

    def _keep(self, batch: list[Capture]) -> None:
        unsent = batch
        if self._journal is None:
            for pause in (0.0, *_TRIES_AFTER_SECONDS):
                if not self._closing.is_set():
                    self._closing.wait(pause)
                unsent = self._count(self._store.submit_captures(unsent).wait(None))
                if not unsent:
                    return
        elif not self._store.busy and self._journal.waiting == 0:
            patience = _BRIEF_SECONDS if self._waiting else _PATIENCE_SECONDS
            outcome = self._store.submit_captures(batch).wait(patience)
            unsent = batch if outcome is None else self._count(outcome)
        if not unsent:
            return
        # The sink may still take a batch that was too slow: each id is kept once, and counted below.
        if self._journal is not None and self._journal.append(unsent):
            self.counts.add("journaled", len(unsent))
        else:
            self._lose(len(unsent))

    def _count(self, outcome: "_Outcome | None") -> list[Capture]:
        """Count what was settled; returns what the sink could not take now."""
        assert outcome is not None
        self.counts.add("kept", outcome.kept)
        if outcome.refused:
            self._lose(outcome.refused)
        return outcome.unsent

    def _move_journal(self) -> bool:
        """Hand the next page of the journal to the sink; True where one was taken."""
        journal = self._journal
        if journal is None or not journal.waiting:
            return False
        if self._drain is None:
            if self._store.busy or (time.monotonic() < self._drain_at and not self._closing.is_set()):
                return False
            page, self._drain_lines = journal.read(_BATCH)
            self._drain = self._store.submit_captures(page)
        outcome = self._drain.wait(_PATIENCE_SECONDS)
        if outcome is None:
            return False
        self._drain = None
        if outcome.unsent:
            self._drain_at = time.monotonic() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            return False
        self._pause, self._drain_at = _FIRST_PAUSE, 0.0
        journal.advance(self._drain_lines)
        self.counts.add("journaled", -self._drain_lines)
        self.counts.add("kept", outcome.kept)
        if missing := self._drain_lines - outcome.kept:
            self._lose(missing)
        return True

    def _lose(self, count: int) -> None:
        self.counts.add("lost", count)
        self._warn("%d exchanges are lost so far", self.lost)

    def _warn(self, message: str, count: int) -> None:
        now = time.monotonic()
        if now - self._warned_at >= _WARN_SECONDS:
            self._warned_at = now
            log.error(f"captures: {message}", count)


class _Outcome(NamedTuple):
    """What the sink did with a batch."""

    kept: int
    refused: int = 0
    """What it never takes."""
    unsent: list[Capture] = []
    """What it could not take now."""


class _SinkCall:
    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work
        self.done = threading.Event()
        self.outcome: _Outcome | None = None

    def wait(self, seconds: float | None) -> _Outcome | None:
        """None where it takes longer."""
        return self.outcome if self.done.wait(seconds) else None


class _SinkThread:
    """Calls the sink, one call at a time, so that a slow one blocks no other."""

    def __init__(self, sink: CaptureSink) -> None:
        self._sink = sink
        self._calls: deque[_SinkCall] = deque()
        self._wake = threading.Event()
        self._last: _SinkCall | None = None
        self._thread = threading.Thread(target=self._run, name="captures-store", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def busy(self) -> bool:
        return self._last is not None and not self._last.done.is_set()

    def submit_captures(self, captures: list[Capture]) -> _SinkCall:
        return self.submit(lambda: self._add(captures))

    def submit(self, work: Callable[[], object]) -> _SinkCall:
        self._last = call = _SinkCall(work)
        self._calls.append(call)
        self._wake.set()
        return call

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            while self._calls:
                call = self._calls.popleft()
                try:
                    outcome = call.work()
                    call.outcome = outcome if isinstance(outcome, _Outcome) else _Outcome(0)
                except Exception as error:
                    log.warning("captures: old ones cannot be deleted now (%s)", type(error).__name__)
                    call.outcome = _Outcome(0)
                call.done.set()

    def _add(self, captures: list[Capture]) -> _Outcome:
        try:
            if captures:
                self._sink.add_many(captures)
            return _Outcome(len(captures))
        except (GraftError, OSError) as error:
            log.warning("captures: the sink failed (%s)", type(error).__name__)
            return _Outcome(0, unsent=captures)
        except Exception as error:
            # No traceback: a database names the values of a failed statement in it.
            log.warning("captures: the sink refused a batch (%s)", type(error).__name__)
        # One that the sink never takes must not cost the others of its batch.
        kept = refused = 0
        for place, capture in enumerate(captures):
            try:
                self._sink.add_many([capture])
                kept += 1
            except (GraftError, OSError):
                return _Outcome(kept, refused, captures[place:])  # the rest would fare the same
            except Exception:
                refused += 1
        return _Outcome(kept, refused)


def make_capture(exchange: ServedExchange, clean: CleanTexts | None = None) -> Capture:
    """The exchange with every text redacted: the request, the reply and the session's name."""
    redactor = Redactor(clean)  # one an exchange: placeholders agree inside it, and nothing grows
    assignment, escalated = exchange.assignment, exchange.escalated
    return Capture(
        id=exchange.id,
        at=datetime.fromtimestamp(exchange.at, UTC).isoformat(timespec="milliseconds"),
        session=redact_name(exchange.session, redactor),
        # Other programs name their agents and models.
        model=exchange.model if exchange.trace is None else redactor.redact(exchange.model).text,
        release=exchange.release if exchange.trace is None else redactor.redact(exchange.release).text,
        request=_redact_value(exchange.request, redactor),
        reply=redactor.redact(exchange.reply).text,
        finish_reason=exchange.finish_reason,
        prompt_tokens=exchange.prompt_tokens,
        reply_tokens=exchange.reply_tokens,
        first_token_ms=exchange.first_token_ms,
        total_ms=exchange.total_ms,
        disconnected=exchange.disconnected,
        dealt=None if assignment is None else assignment.experiment,
        arm=None if assignment is None else assignment.arm,
        share=None if assignment is None else assignment.share,
        trace=redact_name(exchange.trace, redactor, kind="trace"),
        cost=exchange.cost,
        cached_tokens=exchange.cached_tokens,
        user=redact_name(exchange.user, redactor, kind="user"),
        escalated_from=None if escalated is None else escalated.release,
        failed_check=exchange.failed_check if escalated is None else escalated.check,
        rejected=None
        if escalated is None or escalated.reply is None
        else redactor.redact(escalated.reply).text,
        chain=None if exchange.chain is None else exchange.chain.name,
        chain_trace=None if exchange.chain is None else exchange.chain.trace,
        shadow_of=exchange.shadow_of,
    )


def redact_name(name: str | None, redactor: Redactor, *, kind: str = "session") -> str | None:
    """A session named after a person keeps its identity, not its name."""
    if name is None or redactor.redact(name).text == name:
        return name
    return f"{kind}-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:16]}"


def _redact_value(value: Any, redactor: Redactor, name: str = "") -> Any:
    """`name` is that of the field: the value of a field `password` is a password."""
    if isinstance(value, str):
        if name and may_name_secret(name):
            return redactor.redact_under(name, value).text
        return _redact_text(value, redactor)
    if isinstance(value, list):
        return [_redact_value(item, redactor, name) for item in value]
    if isinstance(value, dict):
        return {
            _redact_text(key, redactor): _redact_value(item, redactor, key) for key, item in value.items()
        }
    return value


def _redact_text(text: str, redactor: Redactor) -> str:
    # Most strings of a request are names such as "role" and "user": too short to hold a secret.
    return text if len(text) < 12 and text.isidentifier() else redactor.redact(text).text
