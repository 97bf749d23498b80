"""Rows of logs: their audit, the dataset prepared from them, and rows whose answers were corrected."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pydantic import Field

from graftwork.records.base import Figure, Record
from graftwork.records.interaction import AnswerOrigin, CallUsage, CaptureOrigin, Message, Origin, UsageDay

Split = Literal["train", "validation", "test", "rl"]
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
"""Splits of every dataset. Prompts for reinforcement learning, if requested, are in `rl`."""


class RenderedTokens(NamedTuple):
    """`tokens[trained_from:]` is the reply and the token that ends its turn."""

    tokens: Sequence[int]
    trained_from: int


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
    """What the logged call used; None if the log states neither tokens nor cost."""


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
    rows_per_epoch: float
    """Training rows, each counted by its weight."""


Severity = Literal["blocker", "warning", "info"]
ClusterKind = Literal["duplicate", "near_duplicate", "conflicting_answers"]


class Example(Record):
    """A row that shows the finding, with an excerpt that holds no secret."""

    origin: Origin
    excerpt: str = ""


class Finding(Record):
    """One kind of fault: how often, where, what it does to training, which setting fixes it.

    `count` is exact; `rows` names the first of them. `reasons` counts how the fault was recognized.
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
    """How many rows fall between two neighbors of the audit's `length_edges`; the last has no end."""

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
    """The field of a JSON reply; None if the reply itself is the label."""
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


class Correction(Record):
    """A corrected answer of a capture: a training row, and a pair with the served answer as the loser."""

    capture: str
    at: str
    reviewer: str | None = None
    release: str
    messages: tuple[Message, ...]
    served: str
    corrected: str
    prompt_hash: str


class CorrectionConflict(Record):
    """Several people corrected the same prompt, and not in the same words. The last one is trained on."""

    prompt_hash: str
    question: str
    corrections: tuple[Correction, ...]


class Corrections(Record):
    corrections: tuple[Correction, ...]
    conflicts: tuple[CorrectionConflict, ...]


class JudgeLabel(Record):
    """What a person thinks of an answer, from 0 (bad) to 1 (good): what a judge is held against."""

    messages: tuple[Message, ...]
    answer: str
    score: float = Field(ge=0, le=1)
    at: str
    reviewer: str | None = None
    capture: str = ""
    source: Literal["score", "correction", "review"] = "score"
    instead_of: str | None = None
    """The answer that the person replaced by this one."""
    session: str | None = None
    group: str | None = None
    item: str = ""
    """The capture or the row that the person looked at."""


ReviewAction = Literal["accept", "reject", "edit", "skip", "undo"]
ReviewReason = Literal[
    "disagreement", "low_reward", "gate_failure", "wrong_label", "drift", "rare_group", "unrated"
]


def key_of_capture(capture: str) -> str:
    """The key of the item that a capture is in the queue."""
    return f"capture:{capture}"


class OtherAnswer(Record):
    """Another answer to the prompt of a review item, and who or what gave it."""

    reply: str
    capture: str = ""
    origin: Origin | None = None
    reviewer: str = ""
    question: str = ""
    """What was asked, if it is not the same letter for letter."""


class ReviewItem(Record):
    """A row to review. `key` identifies its content, so that no reviewer sees it twice."""

    key: str
    kind: Literal["capture", "row"]
    messages: tuple[Message, ...]
    reply: str
    reasons: dict[ReviewReason, str]
    """Why it is worth looking at, each with a sentence."""
    group: str | None = None
    origin: Origin | None = None
    input_hash: str = ""
    capture: str = ""
    alike: tuple[str, ...] = ()
    """Other captures with the same prompt and reply: what is decided holds for them too."""
    other: str = ""
    """What the adapter answers."""
    others: tuple[OtherAnswer, ...] = ()
    """The other answers to the same or nearly the same prompt."""

    @property
    def keys(self) -> frozenset[str]:
        """Its key, and those under which others may see it: of captures with the same prompt and reply."""
        return frozenset((self.key, *(key_of_capture(capture) for capture in self.alike)))


class ReviewDecision(Record):
    """One decision. Decisions are only added; `undo` takes back the last one about the same item."""

    item: ReviewItem
    action: ReviewAction
    who: str
    at: str
    reply: str | None = None
    """The edited reply."""


RepairState = Literal[
    "ask", "cached", "shared", "skipped", "accepted", "refused", "unanswered", "over_budget"
]
"""In a plan: to be asked, cached, same prompt as an earlier row, skipped. In a run: accepted, refused by a
rule, no answer from the teacher, over budget. The last two are retried by the next run.
"""
UNDECIDED: tuple[RepairState, ...] = ("unanswered", "over_budget")


class RepairRow(Record):
    """One row of the log, or one row to be added for a small role. Tokens and cost are estimates."""

    origin: Origin
    group: str | None = None
    fault: str
    reason: str
    prompt_hash: str = ""
    state: RepairState
    why: str = ""
    """Why the row was skipped, refused or not answered."""
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float | None = None


class TeacherSpending(Record):
    """What the teacher was paid for. `lost` are requests whose answers a kill lost: they count as answered in
    full. `cost` is None without prices."""

    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    lost: int = 0
    cost: float | None = None


class RepairPlan(Record):
    """What a repair would ask, before anything is asked."""

    teacher: str
    faults: dict[str, int]
    """Rows by fault."""
    rows: tuple[RepairRow, ...]
    prompts: int
    """Distinct prompts to ask; rows with the same prompt share an answer."""
    requests: int
    cached: int
    tokens_in: int
    tokens_out: int
    tokens_out_at_most: int
    cost: float | None
    cost_at_most: float | None
    usable: int
    """Usable rows of the log now."""
    small_groups: dict[str, int] = {}
    """Roles with few usable rows: `--augment role=NAME` adds some."""
    spent: TeacherSpending = TeacherSpending()
    price: str = ""
    """The prices that the cost is computed with, and where they are from; empty without prices."""
    limits: tuple[str, ...] = ()
    """Budgets that would not suffice for every request."""
    overlong: int = 0
    """Answers that probably make rows which `graft data prepare` drops as longer than data.max_tokens."""


AUGMENT = "augment"
"""The fault code of rows that are added for a small role."""

CUT_OFF = "the answer was cut off"
"""Beginning of the refusal reason if the answer reached the token limit."""


class RepairOutcome(Record):
    """What became of each row. `written` rows are in `file`."""

    teacher: str
    file: str
    rows: tuple[RepairRow, ...]
    written: int
    states: dict[str, int]
    spent: TeacherSpending
    usable_before: int
    usable_after: int | None = None
    """Usable rows of the logs with the repaired ones."""
    overlong: int = 0
    """Accepted rows that `graft data prepare` probably drops as longer than data.max_tokens."""
    in_logs: bool
    """Whether data.logs names the file, so that `graft data prepare` reads it."""

    @property
    def undecided(self) -> int:
        return sum(self.states.get(state, 0) for state in UNDECIDED)
