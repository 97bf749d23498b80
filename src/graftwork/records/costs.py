"""What calls cost: prices of tokens, the usage that logs state day by day, and what a small model saves."""

from datetime import date

from graftwork.records.base import Figure, Record

MILLION = 1e6


class TokenPrice(Record):
    """What the provider of a model asks for a million tokens, in US dollars."""

    model: str
    provider: str = ""
    usd_per_million_input: float
    usd_per_million_output: float
    usd_per_million_cached: float | None = None
    """Of input tokens that the provider reads from its cache; None where they cost as much as others."""
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
    """What one logged call used, as far as the log states it."""

    model: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    reply_tokens: int | None = None
    cost: float | None = None
    """US dollars."""

    @property
    def tokens(self) -> int | None:
        """Read and written; None where the log does not state both."""
        if self.prompt_tokens is None or self.reply_tokens is None:
            return None
        return self.prompt_tokens + self.reply_tokens


class UsageDay(Record):
    """The calls of one role to one model on one day, dropped rows included: they cost as well."""

    day: date | None
    """None where the log does not state when."""
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
    """None where the cost of the log or of the hosting is not known."""
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
