"""A prepared dataset: rows rendered to tokens, the trained span marked, and the proof of both."""

from typing import Any, Literal

from graftwork.records.base import Record
from graftwork.records.interaction import Message, Origin

Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")


class Row(Record):
    """One rendered interaction. `tokens[trained_from:]` is the reply and its end-of-turn token."""

    id: str
    origin: Origin
    messages: tuple[Message, ...]
    reply: str
    tokens: tuple[int, ...]
    trained_from: int
    group: str | None = None
    session: str | None = None
    duration_ms: float | None = None


class InputFile(Record):
    file: str
    sha256: str
    rows: int


class Drop(Record):
    """A row that was left out, and the rule that left it out."""

    origin: Origin
    step: str
    reason: str


class SplitSummary(Record):
    rows: int
    groups: int
    tokens: int
    trained_tokens: int
    longest: int
    sha256: str


class Dataset(Record):
    """The manifest, written last. `content_hash` covers all rows of all splits."""

    content_hash: str
    base: str
    base_fingerprint: str
    template_fingerprint: str
    tokenizer_fingerprint: str
    inputs: tuple[InputFile, ...]
    splits: dict[Split, SplitSummary]
    lengths: dict[Split, tuple[int, ...]]
    kept_after: dict[str, int]
    drops: tuple[Drop, ...]
    redactions: dict[str, int]
    settings: dict[str, Any]
