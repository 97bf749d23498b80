"""A project at a glance: what is live, what runs, what failed last, what was spent.

In: a project. Out: an `Overview` that is cheap to read, whatever the size of the project; and, apart from it,
what takes longer: which steps are out of date, and what the endpoint says.
"""

import hashlib
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from graftwork.api.captures import Traffic, summarize_traffic
from graftwork.api.cycle import find_waiting_step, next_sessions, read_week
from graftwork.api.project import Project
from graftwork.api.runs import RunLine, to_line
from graftwork.cycle.state import CoordinatorState
from graftwork.pipeline.fleet_jobs import CostSummary, summarize_costs
from graftwork.pipeline.open_project import OpenProject
from graftwork.pipeline.releases import read_verdict
from graftwork.pipeline.status import (
    EndpointStatus,
    NextRun,
    RunStatus,
    StepState,
    ask_endpoint,
    describe_run,
    examine_steps,
    find_running,
    next_run,
)
from graftwork.pipeline.step import name_entry
from graftwork.pipeline.table import ONLY_AFTER_DEPLOY, STEPS
from graftwork.process.worker import lock_holder
from graftwork.records.base import Record
from graftwork.records.errors import GraftError
from graftwork.records.release import AliasMove, ReleaseEntry
from graftwork.records.report import Verdict
from graftwork.records.run import RunState
from graftwork.records.week import ShownSession
from graftwork.registry.index import plan_rollback
from graftwork.store.database import Database, open_database

RECENT_CAPTURES = 500
RECENT_RUNS = 5


class StepGlance(Record):
    """When a step was last done. Whether it is up to date is a question of its own."""

    step: str
    title: str
    finished_at: str | None = None
    seconds: float | None = None
    needs: tuple[str, ...] = ()
    only_after_deploy: bool = False


class LiveRelease(Record):
    """What an alias points at, since when, and on which verdict."""

    alias: str
    release: ReleaseEntry
    move: AliasMove | None
    verdict: Verdict | None
    back_to: str | None
    """The release that a rollback leads to; None where there is none."""
    back_to_version: str = ""


class LastFailure(Record):
    """The last run that failed, with what the error says."""

    run: str
    at: str
    what: str
    why: str = ""
    fix: str = ""


class Overview(Record):
    project: str
    base: str
    models: tuple[str, ...]
    steps: tuple[StepGlance, ...]
    live: tuple[LiveRelease, ...]
    runs: tuple[RunStatus, ...]
    last_run: RunLine | None
    run_counts: dict[RunState, int]
    failure: LastFailure | None
    costs: CostSummary
    verdict: Verdict | None
    """The last one of the gate, whether it led to a release or not."""
    sessions: tuple[ShownSession, ...]
    """The next sessions of the planned week."""
    captures: int
    releases: int
    traffic: Traffic
    challenger: str | None
    """The challenger's alias and share, where graft.yaml sets up an experiment."""
    working: bool
    cycle: CoordinatorState
    """The open cycle of `graft up`, or why none goes on."""
    waits_for: str | None
    """The step of the cycle that a person has to approve."""


class Freshness(Record):
    """Which steps are up to date, and what `graft run` would do."""

    steps: tuple[StepState, ...]
    next: NextRun


def read_overview(project: Project) -> Overview:
    with project.open() as work:
        split, recent = work.settings.serve.split, work.runs.list(limit=RECENT_RUNS)
        cycle = work.cycles.read()
        return Overview(
            project=work.settings.project,
            base=work.settings.base,
            models=tuple(work.project.settings.all_models),
            steps=_glance(work),
            live=_list_live(work),
            runs=tuple(describe_run(run) for run in recent),
            last_run=to_line(recent[0]) if recent else None,
            run_counts=work.runs.count(),
            failure=_last_failure(work),
            costs=summarize_costs(work).model_copy(update={"lines": ()}),
            verdict=_read_last_verdict(work),
            sessions=_next_sessions(project),
            captures=work.captures.count(),
            releases=len(work.releases.entries()),
            traffic=summarize_traffic(work.captures.recent(limit=RECENT_CAPTURES)),
            challenger=f"{split.challenger} gets {split.share:.0%} of the sessions" if split else None,
            working=lock_holder(work.project.state / "pipeline") is not None,
            cycle=cycle,
            waits_for=find_waiting_step(cycle, work.settings.cycle),
        )


def check_freshness(project: Project) -> Freshness:
    """Compare every step with its inputs; reads the logs to hash them."""
    with project.open() as work:
        steps = find_running(work, examine_steps(work))
        return Freshness(steps=steps, next=next_run(work, steps))


