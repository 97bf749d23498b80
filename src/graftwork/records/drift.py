"""How far live prompts have moved from the training data."""

from graftwork.records.base import Record


class DriftShare(Record):
    """Prompts that are unlike any training prompt, with the bounds of the 95 % interval."""

    prompts: int
    unlike: int
    share: float
    low: float
    high: float


class GroupDrift(DriftShare):
    """The same for the prompts that are nearest to training rows of one role."""

    group: str


class PromptDrift(Record):
    """`expected` is the share that is unlike without any drift. Without a share, `why_not` says why."""

    dataset: str = ""
    all: DriftShare | None = None
    expected: float = 0.0
    by_group: tuple[GroupDrift, ...] = ()
    examples: tuple[str, ...] = ()
    """The most unlike prompts, shortened. Captures are redacted before they are stored."""
    due: bool = False
    reason: str = ""
    """Why a retraining is due or not."""
    why_not: str = ""
