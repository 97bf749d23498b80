"""Replies that are no answers: failed calls, failures in disguise, empty, a stand-in, cut off.

What counts is what `judge` says, so that the audit and the preparation never disagree.
"""

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from graftwork.data.captures import FILTERED, NEGATIVE, TRIED
from graftwork.data.judge import SAID, find_fault
from graftwork.data.redaction import RedactedRow
from graftwork.data.rules.facts import Facts
from graftwork.data.rules.finding import count_rows, find_noted, mend
from graftwork.data.rules.note import Note, Sight, show_around, show_end, show_start
from graftwork.data.settings import DataSettings
from graftwork.records.audit import Finding, Severity
from graftwork.records.interaction import Interaction

# Where a blank in a long reply may stand: only for showing it, what is one the judge decides.
_BLANK = re.compile(r"[\[<{](?:generated|simulated|placeholder|insert|your|enter|add)\b", re.IGNORECASE)


MOST_STATUSES = 6


class _Wording(NamedTuple):
    what: str
    effect: str
    fix: Callable[[DataSettings], str]
    severity: Severity = "blocker"


def check_reply(raw: Interaction, redacted: RedactedRow, *, sight: Sight) -> Iterator[Note]:
    fault = find_fault(raw, sight.settings)
    if fault is None:
        return
    row = redacted.row
    blank = _BLANK.search(row.reply) if fault.code == "placeholder" else None
    if fault.code == "truncated":
        excerpt = show_end(row.reply)
    elif blank:
        excerpt = show_around(row.reply, blank.group())
    else:
        # Where there is no reply, the end of the question: its beginning is often the sources.
        excerpt = show_start(row.reply) or show_end(row.question)
    yield Note(fault.code, fault.reason, excerpt)


def find_bad_replies(facts: Facts) -> Iterator[Finding]:
    for code, wording in _WORDINGS.items():
        count = facts.tally[code].count
        if count:
            yield find_noted(
                facts,
                code,
                wording.severity,
                title=count_rows(count, wording.what) + _name_statuses(facts, code),
                effect=wording.effect,
                fix=wording.fix(facts.settings),
            )


def _name_statuses(facts: Facts, code: str) -> str:
    """Which statuses the log states: a value that nobody foresaw looks like a failure otherwise."""
    if code != "failed_status":
        return ""
    said = facts.tally[code].say_reasons(MOST_STATUSES).replace(f"{SAID} ", "")
    return f": {said}" if said else ""


def _mend_failed(settings: DataSettings) -> str:
    return mend("drop_failed", on=settings.drop_failed, done="drops these")


_WORDINGS = {
    NEGATIVE: _Wording(
        "are captured replies that users said are bad",
        "trained on, they teach the model to repeat its mistakes",
        lambda settings: (
            "`graft data prepare` drops these always; a correction sent to /v1/feedback makes one a good row"
        ),
    ),
    TRIED: _Wording(
        "are held-out questions that `graft run` asked to try a release out",
        "trained on, they would make the evaluation measure memory",
        lambda settings: "`graft data prepare` and `graft data captures` leave these out always",
        "warning",
    ),
    FILTERED: _Wording(
        "are captured exchanges that data.captures leaves out",
        "they are not trained on",
        lambda settings: "data.captures says which captured exchanges are used",
        "info",
    ),
    "failed_status": _Wording(
        "state a status that does not count as success",
        "trained on, they teach the model to answer with failures",
        lambda settings: (
            f"{_mend_failed(settings)}; data.keep_status names what counts as success "
            f"({', '.join(settings.keep_status)})"
        ),
    ),
    "claims_success_but_fails": _Wording(
        "are not marked as failed, and the reply reports a failure",
        "trained on, they teach the model to answer with error messages",
        lambda settings: f"{_mend_failed(settings)}; let the logger write the true status",
    ),
    "empty": _Wording(
        "have no question or no reply",
        "trained on, they teach the model to say nothing",
        lambda settings: "`graft data prepare` drops these always",
    ),
    "placeholder": _Wording(
        "have a stand-in where the answer belongs",
        "trained on, they teach the model to answer with stand-ins",
        lambda settings: mend("drop_placeholders", on=settings.drop_placeholders, done="drops these"),
    ),
    "truncated": _Wording(
        "are cut off before the end of the reply",
        "trained on, they teach the model to stop in the middle",
        lambda settings: (
            mend("drop_truncated", on=settings.drop_truncated, done="drops these")
            + "; raise the token limit where they were logged"
        ),
    ),
}
