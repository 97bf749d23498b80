"""Step: train the adapter in a child process that may die and be started again.

What was decided after a run took more memory than there is stays in the run's folder, so that the same
command, given again, does not make the same mistake.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from graftwork.data.project import PreparedData
from graftwork.evaluate.gate.project import note_rules
from graftwork.files.disk import Journal, folder_digest, write_atomic
from graftwork.model.base import verify_base
from graftwork.pipeline.preflight import require_rewards
from graftwork.pipeline.step import PipelineStep, StepOutputs
from graftwork.pipeline.steps.plan import find_start_adapter, kind_of_run, run_id_of
from graftwork.plan.estimate import compare, compare_parts, find_drifts
from graftwork.process import clock
from graftwork.process.alert import Alarm
from graftwork.process.clock import add_waited, read_waited
from graftwork.process.heartbeat import Patience
from graftwork.process.worker import hold_lock, interruption_error
from graftwork.project.open_project import OpenProject, report_base_note, timestamp
from graftwork.project.reporter import Reporter
from graftwork.project.supervise import Hooks, StallWatcher, WorkerTask, run_job
from graftwork.records.errors import GracefulStop, GraftError, Interrupted, OutOfMemory
from graftwork.records.plan import Plan, Residual
from graftwork.records.run import TrainJob, TrainOutcome
from graftwork.text.redact import publish_text, publishable
from graftwork.train.checkpoints import pass_mirrors
from graftwork.train.distributed.multi_node import launch_of
from graftwork.train.rollouts.project import find_case_file, find_eval_file, keep_reward_seconds
from graftwork.train.run_folder import MESSAGES, OUTCOME, REPLANNED
from graftwork.train.runs import read_parts, write_training_page


def _train_adapter(work: OpenProject, outputs: StepOutputs) -> TrainOutcome:
    plan = outputs.get("plan", Plan)
    job = make_job(work, outputs)
    run_id, folder = job.run_id, Path(job.folder)
    enter_run(work, job)
    verify_base(work.weights)
    report_base_note(work)
    work.runs.update(run_id, state="running", when=timestamp())
    try:
        require_rewards(work, folder)
        minutes = _train(work, job)
    except (GracefulStop, Interrupted, KeyboardInterrupt) as stopped:
        # Ctrl-C before the worker runs reaches this as it is.
        reason = interruption_error() if isinstance(stopped, KeyboardInterrupt) else stopped
        work.runs.update(run_id, state="stopped", when=timestamp(), error=reason.as_json())
        raise
    except GraftError as failure:
        work.runs.update(run_id, state="failed", when=timestamp(), error=failure.as_json())
        raise
    verify_base(work.weights)
    outcome = TrainOutcome.from_json((folder / OUTCOME).read_bytes())
    outcome = compare_with_plan(plan, outcome, folder, minutes=minutes)
    if (seconds := outcome.measures_last.get("reward_seconds")) is not None:
        keep_reward_seconds(work, seconds)
    work.residuals.add(
        run_id,
        device=plan.device.name,
        base=kind_of_run(work),
        found=[*outcome.residuals, *outcome.residual_parts],
        when=timestamp(),
    )
    for drift in outcome.drifts:
        work.reporter.info(f"outside the planned range: {drift.says}")
    work.runs.update(run_id, state="done", when=timestamp(), outcome=outcome.model_dump(mode="json"))
    write_training_page(folder, plan, outcome)
    return outcome


def compare_with_plan(plan: Plan, outcome: TrainOutcome, folder: Path, *, minutes: float) -> TrainOutcome:
    """The outcome with the plan's figures and those outside their range."""
    run_residuals = compare(plan, outcome, minutes=minutes)
    parts = compare_parts(plan, outcome, read_parts(folder, outcome, minutes=minutes))
    drifts = find_drifts(run_residuals, parts)
    return outcome.model_copy(update={"residuals": run_residuals, "residual_parts": parts, "drifts": drifts})


