"""`POST /v1/feedback`: what users think of an answer, redacted and stored.

Feedback waits a moment for its capture, which may not be written yet. Knows nothing of databases.
"""

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Protocol

import orjson

from graftwork.http.messages import RETRY, ApiError, Request, Response, json_response
from graftwork.records.interaction import Feedback
from graftwork.serve.captures import CaptureWriter, redact_name
from graftwork.text.redact import Redactor

log = logging.getLogger(__name__)


class FeedbackSink(Protocol):
    """Stores feedback on answers. Called from several threads; may be slow, may fail."""

    def add_feedback(self, feedback: Feedback) -> bool:
        """Store it; False if there is no such capture (yet)."""
        ...


PAUSES = (0.02, 0.08, 0.3, 0.6)
"""Seconds between tries to find the capture."""
_ID = re.compile(r"(?:chatcmpl-|msg_|resp_)?([0-9a-f]{32})")
_KEYS = ("capture", "score", "comment", "user", "correction", "corrected", "reviewer")
_SYNONYMS = {"corrected": "correction", "reviewer": "user"}
_MOST_BYTES = 64 * 1024
_LONGEST_COMMENT = 8000
_LONGEST_USER = 512
_LONGEST_CORRECTION = 32_000
_AT_ONCE = 16
FINISH_SECONDS = 10.0
"""How long feedback waits for an escalated answer, whose capture needs the small model's answer too."""


class FeedbackEndpoint:
    """Takes feedback for the captures that `captures` writes and `book` knows."""

    def __init__(
        self,
        book: FeedbackSink,
        *,
        captures: CaptureWriter,
        pauses: tuple[float, ...] = PAUSES,
    ) -> None:
        self._sink = book
        self._captures = captures
        self._pauses = pauses
        self.finish_seconds = FINISH_SECONDS
        self.waiting = 0
        self.kept = 0
        self._keeping: set[asyncio.Task[None]] = set()

    async def take(
        self,
        request: Request,
        *,
        is_running: Callable[[str], bool],
        finishing: Mapping[str, asyncio.Task[None]],
    ) -> Response:
        """`is_running` is true while an answer is still streaming; `finishing` has those that were given but
        not captured yet. Raises ApiError.
        """
        feedback = parse_feedback(request.body, at=time.time())
        if is_running(feedback.capture):
            message = "this answer is still being given; send the feedback when it is over"
            raise ApiError(409, message, param="capture", code="still_answering", headers=RETRY)
        if self.waiting >= _AT_ONCE:
            raise ApiError(429, "too much feedback at once; try again soon", code="full", headers=RETRY)

        def end_one(keeping: "asyncio.Task[None]") -> None:
            self._keeping.discard(keeping)
            self.waiting -= 1

        self.waiting += 1
        keeping = asyncio.create_task(self._keep(feedback, finishing.get(feedback.capture)))
        self._keeping.add(keeping)
        keeping.add_done_callback(end_one)
        # It continues without a client that leaves: the thread that writes could not be interrupted anyway,
        # and counts until it is done.
        await asyncio.shield(keeping)
        return json_response({"object": "feedback", "capture": feedback.capture, "score": feedback.score})

    async def _keep(self, feedback: Feedback, finishing: "asyncio.Task[None] | None") -> None:
        if finishing is not None:
            await asyncio.wait([finishing], timeout=self.finish_seconds)
            if not finishing.done():
                message = "the other model's answer to this request is not complete yet; try again soon"
                raise ApiError(409, message, param="capture", code="not_captured_yet", headers=RETRY)
        for pause in (*self._pauses, None):
            # Asked first: what is handed to the sink in between is found by the try that follows.
            all_written = self._captures.idle
            try:
                if await asyncio.to_thread(self._sink.add_feedback, feedback):
                    self.kept += 1
                    return
            except Exception as error:
                log.exception("feedback: it could not be kept")
                message = "the feedback could not be kept; try again soon"
                raise ApiError(503, message, code="not_kept", headers=RETRY) from error
            if pause is not None:
                await asyncio.sleep(pause)
        if not all_written:
            message = "captures are still being written; try again soon"
            raise ApiError(503, message, param="capture", code="not_written_yet", headers=RETRY)
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
    for key, canonical in _SYNONYMS.items():
        if body.get(canonical) not in (None, "") and body.get(key) not in (None, "", body[canonical]):
            raise ApiError(400, f"{key} and {canonical} mean the same and differ", param=key)
    redactor = Redactor()
    comment = _take_text(body, "comment", longest=_LONGEST_COMMENT)
    correction = _take_text(body, "correction", "corrected", longest=_LONGEST_CORRECTION)
    user = _take_text(body, "user", "reviewer", longest=_LONGEST_USER)
    if correction is None and body.get("score") is None:
        message = "give a score (true, false, or a number from 0 to 1), or `corrected`, or both"
        raise ApiError(400, message, param="score")
    # A correction without a score means that the served answer was wrong.
    score = 0.0 if body.get("score") is None else body["score"]
    if not isinstance(score, bool | int | float) or not math.isfinite(score) or not 0 <= score <= 1:
        raise ApiError(400, "score must be true, false, or a number from 0 (bad) to 1 (good)", param="score")
    capture = _ID.fullmatch(body["capture"]) if isinstance(body.get("capture"), str) else None
    if capture is None:
        message = "capture must be what the header x-graft-capture named, or the id of the answer"
        raise ApiError(400, message, param="capture")
    return Feedback(
        capture=capture[1],
        at=datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds"),
        score=float(score),
        comment=None if comment is None else redactor.redact(comment).text,
        who=redact_name(user, redactor, kind="user"),
        correction=None if correction is None else redactor.redact(correction).text,
    )


def _take_text(body: dict[str, Any], *keys: str, longest: int) -> str | None:
    """The text under the first of the keys that has a value; the keys mean the same."""
    key = next((key for key in keys if body.get(key) not in (None, "")), None)
    if key is None:
        return None
    value = body[key]
    if not isinstance(value, str) or len(value) > longest:
        raise ApiError(400, f"{key} must be a string of at most {longest:,} characters", param=key)
    return value
