"""What our own endpoint captured: the request as the client sent it, and the reply that was served.

Where a person corrected the reply, the correction is the reply, and what was served is the one that lost.
"""

from typing import Any

from pydantic import ValidationError

from graftwork.data.formats.fields import BadRow, first_of, take_count, take_text
from graftwork.data.formats.turns import require_user, take_turns, to_messages
from graftwork.records.interaction import Capture, CaptureOrigin, Interaction, Origin

EXPECTS = "a capture with request and reply"


def fits(row: dict[str, Any]) -> bool:
    request = row.get("request")
    return isinstance(request, dict) and "messages" in request and "reply" in row


def to_interaction(row: dict[str, Any], origin: Origin) -> Interaction:
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
    return Interaction(
        id=capture.id,
        origin=origin,
        messages=to_messages(turns, tools=first_of(request, "tools", "functions")),
        reply=reply,
        # A client that hung up got a part of the reply: nobody has seen whether it was good.
        status="disconnected" if capture.disconnected and not was_wrong else None,
        finish_reason=None if was_wrong else capture.finish_reason,
        group=capture.model,
        session=capture.session,
        model=capture.release,
        duration_ms=capture.total_ms,
        max_tokens=None if was_wrong else take_count(limit),
        rejected=served if was_wrong and served.strip() else None,
        reward=None if was_wrong else capture.feedback,
        capture=CaptureOrigin(
            id=capture.id,
            release=capture.release,
            at=capture.at,
            feedback=capture.feedback,
            corrected=capture.correction is not None,
        ),
        extra={"timestamp": capture.at},
    )
