"""Nothing is left to train on."""

from collections.abc import Iterator

from graftwork.data.log import Log
from graftwork.data.rules.finding import make_finding
from graftwork.records.audit import Finding


def find(log: Log) -> Iterator[Finding]:
    if log.selection.rows:
        return
    hits = [(redacted.row.origin, "") for redacted in log.rows] + [
        (fault.origin, fault.message) for fault in log.faults
    ]
    yield make_finding(
        "nothing_usable",
        "blocker",
        hits,
        title="no row is left to train on",
        effect="there is nothing to learn from",
        fix="see the other findings for why the rows went; name other files under data.logs",
    )
