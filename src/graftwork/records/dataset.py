"""A prepared dataset: rows rendered to tokens, the trained span marked, and the proof of both."""

from typing import Any, Literal

from graftwork.records.base import Record
from graftwork.records.costs import CallUsage
from graftwork.records.interaction import AnswerOrigin, CaptureOrigin, Message, Origin

Split = Literal["train", "validation", "test", "rl"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
"""Splits of every dataset. Prompts for reinforcement learning, if requested, are in `rl`."""


class Row(Record):
    """One rendered interaction. `tokens[trained_from:]` is the reply and its end-of-turn token.

    `input_hash` is the hash of the log line that it was read from; `weight` says how often it is
    trained on, `stage` how early.
    """

    id: str
    origin: Origin
    messages: tuple[Message, ...]
    reply: str
    tokens: tuple[int, ...]
    trained_from: int
    group: str | None = None
    domain: str | None = None
    session: str | None = None
    stage: int | None = None
    weight: float = 1.0
    duration_ms: float | None = None
    rejected: str | None = None
    reward: float | None = None
    input_hash: str = ""
    capture: CaptureOrigin | None = None
    answered: AnswerOrigin | None = None
    usage: CallUsage | None = None
    """What the logged call used; None where the log states neither tokens nor cost."""


class InputFile(Record):
    file: str
    sha256: str
    rows: int


class Drop(Record):
    """A row that was left out, and the rule that left it out."""

    origin: Origin
    step: str
    reason: str
    input_hash: str = ""


class Shard(Record):
    """One file of rows."""

    file: str
    rows: int
    sha256: str


class SplitSummary(Record):
    """`lengths` counts rows by their number of tokens."""

    rows: int
    groups: int
    tokens: int
    trained_tokens: int
    longest: int
    shards: tuple[Shard, ...] = ()
    lengths: dict[int, int] = {}

    def spread_lengths(self) -> tuple[int, ...]:
        """The length of every row, shortest first."""
        return tuple(length for length, rows in sorted(self.lengths.items()) for _ in range(rows))


class Packing(Record):
    """How the training rows fill sequences of `length` tokens."""

    length: int
    sequences: int
    fill: float
    file: str
    sha256: str


class Dataset(Record):
    """The manifest, written last. `content_hash` covers it, and through its hashes every row.

    `model` is the one of the project's models that this dataset is for. `dropped` counts the rows
    that were left out by step; each is in the file `drops` with its reason.
    """

    content_hash: str
    model: str = "main"
    base: str
    base_fingerprint: str
    template_fingerprint: str
    tokenizer_fingerprint: str
    inputs: tuple[InputFile, ...]
    splits: dict[Split, SplitSummary]
    packing: Packing | None = None
    kept_after: dict[str, int]
    dropped: dict[str, int] = {}
    drops: Shard | None = None
    redactions: dict[str, int]
    settings: dict[str, Any]


class SubsetSummary(Record):
    """Row counts of one model. `stages` counts training rows, replayed ones included."""

    model: str
    own: int
    replayed: int
    rl: int
    validation: int
    test: int
    stages: dict[int, int]
    without_stage: int
    rows_an_epoch: float
    """Training rows, each counted by its weight."""
