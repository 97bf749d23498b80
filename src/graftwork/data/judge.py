"""May this one row be learned from? The same judgement for the audit and for the preparation.

In: one interaction and the settings. Out: the code and the reason of the first fault that speaks
against it, or None. Knows no other rows.
"""

from typing import NamedTuple

from graftwork.data.captures import CAPTURE_CODES, find_refusal
from graftwork.data.settings import DataSettings
from graftwork.records.interaction import Interaction
from graftwork.text.redact import redact
from graftwork.text.shape import find_cut, find_failure, find_stand_in

CODES = CAPTURE_CODES | {"empty", "placeholder", "truncated", "failed_status", "claims_success_but_fails"}


SAID = "the log says"
"""How the reason of a fault begins that quotes the status of a row."""


class Fault(NamedTuple):
    code: str
    reason: str


def find_fault(row: Interaction, settings: DataSettings) -> Fault | None:
    """The first fault by weight: a failed call is not also called empty."""
    return (
        _judge_capture(row, settings) or _judge_status(row, settings) or _judge_text(row) or _judge_claim(row)
    )


def _judge_capture(row: Interaction, settings: DataSettings) -> Fault | None:
    refusal = None if row.capture is None else find_refusal(row.capture, row.session, settings.captures)
    return None if refusal is None else Fault(*refusal)


def _judge_status(row: Interaction, settings: DataSettings) -> Fault | None:
    kept = {status.casefold() for status in settings.keep_status}
    if row.status is None or row.status.casefold() in kept:
        return None
    return Fault("failed_status", f"{SAID} {redact(row.status).text[:40]!r}")


def _judge_text(row: Interaction) -> Fault | None:
    if not row.question.strip():
        return Fault("empty", "the question is empty")
    if not row.reply.strip():
        return Fault("empty", "the reply is empty")
    stand_in = find_stand_in(row.reply)
    if stand_in:
        return Fault("placeholder", stand_in)
    cut = find_cut(row.reply, finish_reason=row.finish_reason, max_tokens=row.max_tokens)
    return Fault("truncated", cut) if cut else None


def _judge_claim(row: Interaction) -> Fault | None:
    failure = find_failure(row.reply)
    if failure:
        return Fault("claims_success_but_fails", failure)
    if row.extra.get("errors"):
        return Fault("claims_success_but_fails", "the log holds errors for it")
    return None


def is_dropped(code: str, settings: DataSettings) -> bool:
    """Whether the settings drop rows with this fault. A row without a reply never trains."""
    if code in CAPTURE_CODES:
        return True
    return {
        "empty": True,
        "placeholder": settings.drop_placeholders,
        "truncated": settings.drop_truncated,
        "failed_status": settings.drop_failed,
        "claims_success_but_fails": settings.drop_failed,
    }[code]
