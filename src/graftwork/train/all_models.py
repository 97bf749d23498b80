"""Train every model of a project in one process, or each at the cluster that `engine` names.

Input: an open project. Output: the result of each model. All models are planned first; then one worker trains
what is not trained yet, each run in its own folder and each base loaded once, or each run is a job of the
cluster; then each model's step continues from there as if it had been trained alone. A failure stops no
other. A model may also be trained with settings that graft.yaml does not have; its own results stay as they
are.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from graftwork.files.disk import Journal, write_atomic
from graftwork.fleet.jobs import (
    FleetRequest,
    RunSet,
    jobs_go_on,
)
from graftwork.model.base import verify_base
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.plan import note_done
from graftwork.pipeline.steps.train import WorkerMessages, enter_run, make_job, stall_watcher
from graftwork.pipeline.table import run_pipeline
from graftwork.process import clock
from graftwork.process.heartbeat import read_beat
from graftwork.process.worker import ERROR_FILE, hold_lock
from graftwork.project.open_project import OpenProject, timestamp
from graftwork.project.reporter import ModelReporter
from graftwork.project.supervise import JOB_FILE, Hooks, StallWatcher, WorkerTask, run_job
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import (
    EnvironmentFailure,
    GracefulStop,
    GraftError,
    Interrupted,
    UserError,
    WorkerFailed,
)
from graftwork.records.fleet import AlertKind
from graftwork.records.run import TrainBatch, TrainJob, TrainOutcome
from graftwork.text.wording import explain_error
from graftwork.train.checkpoints import pass_mirrors
from graftwork.train.multi_run import choose_side_by_side, write_failure
from graftwork.train.run_folder import ATTEMPTS, OUTCOME, failure_of, is_settled
from graftwork.train.settings import TrainSettings


def train_at_engine(work: OpenProject, planned: Mapping[str, "PlannedModel"]) -> bool:
    """Train them at the place of this project's engine; False if it takes no job."""
    engine = work.project.settings.engine
    work.reporter.started("train", f"train {len(planned)} run(s) on {engine}")
    waiting, training, accepted = dict(planned), RunSet(), 0
    with jobs_go_on():
        while waiting or training:
            for name, model in list(waiting.items()):
                job = model.job
                if job.start_adapter and not Path(job.start_adapter).exists() and training:
                    continue
                del waiting[name]
                if is_settled(job):
                    continue
                try:
                    training.start(name, model.work, FleetRequest(place=engine), model.made)
                except EnvironmentFailure as error:
                    if not accepted:
                        work.reporter.info(f"{error.what}; training here instead")
                        return False
                    write_failure(job, error)
                except GraftError as error:
                    write_failure(job, error)
                accepted += 1
            for name, job_there, why in training.ended():
                model = planned[name]
                model.work.reporter.info(f"job {job_there.id} at {job_there.place}: {job_there.state}")
                if why and not (Path(model.job.folder) / ERROR_FILE).exists():
                    write_failure(
                        model.job,
                        WorkerFailed(
                            f"job {job_there.id} did not finish at {job_there.place}: {why}",
                            fix=f"`graft fleet logs {job_there.id}` shows its output; "
                            "the same command resumes from there",
                            where=job_there.place,
                        ),
                    )
            if training:
                training.wait()
    return True


def with_train(work: OpenProject, changes: dict[str, Any]) -> OpenProject:
    """The project with these settings of `train` for the model that is worked on."""
    settings = work.project.settings
    model = settings.models.get(work.model)
    try:
        if model is None:
            train = TrainSettings.model_validate({**settings.train.model_dump(mode="json"), **changes})
            settings = settings.model_copy(update={"train": train})
        else:
            overrides = type(model.train).model_validate({**model.train.model_dump(mode="json"), **changes})
            changed_model = model.model_copy(update={"train": overrides})
            settings = settings.model_copy(update={"models": {**settings.models, work.model: changed_model}})
        changed = replace(work, project=replace(work.project, settings=settings))
        # A model's own settings are checked together with those of all models.
        _ = changed.settings
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        message = explain_error(first)
        raise UserError(
            "these training settings are not possible",
            why=f"{name}: {message}" if name else message,
            fix="choose values that `train` in graft.yaml could have",
            where="train",
        ) from error
    return changed


def train_variant(work: OpenProject, outputs: StepOutputs) -> TrainOutcome:
    """Train the run of the plan in `outputs` on this machine, unless it is trained already."""
    job = make_job(work, outputs)
    folder = Path(job.folder)
    if not (folder / OUTCOME).exists():
        enter_run(work, job)
        (folder / ERROR_FILE).unlink(missing_ok=True)
        run_batch(work, [job], names={job.run_id: work.model})
    failure = failure_of(job)
    if failure is not None:
        work.runs.update(job.run_id, state="failed", when=timestamp(), error=failure)
        raise WorkerFailed(
            str(failure["what"]), why=str(failure["why"]), fix=str(failure["fix"]), where=job.folder
        )
    return note_done(work, job.run_id)


