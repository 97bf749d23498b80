"""The plan was wrong: the run took more memory than there is. Record it, take fewer rows at a time, go on.

In: a job, and what was measured when memory ran out. Out: the job of the same run with half the rows
at a time, or None where one row is already too much. What was decided stays in the run's folder, so
that the same command, given again, does not make the same mistake.
"""

import json
import math
from pathlib import Path

from graftwork.coordinate.steps.plan import kind_of_run
from graftwork.coordinate.workplace import Workplace, now
from graftwork.files.whole import write_whole
from graftwork.process.alert import Alarm
from graftwork.records.errors import OutOfMemory
from graftwork.records.plan import Residual
from graftwork.records.run import TrainJob
from graftwork.train.files import REPLANNED

MICRO_ROWS = "micro_rows"
GIVE_WAY = 0.92
"""Of a card's limit, each time that it was too much."""


def as_replanned(job: TrainJob) -> TrainJob:
    """The job as an earlier attempt at this run had to change it."""
    path = Path(job.folder) / REPLANNED
    return with_micro_rows(job, int(json.loads(path.read_text())[MICRO_ROWS])) if path.exists() else job


def replan(work: Workplace, job: TrainJob, exhausted: OutOfMemory, alarm: Alarm) -> TrainJob | None:
    """Remember what was measured; half the rows at a time."""
    _remember(work, job, exhausted)
    rows = rows_at_a_time(job)
    measured = exhausted.figures.get("peak_memory_gib")
    took = f"{measured:.2f} GiB were taken" if measured is not None else "how much was taken is not known"
    why = f"the plan expected {job.plan.peak_memory_gib.value:.2f} GiB, {took}; {exhausted.why}"
    if rows <= 1:
        alarm.tell("out_of_memory", "out of memory with a single row at a time", why=why, fix=exhausted.fix)
        return None
    fewer = rows // 2
    alarm.tell("out_of_memory", f"out of memory: going on with {fewer} row(s) at a time", why=why)
    write_whole(Path(job.folder) / REPLANNED, json.dumps({MICRO_ROWS: fewer, "measured": exhausted.figures}))
    return with_micro_rows(job, fewer)


def rows_at_a_time(job: TrainJob) -> int:
    return int(job.plan.train.get(MICRO_ROWS) or job.plan.train["settings"]["batch_rows"])


def with_micro_rows(job: TrainJob, rows: int) -> TrainJob:
    plan = job.plan.model_copy(update={"train": {**job.plan.train, MICRO_ROWS: rows}})
    if plan.tuning is not None:
        # On a card, what blocks keep is what gives way.
        halvings = math.log2(job.plan.train["settings"]["batch_rows"] / rows)
        limit = plan.tuning.limit_gib * GIVE_WAY**halvings
        plan = plan.model_copy(update={"tuning": plan.tuning.model_copy(update={"limit_gib": limit})})
    return job.model_copy(update={"plan": plan})


def _remember(work: Workplace, job: TrainJob, exhausted: OutOfMemory) -> None:
    """Beside the plans of finished runs, so that the next plan can know better."""
    taken = exhausted.figures.get("peak_memory_gib")
    if taken is None:
        return
    # What was asked for in vain belongs to what the work would have taken.
    needed = taken + exhausted.figures.get("asked_gib", 0.0)
    found = Residual(name="peak_memory_gib", planned=job.plan.peak_memory_gib, actual=needed)
    work.residuals.add(
        job.run_id, device=job.plan.device.name, base=kind_of_run(work), found=[found], when=now()
    )
