"""One logged exchange with a model, traceable to its file and line for good."""

from typing import Any, Literal

from pydantic import Field

from graftwork.records.base import Record

Role = Literal["system", "user", "assistant", "tool"]
RewardLevel = Literal["call", "trace"]


class Origin(Record):
    """Where a row came from: the file as the user named it, and the line counted from 1."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Message(Record):
    """One turn. Tool calls and reasoning are in `content`, in the tags that models are trained on."""

    role: Role
    content: str


class CaptureOrigin(Record):
    """The served exchange that a row was captured from, and the users' feedback on it."""

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
    `trace` ties the calls of one task; `reward_level` says whether the reward is of this call or of its
    whole trace. What the log does not state is None, never guessed.
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
    first_token_ms: float | None = None
    prompt_tokens: int | None = None
    """Tokens that the model read, including cached ones."""
    cached_tokens: int | None = None
    reply_tokens: int | None = None
    """Tokens that the model wrote, including reasoning."""
    cost: float | None = None
    """US dollars, as the log states them."""
    max_tokens: int | None = None
    rejected: str | None = None
    reward: float | None = None
    reward_level: RewardLevel | None = None
    trace: str | None = None
    split: str | None = None
    capture: CaptureOrigin | None = None
    extra: dict[str, Any] = {}

    @property
    def question(self) -> str:
        """The last turn of the user: what the reply answers."""
        return next((m.content for m in reversed(self.messages) if m.role == "user"), "")


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
    """The experiment that assigned the release at random; None without an experiment."""
    arm: Arm | None = None
    """What was drawn."""
    share: float | None = None
    """The share of sessions that the challenger gets in that experiment."""
    feedback: float | None = None
    """The users' latest feedback, from 0 (bad) to 1 (good). Filled in when captures are exported."""
    correction: str | None = None
    """The reply that a person wrote in its place, the last one. Filled in when captures are exported."""
    trace: str | None = None
    """The trace that another program sent: `release` is the model that it asked, `model` its agent."""
    cost: float | None = None
    """US dollars, as the trace states them."""
    cached_tokens: int | None = None


class Feedback(Record):
    """Feedback on one answer, redacted before it is stored. Nothing is ever overwritten."""

    capture: str
    at: str
    score: float = Field(ge=0, le=1)
    """From 0 (bad) to 1 (good)."""
    comment: str | None = None
    who: str | None = None
    correction: str | None = None
    """The right reply, as a person wrote it; the served reply itself confirms that one."""
