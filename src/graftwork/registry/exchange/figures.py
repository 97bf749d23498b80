"""What a tracker is told of a release: a few facts as text, and the figures of its report."""

from pathlib import Path

from graftwork.records.release import Release
from graftwork.records.report import Report

REPORT = "report.json"
RELEASE = "graftwork.release"
"""Under this fact a tracker finds a release again."""


def facts_of(release: Release) -> dict[str, str]:
    return {
        RELEASE: release.id,
        "graftwork.project": release.project,
        "graftwork.model": release.model,
        "graftwork.base": release.base,
        "graftwork.decision": release.decision,
        "graftwork.run": release.run_id,
        "graftwork.dataset": release.dataset_hash,
        "graftwork.parent": release.parent or "",
    }


def figures_of(folder: Path) -> dict[str, float]:
    """What was measured of the candidate; nothing where the release was imported without a report."""
    path = folder / REPORT
    if not path.is_file():
        return {}
    report = Report.from_json(path.read_bytes())
    return {name: metric.value for name, metric in report.candidate.metrics.items() if metric.n}