MODULE = "graftwork.train.worker_process"
BATCHES = "batches"
RETRIED_ALONE = "OutOfMemory"
"""The failure that a model's own step can recover from: it plans a smaller run."""


def run_batch(work: OpenProject, jobs: Sequence[TrainJob], *, names: Mapping[str, str]) -> None:
    """Train them all in one process. `names` gives the model of each run's id."""
    folder = work.project.state / BATCHES / fingerprint([job.run_id for job in jobs])[:12]
    groups = choose_side_by_side(jobs)
    batch = TrainBatch(folder=str(folder), begun=clock.now(), jobs=tuple(jobs), side_by_side=groups)
    many = f"{len(jobs)} run" + ("s" if len(jobs) > 1 else "")
    for job in jobs:
        # The same file that a run of its own has.
        write_atomic(Path(job.folder) / JOB_FILE, job.to_json())
    work.reporter.started("train", f"train {many} in one process")
    for group in groups:
        together = ", ".join(names[jobs[index].run_id] for index in group)
        work.reporter.info(f"side by side: {together}")
    with hold_lock(work.project.state / "pipeline"), ExitStack() as stack:
        progress = _BatchProgress(work, batch, names, stack)
        verify_base(work.weights)
        task = WorkerTask(
            name="training",
            module=MODULE,
            job=batch,
            folder=folder,
            environment=pass_mirrors(
                {run: work.project.settings.of_model(name).train.run.mirror for run, name in names.items()}
            ),
            # Each run counts its own crashes and gives up by itself; this only bounds them all.
            max_restarts=sum(int(job.run.get("max_restarts", 3)) + 1 for job in jobs),
        )
        hooks = Hooks(
            on_poll=progress.follow,
            active_folders=lambda: [Path(job.folder) for job in progress.active_jobs()],
            watcher=progress,
        )
        try:
            run_job(task, reporter=work.reporter, hooks=hooks, place=work.place)
        except (GracefulStop, Interrupted) as stopped:
            progress.stopped(stopped)
            raise
        except GraftError as failure:
            progress.failed(failure)


class _BatchProgress:
    """Tracks the runs of a batch by the files in their folders; holds the RunWatcher of the active ones."""

    def __init__(
        self, work: OpenProject, batch: TrainBatch, names: Mapping[str, str], stack: ExitStack
    ) -> None:
        self._work = work
        self._stack = stack
        self._watchers: dict[str, StallWatcher] = {}
        self._batch = batch
        self._names = names
        self._entered: set[str] = set()
        self._failures_reported: set[str] = set()
        self._messages = {job.run_id: WorkerMessages(Path(job.folder)) for job in batch.jobs}

    def active_jobs(self) -> list[TrainJob]:
        """Runs that have begun and are not settled."""
        return [job for job in self._batch.jobs if not is_settled(job) and self._has_begun(job)]

    def follow(self) -> None:
        """Record runs that have begun; report the progress and messages of active ones, and failures."""
        for job in self._batch.jobs:
            if self._has_begun(job):
                if job.run_id not in self._entered:
                    self._entered.add(job.run_id)
                    self._work.runs.update(job.run_id, state="running", when=timestamp())
                reporter = ModelReporter(self._work.reporter, self._names[job.run_id])
                self._messages[job.run_id].report(reporter)
                beat = read_beat(Path(job.folder)) if not is_settled(job) else None
                if beat is not None:
                    reporter.progress(
                        beat.phase, beat.done, beat.total, seconds_left=beat.seconds_left, detail=beat.detail
                    )
            # A failure is reported once for each run, unless its own step will try again.
            failure = failure_of(job) if job.run_id not in self._failures_reported else None
            if failure is None:
                continue
            self._failures_reported.add(job.run_id)
            if failure["error"] != RETRIED_ALONE:
                what, why, fix = (str(failure[name]) for name in ("what", "why", "fix"))
                self._watcher(job).alert("failed", what, why=why, fix=fix)

    @property
    def expected_seconds(self) -> float:
        return max((self._watcher(job).expected_seconds for job in self.active_jobs()), default=0.0)

    def check(self, process_state: str) -> None:
        for job in self.active_jobs():
            self._watcher(job).check(process_state)

    def alert(self, kind: AlertKind, what: str, *, why: str = "", fix: str = "") -> None:
        """An alert about the process concerns the active runs, or else the next one."""
        unsettled = [job for job in self._batch.jobs if not is_settled(job)]
        for job in self.active_jobs() or unsettled[:1]:
            self._watcher(job).alert(kind, what, why=why, fix=fix)

    def worker_ended(self) -> None:
        for watcher in self._watchers.values():
            watcher.worker_ended()

    def stopped(self, reason: GraftError) -> None:
        for job in self._batch.jobs:
            if job.run_id in self._entered and not is_settled(job):
                self._work.runs.update(job.run_id, state="stopped", when=timestamp(), error=reason.as_json())

    def failed(self, reason: GraftError) -> None:
        """The process itself gave up: all runs that are not settled have failed with it."""
        for job in self._batch.jobs:
            if not is_settled(job):
                write_failure(job, reason)

    def _has_begun(self, job: TrainJob) -> bool:
        if job.run_id in self._entered:
            return True
        lines = Journal(Path(job.folder) / ATTEMPTS).read()
        latest = clock.read_moment(lines[-1]) if lines else None
        return latest is not None and clock.seconds_between(self._batch.begun, latest) >= 0

    def _watcher(self, job: TrainJob) -> StallWatcher:
        """The alerts of one run, with the alert settings of its own model."""
        if job.run_id not in self._watchers:
            name = self._names[job.run_id]
            model_work = replace(
                self._work, asked_model=name, reporter=ModelReporter(self._work.reporter, name)
            )
            self._watchers[job.run_id] = self._stack.enter_context(stall_watcher(model_work, job))
        return self._watchers[job.run_id]


