"""The id of the run of a plan, whether it is done, and the adapter that a training run continues from.

A plan names the run of the main model, not the bytes it produces, so that all models can be planned before
the first is trained.
"""

from pathlib import Path
from typing import NamedTuple

from graftwork.files.disk import folder_digest
from graftwork.project.open_project import OpenProject, timestamp
from graftwork.project.settings import FROM_MAIN
from graftwork.records.base import fingerprint
from graftwork.records.errors import UserMistake
from graftwork.records.plan import Plan
from graftwork.records.run import TrainOutcome
from graftwork.train.run_folder import ADAPTER, OUTCOME


class StartAdapter(NamedTuple):
    """An adapter to go on from. `named` is part of what makes the run what it is."""

    folder: Path
    named: dict[str, str]


def plan_identity(plan: Plan) -> str:
    """What will be trained, without the estimates."""
    return fingerprint([plan.base_fingerprint, plan.dataset_hash, plan.dtype, plan.train])


def run_id_of(plan: Plan) -> str:
    """The same plan is the same run, so it is resumed."""
    return plan_identity(plan)[:12]


def note_done(work: OpenProject, run_id: str) -> TrainOutcome:
    """Note that a run is done: its outcome is in its folder, wherever it was trained."""
    outcome = TrainOutcome.from_json((work.project.runs / run_id / OUTCOME).read_bytes())
    work.runs.update(run_id, state="done", when=timestamp(), outcome=outcome.model_dump(mode="json"))
    return outcome


def starts_from_main(work: OpenProject) -> bool:
    return work.settings.train.start_from == FROM_MAIN


def find_start_adapter(work: OpenProject) -> StartAdapter | None:
    """The adapter that this model's training starts from, if it was asked for."""
    asked = work.settings.train.start_from
    if asked is None:
        return None
    if asked == FROM_MAIN:
        planned = work.ledger.get("plan")
        if planned is None:
            raise UserMistake(
                "the main model is not planned yet",
                why=f"the model {work.model} starts from its adapter",
                fix="`graft train --all` trains the main model first",
            )
        run_id = run_id_of(Plan.model_validate(planned.output))
        return StartAdapter(work.project.runs / run_id / ADAPTER, {"run": run_id})
    folder = (work.project.root / asked).expanduser()
    if not folder.is_dir():
        raise UserMistake(
            f"there is no adapter to start from at {asked}",
            fix=f"set `train.start_from` to `{FROM_MAIN}` or to a PEFT folder",
            where=str(folder),
        )
    return StartAdapter(folder, {"adapter": folder_digest(folder)})
