"""Interactions without secrets and personal data.

In: an interaction. Out: the same one with placeholders, and how many values of each kind stood in
it. All text that can reach a dataset goes through here: messages, reply, session, group, id.
"""

from collections import Counter
from typing import NamedTuple

from graftwork.records.interaction import Interaction, Message
from graftwork.text.redact import Redactor


class RedactedRow(NamedTuple):
    row: Interaction
    counts: dict[str, int]


def redact_row(row: Interaction, *, redactor: Redactor) -> RedactedRow:
    counts: Counter[str] = Counter()

    def clean(text: str) -> str:
        redacted = redactor.redact(text)
        counts.update(redacted.counts)
        return redacted.text

    messages = tuple(Message(role=message.role, content=clean(message.content)) for message in row.messages)
    cleaned = row.model_copy(
        update={
            "messages": messages,
            "reply": clean(row.reply),
            "id": clean(row.id),
            "session": None if row.session is None else clean(row.session),
            "group": None if row.group is None else clean(row.group),
        }
    )
    return RedactedRow(cleaned, dict(sorted(counts.items())))
