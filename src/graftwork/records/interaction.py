"""One logged exchange with a model, traceable to its file and line for good."""

from typing import Any, Literal

from graftwork.records.base import Record

Role = Literal["system", "user", "assistant", "tool"]


class Origin(Record):
    """Where a row came from: the file as the user named it, and the line counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Message(Record):
    """One turn. Tool calls and reasoning stand in `content`, in the tags that models are trained on."""

    role: Role
    content: str


class CaptureOrigin(Record):
    """The served exchange that a row was captured from, and what users said of it."""

    id: str
    release: str
    at: str
    feedback: float | None = None
    corrected: bool = False
    """Whether a person wrote or confirmed the reply of the row; otherwise the release wrote it."""


class Interaction(Record):
    """What was asked (`messages`), what was answered (`reply`), and what the log says about it.

    `group` is the role of the agent and `domain` its subject; `session` ties exchanges of one
    conversation; `stage` is the place in a curriculum. `rejected` is the reply that lost against
    `reply` in a preference pair, `reward` a judgement of the reply from outside, `split` the side
    that already divided data puts the row on, `capture` the served exchange that it was captured from.
    What the log does not state is None, never guessed.
    """

    id: str
    origin: Origin
    messages: tuple[Message, ...]
    reply: str
    status: str | None = None
    finish_reason: str | None = None
    group: str | None = None
    domain: str | None = None
    session: str | None = None
    stage: int | None = None
    model: str | None = None
    duration_ms: float | None = None
    max_tokens: int | None = None
    rejected: str | None = None
    reward: float | None = None
    split: str | None = None
    capture: CaptureOrigin | None = None
    extra: dict[str, Any] = {}

    @property
    def question(self) -> str:
        """The last turn of the user: what the reply answers."""
        return next((m.content for m in reversed(self.messages) if m.role == "user"), "")
