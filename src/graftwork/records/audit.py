"""What an audit of the logs found."""

from typing import Literal

from graftwork.records.base import Record
from graftwork.records.interaction import Origin

Severity = Literal["blocker", "warning", "info"]


class Example(Record):
    """A row that shows the finding, with an excerpt that holds no secret."""

    origin: Origin
    excerpt: str = ""


class Finding(Record):
    """One kind of fault: how often, where, what it does to training, which setting mends it."""

    code: str
    severity: Severity
    count: int
    title: str
    effect: str
    fix: str
    rows: tuple[Origin, ...] = ()
    examples: tuple[Example, ...] = ()


class LengthSummary(Record):
    """How long prompts and replies are, in characters."""

    smallest: int
    median: int
    p95: int
    largest: int


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
