"""What the endpoint keeps of each exchange, so that it can become data again."""

from typing import Any

from graftwork.records.base import Record


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
