"""Prompts with made-up content in them."""

from collections.abc import Iterator

from graftwork.data.redaction import RedactedRow
from graftwork.data.rules.facts import Facts
from graftwork.data.rules.finding import count_rows, find_noted
from graftwork.data.rules.note import Note, Sight, show_around
from graftwork.records.audit import Finding
from graftwork.records.interaction import Interaction
from graftwork.text.shape import find_stand_in, holds_stand_in


def check_prompt(raw: Interaction, redacted: RedactedRow, *, sight: Sight) -> Iterator[Note]:
    if holds_stand_in(raw.question) and not find_stand_in(raw.reply):
        yield Note(
            "placeholder_prompt", "made-up content in the prompt", show_around(redacted.row.question, "[")
        )


def find_placeholder_prompts(facts: Facts) -> Iterator[Finding]:
    count = facts.tally["placeholder_prompt"].count
    if count:
        yield find_noted(
            facts,
            "placeholder_prompt",
            "warning",
            title=count_rows(count, "have made-up content in the prompt"),
            effect="the reply cannot follow from such a prompt: the model learns to invent",
            fix="log the real content, or leave these rows out of the file",
        )
