"""What people wrote or decided in place of a model's answer."""

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
