"""Every model of a project, trained in one go: the main one first, each base loaded once.

In: an open workplace. Out: how each model stands afterwards. All models are planned first; then one
process trains what is not trained yet, each run in its own folder; then each model's step takes up
what lies there, as if it had been trained alone. One model that fails does not stop the others.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from graftwork.pipeline.batch import RETRIED_ALONE, run_batch
from graftwork.pipeline.pipeline import run_pipeline
from graftwork.pipeline.reporter import ModelReporter
from graftwork.pipeline.step import Made
from graftwork.pipeline.steps.train import enter_run, make_job
from graftwork.pipeline.workplace import Workplace, now
from graftwork.process.worker import ERROR_FILE
from graftwork.records.base import Record
from graftwork.records.errors import GraftError, Interrupted, StoppedInOrder
from graftwork.records.run import TrainJob, TrainOutcome
from graftwork.train.files import OUTCOME
from graftwork.train.settled import failure_of

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
    work: Workplace
    job: TrainJob
    trained_before: bool


def train_all(work: Workplace) -> TrainedAll:
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
        _take_up(planned[name]) if name in planned else _failure(name, failed[name].as_json())
        for name in work.project.settings.all_models
    ]
    return TrainedAll(
        project=work.project.settings.project, models=tuple(results), seconds=time.perf_counter() - begun
    )


def _plan(work: Workplace) -> _Planned:
    made: Made = run_pipeline(work, upto="plan")
    job = make_job(work, made)
    enter_run(work, job)
    return _Planned(work, job, (Path(job.folder) / OUTCOME).exists())


def _train_what_is_left(work: Workplace, planned: dict[str, _Planned]) -> None:
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
        # What went wrong at an earlier command may go well now.
        (Path(job.folder) / ERROR_FILE).unlink(missing_ok=True)
    jobs = [left[name] for name in names.values()]
    # Runs on one base stand together, in the order in which their bases first come.
    bases = list(dict.fromkeys(job.base_folder for job in jobs))
    if jobs:
        run_batch(work, sorted(jobs, key=lambda job: bases.index(job.base_folder)), names=names)


def _take_up(planned: _Planned) -> ModelResult:
    """The model's own step: it finds the run done, or says why it is not."""
    work, job = planned.work, planned.job
    said = failure_of(job)
    if said is not None and said["error"] != RETRIED_ALONE:
        work.runs.update(job.run_id, state="failed", when=now(), error=said)
        return _failure(work.model, said, run_id=job.run_id)
    try:
        outcome = run_pipeline(work, upto="train").get("train", TrainOutcome)
    except (Interrupted, StoppedInOrder):
        raise
    except GraftError as error:
        return _failure(work.model, error.as_json(), run_id=job.run_id)
    minutes = next((one.actual for one in outcome.residuals if one.name == "minutes"), outcome.seconds / 60)
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
