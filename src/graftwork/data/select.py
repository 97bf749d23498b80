"""From read rows to the rows worth learning from, every one that goes with its reason.

In: interactions and settings. Out: the kept rows, redacted, in the order of the logs, and a drop
for each other row. Pure: reads and writes no files. The audit counts with it and the preparation
works with it, so that the two never disagree.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from graftwork.data.judge import find_fault, is_dropped
from graftwork.data.redaction import redact_row
from graftwork.data.repeats import Repeat, find_conflicts, find_duplicates, find_near_duplicates
from graftwork.data.settings import DataSettings
from graftwork.records.dataset import Drop
from graftwork.records.interaction import Interaction, Message
from graftwork.text.redact import Redactor


@dataclass
class Selection:
    """What is left, what went and why, and how many were left after each step."""

    rows: list[Interaction]
    drops: list[Drop] = field(default_factory=list)
    kept_after: dict[str, int] = field(default_factory=dict)
    redactions: dict[str, int] = field(default_factory=dict)

    def drop(self, step: str, reasons: dict[int, str]) -> None:
        """Leave out the rows at these positions."""
        self.drops += [
            Drop(origin=self.rows[position].origin, step=step, reason=reason)
            for position, reason in sorted(reasons.items())
        ]
        self.rows = [row for position, row in enumerate(self.rows) if position not in reasons]
        self.kept_after[step] = len(self.rows)


Step = Callable[[Selection, DataSettings], None]


def select(rows: Sequence[Interaction], settings: DataSettings) -> Selection:
    """All steps in their order."""
    selection = Selection(rows=list(rows), kept_after={"read": len(rows)})
    for _, step in STEPS:
        step(selection, settings)
    return selection


def filter_rows(selection: Selection, settings: DataSettings) -> None:
    reasons = {}
    for position, row in enumerate(selection.rows):
        fault = find_fault(row, settings)
        if fault and is_dropped(fault.code, settings):
            reasons[position] = f"{fault.code}: {fault.reason}"
    selection.drop("filter", reasons)


def redact_rows(selection: Selection, settings: DataSettings) -> None:
    if settings.redact:
        redactor = Redactor()
        redacted = [redact_row(row, redactor=redactor) for row in selection.rows]
        counts: Counter[str] = Counter()
        for _, found in redacted:
            counts.update(found)
        selection.rows = [row for row, _ in redacted]
        selection.redactions = dict(sorted(counts.items()))
    if settings.system_prompt is not None:
        selection.rows = [_give_prompt(row, settings.system_prompt) for row in selection.rows]
    selection.kept_after["redact"] = len(selection.rows)


def drop_duplicates(selection: Selection, _settings: DataSettings) -> None:
    repeats = find_duplicates(selection.rows)
    selection.drop("duplicate", _name_kept(selection, repeats, "the same as"))


def drop_near_duplicates(selection: Selection, settings: DataSettings) -> None:
    repeats = find_near_duplicates(selection.rows, threshold=settings.near_duplicate)
    selection.drop("near_duplicate", _name_kept(selection, repeats, "nearly the same as"))


def drop_conflicts(selection: Selection, settings: DataSettings) -> None:
    if settings.conflicts == "keep_all":
        selection.drop("conflicting_answers", {})
        return
    repeats = find_conflicts(selection.rows, keep=settings.conflicts)
    selection.drop("conflicting_answers", _name_kept(selection, repeats, "other reply to the same prompt in"))


STEPS: tuple[tuple[str, Step], ...] = (
    ("filter", filter_rows),
    ("redact", redact_rows),
    # Before the duplicates: a reply that was given, corrected and given again is the last one logged.
    ("conflicting_answers", drop_conflicts),
    ("duplicate", drop_duplicates),
    ("near_duplicate", drop_near_duplicates),
)


def _name_kept(selection: Selection, repeats: Sequence[Repeat], words: str) -> dict[int, str]:
    return {repeat.position: f"{words} {selection.rows[repeat.kept].origin}" for repeat in repeats}


def _give_prompt(row: Interaction, prompt: str) -> Interaction:
    rest = tuple(message for message in row.messages if message.role != "system")
    return row.model_copy(update={"messages": (Message(role="system", content=prompt), *rest)})
