"""A project at a glance: what is live, what runs, what failed last, what was spent.

Input: a project. Output: an `Overview` that is cheap to read, whatever the size of the project; and, apart
from it, what takes longer: which steps are out of date, and what the endpoint says.
"""

import hashlib
import os
from contextlib import suppress
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from graftwork.api.components import has_generations
from graftwork.api.cycle import WEEK_FILE, find_waiting_step, next_sessions, read_week
from graftwork.api.endpoint import Traffic, summarize_traffic
from graftwork.api.project import Project, changed_at
from graftwork.cycle.state import CoordinatorState
from graftwork.fleet.jobs import CostSummary, summarize_costs
from graftwork.pipeline.status import (
    EndpointStatus,
    NextRun,
    RunStatus,
    ask_endpoint,
    describe_run,
    examine_steps,
    find_running,
    list_steps,
    next_run,
)
from graftwork.pipeline.status import StepState as StepState  # noqa: PLC0414
from graftwork.pipeline.table import STEPS
from graftwork.process.worker import lock_holder
from graftwork.project.open_project import OpenProject, name_entry
from graftwork.records.base import Record
from graftwork.records.errors import GraftError
from graftwork.records.release import AliasMove, ReleaseEntry
from graftwork.records.report import Verdict
from graftwork.records.run import RunState
from graftwork.records.week import ShownSession
from graftwork.registry.index import plan_rollback
from graftwork.registry.project import read_verdict
from graftwork.store.database import Database, open_database
from graftwork.store.runs import RunEntry

RECENT_CAPTURES = 500
RECENT_RUNS = 5


class LiveRelease(Record):
    """What an alias points at, since when, and on which verdict."""

    alias: str
    release: ReleaseEntry
    move: AliasMove | None
    verdict: Verdict | None
    back_to: str | None
    """The release that a rollback leads to; None if there is none."""
    back_to_version: str = ""


class Overview(Record):
    project: str
    base: str
    models: tuple[str, ...]
    steps: tuple[StepState, ...]
    """Whether each is done; whether it is up to date is checked separately."""
    live: tuple[LiveRelease, ...]
    runs: tuple[RunStatus, ...]
    last_run: RunEntry | None
    run_counts: dict[RunState, int]
    failure: RunEntry | None
    """The last run that failed."""
    costs: CostSummary
    verdict: Verdict | None
    """The gate's last verdict, whether it led to a release or not."""
    sessions: tuple[ShownSession, ...]
    """The next sessions of the planned week."""
    captures: int
    releases: int
    traffic: Traffic
    challenger: str | None
    """The challenger's alias and share, if graft.yaml sets up an experiment."""
    working: bool
    cycle: CoordinatorState
    """The open cycle of `graft up`, or why none continues."""
    waits_for: str | None
    """The step of the cycle that a person has to approve."""


def read_overview(project: Project) -> Overview:
    with project.open() as work:
        split, recent = work.settings.serve.split, work.runs.list(limit=RECENT_RUNS)
        cycle, judged = work.cycles.read(), work.ledger.get(name_entry(work, "gate"))
        verdict, week = None, None
        with suppress(ValueError):
            verdict = Verdict.model_validate(judged.output) if judged is not None else None
        with suppress(GraftError):  # its own page says what is wrong with it
            week = read_week(project)
        return Overview(
            project=work.settings.project,
            base=work.settings.base,
            models=tuple(work.project.settings.all_models),
            steps=list_steps(work),
            live=list_live(work),
            runs=tuple(describe_run(run) for run in recent),
            last_run=recent[0] if recent else None,
            run_counts=work.runs.count(),
            failure=work.runs.last_failure(),
            costs=summarize_costs(work).model_copy(update={"lines": ()}),
            verdict=verdict,
            sessions=next_sessions(week, now=datetime.now(UTC)) if week is not None else (),
            captures=work.captures.count(),
            releases=len(work.releases.entries()),
            traffic=summarize_traffic(work.captures.page(limit=RECENT_CAPTURES)),
            challenger=f"{split.challenger} gets {split.share:.0%} of the sessions" if split else None,
            working=lock_holder(work.project.state / "pipeline") is not None,
            cycle=cycle,
            waits_for=find_waiting_step(cycle, work.settings.cycle),
        )


def list_live(work: OpenProject) -> tuple[LiveRelease, ...]:
    """What every alias points at."""
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


def check_freshness(project: Project) -> tuple[tuple[StepState, ...], NextRun]:
    """Compare every step with its inputs; reads the logs to hash them. Also what `graft run` would do."""
    with project.open() as work:
        steps = find_running(work, examine_steps(work))
        return steps, next_run(work, steps)


def check_endpoint(project: Project) -> EndpointStatus:
    """Ask the endpoint for its health, at the address in graft.yaml."""
    return ask_endpoint(project.settings.serve, root=project.root)


NEEDED_STEPS = {step.name: tuple(step.needs) for step in STEPS}
"""For each step, the steps that it needs."""


def find_used_parts(project: Project) -> frozenset[str]:
    """Which parts that not every project needs are set up or were used: components, cycle, fleet, week."""
    settings = project.settings
    used = settings.model_fields_set & {"cycle", "fleet"}
    if "generate" in settings.model_fields_set or has_generations(project):
        used |= {"components"}
    if (project.root / WEEK_FILE).exists() or "week" in settings.plan.model_fields_set:
        used |= {"week"}
    with project.open() as work:
        if work.cycles.read() != CoordinatorState():
            used |= {"cycle"}
        if work.jobs.list():
            used |= {"fleet"}
    return frozenset(used)


WATCHED_FILES = ("heartbeat.json", "steps.jsonl", "evaluations.jsonl", "saved.jsonl", "messages.jsonl")
MOST_WATCHED = 4


def mark_project(project: Project) -> str:
    """Return a text that changes with every change of the database, of graft.yaml or of a running job. Only
    reads files, and is cheap enough to call every second.
    """
    folder = project.folder
    parts = [_mark_of(folder.file), *_mark_database(folder.database_url)]
    try:
        with os.scandir(folder.runs) as entries:
            runs = sorted(entries, key=changed_at, reverse=True)[:MOST_WATCHED]
    except OSError:
        runs = []
    parts += [_mark_of(Path(run.path) / name) for run in runs for name in WATCHED_FILES]
    parts.append(str(lock_holder(folder.state / "pipeline") is not None))
    return hashlib.blake2b("-".join(parts).encode(), digest_size=12).hexdigest()


def _mark_of(path: Path) -> str:
    try:
        found = path.stat()
    except OSError:
        return "0"
    return f"{found.st_mtime_ns:x}.{found.st_size:x}"


@lru_cache(maxsize=1)
def _watched_server(url: str) -> Database:
    """Connection that is kept open, because it is queried every second."""
    return open_database(url)


def _mark_database(url: str) -> list[str]:
    """Return the state of SQLite's files. Readers empty the WAL, so only a WAL with content counts."""
    if not url.startswith("sqlite:///"):
        return [str(_watched_server(url).count_written_rows())]
    path = Path(url.removeprefix("sqlite:///"))
    log = path.with_name(path.name + "-wal")
    try:
        empty = log.stat().st_size == 0
    except OSError:
        empty = True
    return [_mark_of(path), "0" if empty else _mark_of(log)]
