"""One logged exchange with a model, traceable to its file and line for good; and what calls cost."""

from collections.abc import Sequence
from datetime import date
from typing import Any, Literal

from pydantic import Field

from graftwork.records.base import Figure, Record

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


INTERRUPTED = "interrupted"
"""The finish reason of a shadow answer that made way for a user."""
CORRECTED_FIELDS = ("corrected_by", "corrected_at")
TRACE_FIELDS = ("trace", "cost", "cached_tokens")
ESCALATED_FIELDS = ("escalated_from", "failed_check", "rejected", "upstream")
CHAIN_FIELDS = ("chain", "chain_trace", "shadow_of")


class CaptureOrigin(Record):
    """The served exchange that a row was captured from, and the users' feedback on it."""

    id: str
    release: str
    at: str
    upstream: str | None = None
    """The model of an endpoint that is not ours, if that replied: its reply is like one of any other log."""
    feedback: float | None = None
    corrected: bool = False
    """Whether a person wrote or confirmed the reply of the row; otherwise the release wrote it."""
    corrected_by: str | None = None
    corrected_at: str | None = None


class AnswerOrigin(Record):
    """Who wrote the reply of a row in place of the logged one, or decided about it."""

    by: Literal["teacher", "reviewer"]
    name: str
    """The model of the teacher, or the id of the reviewer."""
    at: str
    prompt_hash: str
    """The hash of the messages that were answered."""
    replaces: str = ""
    """The hash of the log line whose row this one replaces; empty for a new row."""
    reason: str = ""
    """The fault of the replaced row, or why a row was added."""
    rejected: bool = False
    """Whether the reviewer rejected the row without writing a better reply."""


class Interaction(Record):
    """What was asked (`messages`), what was answered (`reply`), and what the log says about it.

    `group` is the role of the agent and `domain` its subject; `session` ties exchanges of one
    conversation; `stage` is the place in a curriculum. `rejected` is the reply that lost against
    `reply` in a preference pair, `reward` a judgement of the reply from outside, `split` the side
    that already divided data puts the row on, `capture` the served exchange that it was captured from,
    `answered` who wrote the reply afterwards. `turn_weights` has a weight for each assistant turn, the reply
    last: 0 is not trained on, None is not stated. `trace` ties the calls of one task; `reward_level` says
    whether the reward is of this call or of its whole trace. What the log does not state is None, never
    guessed.
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
    answered: AnswerOrigin | None = None
    turn_weights: tuple[float | None, ...] | None = None
    extra: dict[str, Any] = {}

    @property
    def question(self) -> str:
        """The last turn of the user: what the reply answers."""
        return find_question(self.messages)


def find_question(messages: Sequence[Message]) -> str:
    """The last turn of the user; empty if there is none."""
    return next((message.content for message in reversed(messages) if message.role == "user"), "")


def user_texts(messages: Any) -> list[str]:
    """The texts of the user's turns of a request, which may be of any form; of parts, those that are text."""
    if not isinstance(messages, list):
        return []
    turns = [turn for turn in messages if isinstance(turn, dict) and turn.get("role") == "user"]
    return [text for turn in turns if (text := _text_of(turn.get("content"))) is not None]


def _text_of(content: Any) -> str | None:
    if not isinstance(content, list):
        return content if isinstance(content, str) else None
    texts = [part.get("text") for part in content if isinstance(part, dict)]
    stated = [text for text in texts if isinstance(text, str)]
    return "".join(stated) if stated else None


Arm = Literal["champion", "challenger"]

TRY_OUT_SESSION = "try-out"
"""The session in which `graft run` asks a new release held-out questions: no data for training."""
CHAT_SESSION = "graft-chat-"
"""How the sessions of `graft chat` and of the playground begin. Their corrections may be trained on."""


