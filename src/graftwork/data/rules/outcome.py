"""Calls that failed, and calls that failed while the log says that they did not."""

from collections.abc import Iterator

from graftwork.data.log import Log
from graftwork.data.rules.finding import count_rows, make_finding, mend, show_start
from graftwork.records.audit import Finding


def find(log: Log) -> Iterator[Finding]:
    fix = mend("drop_failed", on=log.settings.drop_failed, done="drops these")
    failed = [
        (row.origin, f"{reason}: {show_start(row.reply)}") for row, reason in log.with_fault("failed_status")
    ]
    if failed:
        kept = ", ".join(log.settings.keep_status)
        yield make_finding(
            "failed_status",
            "blocker",
            failed,
            title=count_rows(len(failed), "are logged as failed"),
            effect="trained on, they teach the model to answer with failures",
            fix=f"{fix}; data.keep_status names what counts as success ({kept})",
        )
    disguised = [
        (row.origin, f"{reason}: {show_start(row.reply)}")
        for row, reason in log.with_fault("claims_success_but_fails")
    ]
    if disguised:
        yield make_finding(
            "claims_success_but_fails",
            "blocker",
            disguised,
            title=count_rows(len(disguised), "are not marked as failed, and the reply reports a failure"),
            effect="trained on, they teach the model to answer with error messages",
            fix=f"{fix}; let the logger write the true status",
        )
