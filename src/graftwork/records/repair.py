"""Rows that a teacher answers again: what is planned, what it costs, and what became of each row."""

from typing import Literal

from graftwork.records.base import Record
from graftwork.records.interaction import Origin

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