State = Literal["trained", "unchanged", "failed"]


class ModelResult(Record):
    """One model after `graft train --all`."""

    model: str
    state: State
    run_id: str = ""
    base: str = ""
    outcome: TrainOutcome | None = None
    minutes: float = 0.0
    error: dict[str, object] | None = None


class TrainedAll(Record):
    """All models of a project, the main one first."""

    project: str
    models: tuple[ModelResult, ...]
    seconds: float

    @property
    def failed(self) -> tuple[ModelResult, ...]:
        return tuple(model for model in self.models if model.state == "failed")


class PlannedModel(NamedTuple):
    work: OpenProject
    made: StepOutputs
    job: TrainJob
    trained_before: bool


def train_all(work: OpenProject) -> TrainedAll:
    """Bring every model of the project up to date as far as its adapter."""
    started_at = time.perf_counter()
    planned: dict[str, PlannedModel] = {}
    failed: dict[str, GraftError] = {}
    for name in work.project.settings.all_models:
        model_work = replace(work, asked_model=name, reporter=ModelReporter(work.reporter, name))
        try:
            outputs = run_pipeline(model_work, upto="plan")
            job = make_job(model_work, outputs)
            enter_run(model_work, job)
            planned[name] = PlannedModel(model_work, outputs, job, (Path(job.folder) / OUTCOME).exists())
        except (Interrupted, GracefulStop):
            raise
        except GraftError as error:
            failed[name] = error
            work.reporter.info(f"{name}: {error.what}")
    _train_what_is_left(work, planned)
    results = [
        _finish(planned[name])
        if name in planned
        else ModelResult(model=name, state="failed", error=failed[name].as_json())
        for name in work.project.settings.all_models
    ]
    return TrainedAll(
        project=work.project.settings.project, models=tuple(results), seconds=time.perf_counter() - started_at
    )


def _train_what_is_left(work: OpenProject, planned: dict[str, PlannedModel]) -> None:
    """One process for all; two models that come to the same run share it."""
    untrained = {
        name: model.job
        for name, model in planned.items()
        # A run on several devices has processes of its own: its model's step starts them.
        if not model.trained_before and model.work.settings.train.strategy == "single"
    }
    names: dict[str, str] = {}
    for name, job in untrained.items():
        names.setdefault(job.run_id, name)
        # What failed in an earlier command may succeed now.
        (Path(job.folder) / ERROR_FILE).unlink(missing_ok=True)
    distinct = {name: planned[name] for name in names.values()}
    if names and work.project.settings.engine != "local" and train_at_engine(work, distinct):
        return
    jobs = [untrained[name] for name in names.values()]
    # Runs on one base are trained together, in the order in which their bases first occur.
    bases = list(dict.fromkeys(job.base_folder for job in jobs))
    if jobs:
        run_batch(work, sorted(jobs, key=lambda job: bases.index(job.base_folder)), names=names)


def _finish(planned: PlannedModel) -> ModelResult:
    """Run the model's own step, which finds the run done or explains why it is not."""
    work, job = planned.work, planned.job
    failure = failure_of(job)
    if failure is not None and failure["error"] != RETRIED_ALONE:
        work.runs.update(job.run_id, state="failed", when=timestamp(), error=failure)
        return ModelResult(model=work.model, state="failed", run_id=job.run_id, error=failure)
    try:
        outcome = run_pipeline(work, upto="train").get("train", TrainOutcome)
    except (Interrupted, GracefulStop):
        raise
    except GraftError as error:
        return ModelResult(model=work.model, state="failed", run_id=job.run_id, error=error.as_json())
    return ModelResult(
        model=work.model,
        state="unchanged" if planned.trained_before else "trained",
        run_id=outcome.run_id,
        base=work.base.name,
        outcome=outcome,
        minutes=outcome.minutes,
    )