def make_job(work: OpenProject, outputs: StepOutputs) -> TrainJob:
    """All input of the worker for this model's run."""
    plan, start = outputs.get("plan", Plan), find_start_adapter(work)
    run_id, minutes = run_id_of(plan), work.settings.train.run.deadline_minutes
    now = clock.now()
    return TrainJob(
        run_id=run_id,
        folder=str(work.project.runs / run_id),
        base_folder=work.weights.folder,
        dataset_folder=outputs.get("prepare", PreparedData).folder,
        plan=plan,
        run=publishable(work.settings.train.run),
        crew=work.settings.train.distribution(),
        keeping=work.settings.train.keeping(),
        endpoint=work.settings.train.endpoint_access(),
        start_adapter=str(start.folder) if start else None,
        project_folder=str(work.project.root),
        cases_file=str(path) if (path := find_case_file(work)) is not None else None,
        eval_file=str(eval_rows_file) if (eval_rows_file := find_eval_file(work)) is not None else None,
        # Counted from here and not from the worker's start: a worker that is started again has less left.
        deadline=now.at + minutes * 60 if minutes else None,
        deadline_from=now if minutes else None,
    )


def enter_run(work: OpenProject, job: TrainJob) -> None:
    """Enter the run in the store, once."""
    if work.runs.get(job.run_id) is None:
        work.runs.create(
            job.run_id, folder=job.folder, plan=job.plan.model_dump(mode="json"), when=timestamp()
        )
    # Rules are written before the result is known: a later change of them is seen at the gate.
    note_rules(work, job.run_id, stage="trained")


def _train(work: OpenProject, job: TrainJob) -> float:
    """Minutes that the user waited, over all attempts."""
    folder = Path(job.folder)
    messages = WorkerMessages(folder)
    started_at = time.perf_counter()

    if (folder / OUTCOME).exists():
        # Trained at another place, with the others of its project, or just before a crash of this side.
        return read_waited(folder) / 60
    job = as_replanned(job)
    # Busy, and no crash, while the worker of a killed command still writes its checkpoint.
    with hold_lock(folder):
        pass

    def take_less(exhausted: OutOfMemory) -> TrainJob | None:
        nonlocal job
        smaller = replan(work, job, exhausted, alarm)
        job = smaller or job
        return smaller

    launch = launch_of(work, folder)
    try:
        with stall_watcher(work, job) as watcher:
            alarm = watcher.alarm
            task = WorkerTask(
                name="training",
                module=launch.module,
                job=job,
                folder=folder,
                arguments=launch.arguments,
                environment=pass_mirrors({job.run_id: work.settings.train.run.mirror}),
                max_restarts=work.settings.train.run.max_restarts,
            )
            hooks = Hooks(
                on_start=launch.call,
                on_poll=lambda: messages.report(work.reporter),
                on_out_of_memory=take_less,
                watcher=watcher,
            )
            run_job(task, reporter=work.reporter, hooks=hooks, place=work.place)
    finally:
        launch.over()
        waited = add_waited(folder, time.perf_counter() - started_at)
    return waited / 60


class WorkerMessages:
    """Messages from the worker of a run from now on."""

    def __init__(self, folder: Path) -> None:
        self._journal = Journal(folder / MESSAGES)
        self._read_until = max((offset for _, offset in self._journal.follow(0)), default=0)

    def report(self, reporter: Reporter) -> None:
        for line, offset in self._journal.follow(self._read_until):
            self._read_until = offset
            reporter.info(str(line["message"]))


@contextmanager
def stall_watcher(work: OpenProject, job: TrainJob) -> Iterator[StallWatcher]:
    """Sends alerts about stalls and failures as configured; waits for their delivery at the end."""
    alerts = work.settings.train.run.alerts
    with Alarm(
        Path(job.folder),
        run=job.run_id,
        project=work.settings.project,
        command=alerts.command,
        webhook=alerts.webhook,
        # The reason of a failed delivery is what a command of the user wrote.
        on_info=lambda text: work.reporter.info(publish_text(text)),
    ) as alarm:
        yield StallWatcher(
            Path(job.folder),
            alarm,
            expected_seconds=job.plan.minutes.value * 60 / max(job.plan.steps.value, 1),
            patience=Patience(),
        )


STEP = PipelineStep(
    name="train",
    title="train the adapter",
    needs=("prepare", "plan"),
    makes=TrainOutcome,
    depends_on=lambda _work, _outputs: None,
    do=_train_adapter,
    identity=lambda outcome: str(outcome.adapter_hash),
    still_there=lambda _work, outcome: (
        Path(outcome.adapter_folder).is_dir()
        and folder_digest(Path(outcome.adapter_folder)) == outcome.adapter_hash
    ),
)


