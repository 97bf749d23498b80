"""Reports by the adapter that they are about, kept for the session after the next training.

In: an adapter's hash and its report. Out: the same, later. The ledger remembers only the last one.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from graftwork.coordinate.workplace import Workplace
from graftwork.evaluate.gate.course import GoodRun, compare_plans
from graftwork.files.whole import write_whole
from graftwork.records.plan import Plan
from graftwork.records.report import Report
from graftwork.records.run import TrainOutcome


def keep_report(work: Workplace, adapter_hash: str, report: Report) -> None:
    path = _place(work, adapter_hash)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, report.to_json())


def find_report(work: Workplace, adapter_hash: str) -> Report | None:
    """None where the adapter was never judged here, or by a version that wrote otherwise."""
    path = _place(work, adapter_hash)
    try:
        return Report.from_json(path.read_bytes()) if path.is_file() else None
    except ValidationError:
        return None


def find_better_run(work: Workplace, outcome: TrainOutcome, report: Report) -> GoodRun | None:
    """The newest earlier run that was better at the primary metric, with what was changed since."""
    primary = work.settings.gate.primary_rule
    now, plan = work.runs.get(outcome.run_id), None
    if primary is not None and now is not None:
        plan = _read_plan(now.plan)
    mine = report.candidate.metrics.get(primary.metric) if primary is not None else None
    if plan is None or primary is None or mine is None:
        return None
    for entry in work.runs.list():
        if entry.id == outcome.run_id or entry.outcome is None:
            continue
        kept, before = find_report(work, str(entry.outcome.get("adapter_hash", ""))), _read_plan(entry.plan)
        theirs = kept.candidate.metrics.get(primary.metric) if kept is not None else None
        if kept is None or before is None or theirs is None or not theirs.n or theirs.value <= mine.value:
            continue
        return GoodRun(entry.id, kept, compare_plans(before, plan))
    return None


def _read_plan(given: dict[str, Any]) -> Plan | None:
    try:
        return Plan.model_validate(given)
    except ValidationError:
        return None


def _place(work: Workplace, adapter_hash: str) -> Path:
    return work.project.evaluations / "reports" / f"{adapter_hash[:32]}.json"