def check_endpoint(project: Project) -> EndpointStatus:
    """Ask the endpoint for its health, where graft.yaml says that it listens."""
    return ask_endpoint(project.settings.serve, root=project.root)


def _glance(work: OpenProject) -> tuple[StepGlance, ...]:
    done = work.ledger.times()
    found = []
    for step in STEPS:
        times = done.get(name_entry(work, step.name))
        found.append(
            StepGlance(
                step=step.name,
                title=step.title,
                finished_at=times.finished_at if times else None,
                seconds=times.seconds if times else None,
                needs=tuple(step.needs),
                only_after_deploy=step.name in ONLY_AFTER_DEPLOY,
            )
        )
    return tuple(found)


def list_live(project: Project) -> tuple[LiveRelease, ...]:
    """What every alias points at."""
    with project.open() as work:
        return _list_live(work)


def _list_live(work: OpenProject) -> tuple[LiveRelease, ...]:
    found = []
    for alias, release_id in work.releases.aliases().items():
        moves = work.releases.alias_log(alias)
        try:
            back_to = plan_rollback(work.releases, alias=alias).target
        except GraftError:
            back_to = None
        found.append(
            LiveRelease(
                alias=alias,
                release=work.releases.entry(release_id),
                move=moves[-1] if moves else None,
                verdict=read_verdict(work, work.releases.get(release_id)),
                back_to=back_to,
                back_to_version=work.releases.entry(back_to).version or "" if back_to else "",
            )
        )
    return tuple(found)


def _read_last_verdict(work: OpenProject) -> Verdict | None:
    entry = work.ledger.get(name_entry(work, "gate"))
    try:
        return Verdict.model_validate(entry.output) if entry is not None else None
    except ValueError:
        return None


def _next_sessions(project: Project) -> tuple[ShownSession, ...]:
    try:
        week = read_week(project)
    except GraftError:
        return ()  # its own page says what is wrong with it
    return next_sessions(week, now=datetime.now(UTC)) if week is not None else ()


def _last_failure(work: OpenProject) -> LastFailure | None:
    run = work.runs.last_failure()
    if run is None or run.error is None:
        return None
    error = run.error
    return LastFailure(
        run=run.id,
        at=run.updated_at,
        what=str(error.get("what", "the run failed")),
        why=str(error.get("why", "")),
        fix=str(error.get("fix", "")),
    )


@dataclass(frozen=True)
class ProjectWatch:
    """Notices that a project has changed, by its files alone. Cheap enough for every second."""

    project: Project

    def mark(self) -> str:
        """Another text after every change of the database, of graft.yaml or of a running job."""
        folder = self.project.folder
        parts = [_mark_of(folder.file), *_mark_database(folder.database_url)]
        parts += [_mark_of(path) for path in _working_files(folder.runs)]
        parts.append(str(lock_holder(folder.state / "pipeline") is not None))
        return hashlib.blake2b("-".join(parts).encode(), digest_size=12).hexdigest()


WATCHED_FILES = ("heartbeat.json", "steps.jsonl", "evaluations.jsonl", "saved.jsonl", "messages.jsonl")
MOST_WATCHED = 4


def _working_files(runs: Path) -> list[Path]:
    """The journals of the runs that changed last."""
    try:
        with os.scandir(runs) as found:
            folders = sorted((entry for entry in found), key=_changed_at, reverse=True)[:MOST_WATCHED]
    except OSError:
        return []
    return [Path(folder.path) / name for folder in folders for name in WATCHED_FILES]


def _changed_at(entry: "os.DirEntry[str]") -> float:
    try:
        return entry.stat().st_mtime
    except OSError:
        return 0.0


def _mark_of(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "0"
    return f"{found.st_mtime_ns:x}.{found.st_size:x}"


@lru_cache(maxsize=1)
def _watched_server(url: str) -> Database:
    """Kept open: it is asked every second."""
    return open_database(url)


def _mark_database(url: str) -> list[str]:
    """Of SQLite its files. Its log is made empty by readers: only a log with content counts."""
    if not url.startswith("sqlite:///"):
        return [str(_watched_server(url).count_written_rows())]
    path = Path(url.removeprefix("sqlite:///"))
    log = path.with_name(path.name + "-wal")
    try:
        empty = log.stat().st_size == 0
    except OSError:
        empty = True
    return [_mark_of(path), "0" if empty else _mark_of(log)]
