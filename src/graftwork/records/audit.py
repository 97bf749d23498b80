"""What an audit of the logs found."""

from typing import Literal

from graftwork.records.base import Record
from graftwork.records.interaction import Origin

Severity = Literal["blocker", "warning", "info"]
ClusterKind = Literal["duplicate", "near_duplicate", "conflicting_answers"]


class Example(Record):
    """A row that shows the finding, with an excerpt that holds no secret."""

    origin: Origin
    excerpt: str = ""


class Finding(Record):
    """One kind of fault: how often, where, what it does to training, which setting mends it.

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

    @property
    def verdict(self) -> str:
        """One sentence."""
        if self.fit_to_train:
            return "fit to train on as it is"
        reasons = [finding.title for finding in self.findings if finding.severity == "blocker"]
        return f"must not be trained on as it is: {'; '.join(reasons)}"
