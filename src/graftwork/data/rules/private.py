"""Secrets and personal data in prompts and replies."""

from collections import Counter
from collections.abc import Iterator

from graftwork.data.log import Log
from graftwork.data.redaction import RedactedRow
from graftwork.data.rules.finding import Hit, count_rows, make_finding, mend, show_around
from graftwork.records.audit import Finding
from graftwork.text.redact import PERSONAL_KINDS, SECRET_KINDS


def find(log: Log) -> Iterator[Finding]:
    fix = mend("redact", on=log.settings.redact, done="puts placeholders in their place")
    secrets, kinds = _collect(log, SECRET_KINDS)
    if secrets:
        yield make_finding(
            "secret",
            "blocker",
            secrets,
            title=f"{count_rows(len(secrets), 'hold a secret')} ({kinds})",
            effect="a model repeats the secrets that it was trained on to whoever asks",
            fix=f"{fix}; revoke them: they are in a log file",
        )
    personal, kinds = _collect(log, PERSONAL_KINDS)
    if personal:
        yield make_finding(
            "personal_data",
            "warning",
            personal,
            title=f"{count_rows(len(personal), 'hold personal data')} ({kinds})",
            effect="the model may repeat it, and nobody can take it out of the weights again",
            fix=fix,
        )


def _collect(log: Log, kinds: frozenset[str]) -> tuple[list[Hit], str]:
    hits: list[Hit] = []
    totals: Counter[str] = Counter()
    for redacted in log.rows:
        here = {kind: count for kind, count in redacted.counts.items() if kind in kinds}
        if here:
            totals.update(here)
            hits.append((redacted.row.origin, _excerpt(redacted, min(here))))
    return hits, ", ".join(f"{kind} {count}" for kind, count in sorted(totals.items()))


def _excerpt(redacted: RedactedRow, kind: str) -> str:
    mark = f"<REDACTED:{kind}:"
    texts = [message.content for message in redacted.row.messages] + [redacted.row.reply]
    return next((show_around(text, mark) for text in texts if mark in text), "")
