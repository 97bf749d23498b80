"""How a project stands: each step, each run, what is live, and whether anybody works on it now.

In: an open workplace. Out: a Standing. Changes nothing.
"""

import time
from pathlib import Path

from graftwork.coordinate.pipeline import STEPS
from graftwork.coordinate.workplace import Workplace
from graftwork.process import lock
from graftwork.process.heartbeat import judge, read_beat
from graftwork.records.base import Record
from graftwork.records.job import Health
from graftwork.records.plan import Plan
from graftwork.store.runs import RunEntry


class StepStanding(Record):
    step: str
    title: str
    finished_at: str | None
    seconds: float | None


class RunStanding(Record):
    """`health` says whether a run that should work does; None for one that does not run."""

    id: str
    state: str
    updated_at: str
    health: Health | None = None
    reason: str = ""
    done: float = 0
    total: float = 0
    seconds_left: float | None = None


class Standing(Record):
    project: str
    steps: tuple[StepStanding, ...]
    runs: tuple[RunStanding, ...]
    aliases: dict[str, str]
    releases: int
    captures: int
    working: bool


def standing(work: Workplace) -> Standing:
    return Standing(
        project=work.settings.project,
        steps=tuple(_step(work, step.name, step.title) for step in STEPS),
        runs=tuple(_run(run) for run in work.runs.list(limit=10)),
        aliases=work.releases.aliases(),
        releases=len(work.releases.list()),
        captures=work.captures.count(),
        working=lock.holder_of(work.project.state / "pipeline") is not None,
    )


def _step(work: Workplace, name: str, title: str) -> StepStanding:
    entry = work.ledger.get(name)
    return StepStanding(
        step=name,
        title=title,
        finished_at=entry.finished_at if entry else None,
        seconds=entry.seconds if entry else None,
    )


def _run(run: RunEntry) -> RunStanding:
    shown = RunStanding(id=run.id, state=run.state, updated_at=run.updated_at)
    if run.state != "running":
        return shown
    folder = Path(run.folder)
    beat = read_beat(folder)
    plan = Plan.model_validate(run.plan)
    expected = plan.minutes.value * 60 / max(plan.steps.value, 1)
    alive = lock.holder_of(folder) is not None
    health, reason = judge(beat, alive=alive, now=time.time(), expected_seconds=expected)
    if health == "gone":
        reason += "; `graft run` goes on from its last checkpoint"
    return shown.model_copy(
        update={
            "health": health,
            "reason": reason,
            "done": beat.done if beat else 0,
            "total": beat.total if beat else 0,
            "seconds_left": beat.seconds_left if beat and alive else None,
        }
    )
