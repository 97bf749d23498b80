"""Train every model of a project in one process, or each at the cluster that `engine` names.

In: an open project. Out: the result of each model. All models are planned first; then one worker trains what
is not trained yet, each run in its own folder and each base loaded once, or each run is a job of the cluster;
then each model's step continues from there as if it had been trained alone. A failure stops no other. A model
may also be trained with settings that graft.yaml does not have; its own results stay as they are.
"""

import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from graftwork.files.disk import Journal, write_atomic
from graftwork.fleet.jobs import POLL_SECONDS, FleetRequest, bring, collecting, get_job, start_run
from graftwork.model.base import verify_base
from graftwork.pipeline.run_identity import note_done
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.train import WorkerMessages, enter_run, make_job, stall_watcher
from graftwork.pipeline.table import run_pipeline
from graftwork.process import clock
from graftwork.process.heartbeat import read_beat
from graftwork.process.worker import ERROR_FILE, hold_lock
from graftwork.project.open_project import OpenProject, timestamp
from graftwork.project.reporter import ModelReporter, Reporter
from graftwork.project.supervise import JOB_FILE, Hooks, StallWatcher, WorkerTask, run_job
from graftwork.records.base import Record, fingerprint
from graftwork.records.errors import (
    EnvironmentLacks,
    GraftError,
    Interrupted,
    StoppedInOrder,
    UserMistake,
    WorkerFailed,
)
from graftwork.records.fleet import FleetJob
from graftwork.records.job import AlertKind
from graftwork.records.run import TrainBatch, TrainJob, TrainOutcome
from graftwork.text.validation import explain_error
from graftwork.train.multi_run import choose_side_by_side
from graftwork.train.run_folder import ATTEMPTS, OUTCOME, failure_of, is_settled
from graftwork.train.run_setup import pass_mirrors
from graftwork.train.settings import TrainSettings

Runs = Mapping[str, tuple[OpenProject, TrainJob]]
"""By the name of the model; the project is opened for that model."""


def train_at_engine(work: OpenProject, runs: Runs) -> bool:
    """Train them at the place of this project's engine; False if it takes no job."""
    place = work.project.settings.engine
    work.reporter.started("train", f"train {len(runs)} run(s) on {place}")
    try:
        return _Family(work, runs, place).run()
    except KeyboardInterrupt:
        raise Interrupted(
            f"no longer following; the jobs continue at {place}",
            fix="`graft fleet list` shows them, `graft fleet stop JOB` stops one; the same command resumes",
        ) from None


class _Family:
    def __init__(self, work: OpenProject, runs: Runs, place: str) -> None:
        self._work, self._place = work, place
        self._waiting = dict(runs)
        self._running: dict[str, FleetJob] = {}
        self._open = dict(runs)

    def run(self) -> bool:
        controller, pause = collecting(self._work, self._place), threading.Event()
        while self._waiting or self._running:
            if not self._start_ready():
                return False
            controller.reconcile(now=time.time())
            for name, started in list(self._running.items()):
                job = get_job(self._work, started.id)
                if not job.is_open:
                    del self._running[name]
                    self._take(name, job)
            if self._running:
                pause.wait(POLL_SECONDS)
        return True

    def _start_ready(self) -> bool:
        """Submit every run whose start is there; False if the place takes none."""
        for name, (own, run) in list(self._waiting.items()):
            start = Path(run.start_adapter) if run.start_adapter else None
            if start is not None and not start.exists() and self._running:
                continue
            del self._waiting[name]
            if is_settled(run):
                continue
            try:
                job = start_run(own, FleetRequest(place=self._place), confirm=lambda _quote: True)
            except EnvironmentLacks as error:
                if self._running or len(self._open) > len(self._waiting) + 1:
                    _leave(run, error)
                    continue
                self._work.reporter.info(f"{error.what}; training here instead")
                return False
            except GraftError as error:
                _leave(run, error)
                continue
            self._running[name] = job
        return True

    def _take(self, name: str, job: FleetJob) -> None:
        """Bring the files of an ended job; note why it did not finish."""
        own, run = self._open[name]
        job = bring(own, job)
        done = job.state == "done" and (Path(run.folder) / OUTCOME).exists()
        own.reporter.info(f"job {job.id} at {job.place}: {job.state}")
        if not done and not (Path(run.folder) / ERROR_FILE).exists():
            _leave(
                run,
                WorkerFailed(
                    f"job {job.id} did not finish at {job.place}: {job.reason or job.state}",
                    fix=f"`graft fleet logs {job.id}` shows its output; the same command resumes from there",
                    where=job.place,
                ),
            )


