"""Rows that are answered again: what people wrote or decided, and what a teacher was asked."""

from typing import Literal

from pydantic import Field

from graftwork.records.base import Record
from graftwork.records.interaction import Message, Origin


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
    """Another answer to compare with: the adapter's, or another reviewer's."""

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
"""Of a plan: asked, answered before, same prompt as an earlier row, not asked. Of a run: accepted, refused by
a rule, no answer from the teacher, no budget left. The last two are asked again by the next run."""
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
"""The fault of rows that are added for a small role."""

CUT_OFF = "the answer was cut off"
"""How the reason of a refusal begins where the answer reached the limit of tokens."""


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
