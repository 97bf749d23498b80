"""Reports and verdicts by the adapter that they are about, kept beyond the next training.

In: an adapter's hash and its report, or its weights' hash and the verdict. Out: the same, later. The ledger
remembers only the last one.
"""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from graftwork.evaluate.gate.course import GoodRun, compare_plans
from graftwork.files.disk import file_digest, make_folder, write_atomic
from graftwork.pipeline.open_project import OpenProject
from graftwork.records.plan import Plan
from graftwork.records.report import Report
from graftwork.records.run import TrainOutcome
from graftwork.records.verdict import Verdict
from graftwork.registry.adapter import WEIGHTS


def keep_report(work: OpenProject, adapter_hash: str, report: Report) -> None:
    path = _place(work, adapter_hash)
    write_atomic(path, report.to_json())


def find_report(work: OpenProject, adapter_hash: str) -> Report | None:
    """None where the adapter was never judged here, or by a version that wrote otherwise."""
    path = _place(work, adapter_hash)
    try:
        return Report.from_json(path.read_bytes()) if path.is_file() else None
    except ValidationError:
        return None


def keep_verdict(work: OpenProject, adapter_folder: Path, verdict: Verdict) -> None:
    """By the content of the weights, wherever they are copied to: a refusal must not be forgotten."""
    weights = adapter_folder / WEIGHTS
    if not weights.is_file():
        return
    path = _verdict_place(work, file_digest(weights))
    make_folder(path.parent)
    write_atomic(path, verdict.to_json())


def find_verdict(work: OpenProject, weights_sha256: str) -> Verdict | None:
    """The last verdict about these weights: of a gate here, or of a release that holds them."""
    path = _verdict_place(work, weights_sha256)
    try:
        if path.is_file():
            return Verdict.from_json(path.read_bytes())
    except ValidationError:
        pass  # written by another version: the releases may still know
    for release in work.releases.list():
        if any(file.path == WEIGHTS and file.sha256 == weights_sha256 for file in release.files):
            return Verdict(
                decision=release.decision,
                reason=f"release {release.id[:12]} says {release.decision}",
                rules=(),
                report_hash="",
            )
    return None


def _verdict_place(work: OpenProject, weights_sha256: str) -> Path:
    return work.project.evaluations / "verdicts" / f"{weights_sha256}.json"


def find_better_run(work: OpenProject, outcome: TrainOutcome, report: Report) -> GoodRun | None:
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


def _place(work: OpenProject, adapter_hash: str) -> Path:
    return work.project.evaluations / "reports" / f"{adapter_hash[:32]}.json"
