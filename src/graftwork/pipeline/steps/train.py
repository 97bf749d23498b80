"""Step: train the adapter in a child process that may die and be started again."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graftwork.files.disk import Journal, folder_digest
from graftwork.model.base import verify_base
from graftwork.pipeline.gate import note_rules
from graftwork.pipeline.multi_node import launch_of
from graftwork.pipeline.open_project import OpenProject, report_base_note, timestamp
from graftwork.pipeline.replan import as_replanned, replan
from graftwork.pipeline.reward_check import require_rewards
from graftwork.pipeline.rewards import find_case_file, find_examined_file, keep_reward_seconds
from graftwork.pipeline.run_identity import find_start_adapter, run_id_of
from graftwork.pipeline.runs import read_parts, write_training_page
from graftwork.pipeline.step import PipelineStep, StepOutputs
from graftwork.pipeline.steps.data import PreparedData
from graftwork.pipeline.steps.plan import kind_of_run
from graftwork.pipeline.supervise import Hooks, StallWatcher, WorkerTask, run_job
from graftwork.plan import residuals
from graftwork.process import clock
from graftwork.process.alert import Alarm
from graftwork.process.health import Patience
from graftwork.process.waited import add_waited, read_waited
from graftwork.process.worker import hold_lock, interruption_error
from graftwork.records.errors import GraftError, Interrupted, OutOfMemory, StoppedInOrder
from graftwork.records.plan import Plan
from graftwork.records.run import TrainJob, TrainOutcome
from graftwork.text.redact import publish_text, publishable
from graftwork.train.run_folder import MESSAGES, OUTCOME
from graftwork.train.run_setup import pass_mirrors


def _do(work: OpenProject, made: StepOutputs) -> TrainOutcome:
    plan = made.get("plan", Plan)
    job = make_job(work, made)
    run_id, folder = job.run_id, Path(job.folder)
    enter_run(work, job)
    verify_base(work.weights)
    report_base_note(work)
    work.runs.update(run_id, state="running", when=timestamp())
    try:
        require_rewards(work, folder)
        minutes = _train(work, job)
    except (StoppedInOrder, Interrupted, KeyboardInterrupt) as stopped:
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
    """The outcome with the plan's figures and those that left their range."""
    found = residuals.compare(plan, outcome, minutes=minutes)
    parts = residuals.compare_parts(plan, outcome, read_parts(folder, outcome, minutes=minutes))
    drifts = residuals.find_drifts(found, parts)
    return outcome.model_copy(update={"residuals": found, "residual_parts": parts, "drifts": drifts})


def make_job(work: OpenProject, made: StepOutputs) -> TrainJob:
    """All input of the worker for this model's run."""
    plan, start = made.get("plan", Plan), find_start_adapter(work)
    run_id, minutes = run_id_of(plan), work.settings.train.run.deadline_minutes
    begun = clock.now()
    return TrainJob(
        run_id=run_id,
        folder=str(work.project.runs / run_id),
        base_folder=work.weights.folder,
        dataset_folder=made.get("prepare", PreparedData).folder,
        plan=plan,
        run=publishable(work.settings.train.run),
        crew=work.settings.train.distribution(),
        keeping=work.settings.train.keeping(),
        endpoint=work.settings.train.endpoint_access(),
        start_adapter=str(start.folder) if start else None,
        project_folder=str(work.project.root),
        cases_file=str(path) if (path := find_case_file(work)) is not None else None,
        examined_file=str(held) if (held := find_examined_file(work)) is not None else None,
        # Counted from here and not from the worker's start: a worker that is started again has less left.
        deadline=begun.at + minutes * 60 if minutes else None,
        deadline_from=begun if minutes else None,
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
    words = Journal(folder / MESSAGES)
    heard = max((offset for _, offset in words.follow(0)), default=0)
    begun = time.perf_counter()

    def listen() -> None:
        nonlocal heard
        for line, offset in words.follow(heard):
            heard = offset
            work.reporter.info(str(line["message"]))

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
            hooks = Hooks(on_start=launch.call, on_poll=listen, on_out_of_memory=take_less, watcher=watcher)
            run_job(task, reporter=work.reporter, hooks=hooks, place=work.place)
    finally:
        launch.over()
        waited = add_waited(folder, time.perf_counter() - begun)
    return waited / 60


@contextmanager
def stall_watcher(work: OpenProject, job: TrainJob) -> Iterator[StallWatcher]:
    """Sends alerts about stalls and failures as the settings say; waits for their delivery at the end."""
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
            patience=Patience.of(alerts.patience_seconds),
        )


def _still_there(_work: OpenProject, outcome: TrainOutcome) -> bool:
    folder = Path(outcome.adapter_folder)
    return folder.is_dir() and folder_digest(folder) == outcome.adapter_hash


STEP = PipelineStep(
    name="train",
    title="train the adapter",
    needs=("prepare", "plan"),
    makes=TrainOutcome,
    depends_on=lambda _work, _made: None,
    do=_do,
    identity=lambda outcome: str(outcome.adapter_hash),
    still_there=_still_there,
)
