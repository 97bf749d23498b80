"""Stores what was served, and the feedback on it, off the hot path.

Exchanges are queued, redacted and written to a sink in batches by a thread of their own. A full queue drops
and counts them; a failing sink is retried, then they are counted as lost. `POST /v1/feedback` waits a moment
for its capture, which may not be written yet. Knows nothing of databases.
"""

import asyncio
import hashlib
import logging
import math
import queue
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Protocol

import orjson

from graftwork.records.errors import GraftError
from graftwork.records.interaction import Capture, Feedback
from graftwork.serve.http_messages import ApiError, Request, Response, json_response
from graftwork.serve.routing import ArmAssignment
from graftwork.text.patterns import may_name_secret
from graftwork.text.redact import Redactor


class CaptureSink(Protocol):
    """Keeps captures for good. Called from one background thread; may be slow, may fail."""

    def add_many(self, captures: list[Capture]) -> None: ...


class FeedbackSink(Protocol):
    """Stores feedback on answers. Called from several threads; may be slow, may fail."""

    def add_feedback(self, feedback: Feedback) -> bool:
        """Keep it for good; False where there is no such capture (yet)."""
        ...


log = logging.getLogger(__name__)

_BATCH = 64
_TRIES_AFTER_SECONDS = (0.05, 0.25, 1.0)


@dataclass(frozen=True, slots=True)
class EscalatedAnswer:
    """The small model's answer that failed a check, so that a large model answered."""

    release: str
    check: str
    reply: str


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
    escalated: EscalatedAnswer | None = None


class CaptureWriter:
    """Start it, `offer` exchanges, close it: what was offered is with the sink then."""

    def __init__(self, sink: CaptureSink, *, queue_size: int = 1024) -> None:
        self._sink = sink
        self._queue: queue.Queue[ServedExchange | None] = queue.Queue(maxsize=queue_size)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="captures", daemon=True)
        self.kept = 0
        self.dropped = 0
        self.lost = 0

    def start(self) -> None:
        self._thread.start()

    def offer(self, exchange: ServedExchange) -> bool:
        """Hand over one exchange; returns at once in every case, False if it was dropped."""
        try:
            self._queue.put_nowait(exchange)
        except queue.Full:
            self.dropped += 1
            return False
        return True

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

    def _keep(self, batch: list[ServedExchange]) -> None:
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

    def _redact(self, exchange: ServedExchange) -> Capture | None:
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


def make_capture(exchange: ServedExchange) -> Capture:
    """The exchange with every text redacted: the request, the reply and the session's name."""
    redactor = Redactor()  # one an exchange: placeholders agree inside it, and nothing grows
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
        escalated_from=None if escalated is None else escalated.release,
        failed_check=None if escalated is None else escalated.check,
        rejected=None if escalated is None else redactor.redact(escalated.reply).text,
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


PAUSES = (0.02, 0.08, 0.3, 0.6)
"""Seconds between tries to find the capture."""
_ID = re.compile(r"(?:chatcmpl-)?([0-9a-f]{32})")
_KEYS = ("capture", "score", "comment", "user", "correction", "corrected", "reviewer")
_SYNONYMS = {"corrected": "correction", "reviewer": "user"}
_MOST_BYTES = 64 * 1024
_LONGEST_COMMENT = 8000
_LONGEST_USER = 512
_LONGEST_CORRECTION = 32_000
_AT_ONCE = 16
_RETRY = (("retry-after", "1"),)


class FeedbackEndpoint:
    """Takes feedback for the captures that `captures` writes and `book` knows."""

    def __init__(
        self, book: FeedbackSink, *, captures: CaptureWriter, pauses: tuple[float, ...] = PAUSES
    ) -> None:
        self._sink = book
        self._captures = captures
        self._pauses = pauses
        self._under_way = 0
        self.kept = 0

    async def take(self, request: Request, *, is_running: Callable[[str], bool]) -> Response:
        """`is_running` is true while an answer is still streaming. Raises ApiError."""
        feedback = parse_feedback(request.body, at=time.time())
        if is_running(feedback.capture):
            message = "this answer is still being given; send the feedback when it is over"
            raise ApiError(409, message, param="capture", code="still_answering", headers=_RETRY)
        if self._under_way >= _AT_ONCE:
            raise ApiError(429, "too much feedback at once; try again soon", code="full", headers=_RETRY)
        self._under_way += 1
        try:
            await self._keep(feedback)
        finally:
            self._under_way -= 1
        self.kept += 1
        return json_response({"object": "feedback", "capture": feedback.capture, "score": feedback.score})

    async def _keep(self, feedback: Feedback) -> None:
        for pause in (*self._pauses, None):
            # Asked first: what is handed to the sink in between is found by the try that follows.
            all_written = self._captures.idle
            try:
                if await asyncio.to_thread(self._sink.add_feedback, feedback):
                    return
            except Exception as error:
                log.exception("feedback: it could not be kept")
                message = "the feedback could not be kept; try again soon"
                raise ApiError(503, message, code="not_kept", headers=_RETRY) from error
            if pause is not None:
                await asyncio.sleep(pause)
        if not all_written:
            message = "captures are still being written; try again soon"
            raise ApiError(503, message, param="capture", code="not_written_yet", headers=_RETRY)
        message = (
            f"there is no capture {feedback.capture}; the header x-graft-capture names that of an answer"
        )
        raise ApiError(404, message, param="capture", code="capture_not_found")


def parse_feedback(data: bytes, *, at: float) -> Feedback:
    """The body as a Feedback without secrets. Raises ApiError with what is wrong."""
    if len(data) > _MOST_BYTES:
        raise ApiError(413, f"feedback has at most {_MOST_BYTES} bytes")
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    for key in body:
        if key not in _KEYS:
            message = f"the key {key[:80]!r} is not known; known are: {', '.join(_KEYS)}"
            raise ApiError(400, message, param=key[:80], code="unsupported_parameter")
    for key, known in _SYNONYMS.items():
        if body.get(known) not in (None, "") and body.get(key) not in (None, "", body[known]):
            raise ApiError(400, f"{key} and {known} mean the same and differ", param=key)
        body[known] = body.get(known) or body.pop(key, None)
    redactor = Redactor()
    comment = _take_text(body, "comment", longest=_LONGEST_COMMENT)
    correction = _take_text(body, "correction", longest=_LONGEST_CORRECTION)
    # A correction without a score means that the served answer was wrong.
    score = 0.0 if correction is not None and "score" not in body else _take_score(body.get("score"))
    return Feedback(
        capture=_take_capture(body.get("capture")),
        at=datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
        score=score,
        comment=None if comment is None else redactor.redact(comment).text,
        who=redact_name(_take_text(body, "user", longest=_LONGEST_USER), redactor, kind="user"),
        correction=None if correction is None else redactor.redact(correction).text,
    )


def _take_capture(value: Any) -> str:
    found = _ID.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        message = "capture must be what the header x-graft-capture named, or the id of the answer"
        raise ApiError(400, message, param="capture")
    return found[1]


def _take_score(value: Any) -> float:
    """True and false are 1 and 0."""
    if not isinstance(value, bool | int | float) or not math.isfinite(value) or not 0 <= value <= 1:
        raise ApiError(400, "score must be true, false, or a number from 0 (bad) to 1 (good)", param="score")
    return float(value)


def _take_text(body: dict[str, Any], key: str, *, longest: int) -> str | None:
    value = body.get(key)
    if value is None or value == "":
        return None
    if not isinstance(value, str) or len(value) > longest:
        raise ApiError(400, f"{key} must be a string of at most {longest} characters", param=key)
    return value
