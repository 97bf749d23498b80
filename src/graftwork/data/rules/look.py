"""All rules that can see their fault in one row, over that row.

In: the row as it was logged, its redacted twin, and what is known beside it. Out: notes. Knows no
other rows; the same row gives the same notes for as long as the sight is the same.
"""

from collections.abc import Sequence
from types import ModuleType

from graftwork.data.judge import CODES
from graftwork.data.redaction import RedactedRow
from graftwork.data.rules import control, foreign, judged, language, length, private, prompt
from graftwork.data.rules.note import Note, Sight
from graftwork.records.interaction import Interaction

ROW_RULES: tuple[ModuleType, ...] = (judged, prompt, private, language, control, length, foreign)


def look(raw: Interaction, redacted: RedactedRow, *, sight: Sight) -> list[Note]:
    """What is judged is the raw row; what is quoted comes from the redacted one."""
    return [note for rule in ROW_RULES for note in rule.look(raw, redacted, sight=sight)]


def judgement(notes: Sequence[Note]) -> Note | None:
    """What the judge said of the row: its note comes first. The same as asking the judge once more."""
    return notes[0] if notes and notes[0].code in CODES else None
