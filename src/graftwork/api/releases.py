"""Releases to look at and to move: their list, one with lineage and verdict, two compared, aliases.

Input: a project, an alias, a version or an id. Output: records. Promotions and rollbacks are logged with who
and why.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any

from graftwork.api.overview import LiveRelease
from graftwork.api.overview import list_live as list_live_releases
from graftwork.api.project import Page, Project, cut_page
from graftwork.api.runs import TwoCompared, flatten, list_differences
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, UserError
from graftwork.records.release import AliasMove, Release, ReleaseEntry, ReleaseNote, ReleaseQuery
from graftwork.records.report import Report, Verdict
from graftwork.registry.deploy import archive_path
from graftwork.registry.deploy import export_release as write_release_archive
from graftwork.registry.index import PlannedRollback as PlannedRollback  # noqa: PLC0414
from graftwork.registry.index import find_release
from graftwork.registry.project import LineageGraph as LineageGraph  # noqa: PLC0414
from graftwork.registry.project import LineageNode as LineageNode  # noqa: PLC0414
from graftwork.registry.project import (
    full_alias,
    open_store,
    promote_release,
    read_verdict,
    rollback_alias,
    trace_release,
)

REPORT_FILE = "evaluation.json"


class ReleaseView(Record):
    """A release with its verdict, its notes and every move of an alias that it took part in."""

    release: Release
    entry: ReleaseEntry
    verdict: Verdict | None
    report: Report | None
    notes: tuple[ReleaseNote, ...]
    moves: tuple[AliasMove, ...]
    has_files: bool
    size_bytes: int
    page: str = ""
    """The file of its report page; empty if there is none."""


def list_releases(
    project: Project, *, search: str = "", decision: str = "", page: int = 1
) -> Page[ReleaseEntry]:
    """A page of releases, the newest first."""
    with project.open() as work:
        entries = work.releases.entries(ReleaseQuery(search=search or None))
    return cut_page([entry for entry in entries if decision in ("", entry.decision)], page)


def read_release(project: Project, name: str) -> ReleaseView:
    with project.open() as work:
        release = find_release(work.releases, name)
        store = open_store(work)
        has_files = store.has(release.id)
        folder = store.folder(release.id)
        moves = [
            move
            for log in work.releases.alias_logs().values()
            for move in log
            if release.id in (move.release_id, move.previous)
        ]
        report, names = None, {file.path for file in release.files}
        report_file = next((name for name in ("report.json", REPORT_FILE) if name in names), None)
        with suppress(OSError, ValueError, GraftError):
            if has_files and report_file is not None:
                report = Report.from_json((folder / report_file).read_bytes())
        report_page = next((file.path for file in release.files if file.path.endswith(".html")), "")
        has_page = has_files and bool(report_page) and (folder / report_page).is_file()
        return ReleaseView(
            release=release,
            entry=work.releases.entry(release.id),
            verdict=read_verdict(work, release),
            report=report,
            notes=work.releases.notes(release.id),
            moves=tuple(sorted(moves, key=lambda move: move.when, reverse=True)),
            has_files=has_files,
            size_bytes=sum(file.size for file in release.files),
            page=str(folder / report_page) if has_page else "",
        )


def read_lineage(project: Project, name: str) -> LineageGraph:
    """What a release was made from, down to the lines of the logs."""
    with project.open() as work:
        return trace_release(work, find_release(work.releases, name))


def list_live(project: Project) -> tuple[LiveRelease, ...]:
    """What every alias points at."""
    with project.open() as work:
        return list_live_releases(work)


def read_alias_log(project: Project) -> tuple[AliasMove, ...]:
    """Every move of every alias, the newest first."""
    with project.open() as work:
        moves = [move for log in work.releases.alias_logs().values() for move in log]
    return tuple(sorted(moves, key=lambda move: move.when, reverse=True))


def verify_release(project: Project, name: str) -> Release:
    """Read every byte of a release and compare it with its manifest; its signature too, with a key."""
    with project.open() as work:
        return open_store(work).verify(find_release(work.releases, name).id)


def export_release(project: Project, name: str) -> Path:
    """Write a release as an archive to the project folder, as `graft release export` does."""
    with project.open() as work:
        return write_release_archive(work, name)[1]


def find_archive(project: Project, name: str) -> Path | None:
    """The archive that `export_release` wrote; None if there is none."""
    with project.open() as work:
        path = archive_path(work, find_release(work.releases, name))
    return path if path.is_file() else None


def promote(project: Project, name: str, *, alias: str = "", reason: str, who: str = "") -> AliasMove | None:
    """Point an alias at a release that may be deployed; None if it already points there."""
    with project.open() as work:
        return promote_release(work, name, alias=alias or None, reason=reason, who=who)[2]


def rollback(
    project: Project,
    *,
    alias: str = "",
    reason: str,
    who: str = "",
    planned: PlannedRollback | None = None,
) -> AliasMove:
    """Point an alias at the release before the current one; `planned` is the rollback that was shown."""
    with project.open() as work:
        # A full name such as tagger/champion names its model itself.
        model, slash, name = alias.rpartition("/")
    chosen = project.with_model(model) if slash else project
    with chosen.open() as work:
        return rollback_alias(work, alias=name or None, reason=reason, who=who, planned=planned)


def name_alias(project: Project) -> str:
    """The full name of the alias that graft.yaml serves."""
    with project.open() as work:
        return full_alias(work)


def compare_releases(project: Project, a: str, b: str) -> TwoCompared:
    """Metrics with their intervals, data, settings and versions of two releases."""
    first, second = read_release(project, a), read_release(project, b)
    if first.release.id == second.release.id:
        raise UserError(
            "both are the same release", why=f"{a} and {b} name {first.release.id[:12]}", fix="choose another"
        )
    left, right = first.release, second.release
    rows = [
        *list_differences("metrics", _metrics_of(first), _metrics_of(second)),
        *list_differences("made from", _sources_of(first), _sources_of(second)),
        *list_differences("settings", flatten(left.settings), flatten(right.settings)),
        *list_differences("versions", left.versions, right.versions),
    ]
    return TwoCompared(a=first.entry, b=second.entry, rows=tuple(rows))


def _metrics_of(view: ReleaseView) -> dict[str, Any]:
    if view.report is None:
        return {}
    return {
        name: (metric.value, metric.low, metric.high, metric.kind, metric.unit)
        for name, metric in view.report.candidate.metrics.items()
    }


def _sources_of(view: ReleaseView) -> dict[str, Any]:
    release = view.release
    return {
        "verdict": release.decision,
        "base": release.base,
        "dataset": release.dataset_hash[:12],
        "run": release.run_id,
        "adapter": release.adapter_hash[:12],
        "size, bytes": view.size_bytes,
    }