MICRO_ROWS = "micro_rows"
CHECKPOINTING = "gradient_checkpointing"
LIMIT = "limit_gib"
BACKOFF = 0.92
"""Factor applied to a GPU's memory limit each time it was too much."""
LEAST_SHARE = 0.6
"""Least share of the planned size to retry with: below that the plan itself was wrong."""


def as_replanned(job: TrainJob) -> TrainJob:
    """Return the job with the changes of an earlier attempt at this run."""
    path = Path(job.folder) / REPLANNED
    if not path.exists():
        return job
    change = json.loads(path.read_text())
    if LIMIT in change:
        return with_limit(job, change[LIMIT])
    smaller = with_micro_rows(job, int(change[MICRO_ROWS]))
    return with_checkpointing(smaller) if change.get(CHECKPOINTING) else smaller


def replan(work: OpenProject, job: TrainJob, exhausted: OutOfMemory, alarm: Alarm) -> TrainJob | None:
    """Record what was measured; halve the rows per micro-batch, or lower a GPU's limit a little."""
    measured = exhausted.figures.get("peak_memory_gib")
    if measured is not None:
        # Next to the plans of finished runs, so that the next plan can use it. The failed allocation is part
        # of what the work would have taken.
        needed = measured + exhausted.figures.get("asked_gib", 0.0)
        residual = Residual(name="peak_memory_gib", planned=job.plan.peak_memory_gib, actual=needed)
        device, base = job.plan.device.name, kind_of_run(work)
        work.residuals.add(job.run_id, device=device, base=base, found=[residual], when=timestamp())
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
    """Return the job with smaller micro-batches, the record of that, and a description."""
    tuning = job.plan.tuning
    if tuning is not None:
        # On a GPU, blocks store fewer activations; if they already store none, nothing can be reduced.
        limit = tuning.limit_gib * BACKOFF
        if limit < tuning.peak_gib * LEAST_SHARE:
            return None
        return with_limit(job, limit), {LIMIT: limit}, f"at most {limit:.1f} GiB of the GPU"
    recomputed, rows = recomputes(job), micro_batch_rows(job) // 2
    if rows:
        change = {MICRO_ROWS: rows, **({CHECKPOINTING: True} if recomputed else {})}
        return with_micro_rows(job, rows), change, f"{rows} row(s) at a time"
    if recomputed or job.plan.device.kind != "cuda" or job.keeping.get(CHECKPOINTING, "auto") != "auto":
        return None
    change = {MICRO_ROWS: 1, CHECKPOINTING: True}
    description = "one row at a time, with activation checkpointing"
    return with_checkpointing(with_micro_rows(job, 1)), change, description


def recomputes(job: TrainJob) -> bool:
    """Whether blocks save only their input already."""
    mode, planned = job.keeping.get(CHECKPOINTING, "auto"), job.plan.plain
    return mode == "on" or (mode == "auto" and planned is not None and planned.checkpointed)


def with_checkpointing(job: TrainJob) -> TrainJob:
    return job.model_copy(update={"keeping": {**job.keeping, CHECKPOINTING: "on"}})


def micro_batch_rows(job: TrainJob) -> int:
    """Rows of a micro-batch of each process: as changed before, as planned, or all rows that it has in a
    step.
    """
    planned = job.plan.plain.micro_rows if job.plan.plain is not None else None
    is_single_process = job.crew.get("strategy", "single") == "single"
    shared = 1 if is_single_process else int(job.crew.get("processes", 1)) * int(job.run.get("nodes", 1))
    whole = -(-int(job.plan.train["settings"]["batch_size"]) // shared)
    return int(job.plan.train.get(MICRO_ROWS) or planned or whole)


def with_micro_rows(job: TrainJob, rows: int) -> TrainJob:
    plan = job.plan.model_copy(update={"train": {**job.plan.train, MICRO_ROWS: rows}})
    return job.model_copy(update={"plan": plan})


def with_limit(job: TrainJob, limit_gib: float) -> TrainJob:
    assert job.plan.tuning is not None, "only a GPU has a limit"
    tuning = job.plan.tuning.model_copy(update={"limit_gib": limit_gib})
    return job.model_copy(update={"plan": job.plan.model_copy(update={"tuning": tuning})})
