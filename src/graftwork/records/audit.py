"""What an audit of the logs found."""

from typing import Literal

from graftwork.records.base import Figure, Record
from graftwork.records.costs import UsageDay
from graftwork.records.interaction import Origin

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
    """What the calls used by day, role and model; empty in records older than the field."""
    lengths_counted: bool = False
    """Whether the tokens of rows were counted by a tokenizer; else they are estimated from characters."""

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.fit_to_train:
            return "fit to train on as it is"
        reasons = [finding.title for finding in self.findings if finding.severity == "blocker"]
        return f"must not be trained on as it is: {'; '.join(reasons)}"
