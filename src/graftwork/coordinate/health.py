"""How a project stands: each step, each run, what is live, and whether anybody works on it now.

In: an open workplace. Out: a Standing. Changes nothing.
"""

from pathlib import Path

from graftwork.coordinate.pipeline import STEPS
from graftwork.coordinate.workplace import Workplace
from graftwork.process import clock, lock
from graftwork.process.heartbeat import read_beat
from graftwork.process.judge import Judgement, Patience, judge
from graftwork.process.state import process_state
from graftwork.records.base import Record
from graftwork.records.job import Beat, Health
from graftwork.records.plan import Plan
from graftwork.records.vitals import Vitals
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
    evidence: tuple[str, ...] = ()
    done: float = 0
    total: float = 0
    doing: str = ""
    seconds_left: float | None = None
    expected_step_seconds: float | None = None
    measured_step_seconds: float | None = None
    expected_minutes: float | None = None
    vitals: Vitals | None = None


class Standing(Record):
    project: str
    steps: tuple[StepStanding, ...]
    runs: tuple[RunStanding, ...]
    aliases: dict[str, str]
    releases: int
    captures: int
    working: bool


def standing(work: Workplace) -> Standing:
    patience = Patience.of(work.settings.train.run.alerts.patience_seconds)
    return Standing(
        project=work.settings.project,
        steps=tuple(_step(work, step.name, step.title) for step in STEPS),
        runs=tuple(_run(run, patience) for run in work.runs.list(limit=10)),
        aliases=work.releases.aliases(),
        releases=len(work.releases.list()),
        captures=work.captures.count(),
        working=lock.holder_of(work.project.state / "pipeline") is not None,
    )


def expected_step_seconds(plan: Plan) -> float:
    """What the plan expects one step to take."""
    return plan.minutes.value * 60 / max(plan.steps.value, 1)


def judge_run(folder: Path, *, expected: float, patience: Patience) -> tuple[Judgement, Beat | None]:
    """How the worker in `folder` is now, by its heartbeat, its lock and its process."""
    beat, holder = read_beat(folder), lock.holder_of(folder)
    judgement = judge(
        beat,
        alive=holder is not None,
        age=clock.seconds_since(beat.moment) if beat is not None else 0.0,
        expected_seconds=expected,
        process_state=process_state(holder) if holder else "",
        patience=patience,
    )
    return judgement, beat


def _step(work: Workplace, name: str, title: str) -> StepStanding:
    entry = work.ledger.get(name)
    return StepStanding(
        step=name,
        title=title,
        finished_at=entry.finished_at if entry else None,
        seconds=entry.seconds if entry else None,
    )


def _run(run: RunEntry, patience: Patience) -> RunStanding:
    shown = RunStanding(id=run.id, state=run.state, updated_at=run.updated_at)
    if run.state != "running":
        return shown
    plan = Plan.model_validate(run.plan)
    found, beat = judge_run(Path(run.folder), expected=expected_step_seconds(plan), patience=patience)
    gone = found.health == "gone"
    changes: dict[str, object] = {
        "health": found.health,
        "reason": found.reason + ("; `graft run` goes on from its last checkpoint" if gone else ""),
        "evidence": found.evidence,
        "expected_step_seconds": expected_step_seconds(plan),
        "measured_step_seconds": found.measured_seconds,
        "expected_minutes": plan.minutes.value,
    }
    if beat is not None:
        changes |= {"done": beat.done, "total": beat.total, "doing": beat.doing}
        changes |= {} if gone else {"seconds_left": beat.seconds_left, "vitals": beat.vitals}
    return shown.model_copy(update=changes)