def _leave(run: TrainJob, error: GraftError) -> None:
    write_atomic(Path(run.folder) / ERROR_FILE, json.dumps(error.as_json()))


def with_train(work: OpenProject, changes: dict[str, Any]) -> OpenProject:
    """The project with these settings of `train` for the model that is worked on."""
    try:
        changed = _with_train(work, changes)
        # A model's own settings are checked together with those of all models.
        _ = changed.settings
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        message = explain_error(first)
        raise UserMistake(
            "these training settings are not possible",
            why=f"{name}: {message}" if name else message,
            fix="choose values that `train` in graft.yaml could have",
            where="train",
        ) from error
    return changed


def _with_train(work: OpenProject, changes: dict[str, Any]) -> OpenProject:
    settings = work.project.settings
    model = settings.models.get(work.model)
    if model is None:
        train = TrainSettings.model_validate({**settings.train.model_dump(mode="json"), **changes})
        settings = settings.model_copy(update={"train": train})
    else:
        own = type(model.train).model_validate({**model.train.model_dump(mode="json"), **changes})
        changed = model.model_copy(update={"train": own})
        settings = settings.model_copy(update={"models": {**settings.models, work.model: changed}})
    return replace(work, project=replace(work.project, settings=settings))


def train_variant(work: OpenProject, made: StepOutputs) -> TrainOutcome:
    """Train the run of the plan in `made` on this machine, unless it is trained already."""
    job = make_job(work, made)
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
        together = ", ".join(names[jobs[at].run_id] for at in group)
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
        except (StoppedInOrder, Interrupted) as stopped:
            progress.stopped(stopped)
            raise
        except GraftError as failure:
            progress.failed(failure)


class _BatchProgress:
    """Follows the runs of a batch by the files in their folders; the RunWatcher of the active ones."""

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
        """Those that have begun and are not settled."""
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
                if not is_settled(job):
                    self._report_beat(job, reporter)
            self._report_failure(job)

    @property
    def expected_seconds(self) -> float:
        return max((self._watcher(job).expected_seconds for job in self.active_jobs()), default=0.0)

    def check(self, process_state: str) -> None:
        for job in self.active_jobs():
            self._watcher(job).check(process_state)

    def alert(self, kind: AlertKind, what: str, *, why: str = "", fix: str = "") -> None:
        """An alert about the process concerns the active runs, or else the next one."""
        left = [job for job in self._batch.jobs if not is_settled(job)]
        for job in self.active_jobs() or left[:1]:
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
                write_atomic(Path(job.folder) / ERROR_FILE, json.dumps(reason.as_json()))

    def _has_begun(self, job: TrainJob) -> bool:
        if job.run_id in self._entered:
            return True
        lines = Journal(Path(job.folder) / ATTEMPTS).read()
        latest = clock.read_moment(lines[-1]) if lines else None
        return latest is not None and clock.seconds_between(self._batch.begun, latest) >= 0

    def _report_beat(self, job: TrainJob, reporter: Reporter) -> None:
        beat = read_beat(Path(job.folder))
        if beat is None:
            return
        reporter.progress(
            beat.phase, beat.done, beat.total, seconds_left=beat.seconds_left, detail=beat.detail
        )

    def _report_failure(self, job: TrainJob) -> None:
        """Once for each run, unless its own step will try again."""
        failure = failure_of(job) if job.run_id not in self._failures_reported else None
        if failure is None:
            return
        self._failures_reported.add(job.run_id)
        if failure["error"] != RETRIED_ALONE:
            self._watcher(job).alert(
                "failed", str(failure["what"]), why=str(failure["why"]), fix=str(failure["fix"])
            )

    def _watcher(self, job: TrainJob) -> StallWatcher:
        """Of one run, with the alerts of its own model's settings."""
        if job.run_id not in self._watchers:
            name = self._names[job.run_id]
            own = replace(self._work, asked_model=name, reporter=ModelReporter(self._work.reporter, name))
            self._watchers[job.run_id] = self._stack.enter_context(stall_watcher(own, job))
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