def is_from_users(session: str | None) -> bool:
    """Whether users sent the requests of this session: the team's own questions say nothing about traffic."""
    return session is None or not (session == TRY_OUT_SESSION or session.startswith(CHAT_SESSION))


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
    corrected_by: str | None = None
    """Who wrote it, and when; stated only if it is known."""
    corrected_at: str | None = None
    trace: str | None = None
    """The trace that another program sent: `release` is the model that it asked, `model` its agent."""
    cost: float | None = None
    """US dollars, as the trace states them."""
    cached_tokens: int | None = None
    user: str | None = None
    """Who asked, or a pseudonym of it, so that their captures can be deleted. Never exported."""
    escalated_from: str | None = None
    """The small model's release whose answer failed `failed_check`; `release` answered instead."""
    failed_check: str | None = None
    """The check of `serve.escalate` that the answer of the release that was asked failed."""
    rejected: str | None = None
    """The answer of `escalated_from`; None if it did not end."""
    chain: str | None = None
    """The step of a chain, as `chain/step`; the exchange is one of several with the same `chain_trace`."""
    chain_trace: str | None = None
    upstream: str | None = None
    """The model of the endpoint in `serve.failover` that replied, unless its settings say that it is ours or
    it replied where a small model had failed.
    """
    shadow_of: str | None = None
    """The capture of the request that this is a copy of: no user got this answer."""

    @property
    def asked_release(self) -> str:
        """The release that was asked, even where a large model answered in its place."""
        return self.escalated_from or self.release

    @property
    def own_reply(self) -> str | None:
        """What the release that was asked answered; None if unknown to its end."""
        return self.reply if self.escalated_from is None else self.rejected

    def to_line(self) -> str:
        """The capture as a line of a log; what is not stated is left out."""
        optional = (*CORRECTED_FIELDS, *TRACE_FIELDS, *ESCALATED_FIELDS, *CHAIN_FIELDS)
        unknown = {name for name in optional if getattr(self, name) is None}
        return self.model_dump_json(exclude={*unknown, "user"})

    def to_journal(self) -> str:
        """The capture as a line that holds all of it."""
        return self.model_dump_json()


class Feedback(Record):
    """Feedback on one answer, redacted before it is stored. Nothing is ever overwritten."""

    capture: str
    at: str
    score: float = Field(ge=0, le=1)
    """From 0 (bad) to 1 (good)."""
    comment: str | None = None
    who: str | None = None
    correction: str | None = None
    """The correct reply, as a person wrote it; the served reply itself confirms that one."""


MILLION = 1e6


class TokenPrice(Record):
    """What the provider of a model asks for a million tokens, in US dollars."""

    model: str
    provider: str = ""
    usd_per_million_input: float
    usd_per_million_output: float
    usd_per_million_cached: float | None = None
    """Price of input tokens that the provider reads from its cache; None if they cost as much as others."""
    aliases: tuple[str, ...] = ()
    source: str = ""
    dated: str = ""

    def cost_of(self, prompt_tokens: float, reply_tokens: float, cached_tokens: float = 0.0) -> float:
        """In US dollars; cached tokens are part of the prompt tokens."""
        cached_price = self.usd_per_million_cached
        if cached_price is None:
            cached_price = self.usd_per_million_input
        cached = min(cached_tokens, prompt_tokens)
        read = (prompt_tokens - cached) * self.usd_per_million_input + cached * cached_price
        return (read + reply_tokens * self.usd_per_million_output) / MILLION


class CallUsage(Record):
    """Usage of one logged call, as far as the log states it."""

    model: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    reply_tokens: int | None = None
    cost: float | None = None
    """US dollars."""

    @property
    def tokens(self) -> int | None:
        """Read and written; None if the log does not state both."""
        if self.prompt_tokens is None or self.reply_tokens is None:
            return None
        return self.prompt_tokens + self.reply_tokens


class UsageDay(Record):
    """The calls of one role to one model on one day, dropped rows included: they cost as well."""

    day: date | None
    """None if the log does not state when."""
    group: str | None = None
    model: str | None = None
    calls: int
    prompt_characters: int
    reply_characters: int
    counted: int = 0
    """Calls whose tokens the log states …"""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    reply_tokens: int = 0
    uncounted_prompt_characters: int = 0
    uncounted_reply_characters: int = 0
    """… and the characters of the calls whose tokens it does not."""
    costed: int = 0
    """Calls whose cost the log states."""
    cost: float = 0.0
    unpriced_prompt_tokens: int = 0
    unpriced_cached_tokens: int = 0
    unpriced_reply_tokens: int = 0
    """Tokens of calls whose tokens the log states and whose cost it does not."""


class Hosting(Record):
    """The cheapest offer that serves the model at the logged load, by the figures of `graft plan serve`."""

    machine: str
    place: str
    usd_per_month: Figure
    users: int
    """Requests that are answered at the same time."""
    answer_seconds: Figure
    weights: str
    source: str
    dated: str
    stale: bool = False
    sentence: str


class Savings(Record):
    """What the logged model costs a month, what hosting the small one costs, and the difference."""

    calls_per_month: Figure
    logged_usd_per_month: Figure
    hosting: Hosting | None
    saved_usd_per_month: Figure | None
    """None if the cost of the log or of the hosting is not known."""
    confidence: float
    days: int
    models: tuple[str, ...]
    """The logged models, the most used first."""
    prices: tuple[TokenPrice, ...] = ()
    """The prices that calls without a logged cost were counted with."""
    estimated: float = 0.0
    """The share of calls whose tokens were estimated from their characters."""
    unpriced: float = 0.0
    """The share of calls without any price: they are not in the cost."""
    sentence: str
    notes: tuple[str, ...] = ()
