"""Step: train the adapter in a child process that may die and be started again."""

import time
from pathlib import Path

from graftwork.coordinate.step import Made, Step
from graftwork.coordinate.steps.plan import STEP as PLAN_STEP
from graftwork.coordinate.steps.plan import kind_of_run
from graftwork.coordinate.steps.prepare import Prepared
from graftwork.coordinate.supervise import run_job
from graftwork.coordinate.workplace import Workplace, now
from graftwork.files.digest import folder_digest
from graftwork.files.journal import Journal
from graftwork.files.whole import write_whole
from graftwork.model.base import verify_base
from graftwork.plan import residuals
from graftwork.records.errors import GraftError, Interrupted, StoppedInOrder
from graftwork.records.plan import Plan
from graftwork.records.run import TrainJob, TrainOutcome
from graftwork.train.files import OUTCOME, WAITED, WORDS


def _do(work: Workplace, made: Made) -> TrainOutcome:
    plan, prepared = made.get("plan", Plan), made.get("prepare", Prepared)
    run_id = run_id_of(plan)
    folder = work.project.runs / run_id
    if work.runs.get(run_id) is None:
        work.runs.create(run_id, folder=str(folder), plan=plan.model_dump(mode="json"), when=now())
    job = TrainJob(
        run_id=run_id,
        folder=str(folder),
        base_folder=work.base.folder,
        dataset_folder=prepared.folder,
        plan=plan,
        run=work.settings.train.run.model_dump(mode="json"),
    )
    verify_base(work.base)
    work.runs.update(run_id, state="running", when=now())
    try:
        minutes = _train(work, job)
    except (StoppedInOrder, Interrupted) as stopped:
        work.runs.update(run_id, state="stopped", when=now(), error=stopped.as_json())
        raise
    except GraftError as failure:
        work.runs.update(run_id, state="failed", when=now(), error=failure.as_json())
        raise
    verify_base(work.base)
    outcome = TrainOutcome.from_json((folder / OUTCOME).read_bytes())
    outcome = outcome.model_copy(update={"residuals": residuals.compare(plan, outcome, minutes=minutes)})
    work.residuals.add(
        run_id, device=plan.device.name, base=kind_of_run(work), found=outcome.residuals, when=now()
    )
    work.runs.update(run_id, state="done", when=now(), outcome=outcome.model_dump(mode="json"))
    return outcome


def run_id_of(plan: Plan) -> str:
    """The same plan is the same run: asked for again, it is gone on with."""
    return PLAN_STEP.identity(plan)[:12]


def _train(work: Workplace, job: TrainJob) -> float:
    """Minutes that the user waited, over all attempts."""
    folder = Path(job.folder)
    words = Journal(folder / WORDS)
    heard = max((offset for _, offset in words.follow(0)), default=0)
    begun = time.perf_counter()
    waited_file = folder / WAITED
    before = float(waited_file.read_text()) if waited_file.exists() else 0.0

    def listen() -> None:
        nonlocal heard
        for line, offset in words.follow(heard):
            heard = offset
            work.narrator.word(str(line["word"]))

    try:
        run_job(
            name="training",
            module="graftwork.train.worker",
            job=job,
            folder=folder,
            narrator=work.narrator,
            max_restarts=work.settings.train.run.max_restarts,
            on_poll=listen,
        )
    finally:
        waited = before + time.perf_counter() - begun
        write_whole(waited_file, repr(waited))
    return waited / 60


def _still_there(_work: Workplace, outcome: TrainOutcome) -> bool:
    folder = Path(outcome.adapter_folder)
    return folder.is_dir() and folder_digest(folder) == outcome.adapter_hash


STEP = Step(
    name="train",
    title="train the adapter",
    needs=("prepare", "plan"),
    makes=TrainOutcome,
    depends_on=lambda _work, _made: None,
    do=_do,
    identity=lambda outcome: str(outcome.adapter_hash),
    still_there=_still_there,
)
