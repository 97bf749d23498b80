"""A capture becomes a row: a request that our endpoint answered, with its reply, feedback and correction.

Input: a parsed row that fits. Output: its interaction. `data/audit/row_checks.py` refuses what must not be
trained on, `data/render/` makes tokens of the rest. `data/capture_export.py` writes captures as a log.
"""

from typing import Any

from pydantic import ValidationError

from graftwork.data.ingest.fields import BadRow, first_of, take_count, take_text
from graftwork.data.ingest.llm_spans import INCOMPLETE
from graftwork.data.ingest.turns import require_user, take_turns, to_messages
from graftwork.records.interaction import Capture, CaptureOrigin, Interaction, Origin


def fits_captured(row: dict[str, Any]) -> bool:
    request = row.get("request")
    return isinstance(request, dict) and "messages" in request and "reply" in row


def read_captured(row: dict[str, Any], origin: Origin) -> Interaction:
    """Read a request and the reply we served; a correction becomes the reply, the served one the rejected."""
    try:
        capture = Capture.model_validate(row)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        raise BadRow(f"`{key}`: {first['msg']}") from None
    request = capture.request
    turns = take_turns(request["messages"], "request.messages")
    require_user(turns, "request.messages")
    limit = first_of(request, "max_completion_tokens", "max_tokens")
    served = take_text(capture.reply, "reply")
    reply = capture.correction if capture.correction is not None else served
    was_wrong = reply != served
    ended = INCOMPLETE if capture.finish_reason == "error" else capture.finish_reason
    return Interaction(
        id=capture.id,
        origin=origin,
        messages=to_messages(turns, tools=first_of(request, "tools", "functions")),
        reply=reply,
        # A client that disconnected got only a part of the reply, so its quality is unknown.
        status="disconnected" if capture.disconnected and not was_wrong else None,
        finish_reason=None if was_wrong else ended,
        group=capture.model,
        session=capture.session,
        model=capture.release,
        duration_ms=capture.total_ms,
        first_token_ms=capture.first_token_ms,
        prompt_tokens=capture.prompt_tokens,
        reply_tokens=None if was_wrong else capture.reply_tokens,
        max_tokens=None if was_wrong else take_count(limit),
        rejected=(served if was_wrong and served.strip() else None) or capture.rejected,
        reward=None if was_wrong else capture.feedback,
        cost=capture.cost,
        cached_tokens=capture.cached_tokens,
        trace=capture.trace,
        capture=CaptureOrigin(
            id=capture.id,
            release=capture.release,
            at=capture.at,
            upstream=capture.upstream,
            feedback=capture.feedback,
            corrected=capture.correction is not None,
            corrected_by=capture.corrected_by,
            corrected_at=capture.corrected_at,
        ),
        extra={"timestamp": capture.at},
    )
