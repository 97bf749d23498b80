"""The plan was wrong: the run took more memory than there is. Record it, take fewer rows at a time, go on.

In: a job, and what was measured when memory ran out. Out: the job of the same run with half the rows
at a time, on a card at last with blocks that compute again; or None where nothing more can give way.
What was decided stays in the run's folder, so that the same command, given again, does not make the
same mistake.
"""

import json
from pathlib import Path
from typing import Any

from graftwork.files.disk import write_atomic
from graftwork.pipeline.open_project import OpenProject, timestamp
from graftwork.pipeline.steps.plan import kind_of_run
from graftwork.process.alert import Alarm
from graftwork.records.errors import OutOfMemory
from graftwork.records.plan import Residual
from graftwork.records.run import TrainJob
from graftwork.train.run_folder import REPLANNED

MICRO_ROWS = "micro_rows"
CHECKPOINTING = "checkpointing"
LIMIT = "limit_gib"
GIVE_WAY = 0.92
"""Of a card's limit, each time that it was too much."""
LEAST_SHARE = 0.6
"""Of what was planned: below that the plan itself was wrong."""


def as_replanned(job: TrainJob) -> TrainJob:
    """The job as an earlier attempt at this run had to change it."""
    path = Path(job.folder) / REPLANNED
    if not path.exists():
        return job
    change = json.loads(path.read_text())
    if LIMIT in change:
        return with_limit(job, change[LIMIT])
    smaller = with_micro_rows(job, int(change[MICRO_ROWS]))
    return with_checkpointing(smaller) if change.get(CHECKPOINTING) else smaller


def replan(work: OpenProject, job: TrainJob, exhausted: OutOfMemory, alarm: Alarm) -> TrainJob | None:
    """Remember what was measured; half the rows at a time, or a card's limit a little lower."""
    _remember(work, job, exhausted)
    measured = exhausted.figures.get("peak_memory_gib")
    took = f"{measured:.2f} GiB were taken" if measured is not None else "how much was taken is not known"
    why = f"the plan expected {job.plan.peak_memory_gib.value:.2f} GiB, {took}; {exhausted.why}"
    smaller = _take_less(job)
    if smaller is None:
        alarm.send(
            "out_of_memory", "out of memory, and nothing more can be reduced", why=why, fix=exhausted.fix
        )
        return None
    changed, change, description = smaller
    alarm.send("out_of_memory", f"out of memory: continuing with {description}", why=why)
    write_atomic(Path(job.folder) / REPLANNED, json.dumps({**change, "measured": exhausted.figures}))
    return changed


def _take_less(job: TrainJob) -> tuple[TrainJob, dict[str, Any], str] | None:
    """The job with less at a time, what is remembered of that, and a description."""
    tuning = job.plan.tuning
    if tuning is not None:
        # On a GPU, blocks store fewer activations; if they already store none, nothing can be reduced.
        limit = tuning.limit_gib * GIVE_WAY
        if limit < tuning.peak_gib * LEAST_SHARE:
            return None
        return with_limit(job, limit), {LIMIT: limit}, f"at most {limit:.1f} GiB of the card"
    again, rows = computes_again(job), rows_at_a_time(job) // 2
    if rows:
        change = {MICRO_ROWS: rows, **({CHECKPOINTING: True} if again else {})}
        return with_micro_rows(job, rows), change, f"{rows} row(s) at a time"
    if again or job.plan.device.kind != "cuda" or job.keeping.get(CHECKPOINTING, "auto") != "auto":
        return None
    change = {MICRO_ROWS: 1, CHECKPOINTING: True}
    description = "one row at a time, with activation checkpointing"
    return with_checkpointing(with_micro_rows(job, 1)), change, description


def computes_again(job: TrainJob) -> bool:
    """Whether blocks keep only their input already."""
    asked, planned = job.keeping.get(CHECKPOINTING, "auto"), job.plan.plain
    return asked == "on" or (asked == "auto" and planned is not None and planned.checkpointed)


def with_checkpointing(job: TrainJob) -> TrainJob:
    return job.model_copy(update={"keeping": {**job.keeping, CHECKPOINTING: "on"}})


def rows_at_a_time(job: TrainJob) -> int:
    """Of each process: as changed before, as planned, else all that it has of a step."""
    planned = job.plan.plain.micro_rows if job.plan.plain is not None else None
    alone = job.crew.get("strategy", "single") == "single"
    shared = 1 if alone else int(job.crew.get("processes", 1)) * int(job.run.get("nodes", 1))
    whole = -(-int(job.plan.train["settings"]["batch_rows"]) // shared)
    return int(job.plan.train.get(MICRO_ROWS) or planned or whole)


def with_micro_rows(job: TrainJob, rows: int) -> TrainJob:
    plan = job.plan.model_copy(update={"train": {**job.plan.train, MICRO_ROWS: rows}})
    return job.model_copy(update={"plan": plan})


def with_limit(job: TrainJob, limit_gib: float) -> TrainJob:
    assert job.plan.tuning is not None, "only a card has a limit"
    tuning = job.plan.tuning.model_copy(update={"limit_gib": limit_gib})
    return job.model_copy(update={"plan": job.plan.model_copy(update={"tuning": tuning})})


def _remember(work: OpenProject, job: TrainJob, exhausted: OutOfMemory) -> None:
    """Next to the plans of finished runs, so that the next plan can use it."""
    taken = exhausted.figures.get("peak_memory_gib")
    if taken is None:
        return
    # The failed allocation is part of what the work would have taken.
    needed = taken + exhausted.figures.get("asked_gib", 0.0)
    found = Residual(name="peak_memory_gib", planned=job.plan.peak_memory_gib, actual=needed)
    work.residuals.add(
        job.run_id, device=job.plan.device.name, base=kind_of_run(work), found=[found], when=timestamp()
    )
