"""A project with other training settings for one of its models, for a run that graft.yaml does not describe.

In: an open project and changes. Out: the same project, whose model trains with them. graft.yaml, the ledger
of steps and the results of the model stay as they are.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from graftwork.pipeline.open_project import OpenProject, timestamp
from graftwork.pipeline.run_identity import note_done
from graftwork.pipeline.step import StepOutputs
from graftwork.pipeline.steps.train import enter_run, make_job
from graftwork.pipeline.train_all import run_batch
from graftwork.process.worker import ERROR_FILE
from graftwork.records.errors import UserMistake, WorkerFailed
from graftwork.records.run import TrainOutcome
from graftwork.text.validation import explain_error
from graftwork.train.run_folder import OUTCOME, failure_of
from graftwork.train.settings import TrainSettings


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
