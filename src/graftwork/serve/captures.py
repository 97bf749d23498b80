"""Stores what was served, off the hot path.

Exchanges wait in a bounded queue; a thread redacts them and hands them to a sink in batches. A full queue
drops and counts them. What the sink has not taken after half a second goes to a journal on disk and is tried
again, by the next process too. What neither takes is counted as lost. The counts are in a small file that is
mapped into memory: the kernel keeps it when the process is killed, so the next one knows how many exchanges
were lost. A power cut may cost both. Knows nothing of databases.
"""

import hashlib
import logging
import mmap
import os
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from pydantic import ValidationError

from graftwork.files.disk import make_folder, require_lock
from graftwork.records.base import MIB, Record
from graftwork.records.errors import GraftError
from graftwork.records.interaction import Capture
from graftwork.serve.routing import ArmAssignment
from graftwork.text.patterns import may_name_secret
from graftwork.text.redact import CleanTexts, Redactor


class CaptureSink(Protocol):
    """Stores captures permanently. Called from one background thread; may be slow, may fail."""

    def add_many(self, captures: list[Capture]) -> None: ...


log = logging.getLogger(__name__)

_BATCH = 64
_FLUSH_SECONDS = 0.1
_WORK_SECONDS, _REST_SECONDS = 0.0003, 0.0001
"""Redaction holds the interpreter's lock, which requests wait for: it rests after so much work."""
_LATE_SECONDS = 0.25
"""It rests no more once an exchange has waited for this long: what waits is lost when the process is killed.
"""
_PATIENCE_SECONDS = 0.5
_BRIEF_SECONDS = 0.05
"""How long the sink may take before a batch goes to the journal; less while others wait, which a kill would
cost."""
_TRIES_AFTER_SECONDS = (0.05, 0.25, 1.0)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_PRUNE_SECONDS = 3600.0
_WARN_SECONDS = 10.0

JOURNAL_FILE, COUNTS_FILE = "captures.journal", "captures.counts"
_MAGIC = b"graftcc1"
_COUNTED = ("expected", "offered", "kept", "dropped", "lost", "journaled", "killed")
_NUMBER = struct.Struct("<Q")
_PAGE_BYTES = 1 << 20
_OFFSETS = {field: len(_MAGIC) + _NUMBER.size * index for index, field in enumerate(_COUNTED)}
_SIZE = len(_MAGIC) + _NUMBER.size * len(_COUNTED)


class ChainMark(NamedTuple):
    """Where in a chain an exchange belongs."""

    chain: str
    step: str
    trace: str

    @property
    def name(self) -> str:
        return f"{self.chain}/{self.step}"


@dataclass(frozen=True, slots=True)
class ServedExchange:
    """One answer as it was sent, not redacted yet."""

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
    failed_check: str | None = None
    """The check that the answer failed, although it was sent or so that a large model answered."""
    escalated_from: str | None = None
    """The small model whose answer failed the check, where a large one answered."""
    rejected: str | None = None
    """Its answer; None if only the beginning is known: half an answer is not a fair half of a pair."""
    chain: ChainMark | None = None
    upstream: str | None = None
    shadow_of: str | None = None

    @property
    def asked_release(self) -> str:
        """The release that was requested, even if a large model answered in its place."""
        return self.escalated_from or self.release


