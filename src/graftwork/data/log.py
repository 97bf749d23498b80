"""A log as the audit's rules look at it: read once, judged once, selected once.

In: paths and settings. Out: a `Log`. Its rows are redacted whatever the settings say, since all
that the rules quote comes from them.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from graftwork.data.judge import Fault, find_fault
from graftwork.data.read import ReadFault, find_files, read_file
from graftwork.data.redaction import RedactedRow, redact_row
from graftwork.data.select import STEPS, Selection
from graftwork.data.settings import DataSettings
from graftwork.data.split import group_rows
from graftwork.records.interaction import Interaction
from graftwork.text.redact import Redactor


@dataclass(frozen=True)
class Log:
    """`rows` and `judged` run in step. `before` holds the rows as each step of the selection met them."""

    files: tuple[str, ...]
    faults: tuple[ReadFault, ...]
    rows: tuple[RedactedRow, ...]
    judged: tuple[Fault | None, ...]
    before: dict[str, list[Interaction]]
    selection: Selection
    settings: DataSettings

    @cached_property
    def question_groups(self) -> list[str]:
        """The group of each row that passed the filter, repeats included."""
        return group_rows(self.before["conflicting_answers"], threshold=self.settings.question_similarity)

    def with_fault(self, code: str) -> list[tuple[Interaction, str]]:
        """The rows that were judged so, each with the reason."""
        return [
            (redacted.row, fault.reason)
            for redacted, fault in zip(self.rows, self.judged, strict=True)
            if fault and fault.code == code
        ]


def read_log(paths: Iterable[str], *, settings: DataSettings, root: Path = Path()) -> Log:
    files = find_files(paths, root=root)
    faults: list[ReadFault] = []
    raw: list[Interaction] = []
    for name in files:
        for result in read_file(name, root=root):
            if isinstance(result, ReadFault):
                faults.append(result)
            else:
                raw.append(result)
    redactor = Redactor()
    selection = Selection(rows=list(raw), kept_after={"read": len(raw)})
    before = {}
    for name, step in STEPS:
        before[name] = list(selection.rows)
        step(selection, settings)
    return Log(
        files=files,
        faults=tuple(faults),
        rows=tuple(redact_row(row, redactor=redactor) for row in raw),
        judged=tuple(find_fault(row, settings) for row in raw),
        before=before,
        selection=selection,
        settings=settings,
    )
