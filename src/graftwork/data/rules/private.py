"""Secrets and personal data in prompts and replies."""

from collections.abc import Iterator

from graftwork.data.redaction import RedactedRow
from graftwork.data.rules.facts import Facts
from graftwork.data.rules.finding import count_rows, find_noted, mend
from graftwork.data.rules.note import Note, Sight, show_around
from graftwork.records.audit import Finding
from graftwork.records.interaction import Interaction
from graftwork.text.redact import SECRET_KINDS


def check_private_data(raw: Interaction, redacted: RedactedRow, *, sight: Sight) -> Iterator[Note]:
    for kind in redacted.counts:
        code = "secret" if kind in SECRET_KINDS else "personal_data"
        yield Note(code, kind, _show_placeholder(redacted.row, kind))


def find_private_data(facts: Facts) -> Iterator[Finding]:
    fix = mend("redact", on=facts.settings.redact, done="puts placeholders in their place")
    secrets = facts.tally["secret"].count
    if secrets:
        yield find_noted(
            facts,
            "secret",
            "blocker",
            title=f"{count_rows(secrets, 'hold a secret')} ({facts.tally['secret'].say_reasons()})",
            effect="a model repeats the secrets that it was trained on to whoever asks",
            fix=f"{fix}; revoke them: they are in a log file",
        )
    personal = facts.tally["personal_data"].count
    if personal:
        kinds = facts.tally["personal_data"].say_reasons()
        yield find_noted(
            facts,
            "personal_data",
            "warning",
            title=f"{count_rows(personal, 'hold personal data')} ({kinds})",
            effect="the model may repeat it, and nobody can take it out of the weights again",
            fix=fix,
        )


def _show_placeholder(row: Interaction, kind: str) -> str:
    mark = f"<REDACTED:{kind}:"
    texts = (*(message.content for message in row.messages), row.reply)
    return next((show_around(text, mark) for text in texts if mark in text), "")