class CaptureWriter:
    """Start it, `offer` exchanges, close it: what was offered is then in the sink or the journal.

    `folder` is where journal and counts are kept; without one, both end with the process. `prune` deletes
    what is too old; it is called periodically by the thread that writes. Of exchanges that wait to be kept,
    those beyond `queue` or `queue_bytes` are dropped and counted; what the journal has no room for is lost.
    """

    def __init__(
        self,
        sink: CaptureSink,
        *,
        queue: int = 1024,
        queue_bytes: int = 64 * MIB,
        journal_bytes: int = 64 * MIB,
        folder: Path | None = None,
        prune: Callable[[], object] | None = None,
    ) -> None:
        self._queue, self._queue_bytes = queue, queue_bytes
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
                self._journal = CaptureJournal(folder, most_bytes=journal_bytes)
            except OSError as error:
                # A full disk, or a second endpoint of the project: answers and captures continue without.
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
        """Count an exchange before its answer is sent, so that a kill in between is counted as a loss."""
        self.counts.add("expected")

    def offer(self, exchange: ServedExchange, *, expected: bool = False) -> bool:
        """Hand over one exchange; always returns immediately, False if it was dropped."""
        if not expected:
            self.counts.add("expected")
        self.counts.add("offered")
        waiting_bytes = self._bytes_in - self._bytes_out + exchange.size
        if len(self._waiting) >= self._queue or waiting_bytes > self._queue_bytes:
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
        """Store what waits, then end. Blocks: call it from a separate thread."""
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
        """Count what was settled; return what the sink could not take yet."""
        assert outcome is not None
        self.counts.add("kept", outcome.kept)
        if outcome.refused:
            self._lose(outcome.refused)
        return outcome.unsent

    def _move_journal(self) -> bool:
        """Hand the next page of the journal to the sink; True if one was taken."""
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
    """The result of a batch handed to the sink."""

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
        """None if it takes longer."""
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
        stored = refused = 0
        for index, capture in enumerate(captures):
            try:
                self._sink.add_many([capture])
                stored += 1
            except (GraftError, OSError):
                return _Outcome(stored, refused, captures[index:])  # the rest would fare the same
            except Exception:
                refused += 1
        return _Outcome(stored, refused)


def make_capture(exchange: ServedExchange, clean: CleanTexts | None = None) -> Capture:
    """The exchange with every text redacted: the request, the reply and the session's name."""
    redactor = Redactor(clean)  # one an exchange: placeholders agree inside it, and nothing grows
    assignment = exchange.assignment
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
        escalated_from=exchange.escalated_from,
        failed_check=exchange.failed_check,
        rejected=None if exchange.rejected is None else redactor.redact(exchange.rejected).text,
        chain=None if exchange.chain is None else exchange.chain.name,
        chain_trace=None if exchange.chain is None else exchange.chain.trace,
        upstream=exchange.upstream,
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


class CaptureTotals(Record):
    """What became of all exchanges that this project's endpoints were to capture."""

    expected: int = 0
    """Those whose answer has begun."""
    offered: int = 0
    """Those whose answer has ended."""
    kept: int = 0
    dropped: int = 0
    """The queue was full."""
    lost: int = 0
    """The store and the journal failed, or the endpoint was killed."""
    journaled: int = 0
    """On disk, waiting for the store."""
    killed: int = 0
    """Those of the lost ones that a killed endpoint had not written yet."""

    @property
    def under_way(self) -> int:
        return self.expected - self.kept - self.dropped - self.lost - self.journaled


