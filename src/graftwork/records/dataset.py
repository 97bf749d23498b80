"""What an audit of the logs found, and the dataset that was prepared from them."""

from typing import Any, Literal

from graftwork.records.base import Figure, Record
from graftwork.records.interaction import AnswerOrigin, CallUsage, CaptureOrigin, Message, Origin, UsageDay

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


Severity = Literal["blocker", "warning", "info"]
ClusterKind = Literal["duplicate", "near_duplicate", "conflicting_answers"]


class Example(Record):
    """A row that shows the finding, with an excerpt that holds no secret."""

    origin: Origin
    excerpt: str = ""


class Finding(Record):
    """One kind of fault: how often, where, what it does to training, which setting fixes it.

    `count` is exact; `rows` names the first of them. `reasons` counts how the fault was recognised.
    """

    code: str
    severity: Severity
    count: int
    title: str
    effect: str
    fix: str
    rows: tuple[Origin, ...] = ()
    examples: tuple[Example, ...] = ()
    reasons: dict[str, int] = {}


class NotLookedFor(Record):
    """A rule that needs something that the logs do not state."""

    code: str
    why: str


class LengthSummary(Record):
    """How long prompts and replies are, in characters."""

    smallest: int
    median: int
    p95: int
    largest: int


class LengthHistogram(Record):
    """How many rows fall between two neighbours of the audit's `length_edges`; the last has no end."""

    of: Literal["prompt", "reply"]
    group: str | None = None
    counts: tuple[int, ...]


class ReadableRow(Record):
    """A row to be read by people: redacted, and shortened where it is long."""

    origin: Origin
    question: str
    reply: str
    group: str | None = None
    model: str | None = None


class Cluster(Record):
    """Rows that repeat or contradict each other: how many, the first of them, and what some say."""

    kind: ClusterKind
    size: int
    rows: tuple[Origin, ...]
    shown: tuple[ReadableRow, ...]


class SuspiciousLabel(Record):
    """A row whose label disagrees with what the rest of the log says of such a prompt."""

    origin: Origin
    field: str | None
    """The field of a JSON reply; None where the reply itself is the label."""
    label: str
    suggested: str
    score: float
    """How much more the rest of the log supports the suggested label; from 0 to about 1."""
    question: str
    near: Origin | None = None
    """A row with nearly the same prompt that has another label."""


class FieldNoise(Record):
    """The estimated share of wrong labels, of the reply or of one field of it."""

    field: str | None
    rows: int
    labels: int
    rate: Figure
    """With its 95 % interval."""
    judged: int
    """Rows that the estimate rests on: those whose label the rest of the log predicts clearly."""
    agreement: float
    """Share of all rows whose label is predicted from the other rows."""
    near_duplicates: int = 0
    """Pairs of rows with nearly the same prompt …"""
    contradictions: int = 0
    """… and those among them that have different labels."""


class LabelNoise(Record):
    """What is known about wrong labels. Without fields nothing was estimated, and `why_not` says why."""

    fields: tuple[FieldNoise, ...] = ()
    suspicious: tuple[SuspiciousLabel, ...] = ()
    """To be reviewed, the most suspicious first."""
    not_estimated: dict[str, str] = {}
    """Fields that look like labels and cannot be judged, with the reason."""
    why_not: str = ""


class Audit(Record):
    """The answer to: may this be trained on as it is?"""

    files: tuple[str, ...]
    rows: int
    readable: int
    usable: int
    fit_to_train: bool
    findings: tuple[Finding, ...]
    groups: dict[str, int]
    prompt_length: LengthSummary
    reply_length: LengthSummary
    seconds: float = 0.0
    not_looked_for: tuple[NotLookedFor, ...] = ()
    usable_groups: dict[str, int] = {}
    domains: dict[str, int] = {}
    models: dict[str, int] = {}
    length_edges: tuple[int, ...] = ()
    length_histograms: tuple[LengthHistogram, ...] = ()
    clusters: tuple[Cluster, ...] = ()
    examples: tuple[ReadableRow, ...] = ()
    label_noise: LabelNoise = LabelNoise()
    usage: tuple[UsageDay, ...] = ()
    """What the calls used by day, role and model."""
    lengths_counted: bool = False
    """Whether the tokens of rows were counted by a tokenizer; else they are estimated from characters."""

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.fit_to_train:
            return "fit to train on as it is"
        reasons = [finding.title for finding in self.findings if finding.severity == "blocker"]
        return f"must not be trained on as it is: {'; '.join(reasons)}"
