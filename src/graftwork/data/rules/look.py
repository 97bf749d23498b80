"""All rules that can see their fault in one row, over that row.

In: the row as it was logged, its redacted twin, and what is known beside it. Out: notes. Knows no
other rows; the same row gives the same notes for as long as the sight is the same.
"""

from collections.abc import Sequence

from graftwork.data.judge import CODES
from graftwork.data.redaction import RedactedRow
from graftwork.data.rules.control import check_control_tokens
from graftwork.data.rules.foreign import check_reasoning
from graftwork.data.rules.judged import check_reply
from graftwork.data.rules.language import check_encoding
from graftwork.data.rules.length import check_length
from graftwork.data.rules.note import Note, Sight
from graftwork.data.rules.private import check_private_data
from graftwork.data.rules.prompt import check_prompt
from graftwork.records.interaction import Interaction

ROW_CHECKS = (
    check_reply,
    check_prompt,
    check_private_data,
    check_encoding,
    check_control_tokens,
    check_length,
    check_reasoning,
)


def check_row(raw: Interaction, redacted: RedactedRow, *, sight: Sight) -> list[Note]:
    """What is judged is the raw row; what is quoted comes from the redacted one."""
    return [note for check in ROW_CHECKS for note in check(raw, redacted, sight=sight)]


def find_verdict(notes: Sequence[Note]) -> Note | None:
    """What the judge said of the row: its note comes first. The same as asking the judge once more."""
    return notes[0] if notes and notes[0].code in CODES else None
