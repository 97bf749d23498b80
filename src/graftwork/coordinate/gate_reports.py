"""Reports by the adapter that they are about, kept for the session after the next training.

In: an adapter's hash and its report. Out: the same, later. The ledger remembers only the last one.
"""

from pathlib import Path

from pydantic import ValidationError

from graftwork.coordinate.workplace import Workplace
from graftwork.files.whole import write_whole
from graftwork.records.report import Report


def keep_report(work: Workplace, adapter_hash: str, report: Report) -> None:
    path = _place(work, adapter_hash)
    write_whole(path, report.to_json())


def find_report(work: Workplace, adapter_hash: str) -> Report | None:
    """None where the adapter was never judged here, or by a version that wrote otherwise."""
    path = _place(work, adapter_hash)
    try:
        return Report.from_json(path.read_bytes()) if path.is_file() else None
    except ValidationError:
        return None


def _place(work: Workplace, adapter_hash: str) -> Path:
    return work.project.evaluations / "reports" / f"{adapter_hash[:32]}.json"
