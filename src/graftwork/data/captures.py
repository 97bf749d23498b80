"""Which captured exchanges may be learned from, and which may be a reference for tests.

In: where a row was captured, its session, the settings. Out: why it is left out, or None; and whether a
person stands behind its reply. The same answer for the export, the audit and the preparation. Pure.
"""

from datetime import datetime
from typing import NamedTuple

from graftwork.data.settings import CaptureSettings
from graftwork.records.interaction import TRY_OUT_SESSION, CaptureOrigin

NEGATIVE, FILTERED, TRIED = "negative_feedback", "captures_filter", "tried_out"
CAPTURE_CODES = frozenset({NEGATIVE, FILTERED, TRIED})


class Refusal(NamedTuple):
    code: str
    reason: str


def is_negative(captured: CaptureOrigin, settings: CaptureSettings) -> bool:
    """Whether users said that the served reply is bad and nobody wrote a better one."""
    said = captured.feedback
    return not captured.corrected and said is not None and said < settings.negative_below


def is_confirmed(captured: CaptureOrigin, settings: CaptureSettings) -> bool:
    """Whether a person stands behind the reply: then it may be a reference for tests."""
    if captured.corrected:
        return True
    said = captured.feedback
    return settings.positive_confirms and said is not None and said >= settings.negative_below


def find_refusal(
    captured: CaptureOrigin, session: str | None, settings: CaptureSettings, *, judged: bool = True
) -> Refusal | None:
    """Why this exchange is left out. Without `judged`, feedback does not matter."""
    if session == TRY_OUT_SESSION:
        return Refusal(TRIED, "`graft run` asked a held-out question here to try the release out")
    if judged and is_negative(captured, settings):
        return Refusal(NEGATIVE, "users said that this reply is bad")
    return (
        _refuse_release(captured.release, settings)
        or _refuse_time(captured.at, settings)
        or _refuse_session(session, settings)
        or (_refuse_unrated(captured, settings) if judged else None)
    )


def _refuse_release(release: str, settings: CaptureSettings) -> Refusal | None:
    if not settings.releases or any(release.startswith(wanted) for wanted in settings.releases):
        return None
    return Refusal(FILTERED, "another release answered than those under data.captures.releases")


def _refuse_time(at: str, settings: CaptureSettings) -> Refusal | None:
    if settings.since is None and settings.until is None:
        return None
    try:
        moment = datetime.fromisoformat(at)
        early = settings.since is not None and moment < settings.since
        late = settings.until is not None and moment >= settings.until
    except (ValueError, TypeError):
        return Refusal(FILTERED, "it does not say when it was served, and data.captures asks for a time")
    if early or late:
        return Refusal(
            FILTERED, f"served {'before data.captures.since' if early else 'after data.captures.until'}"
        )
    return None


def _refuse_session(session: str | None, settings: CaptureSettings) -> Refusal | None:
    if settings.sessions and session not in settings.sessions:
        return Refusal(FILTERED, "a session that data.captures.sessions does not name")
    if session is not None and session in settings.skip_sessions:
        return Refusal(FILTERED, "a session that data.captures.skip_sessions names")
    return None


def _refuse_unrated(captured: CaptureOrigin, settings: CaptureSettings) -> Refusal | None:
    if settings.feedback == "positive" and captured.feedback is None and not captured.corrected:
        return Refusal(FILTERED, "nobody said whether it is good, and data.captures.feedback is `positive`")
    return None
