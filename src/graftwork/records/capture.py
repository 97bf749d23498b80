"""What the endpoint keeps of each exchange, so that it can become data again, and what users said of it."""

from typing import Any, Literal

from pydantic import Field

from graftwork.records.base import Record

Arm = Literal["champion", "challenger"]

TRY_OUT_SESSION = "try-out"
"""The session in which `graft run` asks a new release held-out questions: no data for training."""


class Capture(Record):
    """One served exchange, redacted before it is kept."""

    id: str
    at: str
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
    dealt: str | None = None
    """The experiment that drew by lot which release answers; None where nobody drew."""
    arm: Arm | None = None
    """What was drawn."""
    share: float | None = None
    """The share of sessions that the challenger gets in that experiment."""
    feedback: float | None = None
    """What users said of it last, from 0 (bad) to 1 (good). Filled in when captures are exported."""
    correction: str | None = None
    """The reply that a person wrote in its place, the last one. Filled in when captures are exported."""


class Feedback(Record):
    """What somebody said of one answer, redacted before it is kept. Nothing is ever overwritten."""

    capture: str
    at: str
    score: float = Field(ge=0, le=1)
    """From 0 (bad) to 1 (good)."""
    comment: str | None = None
    who: str | None = None
    correction: str | None = None
    """The right reply, as a person wrote it; the served reply itself confirms that one."""