class _Planned(NamedTuple):
    work: OpenProject
    job: TrainJob
    trained_before: bool


def train_all(work: OpenProject) -> TrainedAll:
    """Bring every model of the project up to date as far as its adapter."""
    begun = time.perf_counter()
    planned: dict[str, _Planned] = {}
    failed: dict[str, GraftError] = {}
    for name in work.project.settings.all_models:
        own = replace(work, asked_model=name, reporter=ModelReporter(work.reporter, name))
        try:
            planned[name] = _plan(own)
        except (Interrupted, StoppedInOrder):
            raise
        except GraftError as error:
            failed[name] = error
            work.reporter.info(f"{name}: {error.what}")
    _train_what_is_left(work, planned)
    results = [
        _finish(planned[name]) if name in planned else _failure(name, failed[name].as_json())
        for name in work.project.settings.all_models
    ]
    return TrainedAll(
        project=work.project.settings.project, models=tuple(results), seconds=time.perf_counter() - begun
    )


def _plan(work: OpenProject) -> _Planned:
    made: StepOutputs = run_pipeline(work, upto="plan")
    job = make_job(work, made)
    enter_run(work, job)
    return _Planned(work, job, (Path(job.folder) / OUTCOME).exists())


def _train_what_is_left(work: OpenProject, planned: dict[str, _Planned]) -> None:
    """One process for all; two models that come to the same run share it."""
    left = {
        name: one.job
        for name, one in planned.items()
        # A run on several devices has processes of its own: its model's step starts them.
        if not one.trained_before and one.work.settings.train.strategy == "single"
    }
    names: dict[str, str] = {}
    for name, job in left.items():
        names.setdefault(job.run_id, name)
        # What failed in an earlier command may succeed now.
        (Path(job.folder) / ERROR_FILE).unlink(missing_ok=True)
    if names and work.project.settings.engine != "local":
        runs = {name: (planned[name].work, left[name]) for name in names.values()}
        if train_at_engine(work, runs):
            return
    jobs = [left[name] for name in names.values()]
    # Runs on one base are trained together, in the order in which their bases first occur.
    bases = list(dict.fromkeys(job.base_folder for job in jobs))
    if jobs:
        run_batch(work, sorted(jobs, key=lambda job: bases.index(job.base_folder)), names=names)


def _finish(planned: _Planned) -> ModelResult:
    """Run the model's own step, which finds the run done or explains why it is not."""
    work, job = planned.work, planned.job
    failure = failure_of(job)
    if failure is not None and failure["error"] != RETRIED_ALONE:
        work.runs.update(job.run_id, state="failed", when=timestamp(), error=failure)
        return _failure(work.model, failure, run_id=job.run_id)
    try:
        outcome = run_pipeline(work, upto="train").get("train", TrainOutcome)
    except (Interrupted, StoppedInOrder):
        raise
    except GraftError as error:
        return _failure(work.model, error.as_json(), run_id=job.run_id)
    minutes = next(
        (residual.actual for residual in outcome.residuals if residual.name == "minutes"),
        outcome.seconds / 60,
    )
    return ModelResult(
        model=work.model,
        state="unchanged" if planned.trained_before else "trained",
        run_id=outcome.run_id,
        base=work.base.name,
        outcome=outcome,
        minutes=minutes,
    )


def _failure(model: str, error: dict[str, object], *, run_id: str = "") -> ModelResult:
    return ModelResult(model=model, state="failed", run_id=run_id, error=error)
