"""Rows that could not be read: no JSON, no UTF-8, no known shape."""

from collections.abc import Iterator

from graftwork.data.log import Log
from graftwork.data.rules.finding import count_rows, make_finding
from graftwork.records.audit import Finding

_TITLES = {
    "parse_error": "are not JSON",
    "encoding": "are not clean UTF-8",
    "schema": "have a shape or a type that is not known",
}
_FIXES = {
    "parse_error": "mend the lines in the log, or leave them: `graft data prepare` drops them by name",
    "encoding": "write the log as UTF-8, or leave them: `graft data prepare` drops them by name",
    "schema": "rows need `messages` that end with the assistant's turn, or `prompt` and `completion`; "
    "`graft data prepare` drops the others by name",
}


def find(log: Log) -> Iterator[Finding]:
    for code, title in _TITLES.items():
        hits = [(fault.origin, fault.message) for fault in log.faults if fault.code == code]
        if hits:
            yield make_finding(
                code,
                "warning",
                hits,
                title=count_rows(len(hits), title),
                effect="these rows cannot be learned from; many of them mean that the logger is broken",
                fix=_FIXES[code],
            )
