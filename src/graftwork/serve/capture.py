"""Keeps what was served, behind the caller's back: never blocks, never breaks an answer.

In: exchanges as the gateway saw them. Out: redacted Captures to a sink, in batches, from a thread
of its own. What cannot wait is dropped and counted; what the sink refuses is tried again, then
counted as lost. Knows nothing of HTTP or databases.
"""

import hashlib
import logging
import queue
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from graftwork.records.errors import GraftError
from graftwork.records.interaction import Capture
from graftwork.serve.ports import CaptureSink
from graftwork.serve.split import Lot
from graftwork.text.locate import may_name_secret
from graftwork.text.redact import Redactor

log = logging.getLogger(__name__)

_BATCH = 64
_TRIES_AFTER_SECONDS = (0.05, 0.25, 1.0)


@dataclass(frozen=True, slots=True)
class Exchange:
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
    lot: Lot | None = None
    """Who answers was drawn; None where it was not."""


class CaptureWriter:
    """Start it, `offer` exchanges, close it: what was offered is with the sink then."""

    def __init__(self, sink: CaptureSink, *, queue_size: int = 1024) -> None:
        self._sink = sink
        self._queue: queue.Queue[Exchange | None] = queue.Queue(maxsize=queue_size)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="captures", daemon=True)
        self.kept = 0
        self.dropped = 0
        self.lost = 0

    def start(self) -> None:
        self._thread.start()

    def offer(self, exchange: Exchange) -> None:
        """Hand over one exchange; returns at once in every case."""
        try:
            self._queue.put_nowait(exchange)
        except queue.Full:
            self.dropped += 1

    @property
    def idle(self) -> bool:
        """Whether all that was offered is with the sink, dropped or lost."""
        return self._queue.unfinished_tasks == 0

    def close(self, *, seconds: float = 10.0) -> None:
        """Keep what waits, then end. Blocks: call it from a thread of its own."""
        self._closing.set()
        try:
            self._queue.put(None, timeout=seconds)
        except queue.Full:
            log.exception("captures: the sink is stuck; %d exchanges are lost", self._queue.qsize())
            return
        self._thread.join(seconds)

    def _run(self) -> None:
        ended = False
        while not ended:
            taken = [self._queue.get()]
            while len(taken) < _BATCH and taken[-1] is not None:
                try:
                    taken.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            ended = taken[-1] is None
            batch = [exchange for exchange in taken if exchange is not None]
            if batch:
                self._keep(batch)
            for _ in taken:
                self._queue.task_done()

    def _keep(self, batch: list[Exchange]) -> None:
        captures = [capture for exchange in batch if (capture := self._redact(exchange)) is not None]
        for pause in (*_TRIES_AFTER_SECONDS, None):
            try:
                self._sink.add_many(captures)
            except Exception as error:
                # No traceback: a database names the values of a failed statement in it.
                if pause is None:
                    log.warning("captures: the sink failed (%s)", type(error).__name__)
                    self._keep_singly(captures)
                    return
                log.warning("captures: the sink failed (%s); trying again", type(error).__name__)
                if not self._closing.is_set():
                    self._closing.wait(pause)
            else:
                self.kept += len(captures)
                return

    def _redact(self, exchange: Exchange) -> Capture | None:
        try:
            return make_capture(exchange)
        except Exception as error:
            # This must neither end the thread nor cost other callers their captures; and nothing
            # unredacted is kept or logged.
            log.warning("captures: %s could not be redacted: %s", exchange.id, type(error).__name__)
            self.lost += 1
            return None

    def _keep_singly(self, captures: list[Capture]) -> None:
        """One that the sink never takes must not cost the others of its batch."""
        lost = 0
        for i, capture in enumerate(captures):
            try:
                self._sink.add_many([capture])
                self.kept += 1
            except (GraftError, OSError):
                lost += len(captures) - i  # the sink is busy, full or gone: the rest would fare the same
                break
            except Exception:
                lost += 1
        if lost:
            self.lost += lost
            log.error("captures: %d exchanges are lost", lost)


def make_capture(exchange: Exchange) -> Capture:
    """The exchange with every text redacted: the request, the reply and the session's name."""
    redactor = Redactor()  # one an exchange: placeholders agree inside it, and nothing grows
    lot = exchange.lot
    return Capture(
        id=exchange.id,
        at=datetime.fromtimestamp(exchange.at, UTC).isoformat(timespec="milliseconds"),
        session=redact_name(exchange.session, redactor),
        model=exchange.model,
        release=exchange.release,
        request=_redact_value(exchange.request, redactor),
        reply=redactor.redact(exchange.reply).text,
        finish_reason=exchange.finish_reason,
        prompt_tokens=exchange.prompt_tokens,
        reply_tokens=exchange.reply_tokens,
        first_token_ms=exchange.first_token_ms,
        total_ms=exchange.total_ms,
        disconnected=exchange.disconnected,
        dealt=None if lot is None else lot.experiment,
        arm=None if lot is None else lot.arm,
        share=None if lot is None else lot.share,
    )


def redact_name(name: str | None, redactor: Redactor, *, kind: str = "session") -> str | None:
    """A session named after a person keeps its identity, not its name."""
    if name is None or redactor.redact(name).text == name:
        return name
    return f"{kind}-{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:16]}"


def _redact_value(value: Any, redactor: Redactor, name: str = "") -> Any:
    """`name` is that of the field: whatever stands under `password` is one."""
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