class CaptureCounts:
    """The counts of this process, and the totals in a file. Each field has one thread that writes it."""

    def __init__(self, folder: Path | None = None) -> None:
        self._values = dict.fromkeys(_COUNTED, 0)
        self._start = dict.fromkeys(_COUNTED, 0)
        self._memory: mmap.mmap | bytearray = bytearray(_SIZE)
        self._file: int | None = None
        if folder is None:
            return
        make_folder(folder)
        file = os.open(folder / COUNTS_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            require_lock(file, "another endpoint of the project counts here")
            data = os.pread(file, _SIZE, 0)
            totals = _parse(data) or CaptureTotals()
            if _parse(data) is None:
                # Written and synced before it is mapped: the disk has the room then, whatever fills it later.
                os.pwrite(file, _MAGIC + bytes(_SIZE - len(_MAGIC)), 0)
                os.fsync(file)
            self._memory = mmap.mmap(file, _SIZE)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        self._start = totals.model_dump()

    def __getitem__(self, field: str) -> int:
        return self._values[field]

    def add(self, field: str, count: int = 1) -> None:
        value = self._values[field] = self._values[field] + count
        _NUMBER.pack_into(self._memory, _OFFSETS[field], self._start[field] + value)

    def settle_past(self, *, journaled: int) -> int:
        """Count what the last process had not written when it ended as lost; returns how many."""
        self.add("journaled", journaled - self._start["journaled"])
        missing = CaptureTotals(**{**self._start, "journaled": journaled}).under_way
        if missing > 0:
            self.add("killed", missing)
            self._start["lost"] += missing  # not a loss of this process
            self.add("lost", 0)
        return max(missing, 0)

    def close(self) -> None:
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
            self._memory = bytearray(_SIZE)
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_totals(folder: Path) -> CaptureTotals | None:
    """The totals as any process may read them; None if no endpoint has counted yet."""
    try:
        data = (folder / COUNTS_FILE).read_bytes()
    except OSError:
        return None
    return _parse(data)


def _parse(data: bytes) -> CaptureTotals | None:
    if len(data) < _SIZE or not data.startswith(_MAGIC):
        return None
    numbers = struct.unpack_from(f"<{len(_COUNTED)}Q", data, len(_MAGIC))
    return CaptureTotals(**dict(zip(_COUNTED, numbers, strict=True)))


class CaptureJournal:
    """A file of captures, one per line. Used by one thread."""

    def __init__(self, folder: Path, *, most_bytes: int) -> None:
        self._path = folder / JOURNAL_FILE
        self._most_bytes = most_bytes
        self._page = 0
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._file).st_size
        data = b"" if size == 0 else os.pread(self._file, size, 0)
        self._end = data.rfind(b"\n") + 1
        # What the last process had taken out was blanked: counting it again would hide a loss.
        self._read_to = self._end - len(data[: self._end].lstrip(b" "))
        self.waiting = data.count(b"\n")
        """Lines that were not read yet."""
        if self._end != len(data):
            os.ftruncate(self._file, self._end)  # the last line was cut off when the process was killed

    def append(self, captures: Iterable[Capture]) -> bool:
        """Returns False and writes nothing if the journal or the disk is full."""
        data = "".join(capture.to_journal() + "\n" for capture in captures).encode(errors="replace")
        if self._end - self._read_to + len(data) > self._most_bytes:
            return False
        try:
            offset = 0
            while offset < len(data):
                offset += os.pwrite(self._file, data[offset:], self._end + offset)
        except OSError as error:
            log.warning("captures: the journal cannot be written: %s", error.strerror)
            self._cut()
            return False
        self._end += len(data)
        self.waiting += data.count(b"\n")
        return True

    def read(self, most: int) -> tuple[list[Capture], int]:
        """The next captures and how many lines they took, at most `most`; `advance` takes them out."""
        size, data = _PAGE_BYTES, b""
        while b"\n" not in data and self.waiting:
            data = os.pread(self._file, min(size, self._end - self._read_to), self._read_to)
            size *= 2
        lines = data.split(b"\n")[:-1][:most]
        self._page = sum(len(line) + 1 for line in lines)
        captures = []
        for line in lines:
            try:
                captures.append(Capture.model_validate_json(line))
            except ValidationError:
                log.warning("captures: a line of the journal cannot be read")
        return captures, len(lines)

    def advance(self, lines: int) -> None:
        """Remove what `read` returned last."""
        try:
            os.pwrite(self._file, b" " * self._page, self._read_to)
        except OSError as error:
            log.warning("captures: the journal cannot be written: %s", error.strerror)
        self._read_to += self._page
        self.waiting -= lines
        if self.waiting == 0:
            self._read_to = self._end = 0
            self._cut()

    def _cut(self) -> None:
        try:
            os.ftruncate(self._file, self._end)
        except OSError as error:
            log.warning("captures: the journal cannot be shortened: %s", error.strerror)

    def close(self) -> None:
        os.close(self._file)
